"""Warnings from step curves: a planted fault is found, and a healthy run, noisy and autocorrelated, rarely warns."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from components.base.jsonl import read_rows
from components.gates.gate_text import outcome
from components.gates.judging import GatesConfig, judge
from components.ppo.config import KLConfig
from components.ppo.control import KLController
from components.ppo.monitors.curves import curve_metrics, uniform_scores

TARGET, RUNS = 3.0, 200
DRIFT, CLIMB = "ppo/beta_drift_below_target", "ppo/proxy_rise_at_level_kl"


def history(
    chance: np.random.Generator,
    updates: int,
    rho: float,
    kl_of: Callable[[float, float], float],
    reward_of: Callable[[float, float], float] = lambda share, kl: math.sqrt(kl / TARGET),
    noise: float = 0.3,
) -> tuple[list[dict[str, float]], KLConfig]:
    """A run by the real controller: mean KL is `kl_of(share of the run, β)` times log-normal AR(1) noise."""
    config = KLConfig(control="adaptive", coefficient=0.2, target=TARGET, horizon=updates / 14)
    controller, rows = KLController.start(config), []
    z = chance.standard_normal(2)
    for update in range(updates):
        z = rho * z + math.sqrt(1 - rho**2) * chance.standard_normal(2)
        kl = kl_of(update / updates, controller.beta) * math.exp(noise * z[0])
        rows.append({"ppo/kl": kl, "ppo/kl_per_token": kl / 20, "ppo/beta": controller.beta, "ppo/ratio_max": 1.5,
                     "ppo/clip_fraction": 0.1, "ppo/proxy_reward": reward_of(update / updates, kl) + 0.1 * z[1]}
                    )  # fmt: skip
        controller.update(kl)
    return rows, config


def settles(share: float, beta: float) -> float:
    """KL that rises within a tenth of the run, and answers β."""
    return TARGET * (0.2 / beta) ** 0.8 * (1 - math.exp(-20 * share))


def warned(name: str, threshold: float, updates: int, rho: float, *curves: Any, noise: float = 0.3) -> float:
    """Share of runs in which a warning's metric is above its threshold."""
    chance = np.random.default_rng(updates)
    found = [curve_metrics(*history(chance, updates, rho, *curves, noise=noise))[name] for _ in range(RUNS)]
    return float(np.mean([value > threshold for value in found]))


@pytest.mark.parametrize("rho", [0.0, 0.6])
@pytest.mark.parametrize("updates", [20, 60])
def test_a_healthy_run_rarely_warns(updates: int, rho: float) -> None:
    for noise in (0.2, 0.5):
        assert warned(DRIFT, 0.2, updates, rho, settles, noise=noise) <= 0.03
        assert warned(CLIMB, 0.2, updates, rho, settles, noise=noise) <= 0.03
        slow: Any = (lambda share, beta: 4 * share + 0.01, lambda share, kl: 2 * math.sqrt(share))
        assert warned(CLIMB, 0.2, updates, rho, *slow, noise=noise) <= 0.05, "KL that grows pays for the reward"


@pytest.mark.parametrize(("updates", "rho", "least"), [(20, 0.0, 0.7), (20, 0.6, 0.5), (60, 0.0, 0.9), (60, 0.6, 0.7)])
def test_kl_that_stays_below_its_target_while_beta_still_falls_is_found(updates: int, rho: float, least: float) -> None:
    assert warned(DRIFT, 0.2, updates, rho, lambda share, beta: 1.8, noise=0.2) >= least


@pytest.mark.parametrize(("updates", "rho", "least"), [(20, 0.0, 0.8), (20, 0.6, 0.3), (60, 0.0, 0.9), (60, 0.6, 0.8)])
def test_proxy_reward_that_climbs_while_kl_does_not_is_found(updates: int, rho: float, least: float) -> None:
    assert (
        warned(CLIMB, 0.2, updates, rho, lambda share, beta: TARGET, lambda share, kl: 1.5 * share, noise=0.2) >= least
    )


