"""The profile on real preferences with a real pretrained model, smaller: about ten minutes on two quiet cores.

`TETHER_DATA=... pytest -m "real_data and slow" tests/test_real_data.py`, after `tether fetch smollm2`.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("TETHER_DATA", ROOT.parent / "shared" / "data"))
SMALLER = {
    "data.split": "{train: 0.9, calibration: 0.05, test: 0.05}",
    "sft.max_demonstrations": "32", "sft.evaluate": "16",
    "reward.max_pairs": "64", "reward.scale_responses": "16",
    "ppo.updates": "2", "ppo.batch_size": "16",
    "human_eval.items": "8",
    # So little training promises no accuracy and so few pairs no calibration; the gates on a sound run stay.
    "gates.reward.accuracy_low": "null", "gates.reward.ece": "null",
    "gates.human_eval.items": "8", "gates.human_eval.win_rate_low": "null",
}  # fmt: skip

pytestmark = [pytest.mark.real_data, pytest.mark.slow, pytest.mark.timeout(5400)]


def tether(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Waiting threads that spin slow each other down where the cores are shared.
    variables = {**os.environ, "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command, cwd=home.parent, env=variables, capture_output=True, text=True, check=False, timeout=5000
    )


def status(home: Path) -> dict[str, Any]:
    done = tether(home, "status", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh home that holds the fetched model and nothing else."""
    if not (DATA / "hh-rlhf").is_dir():
        pytest.skip(f"no hh-rlhf in {DATA}: set TETHER_DATA")
    fetched = Path(os.environ.get("TETHER_HOME", ROOT / ".tether")) / "models"
    if not (fetched / "smollm2").is_dir():
        pytest.skip(f"no smollm2 in {fetched}: run `tether fetch smollm2`")
    home = tmp_path_factory.mktemp("real") / "home"
    home.mkdir()
    (home / "models").symlink_to(fetched.resolve())
    return home


@pytest.fixture(scope="module")
def waiting(home: Path) -> dict[str, Any]:
    preferences = f"data.preferences={DATA / 'hh-rlhf' / 'helpful-base-test.jsonl.gz'}"
    smaller = [part for name, value in SMALLER.items() for part in ("--set", f"{name}={value}")]
    done = tether(home, "run", "hh-smollm2", "--set", preferences, *smaller)
    assert done.returncode == 0, done.stdout + done.stderr
    return status(home)


def test_the_run_goes_through_every_stage_and_waits_for_people(waiting: dict[str, Any]) -> None:
    assert [stage["state"] for stage in waiting["stages"]] == ["passed"] * 4 + ["awaiting_labels"]
    metrics = {name: value for stage in waiting["stages"] for name, value in stage["metrics"].items()}
    assert metrics["data/quarantined"] == 15, "9 differing prompts, 4 empty responses, 2 identical"
    assert metrics["data/leaked_prompts"] == 0
    assert metrics["sft/perplexity"] < metrics["sft/base_perplexity"] < metrics["sft/unigram_perplexity"]
    assert metrics["reward/test_pairs"] > 90
    assert metrics["ppo/updates"] == 2


def test_ppo_started_at_the_sft_model_and_moved(home: Path, waiting: dict[str, Any]) -> None:
    from components.artifacts import ArtifactStore
    from components.data.jsonl import read_rows

    history = read_rows(ArtifactStore(home).path(waiting["stages"][3]["digest"]) / "history.jsonl")
    assert abs(history[0]["ppo/kl"]) <= 1e-2
    assert history[0]["ppo/sampler_drift"] <= 1e-2
    assert history[1]["ppo/kl_k3"] > history[0]["ppo/kl_k3"]


def test_a_generated_sheet_finishes_it(home: Path, waiting: dict[str, Any], tmp_path: Path) -> None:
    with (home / "runs" / waiting["run"] / "sheet.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row.update({name: ("a", "b", "tie", "a")[number % 4] for name in row if name.startswith("rating_")})
    filled = tmp_path / "filled.csv"
    with filled.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    done = tether(home, "human-eval", "score", str(filled))
    assert done.returncode == 0, done.stdout + done.stderr
    human = status(home)["stages"][4]
    assert human["state"] == "passed"
    assert human["metrics"]["human_eval/items"] == len(rows) == 8
    assert human["metrics"]["human_eval/fleiss_kappa"] == pytest.approx(1)
