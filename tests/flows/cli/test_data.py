"""`tether data` through the real command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows, write_rows
from components.data.config import DataConfig
from components.store.store import ArtifactStore
from data_contracts.rows.gather import RowSource, judged_rows
from flows.data.candidates import find_models
from tasks.runs.status import StatusFile
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
WORDS = "my order is late what can you do about it now".split()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_model(folder: Path, seed: int) -> Path:
    from components.models.config import ScratchModel
    from components.models.folders import build_causal_lm, save_model
    from components.models.tokenizers import train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    save_model(
        build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 256, seed), tokenizer, folder
    )
    return folder


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts (row 3 is bad), two models, and a home whose run `r1` has one of them as its `ppo`."""
    root = tmp_path_factory.mktemp("desk")
    rows = [{"prompt": " ".join(WORDS[: 2 + n])} for n in range(8)]
    write_rows(root / "prompts.jsonl", [*rows[:2], {"prompt": ""}, *rows[2:], rows[0]])
    write_model(root / "alpha", 0)
    write_model(root / "artifact" / "model", 1)
    record = ArtifactStore(root / "home").publish("k" * 64, root / "artifact", None, {"stage": "ppo"})
    status = StatusFile.start(root / "home" / "runs" / "r1", "r1", "tiny", ["sft", "reward", "ppo"])
    status.update("ppo", state="passed", digest=record.digest)
    status.finish()
    return root


COMMAND = ("data", "candidates", "prompts.jsonl", "--model", "alpha", "--model", "r1:ppo", "--max-new-tokens", "5")
COMMAND += ("--pairs", "3", "--out", "out")


@pytest.fixture(scope="module")
def made(tether, desk: Path) -> subprocess.CompletedProcess[str]:
    """The command as it ended, with its folder in `desk / "out"`."""
    return tether(*COMMAND, "--json", home=desk / "home")


def test_candidates_of_a_folder_and_of_a_runs_model_are_written_whole(made, desk: Path) -> None:
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert "row 3 is left out: empty prompt turn" in made.stderr and "candidates 32/32" in made.stderr
    assert (found["rows"], found["prompts"], found["quarantined"]) == (10, 8, 1)
    assert found["checks"] == [
        {"name": "texts_filled", "severity": "error", "rows": 1, "row_numbers": [3], "threshold": 0.05, "value": 0.1}
    ]
    assert [found[name] for name in ("kappa", "alpha", "longer_wins", "majority")] == [None] * 4
    assert [model["name"] for model in found["models"]] == ["alpha", "r1:ppo"]
    assert found["models"][1]["digest"] == ArtifactStore(desk / "home").lookup("k" * 64).digest
    assert found["candidates"] + found["duplicates"] == 32 and found["pairs"] == 24 and found["out"] == "out"
    assert sorted(contents(desk / "out")) == [
        "candidates.json", "candidates.jsonl", "key.jsonl", "pairs.csv", "pairs.jsonl", "quarantine.jsonl",
    ]  # fmt: skip
    assert not [path for path in (desk / "home" / "work").iterdir() if path.suffix != ".lock"]


def test_a_second_call_computes_nothing_and_another_one_overwrites_nothing(tether, made, desk: Path) -> None:
    before = contents(desk / "out")
    again = tether(*COMMAND, home=desk / "home")
    assert again.returncode == 0 and "8 prompts of 10 rows (1 left out)" in again.stdout
    assert "candidates 32/32" not in again.stderr
    other = tether(*COMMAND, "--seed", "1", home=desk / "home")
    assert other.returncode == 2 and "--out out holds candidates of other prompts" in other.stderr
    assert contents(desk / "out") == before


def test_a_labelled_sheet_is_a_preference_file(made, desk: Path) -> None:
    rows = [row | {"label": "ab"[n % 2]} for n, row in enumerate(read_rows(desk / "out" / "pairs.jsonl"))]
    write_rows(desk / "labelled.jsonl", rows)
    source = RowSource.named("preferences", desk / "labelled.jsonl", DataConfig())
    found = list(judged_rows(source, 20_000))
    assert len(found) == len(rows) == 24 and not any(row.problems for row in found)
    assert [row.item["chosen"] for row in found if row.item] == [row[row["label"]] for row in rows]


@pytest.mark.faults
def test_a_call_that_is_killed_and_interrupted_goes_on_from_its_chunks_to_the_same_bytes(
    tether, desk: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "prompts.jsonl", ({"prompt": f"{' '.join(WORDS)} {n}"} for n in range(700)))
    command = ["data", "candidates", "prompts.jsonl", "--model", str(desk / "alpha"), "--per-prompt", "2", "--out"]
    home = tmp_path / "home"
    environment = {**os.environ, "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def chunks() -> int:
        return len(list(home.glob("work/*/*.json")))

    for how, after, code in ((signal.SIGKILL, 2, -signal.SIGKILL), (signal.SIGINT, 5, 130)):
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *command, "out"],
            cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            # A shell that runs the tests in the background has its children ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        until("it has stored chunks", lambda: chunks() >= after, 200, process.poll, every=0.01)  # noqa: B023
        process.send_signal(how)
        assert process.wait(PATIENCE * 60) == code
        assert after <= chunks() < 22 and not (tmp_path / "out").exists()
    for name, state in (("out", home), ("whole", tmp_path / "fresh")):
        done = tether(*command, name, home=state, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not list(tmp_path.glob(".out.*"))


def test_a_mistake_ends_in_one_paragraph_and_writes_nothing(tether_here, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hi"}])
    alpha = str(desk / "alpha")
    for arguments, said in [
        (["nowhere.jsonl", "--model", alpha, "--out", "out"], "PROMPTS: there is no file"),
        (["empty.jsonl", "--model", alpha, "--out", "out"], "no valid prompt in 1 row"),
        (["prompts.jsonl", "--model", "nowhere", "--out", "out"], "--model nowhere: there is no such folder"),
        (["prompts.jsonl", "--model", alpha, "--out", "full"], "--out full holds something else already"),
        (["prompts.jsonl", "--model", alpha, "--out", "out", "--per-prompt", "0"], "per_prompt = 0: must be greater"),
        (["prompts.jsonl", "--model", alpha, "--out", "out", "--temperature", "nan"], "temperatures.0 = nan"),
        (["prompts.jsonl", "--model", alpha, "--out", "out", "--temperature", "1", "--temperature", "1"], "given once"),
    ]:
        done = tether_here("data", "candidates", *arguments, home=tmp_path / "home")
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "home").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["alpha", "alpha"], "it is the same model as --model"),
        (["r2:ppo"], "there is no run r2"),
        (["r1:reward"], "stage reward has no language model; name sft or ppo"),
        (["r1:sft"], "run r1 has no sft model"),
        (["broken"], "holds no model: its config.json can't be read"),
        (["classifier"], "holds a LlamaForSequenceClassification, which writes no text"),
    ],
)
def test_what_is_no_model_is_refused_by_name(
    desk: Path, names: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    for name, config in (("broken", "{"), ("classifier", '{"architectures": ["LlamaForSequenceClassification"]}')):
        (desk / name).mkdir(exist_ok=True)
        (desk / name / "config.json").write_text(config)
    with pytest.raises(UserError) as error:
        find_models(names, desk / "home")
    assert said in str(error.value)
