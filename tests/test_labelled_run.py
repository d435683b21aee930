"""A run on files that waits for people's labels: finished by the sheet they fill in and by nothing else, and explained
by MLflow alone.
"""

import csv
import getpass
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from components.base.jsonl import read_rows, write_rows
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, save_model
from components.models.tokenizers import texts_of, train_tokenizer
from components.store.store import ArtifactStore, Record, digest_folder
from tasks.runs.status import load_status
from tests.champions import make_champion
from tests.sheets import fill

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent
ITEMS = 16
LOST = 4
"""Items on which the filled sheet prefers SFT; the policy wins the others."""
BECAUSE = "the annotators are simulated | and few"
WAIVED = ("validate.annotator_agreement", "policy.kl")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels") / "home"


@pytest.fixture(scope="module")
def sources(home: Path) -> dict[str, Path]:
    """Pairs, one with an empty and one with a tied chosen response; demonstrations; a model that knows their words."""
    demonstrations, pairs = generate(0, SupportDeskConfig(demonstrations=300, pairs=800))
    pairs[3] |= {"chosen": " "}
    pairs[5] |= {"votes": 4, "votes_chosen": 2}
    found = {name: home.parent / f"{name}.jsonl" for name in ("preferences", "demonstrations")}
    write_rows(found["preferences"], pairs)
    write_rows(found["demonstrations"], demonstrations)
    tokenizer = train_tokenizer(texts_of(demonstrations), 600)
    found["base"] = home.parent / "pretrained"
    save_model(
        build_causal_lm(ScratchModel(hidden_size=32, layers=2, heads=2), tokenizer, 256, seed=3),
        tokenizer,
        found["base"],
    )
    return found