def by_hand(rows: list[dict[str, float]]) -> dict[str, float]:
    """The four gated metrics by other code: linregress, and a t test at the number of values that they are worth."""

    def half(y: np.ndarray, errors: np.ndarray, k: int, naive: float) -> float:
        if abs(errors).max() < 1e-12:
            return 0.0
        r = errors[1:] @ errors[:-1] / (errors @ errors)
        r = min(max(r + (k + (2 + k) * r) / len(y), 0.0), 0.95)
        left = max(len(y) * (1 - r) / (1 + r) - k, 0.5)
        return naive * math.sqrt((len(y) - k) / left) * float(stats.t.ppf(0.975, left))

    n = len(rows)
    third, rest = n // 3, 2 * n // 3
    kl = np.array([row["ppo/kl"] for row in rows])
    beta = np.diff(np.log([row["ppo/beta"] for row in rows]))[-third:]
    ends = [m + s * half(y, y - m, 1, stats.sem(y)) for y, s in ((kl[-third:], 1), (beta, -1), (beta, 1))
            for m in [y.mean()]]  # fmt: skip
    drift = max(0.0, ends[1], -ends[2]) * third
    lines = []
    for name in ("proxy_reward", "kl"):
        y = np.array([row[f"ppo/{name}"] for row in rows])[-rest:]
        fit = stats.linregress(np.arange(rest), y)
        errors = y - fit.intercept - fit.slope * np.arange(rest)
        lines.append((fit.slope * (rest - 1), half(y, errors, 2, fit.stderr) * (rest - 1)))
    level = lines[1][0] - lines[1][1] <= 0 and sum(lines[1]) <= kl[-rest:].mean()
    return {
        DRIFT: drift if ends[0] < TARGET else 0.0,
        CLIMB: max(0.0, lines[0][0] - lines[0][1]) if level else 0.0,
        "ppo/ratio_max": sorted(row["ppo/ratio_max"] for row in rows)[-1],
        "ppo/clip_fraction_max": sorted(row["ppo/clip_fraction"] for row in rows)[-1],
        "ppo/replaced_max": sorted(sorted(r["ppo/replaced"] for r in rows[i : i + 5])[0] for i in range(n - 4))[-1],
        "ppo/score_spread_min": sorted(row["ppo/score_spread"] for row in rows)[0],
    }


def test_the_gated_numbers_are_those_of_other_code() -> None:
    chance, seen = np.random.default_rng(1), {DRIFT: 0, CLIMB: 0}
    for run in range(40):
        level = lambda share, beta, run=run: 1.5 + run / 30  # noqa: E731
        rows, config = history(chance, 18 + run, 0.4, level, lambda share, kl: share, noise=0.15)
        for row in rows:
            row |= {"ppo/ratio_max": 1 + chance.random(), "ppo/clip_fraction": chance.random()}
            row |= {"ppo/replaced": chance.random(), "ppo/score_spread": chance.random()}
        found, expected = curve_metrics(rows, config), by_hand(rows)
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
        seen = {name: count + (expected[name] > 0) for name, count in seen.items()}
    assert all(8 <= count <= 39 for count in seen.values()), seen


def test_a_fixed_coefficient_does_not_drift_and_few_updates_measure_nothing() -> None:
    rows, config = history(np.random.default_rng(0), 30, 0.0, lambda share, beta: 1.0)
    fixed = KLConfig(control="fixed", coefficient=0.0, target=TARGET)
    still = [row | {"ppo/beta": 0.0} for row in rows]
    assert curve_metrics(still, fixed)[DRIFT] == 0 and curve_metrics(still, fixed)["ppo/late_log_beta_rise"] == 0
    few = curve_metrics(rows[:6], config)
    assert few.keys() == {"ppo/ratio_max", "ppo/clip_fraction_max"}
    gates = GatesConfig.model_validate({"ppo": {"beta_drift_below_target": 0.2, "ratio_max": 1.0}})
    verdicts = {v.name: v for v in judge("ppo", few, gates)}
    assert verdicts["ppo.beta_drift_below_target"].passed
    assert outcome(verdicts["ppo.ratio_max"]) == "WARN" and not verdicts["ppo.ratio_max"].stops


def test_a_share_of_replaced_scores_below_its_limit_is_not_exceeded_by_the_chance_of_single_batches() -> None:
    """Batches of 32, 100 updates, a limit of 0.9: with a true share of 0.8 some batch nearly always exceeds it."""

    def exceeding(share: float) -> float:
        drawn = np.random.default_rng(0).binomial(32, share, (500, 100)) / 32
        found = [uniform_scores([{"ppo/replaced": value} for value in row])["ppo/replaced_max"] for row in drawn]
        return float(np.mean(np.array(found) > 0.9))

    assert exceeding(0.8) <= 0.01 and exceeding(0.95) == 1
    assert uniform_scores([{"ppo/replaced": 0.7}, {"ppo/replaced": 0.9}])["ppo/replaced_max"] == 0.7, "of two, both"
    assert uniform_scores([{"ppo/score_spread": 1.0}]) == {"ppo/score_spread_min": 1.0}


def test_the_target_is_judged_in_its_own_unit() -> None:
    rows, config = history(np.random.default_rng(0), 60, 0.0, lambda share, beta: 2.0, noise=0.1)
    a_token = config.model_copy(update={"unit": "token", "target": 0.09})  # KL per token is 0.1
    assert curve_metrics(rows, config)[DRIFT] > 0.2 and curve_metrics(rows, a_token)[DRIFT] == 0
    assert curve_metrics(rows, a_token)["ppo/late_kl"] == pytest.approx(0.1, rel=0.1)


def test_a_stages_metrics_are_those_of_its_history(stages: Any, tmp_path: Path) -> None:
    metrics = stages.run("ppo", tmp_path, updates=15, learning_rate=1e-2)
    rows = read_rows(tmp_path / "artifact" / "history.jsonl")
    expected = by_hand(rows)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert metrics[DRIFT] == 0, "β is fixed"
