"""A threshold is chosen on some seeds and its pass rate reported on others."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from components.gates.judging import GatesConfig
from components.gates.table import GATES
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tests.bench import seeds, thresholds
from tests.bench.thresholds import implied, measure, passing, rate, recorded, report, seed_range

PROFILE = GatesConfig.model_validate({
    "reward": {"slice_ece_excess": 0.08, "accuracy_low": 0.7, "calibration_slope": (0.8, 1.25)}
})  # fmt: skip


def metrics(excess: float | None = 0.01, accuracy: float = 0.8, slope: float = 1.0) -> dict[str, float | None]:
    return {
        "reward/slice_ece_excess": excess, "reward/accuracy_low": accuracy, "reward/calibration_slope": slope,
        "reward/slope_null_low": 0.9, "reward/slope_null_high": 1.1,
    }  # fmt: skip


def test_ranges_of_seeds_are_read_and_what_is_none_is_refused() -> None:
    assert seed_range("10-12") == [10, 11, 12] and seed_range("3") == [3] and seed_range("0-1,8") == [0, 1, 8]
    for wrong in ("", "a", "1-", "5-3", "0-3,2", "-4"):
        with pytest.raises(ValueError, match="seed"):
            seed_range(wrong)


def test_a_threshold_is_the_prediction_limit_or_the_worst_seed_if_that_is_looser() -> None:
    values = [0.1, 0.2, 0.3, 0.4]
    reach = stats.t.ppf(0.99, 3) * np.std(values, ddof=1) * math.sqrt(1 + 1 / 4)
    assert implied("<=", values) == pytest.approx(0.25 + reach) and implied(">=", values) == pytest.approx(0.25 - reach)
    assert implied("<=", [0.0] * 200 + [1.0]) == 1.0 and implied(">=", [0.0] * 200 + [-1.0]) == -1.0
    assert implied("<=", [0.1, 0.2]) is None and implied("<=", [0.1, math.nan, 0.2]) is None


def test_one_further_seed_is_within_the_implied_threshold_in_99_percent() -> None:
    drawn = np.random.default_rng(0).normal(size=(4000, 11))
    inside = np.mean([row[10] <= implied("<=", row[:10].tolist()) for row in drawn])
    assert 0.985 <= inside <= 0.998


def test_the_rate_has_the_exact_interval() -> None:
    # Clopper and Pearson 1934: of 10 of 10 the lower end solves p^10 = 0.025.
    assert rate(10, 10) == f"10 of 10 [{0.025**0.1:.3f}, 1.000]" and rate(0, 10).endswith(f"{1 - 0.025**0.1:.3f}]")


def test_a_seed_is_measured_once_and_again_for_other_code_or_another_stage(tmp_path: Path) -> None:
    file, ran = tmp_path / "deep" / "metrics.jsonl", []

    def run(seed: int) -> dict[str, float | None]:
        ran.append(seed)
        if seed == 3:
            raise KeyboardInterrupt
        return metrics(seed / 100)

    with pytest.raises(KeyboardInterrupt):
        measure(file, [1, 2, 3], "reward", "abc", run)
    with file.open("a") as out:
        out.write('{"seed": 4, "un')  # the writer was killed
    assert measure(file, [2, 1, 5], "reward", "abc", run) == {seed: metrics(seed / 100) for seed in (2, 1, 5)}
    assert ran == [1, 2, 3, 5] and sorted(recorded(file, "reward", "abc")) == [1, 2, 5]
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines()] == [1, 2, 5]
    for until, code in (("ppo", "abc"), ("reward", "abc-dirty")):
        assert measure(file, [1], until, code, run) and ran[-1] == 1
    assert ran == [1, 2, 3, 5, 1, 1]


def test_the_pass_rate_is_of_the_reporting_seeds_alone() -> None:
    choosing = {seed: metrics(0.001 * seed) for seed in range(10)}
    reporting = {10: metrics(0.011), 11: metrics(0.07), 12: metrics(0.09), 13: metrics(None), 14: metrics(slope=0.5)}
    found = report(choosing, reporting, PROFILE, "reward")
    line = next(each for each in found.splitlines() if "slice_ece_excess" in each)
    limit = implied("<=", [0.001 * seed for seed in range(10)])
    assert limit is not None and 0.011 < limit < 0.02
    assert f"| 0 to 0.009 | {limit:.4g} | {rate(2, 5)} | 0.08 | {rate(3, 5)} |" in line
    assert f"{rate(2, 5)} pass every gate of the profile up to reward" in found
    assert (
        "Seed 12 fails reward.slice_ece_excess (0.09)." in found
        and "Seed 13 fails reward.slice_ece_excess (None)" in found
    )
    assert "Seed 14 fails reward.calibration_slope (0.5)." in found and "Seed 10" not in found
    assert "ppo.kl" not in found


def test_a_missing_metric_never_passes_and_a_second_bound_counts() -> None:
    gate = GATES["reward.calibration_slope"]
    assert passing(gate, (0.95, 1.05), [metrics(slope=0.91), metrics(slope=0.89), {}]) == 1


@pytest.mark.parametrize("until", thresholds.STAGES)
def test_a_measured_run_judges_nothing_but_its_end(until: str) -> None:
    gates = load_config("demo", [parse_override(each) for each in thresholds.settings(until)]).gates
    judged = [(gate.name, limit) for gate, limit in gates.rules() if limit is not None]
    assert judged == ([] if until == "human_eval" else [(f"{until}.end_of_bench", -1)])


def test_a_seed_that_chose_a_threshold_is_not_reported_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["seeds", "--choose", "0-9", "--report", "9-12"])
    with pytest.raises(SystemExit) as error:
        seeds.main()
    assert error.value.code == 2