@pytest.fixture(scope="module")
def waiting(tether: Any, home: Path, sources: dict[str, Path]) -> dict[str, Any]:
    values = {
        "human_eval.judges": "people", "human_eval.items": ITEMS, "human_eval.repeats": 0, "sft.base": sources["base"],
        "data.preferences": sources["preferences"], "data.demonstrations": sources["demonstrations"],
        "gates.validate.annotator_agreement": 0.99, "gates.policy.kl": -1,
    }  # fmt: skip
    settings = (part for name, value in values.items() for part in ("--set", f"{name}={value}"))
    waivers = (part for gate in WAIVED for part in ("--waive", gate))
    done = tether("run", "tiny", *settings, *waivers, "--because", BECAUSE, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_status(home).as_json()


@pytest.fixture(scope="module")
def sides(home: Path, waiting: dict[str, Any]) -> dict[str, str]:
    """Which side is the policy, by item: from the sealed key, which raters never see."""
    sample = ArtifactStore(home).path(waiting["stages"][4]["digest"])
    return json.loads((sample / "key.json").read_text(encoding="utf-8"))["policy_side"]


Rate = Callable[[int, str], str]


@pytest.fixture(scope="module")
def rate(sides: dict[str, str]) -> Rate:
    """The answer of a rater to an item: all raters are of one mind."""
    assert len(sides) == ITEMS
    return lambda number, item: sides[item] if number >= LOST else {"a": "b", "b": "a"}[sides[item]]


def test_a_run_that_people_judge_waits_and_its_sheet_does_not_tell_the_sides(
    home: Path, waiting: dict[str, Any], sides: dict[str, str]
) -> None:
    assert (waiting["state"], waiting["stages"][4]["state"]) == ("awaiting_labels", "awaiting_labels")
    sheet = (home / "runs" / waiting["run"] / "sheet.csv").read_text(encoding="utf-8-sig")
    header = next(csv.reader(sheet.splitlines()))
    assert header == ["item", "prompt", "response_a", "response_b", "rating_1", "rating_2", "rating_3"]
    assert set(sides.values()) == {"a", "b"}


def test_the_empty_sheet_and_one_half_filled_do_not_finish_it(
    tether: Any, home: Path, waiting: dict[str, Any], rate: Rate, tmp_path: Path
) -> None:
    def first(items: int) -> str:
        """The sheet with the ratings of so many items."""
        return str(fill(empty, lambda *row: rate(*row) if row[0] < items else "", tmp_path / f"{items}.csv"))

    empty = home / "runs" / waiting["run"] / "sheet.csv"
    done = tether("people", "score", str(empty), home=home)
    assert (done.returncode, "holds no rating yet" in done.stdout + done.stderr) == (2, True)

    counted = tether("people", "status", "--json", "--sheet", first(5), home=home)
    assert counted.returncode == 0, counted.stdout + counted.stderr
    told = json.loads(counted.stdout)
    assert (told["answered"], told["asked"], told["complete"]) == (15, 3 * ITEMS, False)
    assert told["raters"] == {f"rater {n}": [5, ITEMS] for n in (1, 2, 3)}

    half = tether("people", "score", first(ITEMS // 2), home=home)
    assert half.returncode == 3, half.stdout + half.stderr
    assert "human_eval.labels_complete" in half.stdout + half.stderr


def test_the_filled_sheet_gives_the_win_rate_that_people_meant(
    tether: Any, home: Path, waiting: dict[str, Any], rate: Rate, tmp_path: Path
) -> None:
    own = sorted((home / "runs" / waiting["run"] / "raters").iterdir())
    assert [path.name for path in own] == ["rater_1.csv", "rater_2.csv", "rater_3.csv"]
    for path in own:  # each fills in their own, and sends it back in a folder
        fill(path, rate, tmp_path / path.name)
    done = tether("people", "score", str(tmp_path), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    labels = home / "runs" / waiting["run"] / "labels.csv"
    joined = fill(home / "runs" / waiting["run"] / "sheet.csv", rate, tmp_path / "filled.csv")
    with labels.open(encoding="utf-8-sig", newline="") as one, joined.open(encoding="utf-8-sig", newline="") as other:
        assert list(csv.reader(one)) == list(csv.reader(other)), "three files are one sheet"
    scored = load_status(home).as_json()
    assert scored["run"] == waiting["run"]
    human = scored["stages"][4]
    assert human["state"] == "passed"
    assert human["metrics"]["human_eval/win_rate"] == pytest.approx(1 - LOST / ITEMS)
    assert human["metrics"]["human_eval/win_rate_low"] < 0.75 < human["metrics"]["human_eval/win_rate_high"]
    assert human["metrics"]["human_eval/fleiss_kappa"] == pytest.approx(1)
    assert human["metrics"]["human_eval/labels_complete"] == 1
    assert [s["digest"] for s in scored["stages"][:4]] == [s["digest"] for s in waiting["stages"][:4]]


# Ten questions, to MLflow alone, from the registered policy on -------------------------------------------------------


class Asked:
    """A registered version, and what MLflow's own client finds from there. Nothing here is Tether's."""

    def __init__(self, uri: str, name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(uri)
        self.version = self.client.get_model_version_by_alias(name, "champion")
        self.policy = self.client.get_logged_model(self.version.source.removeprefix("models:/"))
        self.parent = self.client.get_run(self.version.run_id).data.tags["mlflow.parentRunId"]

    def run(self, stage: str) -> Any:
        """The run of a stage, of the pipeline run that made the policy."""
        query = f"tags.`mlflow.parentRunId` = '{self.parent}' and attributes.run_name = '{stage}'"
        (found,) = self.client.search_runs([self.policy.experiment_id], query)
        return self.client.get_run(found.info.run_id)  # the search leaves out which models went in

    def models(self, stage: str) -> Iterator[Any]:
        """The models that went into a stage."""
        return (self.client.get_logged_model(each.model_id) for each in self.run(stage).inputs.model_inputs)

    def model(self, stage: str, kind: str) -> Any:
        """The one of that kind."""
        (found,) = (model for model in self.models(stage) if model.model_type == kind)
        return found

    def metrics(self, model: Any) -> dict[str, float]:
        """A model's own."""
        return {metric.key: metric.value for metric in model.metrics}


@pytest.fixture(scope="module")
def scored(tether: Any, home: Path) -> dict[str, Any]:
    """The run as the tests above have left it."""
    found = load_status(home).as_json()
    assert found["stages"][4]["state"] == "passed"
    return found


@pytest.fixture(scope="module")
def asked(home: Path, scored: dict[str, Any]) -> Asked:
    make_champion(home)
    return Asked(f"sqlite:///{home / 'mlflow.db'}", "tether-policy")


@pytest.fixture(scope="module")
def records(home: Path, scored: dict[str, Any]) -> dict[str, Record]:
    """The truth: what the store has of each stage."""
    store = ArtifactStore(home)
    found = {stage["name"]: store.lookup(stage["key"], stage["digest"]) for stage in scored["stages"]}
    assert all(isinstance(record, Record) for record in found.values())
    return found  # type: ignore[return-value]


def test_which_data_file_and_digest(asked: Asked, sources: dict[str, Path]) -> None:
    files = {each.dataset.name: each for each in asked.run("validate").inputs.dataset_inputs}
    for name in ("preferences", "demonstrations"):
        digest = hashlib.sha256(sources[name].read_bytes()).hexdigest()
        assert json.loads(files[name].dataset.source) == {"uri": sources[name].as_uri()}
        assert files[name].dataset.digest == digest[:32]
        assert {tag.key: tag.value for tag in files[name].tags}["lineage.digest"] == digest
        assert asked.version.tags[f"lineage.{name}_digest"] == digest


def test_how_many_rows_were_quarantined_and_why(asked: Asked, home: Path, records: dict[str, Record]) -> None:
    run = asked.run("validate")
    kept_out = read_rows(ArtifactStore(home).path(records["validate"].digest) / "quarantine.jsonl")
    assert run.data.metrics["data/quarantined"] == len(kept_out) > 2
    assert {4, 6} <= {row["row"] for row in kept_out}, "rows are counted from 1"
    alike = [row for row in kept_out if "the responses agree in their first" in row["reasons"][0]]
    assert len(alike) + 2 == len(kept_out)
    assert json.loads(run.data.tags["tether.quarantined"]) == {
        "preferences.texts_filled": 1, "preferences.votes_valid": 1, "preferences.differ_truncated": len(alike),
    }  # fmt: skip
    assert f"Kept out: {len(kept_out)} rows" in run.data.tags["mlflow.note.content"]


def test_which_base_model(asked: Asked, sources: dict[str, Path]) -> None:
    base = asked.model("sft", "base")
    assert base.params == {"artifact_uri": sources["base"].as_uri(), "artifact_digest": digest_folder(sources["base"])}
    assert asked.version.tags["lineage.base_digest"] == base.params["artifact_digest"]


def test_which_sft(asked: Asked, records: dict[str, Record]) -> None:
    sft = asked.model("ppo", "sft")
    assert sft.tags["lineage.digest"] == records["sft"].digest == asked.version.tags["lineage.sft_digest"]
    (version,) = json.loads(sft.tags["mlflow.modelVersions"])
    registered = asked.client.get_model_version(version["name"], version["version"])
    assert (registered.name, registered.source) == ("tether-sft", f"models:/{sft.model_id}")


def test_which_reward_model_its_accuracy_and_ece(asked: Asked, records: dict[str, Record]) -> None:
    reward = asked.model("ppo", "reward")
    assert reward.tags["lineage.digest"] == records["reward"].digest == asked.version.tags["lineage.reward_digest"]
    for name in ("reward/accuracy", "reward/ece"):
        assert asked.metrics(reward)[name] == records["reward"].metrics[name]


def test_the_course_of_beta(asked: Asked, home: Path, records: dict[str, Record]) -> None:
    steps = asked.client.get_metric_history(asked.version.run_id, "ppo/beta")
    history = read_rows(ArtifactStore(home).path(records["ppo"].digest) / "history.jsonl")
    assert [each.value for each in steps] == [*(row["ppo/beta"] for row in history), records["ppo"].metrics["ppo/beta"]]
    assert [each.step for each in steps] == [1, 2, 3, 4], "the last one is the final value"


def test_the_final_kl(asked: Asked, records: dict[str, Record]) -> None:
    (kl,) = (metric for metric in asked.policy.metrics if metric.key == "policy/kl")
    assert kl.value == records["ppo"].metrics["policy/kl"]
    assert (kl.step, kl.dataset_name, kl.dataset_digest) == (4, "data", records["validate"].digest[:32])


def test_which_gates_were_waived_by_whom_and_why(asked: Asked, scored: dict[str, Any]) -> None:
    waived = json.loads(asked.version.tags["tether.waivers"])
    assert waived == {gate: {"user": getpass.getuser(), "reason": BECAUSE, "run": scored["run"]} for gate in WAIVED}
    assert [gate["name"] for stage in scored["stages"] for gate in stage["gates"] if gate["waived"]] == list(WAIVED)


def test_the_win_rate_of_people_with_n(asked: Asked, records: dict[str, Record]) -> None:
    judged = json.loads(asked.version.tags["tether.human_eval"])
    assert (judged["win_rate"], judged["items"], judged["judges"]) == (1 - LOST / ITEMS, ITEMS, "people")
    measured = {metric.key: metric for metric in asked.policy.metrics if metric.dataset_name == "sheet"}
    assert measured["human_eval/win_rate"].value == judged["win_rate"]
    assert measured["human_eval/items"].value == ITEMS
    assert measured["human_eval/win_rate"].dataset_digest == records["human_eval"].inputs["sheet"][:32]
    assert "win rate 0.750" in asked.version.description and "n = 16" in asked.version.description


def test_which_code_version(asked: Asked) -> None:
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    expected = commit.stdout.strip() if (ROOT / ".git").exists() else None
    assert asked.version.tags.get("mlflow.source.git.commit") == expected
    assert asked.client.get_run(asked.version.run_id).data.tags.get("mlflow.source.git.commit") == expected


def test_everything_else_that_a_page_links_to_is_there(asked: Asked, home: Path) -> None:
    """Each link of a note leads to a run or model that MLflow has, or to a flow run that Prefect has; what the run
    computed is no hit.
    """
    tags = [asked.run(stage).data.tags for stage in ("validate", "sft", "reward", "ppo", "human_eval")]
    assert [each["cache_hit"] for each in tags] == ["false"] * 5, "scoring takes the run up again"
    notes = [each["mlflow.note.content"] for each in [*tags, asked.client.get_run(asked.parent).data.tags]]
    links = {part.split(")")[0] for note in [*notes, asked.version.description] for part in note.split("](")[1:]}
    pictures = {link for link in links if link.startswith("get-artifact?")}
    assert pictures
    for link in pictures:
        path, run = re.fullmatch(r"get-artifact\?path=(.+)&run_uuid=(\w+)", link).groups()
        assert path in [each.path for each in asked.client.list_artifacts(run)]
    links -= pictures
    of_prefect = {link for link in links if "/runs/flow-run/" in link or "/runs/task-run/" in link}
    assert len(links - of_prefect) > 8 and of_prefect
    for link in of_prefect:
        base, _, kind, name = link.rsplit("/", 3)
        with urlopen(f"{base}/api/{kind.replace('-', '_')}s/{name}", timeout=10) as answer:
            assert json.load(answer)["id"] == name
    for link in links - of_prefect:
        _, _, experiment, kind, name, *file = link.removesuffix("?workflowType=machine_learning").split("/")
        found = {"runs": asked.client.get_run, "models": asked.client.get_logged_model}[kind](name)
        assert asked.policy.experiment_id == experiment and found
        assert not file or file[1] in [each.path for each in asked.client.list_artifacts(name)]
