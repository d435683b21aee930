"""The real command on the tiny profile: a whole run, then what a change recomputes, then people's labels.

The tests of this file go on from each other's home, in order. What computes once more what other tests show of quick
stages is marked `whole`.
"""

import getpass
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals
from typing import Any

import pytest
from huggingface_hub import ModelCard

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.gates.table import GATES
from components.keys.code_version import code_version
from components.store.store import ArtifactStore
from flows.models import lineage, lineage_text
from flows.models.alias_changes import demoted, promoted
from flows.models.model_export import export
from flows.models.reproduce import reproduce
from flows.reports import diff
from flows.reports.run_facts import run_facts
from tasks.runs.config import run_values
from tasks.runs.journal import Sent
from tasks.runs.points import read_points
from tasks.runs.status import list_runs, load_status
from tasks.tracking.mlflow_client import connect
from tasks.tracking.registry import versions
from tests.champions import make_champion
from tests.faults.homes import SAID, Home, Moment
from tests.sheets import fill
from tests.waiting import PATIENCE, until

STAGES = ["validate", "sft", "reward", "ppo", "human_eval"]
HEAVY = {"torch", "transformers", "prefect", "great_expectations", "matplotlib"}


@pytest.fixture(scope="module")
def home(whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the home after one whole run from nothing."""
    return whole[0].copy(tmp_path_factory.mktemp("end_to_end") / "the home").path


@pytest.fixture(scope="module")
def first(tether, home: Path) -> dict[str, Any]:
    """The status of that run."""
    done = tether("status", "--json", home=home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == status(home)
    return status(home)


def status(home: Path) -> dict[str, Any]:
    """What `tether status --json` prints, without a process for it."""
    return load_status(home).as_json()


def digests(shown: dict[str, Any]) -> list[str]:
    return [stage["digest"] for stage in shown["stages"]]


def states(shown: dict[str, Any]) -> list[str]:
    return [stage["state"] for stage in shown["stages"]]


def test_a_run_from_nothing_passes_every_stage_and_gate(
    first: dict[str, Any], home: Path, whole: tuple[Home, list[Moment]]
) -> None:
    assert "simulated" in whole[0].path.with_name(SAID).read_text()
    assert list(first) == ["run", "profile", "state", "seconds", "stages"]
    assert (first["profile"], first["state"]) == ("tiny", "passed")
    assert [stage["name"] for stage in first["stages"]] == STAGES
    for stage in first["stages"]:
        assert list(stage) == [
            "name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates",
        ]  # fmt: skip
        assert (stage["state"], stage["cached"]) == ("passed", False)
        assert len(stage["key"]) == len(stage["digest"]) == 64
        assert stage["mlflow_run"] and stage["metrics"] and stage["gates"]
        for gate in stage["gates"]:
            fields = ["name", "metric", "value", "op", "threshold", "passed", "waived"]
            null = ["within"] if GATES[gate["name"]].or_within else []
            assert list(gate) in (fields, fields + null)
    page = (home / "runs" / first["run"] / "report.md").read_text()
    assert "policy.kl" in page and first["stages"][3]["digest"] in page


def test_a_whole_runs_report_has_all_that_was_computed_and_mlflow_has_it_too(home: Path, first: dict[str, Any]) -> None:
    path = home / "runs" / first["run"] / "report.html"
    facts = run_facts(home, first["run"])
    steps = {metric: [step for step, _ in curve] for metric, curve in facts.stage("ppo").curves.items()}
    assert steps["ppo/kl"] == steps["ppo/beta"] == [1, 2, 3] and facts.stage("sft").curves["sft/train_loss"]
    assert len(facts.reward["bins"]) == 10 and facts.reward["slices"] and facts.reward["probes"]
    assert {why for each in facts.policy.samples for why in each.picked} == {"the worst KL", "the highest reward"}
    assert facts.comparison is not None and facts.comparison["items"] == 32
    assert [stage.name for stage in facts.stages if stage.record is not None] == STAGES
    assert not [each for each in facts.options if each.changed]
    assert "There are no" not in path.read_text() and "no chart is stored" not in path.read_text()
    client, sent = connect(home), Sent.load(path.parent)
    assert Path(client.download_artifacts(sent.parent, "report.html")).read_bytes() == path.read_bytes()


def test_the_same_again_computes_nothing_and_imports_no_framework(tether, home: Path, first: dict[str, Any]) -> None:
    done = tether("run", "tiny", home=home, python=("-X", "importtime"))
    assert done.returncode == 0, done.stdout
    assert "Nothing was computed" in done.stdout
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & HEAVY
    again = status(home)
    assert states(again) == ["cached"] * 5
    assert again["state"] == "cached" and again["run"] != first["run"]
    assert digests(again) == digests(first)
    assert again["seconds"] < first["seconds"]
    assert f"computed by <code>{first['run']}</code>" in (home / "runs" / again["run"] / "report.html").read_text()


def test_the_champion_is_exported_with_the_card_that_mlflow_has_at_the_run_that_made_it(
    home: Path, first: dict[str, Any], tmp_path: Path
) -> None:
    make_champion(home, run=first["run"])
    facts = export(home, "tether-policy@champion", tmp_path / "out")
    assert facts.record.digest == first["stages"][3]["digest"] and facts.run == first["run"]
    exported = ModelCard.load(tmp_path / "out" / "README.md")
    client = connect(home)
    for stage, kind in ((1, "sft"), (2, "reward"), (3, "policy")):
        card = Path(client.download_artifacts(first["stages"][stage]["mlflow_run"], "model_card.md"))
        logged = ModelCard.load(card)
        assert logged.data.model_name == f"tether-{kind}"
        assert card.read_bytes() == (home / "runs" / first["run"] / "cards" / f"tether-{kind}.md").read_bytes()
    assert logged.data.to_dict() == exported.data.to_dict()
    assert facts.promoted is not None and facts.promoted["by"] == getpass.getuser()
    assert "promoted by" not in logged.text, "its run's profile is for trying things"


@pytest.mark.faults
@pytest.mark.kind("told to stop")
@pytest.mark.parametrize(
    ("stage", "sign", "code"),
    [("sft", SIGTERM, 143), ("reward", SIGINT, 130), ("ppo", SIGTERM, 143)],
    ids=["sft", "reward", "ppo"],
)
def test_told_to_stop_in_a_stage_that_learns_a_run_goes_on_from_the_last_step_to_the_same_bytes(
    tether, start_tether, tmp_path: Path, whole: tuple[Home, list[Moment]], stage: str, sign: Signals, code: int
) -> None:
    undisturbed, _ = whole
    home = undisturbed.before(stage, tmp_path / "home").path
    process = start_tether("run", "tiny", f"--set={stage}.checkpoint_every=100000", home=home)
    points = f"runs/*/metrics/{stage}.jsonl"
    until("a step is reported", lambda: any(map(read_points, home.glob(points))), 400, process.poll, every=0.005)
    process.send_signal(sign)
    said = process.communicate(timeout=PATIENCE * 120)[0]
    assert process.returncode == code, said
    assert "finishing this step" in said and "Run the same command again to continue" in said
    assert "Traceback" not in said
    shown = status(home)
    at = STAGES.index(stage)
    assert states(shown)[at:] == ["interrupted"] + ["not_run"] * (4 - at) and shown["state"] == "interrupted"
    (work,) = (home / "work").glob("*/points.jsonl")
    last = read_points(work)[-1]["step"]
    (kept,) = work.parent.glob("*/checkpoint/*/*.json")
    assert kept.name == f"step-{last:09d}.json"
    done = tether("run", "tiny", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(status(home)) == list(undisturbed.digests().values())
    points = read_points(home / "runs" / status(home)["run"] / "metrics" / "ppo.jsonl")
    assert [point["step"] for point in points if "ppo/kl" in point["metrics"]] == [1, 2, 3], "the curve is whole"


def test_a_threshold_alone_recomputes_nothing_and_stops_what_is_below(
    tether, home: Path, first: dict[str, Any]
) -> None:
    done = tether("run", "tiny", "--set", "gates.policy.kl=-1", home=home)
    assert done.returncode == 3
    assert "policy.kl: policy/kl_high is" in done.stderr and "must be <= -1" in done.stderr
    assert "--waive policy.kl --because TEXT" in done.stdout  # what can be done about it
    shown = status(home)
    assert states(shown) == ["cached", "cached", "cached", "gate_failed", "not_run"]
    assert [stage["cached"] for stage in shown["stages"]] == [True, True, True, True, False]
    assert shown["state"] == "gate_failed"


def test_a_waived_gate_lets_the_run_through_and_says_so(tether, home: Path, first: dict[str, Any]) -> None:
    waiver = ("--waive", "policy.kl", "--because", "to see the sheet")
    done = tether("run", "tiny", "--set", "gates.policy.kl=-1", *waiver, home=home)
    assert done.returncode == 0, done.stderr
    assert "to see the sheet" in done.stdout
    shown = status(home)
    assert states(shown) == ["cached", "cached", "cached", "waived", "cached"]
    assert [gate["name"] for gate in shown["stages"][3]["gates"] if gate["waived"]] == ["policy.kl"]


def left_behind(home: Path, run: str) -> dict[str, Any]:
    """All that is kept of a run: its folder's bytes, its rows in MLflow, its files there."""
    sent = Sent.load(home / "runs" / run)
    runs = [sent.parent, *sent.stages.values()]
    folders = [home / "runs" / run, *(folder for each in runs for folder in home.glob(f"mlartifacts/*/{each}"))]
    kept: dict[str, Any] = {
        str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()
    }
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        for table in ("runs", "params", "metrics", "latest_metrics", "tags"):
            rows = database.execute(f"select * from {table} where run_uuid in ({','.join('?' * len(runs))})", runs)
            kept[table] = sorted(map(str, rows))
            assert kept[table]
    return kept


@pytest.mark.whole
@pytest.mark.parametrize(
    ("command", "said", "computed"),
    [("rerun reward --from RUN", "reward again from run RUN", 2), ("run tiny --refresh validate", "(asked for", 0)],
)
def test_same_bytes_leave_later_hits_and_the_earlier_run_alone(
    tether, home: Path, first: dict[str, Any], command: str, said: str, computed: int
) -> None:
    before = left_behind(home, first["run"])
    done = tether(*command.replace("RUN", first["run"]).split(), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said.replace("RUN", first["run"]) in done.stdout
    shown = status(home)
    assert states(shown) == ["passed" if number == computed else "cached" for number in range(5)]
    assert digests(shown) == digests(first)
    assert left_behind(home, first["run"]) == before


def test_a_ppo_field_recomputes_ppo_and_what_follows_and_people_finish_the_run(
    tether, home: Path, first: dict[str, Any]
) -> None:
    changes = ("--set", "ppo.clip_range=0.1", "--set", "human_eval.judges=people")
    done = tether("run", "tiny", *changes, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    waiting = status(home)
    assert states(waiting) == ["cached", "cached", "cached", "passed", "awaiting_labels"]
    assert digests(waiting)[:3] == digests(first)[:3]
    assert digests(waiting)[3] != digests(first)[3]
    assert "ppo: computing (ppo.clip_range 0.2 -> 0.1)" in done.stdout
    told = tether("status", waiting["run"], "--why", "--json", home=home, python=("-X", "importtime"))
    assert not {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()} & HEAVY
    explained = {name: why for stage in json.loads(told.stdout)["stages"] for name, why in stage["explained"].items()}
    assert {name: why["outcome"] for name, why in explained.items()} == {
        "validate": "hit", "sft": "hit", "reward": "hit", "ppo": "computed", "human_eval.sample": "computed",
    }  # fmt: skip
    assert [(c["name"], c["before"], c["now"]) for c in explained["ppo"]["changes"]] == [("ppo.clip_range", 0.2, 0.1)]
    changed = {change["name"] for change in explained["human_eval.sample"]["changes"]}
    assert changed == {"ppo", "human_eval.judges", "seal"}

    empty = home / "runs" / waiting["run"] / "sheet.csv"
    assert f"tether people score {empty} --run {waiting['run']}" in done.stdout
    filled = fill(empty, lambda number, _: "ab"[number % 2], home.parent / "filled.csv")
    done = tether("people", "score", str(filled), "--run", waiting["run"], home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = status(home)
    assert scored["run"] == waiting["run"]
    assert scored["stages"][4]["state"] == "passed"
    assert scored["stages"][4]["metrics"]["human_eval/labels_complete"] == 1
    assert digests(scored)[:4] == digests(waiting)[:4]


@pytest.fixture(scope="module")
def refresh(home: Path, first: dict[str, Any]) -> tuple[str, ...]:
    """Arguments that refresh the first run's reward model with new pairs, two of them bad, and stop the run there."""
    demonstrations, _ = generate(0, SupportDeskConfig(demonstrations=300, pairs=800))  # so its tokenizer is the first's
    _, pairs = generate(5, SupportDeskConfig(demonstrations=50, pairs=600))
    pairs[3] |= {"chosen": " "}
    pairs[5] |= {"votes": 4, "votes_chosen": 2}
    write_rows(home.parent / "demonstrations.jsonl", demonstrations)
    write_rows(home.parent / "preferences.jsonl", pairs)
    values = [f"data.{name}={home.parent / name}.jsonl" for name in ("demonstrations", "preferences")]
    values += ["gates.validate.contract=null", "gates.reward.refresh_gain_low=1"]
    return tuple(argument for value in values for argument in ("--set", value))


@pytest.mark.whole
def test_new_pairs_refresh_the_reward_model_of_an_earlier_run_and_forgetting_stops_the_run(
    tether, home: Path, first: dict[str, Any], refresh: tuple[str, ...]
) -> None:
    before = first["stages"][2]["metrics"]
    done = tether("run", "tiny", *refresh, "--set", f"reward.refresh.from_run={first['run']}", home=home)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "reward.refresh_gain_low: reward/refresh_gain_low is" in done.stderr
    shown = status(home)
    assert [stage["state"] for stage in shown["stages"][2:]] == ["gate_failed", "not_run", "not_run"]
    metrics = shown["stages"][2]["metrics"]
    assert metrics["reward/refresh_accuracy_previous"] == pytest.approx(before["reward/accuracy"])
    assert metrics["reward/refresh_test_pairs"] == before["reward/test_pairs"]
    assert metrics["reward/refresh_left_out"] == 0, "a prompt's split is a function of its text"
    check_what_reached_mlflow(home, shown, before=first)


def check_what_reached_mlflow(home: Path, shown: dict[str, Any], before: dict[str, Any]) -> None:
    """What validation found, as the store has it; and the earlier model as an input of the new one."""
    client = connect(home)
    validate, reward = (stage["mlflow_run"] for stage in (shown["stages"][0], shown["stages"][2]))
    logged = {
        each.path.rpartition("/")[2]
        for folder in ("attachments", "attachments/data_docs")
        for each in client.list_artifacts(validate, folder)
    }
    assert logged >= {"quarantine.jsonl", "review.jsonl", "data_docs", "index.html"}
    artifact = ArtifactStore(home).path(shown["stages"][0]["digest"])
    for name, rows in (("quarantine.jsonl", {4, 6}), ("review.jsonl", {6})):
        text = Path(client.download_artifacts(validate, f"attachments/{name}")).read_text(encoding="utf-8")
        assert {json.loads(line)["row"] for line in text.splitlines()} >= rows
        assert text == (artifact / name).read_text(encoding="utf-8")
    inputs = client.get_run(reward).inputs
    models = [client.get_logged_model(each.model_id) for each in inputs.model_inputs]
    assert before["stages"][2]["digest"] in [model.tags["lineage.digest"] for model in models]
    assert "previous_data" in [each.dataset.name for each in inputs.dataset_inputs]


@pytest.mark.faults
def test_reproducing_a_run_gives_the_same_bytes_from_nothing_and_leaves_all_as_it_was(
    tether, whole: tuple[Home, list[Moment]], tmp_path: Path
) -> None:
    home, run = whole[0].copy(tmp_path / "home").path, whole[0].status()["run"]
    before, runs = left_behind(home, run), list_runs(home)
    done = tether("reproduce", run, home=home, PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Reproduced: run {run}, 7 artifacts, byte for byte the same." in done.stdout
    assert done.stdout.count("computing (") == 7, "nothing of it was found in the store"
    assert (left_behind(home, run), list_runs(home)) == (before, runs)


def run_with(home: Path, option: str, value: Any) -> str:
    """The newest run whose config says so."""
    group, _, name = option.partition(".")
    return next(run for run in list_runs(home) if run_values(home, run)[group][name] == value)


def test_a_policys_lineage_names_data_models_options_code_gates_waivers_and_who_promoted_it(
    home: Path, first: dict[str, Any]
) -> None:
    graph = lineage.lineage(home, first["run"])
    found = graph.as_json()
    nodes = {node["stage"]: node for node in found["nodes"] if node["stage"]}
    assert [node["names"] for node in found["nodes"] if not node["stage"]] == [["sheet"]]
    assert list(nodes) == ["validate", "sft", "reward", "ppo", "human_eval.sample", "human_eval.reward", "human_eval"]
    policy, digest = nodes["ppo"], {stage["name"]: stage["digest"] for stage in first["stages"]}
    into_policy = {edge["name"]: edge["from"] for edge in found["edges"] if edge["to"] == policy["digest"]}
    assert into_policy == {"data": digest["validate"], "sft": digest["sft"], "reward": digest["reward"]}
    assert (policy["run"], policy["seed"], policy["options"]) == (first["run"], 0, {})
    assert policy["libraries"]["torch"] and policy["environment"]["instruction_set"]
    assert policy["code"] == code_version()
    waived = [waiver for judged in policy["judged"] for waiver in judged["waivers"]]
    assert waived == [{"gate": "policy.kl", "user": getpass.getuser(), "reason": "to see the sheet"}]
    (model,) = policy["models"]
    assert model["name"] == "tether-policy"
    assert (model["promoted"]["by"], model["promoted"]["judges"]) == (getpass.getuser(), "simulated")
    by_name = lineage.lineage(home, f"tether-policy/{model['version']}").as_json()
    assert [node["digest"] for node in by_name["nodes"]] == [node["digest"] for node in found["nodes"]][:4]
    changed = lineage.lineage(home, run_with(home, "ppo.clip_range", 0.1)).as_json()["nodes"]
    (policy,) = (node for node in changed if node["stage"] == "ppo")
    assert policy["options"] == {"ppo.clip_range": {"value": 0.1, "default": 0.2}}
    config = home / "runs" / policy["run"] / "config.yaml"
    config.write_text(config.read_text() + "an_option_of_an_older_version: 1\n")
    again = lineage.lineage(home, policy["run"]).as_json()["nodes"]
    assert [node["options"] for node in again if node["stage"] == "ppo"] == [policy["options"]]
    page = lineage_text.page(graph)
    assert "waived by" in page and "://" not in page.replace("http://www.w3.org", "")


@pytest.mark.whole
def test_what_saw_a_file_is_one_question(home: Path, refresh: tuple[str, ...]) -> None:
    """A data set that is withdrawn must be findable; one whose bytes changed since is another one."""
    data = home.parent / "preferences.jsonl"
    nodes = lineage.lineage(home, str(data), downstream=True).as_json()["nodes"]
    assert [node["stage"] for node in nodes][:3] == [None, "validate", "sft"] and "reward" in [
        n["stage"] for n in nodes
    ]
    data.write_text(data.read_text() + "\n")
    with pytest.raises(UserError, match="no run here has read its current content"):
        lineage.lineage(home, str(data), downstream=True)


def test_two_runs_side_by_side_differ_in_what_was_changed_and_what_came_of_it(
    home: Path, first: dict[str, Any]
) -> None:
    found = diff.diff(home, first["run"], run_with(home, "ppo.clip_range", 0.1))
    stages = {stage.name: stage for stage in found.stages}
    assert [stage.same for stage in found.stages] == [True, True, True, False, False]
    assert [str(change) for change in stages["ppo"].changes] == ["ppo.clip_range 0.2 -> 0.1"]
    assert found.options["ppo.clip_range"] == (0.2, 0.1)
    assert "policy/kl" in stages["ppo"].metrics and stages["sft"].metrics == {}
    assert json.loads(json.dumps(found.as_json()))["stages"][3]["changes"][0]["text"] == "ppo.clip_range 0.2 -> 0.1"
    assert "ppo.clip_range 0.2 -> 0.1" in diff.text(found)


def test_a_demoted_policys_lineage_keeps_who_promoted_and_demoted_it(home: Path, first: dict[str, Any]) -> None:
    digest = first["stages"][3]["digest"]
    version = next(each for each in versions(home) if each.digest == digest and each.name == "tether-policy")
    other = next(each for each in versions(home) if each.name == version.name and each.version != version.version)
    name = f"{version.name}/{version.version}"
    for each in (version, other):
        make_champion(home, each.version)
    promoted(home, name, "ada", "the better of the two")
    demoted(home, name, "grace", "a customer's letter")
    promoted(home, f"{other.name}/{other.version}", "grace", "the only one left")
    policy = next(node for node in lineage.lineage(home, name).as_json()["nodes"] if node["digest"] == digest)
    (model,) = policy["models"]
    said = " ".join(model["life"])
    assert model["aliases"] == [] and "ada" in said and "grace" in said and "a customer's letter" in said
    downstream = lineage.lineage(home, first["stages"][0]["digest"], downstream=True).as_json()["nodes"]
    seen = {f"{each['name']}/{each['version']}": each for node in downstream for each in node.get("models", ())}
    assert {name, f"{other.name}/{other.version}"} <= set(seen), "a demoted model has seen the data too"
    assert seen[f"{other.name}/{other.version}"]["promoted"]["by"] == "grace"


@pytest.mark.whole
def test_a_damaged_record_is_said_by_every_question_that_it_leaves_a_gap_in_until_its_stage_is_rerun(
    tether, home: Path, first: dict[str, Any]
) -> None:
    data, sft, _, policy, _ = (stage["digest"] for stage in first["stages"])
    whole = lineage.lineage(home, first["run"])
    key = first["stages"][1]["key"]
    (path,) = (home / "store" / "records" / key).iterdir()
    path.write_bytes(path.read_bytes().replace(b'"seed": 0', b'"seed": 1'))

    upstream = lineage.lineage(home, first["run"]).as_json()
    (gap,) = (node for node in upstream["nodes"] if node["digest"] == sft)
    assert gap["stage"] is None and gap["lost"].startswith(f"sft of run {first['run']}, key {key[:16]}: ")
    assert "its content does not match its sha256" in gap["lost"]
    assert {node["digest"] for node in upstream["nodes"]} == {node.digest for node in whole.nodes}
    downstream = lineage.lineage(home, data, downstream=True)
    assert sft not in {node.digest for node in downstream.nodes} and policy in str(downstream.nodes)
    assert list(downstream.unreadable) == [key]
    for show in (lineage_text.text, lineage_text.page):
        assert "may be incomplete" in show(downstream) and key[:16] in show(downstream)
        assert "may be incomplete" not in show(whole)
    same = diff.diff(home, first["run"], first["run"])
    assert all(stage.same for stage in same.stages)
    with pytest.raises(UserError, match=f"input sft: .*damaged record may have known it .{key[:16]}"):
        reproduce(home, policy)

    done = tether("rerun", "sft", "--from", first["run"], home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [node["stage"] for node in lineage.lineage(home, first["run"]).as_json()["nodes"]] == [
        node["stage"] for node in whole.as_json()["nodes"]
    ], "the same bytes under the same key: the gap is closed"
    assert lineage.lineage(home, data, downstream=True).as_json()["unreadable"] == []
