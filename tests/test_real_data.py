"""The profile on real preferences with a real pretrained model, after `tether fetch smollm2`.

`pytest -m slow tests/test_real_data.py` runs it smaller, a quarter of an hour on two cores. `pytest -m bench` runs
it as it stands, then without the tether and on shuffled labels, which must both be stopped: about two hours. That run
is kept below TETHER_BENCH_HOME, where it is set, and goes on where it was interrupted.
"""

import gzip
import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import read_rows
from components.store.store import ArtifactStore
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from tasks.runs.status import load_status
from tests.bench.tools import ROOT, tether, with_models
from tests.sheets import fill

DATA = Path(os.environ.get("TETHER_DATA", ROOT.parent / "shared" / "data"))
PREFERENCES = [DATA / "hh-rlhf" / f"{name}-base-test.jsonl.gz" for name in ("helpful", "harmless")]
LEARNED = (
    "accuracy_low", "ece", "calibration_slope", "temperature_at_end", "length_gain_low", "ece_width", "brier_high",
    "log_loss_high", "slice_ece_excess", "majority_gain_low", "balanced_length_accuracy_low",
    "length_partial_correlation_high", "probe_texts", "probe_filler_high", "probe_flattery_high", "probe_hedge_high",
    "probe_repetition_high", "probe_dots_high", "probe_exclamations_high", "probe_whitespace_high",
)  # fmt: skip
"""Gates of the reward model on what it has learned."""
WAIVED = ("reward.length_gain_low", "reward.balanced_length_accuracy_low", "reward.probe_hedge_high")
"""What stops the profile as it stands: 3,000 pairs teach this model not much more than length, and to like a hedge."""
TOO_FEW = ("win_rate_low", "position_bias", "self_agreement_low", "reward_agreement_low")
SMALLER = {
    "data.split": "{train: 0.9, calibration: 0.05, test: 0.05}",
    "sft.max_demonstrations": "32", "sft.evaluate": "16",
    "reward.max_pairs": "64", "reward.scale_responses": "16",
    "ppo.updates": "2", "ppo.batch_size": "16", "ppo.kl.control": "fixed",
    "human_eval.items": "8", "human_eval.attention": "1",
    # So little training promises no accuracy, gain or movement, so few pairs no calibration; gates on a sound run stay.
    **{f"gates.sft.{name}": "null" for name in ("loss", "ended")},
    "gates.sft.perplexity_ratio": "1.2",  # 16 held-out demonstrations leave a wide interval
    **{f"gates.reward.{name}": "null" for name in LEARNED},
    **{f"gates.ppo.{name}": "null" for name in ("reward_gain_low", "evaluated", "kl_floor", "ended")},
    "gates.human_eval.items": "8",  # 8 pairs, 2 of them repeated, leave these intervals too wide
    **{f"gates.human_eval.{name}": "null" for name in TOO_FEW},
}  # fmt: skip

pytestmark = [pytest.mark.real_data, pytest.mark.timeout(3 * 5400)]


def status(home: Path) -> dict[str, Any]:
    return load_status(home).as_json()


@pytest.fixture(
    scope="module",
    params=[pytest.param("smaller", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.bench)],
)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh home that holds the fetched model and nothing else; named after the size of the run."""
    if not (DATA / "hh-rlhf").is_dir():
        pytest.skip(f"no hh-rlhf in {DATA}: set TETHER_DATA")
    fetched = Path(os.environ.get("TETHER_HOME", ROOT / ".tether")) / "models"
    if not (fetched / "smollm2").is_dir():
        pytest.skip(f"no smollm2 in {fetched}: run `tether fetch smollm2`")
    kept = os.environ.get("TETHER_BENCH_HOME")
    return with_models(Path(kept or tmp_path_factory.mktemp("real")) / request.param)


def sizes(home: Path) -> list[str]:
    return [f"{name}={value}" for name, value in SMALLER.items()] if home.name == "smaller" else []


def run(
    home: Path, *settings: str, data: Sequence[Path] = PREFERENCES, waive: bool = True
) -> subprocess.CompletedProcess[str]:
    given = [f"data.preferences=[{', '.join(map(str, data))}]", *sizes(home), *settings]
    waived = [part for gate in WAIVED for part in ("--waive", gate)] if home.name == "full" and waive else []
    options = [*(part for setting in given for part in ("--set", setting)), *waived]
    return tether(home, "run", "hh-smollm2", *options, *(["--because", "known: docs/benchmarks.md"] if waived else []))


@pytest.fixture(scope="module")
def waiting(home: Path) -> dict[str, Any]:
    if home.name == "full":
        done = run(home, waive=False)
        assert done.returncode == 3, done.stdout + done.stderr
        assert stopped_by(home)[0][2:] == ["gate_failed", "not_run", "not_run"]
        assert set(stopped_by(home)[1]) == set(WAIVED)
    done = run(home)
    assert done.returncode == 0, done.stdout + done.stderr
    return status(home)


def config_of(home: Path) -> RunConfig:
    return load_config("hh-smollm2", [parse_override(setting) for setting in sizes(home)])


def test_the_run_goes_through_every_stage_and_waits_for_people(home: Path, waiting: dict[str, Any]) -> None:
    assert [stage["state"] for stage in waiting["stages"]][-1] == "awaiting_labels"
    metrics = {name: value for stage in waiting["stages"] for name, value in stage["metrics"].items()}
    assert metrics["data/quarantined"] == 97, (
        "14 differing prompts, 8 empty responses, 2 identical, 10 of doubled turns, 63 with a marker in a turn"
    )
    assert metrics["data/leaked_prompts"] == 0
    assert metrics["sft/perplexity"] < metrics["sft/base_perplexity"] < metrics["sft/unigram_perplexity"]
    assert metrics["reward/test_pairs"] > 90
    assert metrics["ppo/updates"] == config_of(home).ppo.updates


def test_ppo_started_at_the_sft_model_and_moved(home: Path, waiting: dict[str, Any]) -> None:
    history = read_rows(ArtifactStore(home).path(waiting["stages"][3]["digest"]) / "history.jsonl")
    assert abs(history[0]["ppo/kl"]) <= 1e-2
    assert history[0]["ppo/sampler_drift"] <= 1e-2
    assert history[-1]["ppo/kl_k3"] > history[0]["ppo/kl_k3"]


def test_a_generated_sheet_finishes_it(home: Path, waiting: dict[str, Any], tmp_path: Path) -> None:
    """Three raters who see the policy's response as better three times in four and are undecided else, each so in
    words of their own; a pair that is shown again gets the same answer, and an attention check the right one.
    """
    sample = ArtifactStore(home).path(waiting["stages"][4]["digest"])
    key = json.loads((sample / "key.json").read_text())
    sides, repeat_of, checks = key["policy_side"], key["repeat_of"], key["attention"]
    numbers = {item: number for number, item in enumerate(item for item in sides if item not in repeat_of)}
    items: list[str] = []

    def rate(number: int, item: str) -> tuple[str, ...]:
        items.append(item)
        number = numbers.get(repeat_of.get(item, item), 0)  # none of an attention check
        undecided = ("tie", "both_bad", "tie" if number % 8 == 3 else "both_bad")
        return undecided if number % 4 == 3 else (checks.get(item) or sides[item],) * 3

    filled = fill(home / "runs" / waiting["run"] / "sheet.csv", rate, tmp_path / "filled.csv")
    done = tether(home, "people", "score", str(filled))
    assert done.returncode == 0, done.stdout + done.stderr
    human = status(home)["stages"][4]
    assert human["state"] == "passed"
    assert human["metrics"]["human_eval/items"] == len(numbers) == config_of(home).human_eval.items
    assert human["metrics"]["human_eval/repeated"] == len(repeat_of) > 0
    assert len(items) == len(numbers) + len(repeat_of) + len(checks)
    assert human["metrics"]["human_eval/attention"] == 1 and checks
    assert human["metrics"]["human_eval/self_agreement"] == pytest.approx(1)
    assert human["metrics"]["human_eval/win_rate"] == pytest.approx(0.875)


def stopped_by(home: Path) -> tuple[list[str], list[str]]:
    """States of the newest run's stages and the names of its failed gates."""
    stages = status(home)["stages"]
    return [s["state"] for s in stages], [g["name"] for s in stages for g in s["gates"] if not g["passed"]]


@pytest.mark.bench
@pytest.mark.parametrize("home", ["full"], indirect=True)
def test_without_the_tether_the_policy_is_stopped(home: Path, waiting: dict[str, Any]) -> None:
    done = run(home, "ppo.kl.control=fixed", "ppo.kl.coefficient=0")
    assert done.returncode == 3, done.stdout + done.stderr
    states, failed = stopped_by(home)
    assert states == ["cached"] * 3 + ["gate_failed", "not_run"]
    assert "ppo.stopped" in failed, "the published checkpoint may be inside the band, where policy.kl passes"


@pytest.mark.bench
@pytest.mark.parametrize("home", ["full"], indirect=True)
def test_shuffled_labels_are_stopped_before_ppo(home: Path, tmp_path: Path) -> None:
    """A coin turns each pair round, so there is nothing to learn."""
    coin, shuffled = random.Random(0), [tmp_path / f"{source.name}.shuffled.jsonl" for source in PREFERENCES]
    for source, out in zip(PREFERENCES, shuffled, strict=True):
        with gzip.open(source, "rt", encoding="utf-8") as rows, out.open("w", encoding="utf-8") as file:
            for row in map(json.loads, rows):
                if coin.random() < 0.5:
                    row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
                file.write(json.dumps(row) + "\n")
    done = run(home, data=shuffled)
    assert done.returncode == 3, done.stdout + done.stderr
    states, failed = stopped_by(home)
    assert states[2:] == ["gate_failed", "not_run", "not_run"]
    assert "reward.accuracy_low" in failed
