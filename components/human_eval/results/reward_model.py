"""Compare the reward model with the judges on the policy's own replies, to see whether it can still be trusted.

PPO moves the policy towards high scores, so the reward model's errors show first on the policy's replies. Held-out
pairs do not show them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from components.base.jsonl import read_rows
from components.human_eval.results.checks import OTHER_SIDE, prompt_of
from components.human_eval.results.summary import item_score, rating_scores
from components.human_eval.returned_labels import Labels, Sample
from components.stats.calibration.calibration_metrics import ConfidenceBin, calibration, correctness
from components.stats.intervals import Interval, Numbers, clustered_auroc, clustered_proportion
from components.stats.raters import crossed_agreement

BINS = 5
"""Number of equal-mass bins of the calibration error; few, since an evaluation has few pairs."""
QUARTERS = 4
"""Number of groups of equal size by the policy's gain in reward."""
GAPS = (("unanimous", 1.0), ("clear", 0.5), ("narrow", 0.0))
"""How clearly a pair was decided, by the smallest lead: the winner's share of ratings minus the loser's."""
_CALIBRATION = {
    "ece": "ece", "ece_null_95": "ece_null_95", "calibration_slope": "slope",
    "slope_low": "slope_low", "slope_high": "slope_high",
}  # fmt: skip
"""Maps a number of calibration to the name of its metric."""


class RewardAgreement(TypedDict):
    """`reward_model` of `result.json`; its numbers are `calibration`'s, with `accuracy` called `agreement`."""

    pairs: int
    """Number of decided pairs: those with enough ratings, and more for one reply than for the other."""
    minimum: int
    """Fewest ratings of a decided pair."""
    undecided: int
    """Number of rated pairs with fewer ratings than that."""
    numbers: Numbers
    policy_preferred: dict[str, float]
    """Share of the pairs that the policy wins, by `judges` and by `reward_model`."""
    by_gap: list[dict[str, Any]]
    """Accuracy on pairs that were decided with a similar lead (`GAPS`)."""
    by_gain: list[dict[str, Any]]
    """The policy's win rate on a quarter of the rated pairs, including ties, from the lowest gain to the highest. The
    gain is the calibrated reward of the policy's reply minus that of SFT's, in logits."""
    bins: list[ConfidenceBin]


def reward_agreement(
    sample: Sample, rated: Labels, minimum: int, folder: Path | None, seed: int, level: float
) -> RewardAgreement | None:
    """Compare the reward model with the judges on every decided pair; None if there is none.

    Agreement is the share of decided pairs on which it scores the judges' winner higher, a tie 1/2. Its interval is
    over prompts and raters; the other numbers' intervals are over prompts. AUROC is the probability that the gain in
    reward (policy's reply minus SFT's) is higher on a pair that the policy won by the judges than on one that SFT won.
    A model that prefers everything the policy writes has 0.5, however often the policy wins.

    Args:
        rated: the ratings of each rated item.
        minimum: fewest ratings of a decided pair.
        folder: the output of the stage that scored the pairs (`components.reward.substages.sheet_scores`); None if
            there is none.
    """
    if folder is None:
        return None
    raw = {row["item"]: row for row in read_rows(folder / "scores.jsonl")}
    temperature = float(json.loads((folder / "scores.json").read_text(encoding="utf-8"))["temperature"])
    scores = {item: item_score(ratings, sample.policy_side[item]) for item, ratings in rated.items()}
    enough = [item for item, ratings in rated.items() if sum(map(bool, ratings)) >= minimum]
    decided = [item for item in enough if scores[item] != 0.5]
    if not decided:
        return None
    gains = _gains(sample, scores, raw)
    gain = np.array([gains[item] for item in decided])
    won = np.array([scores[item] > 0.5 for item in decided])
    margins = np.where(won, gain, -gain)
    prompts = [prompt_of(sample, item) for item in decided]
    measured = calibration(margins, prompts, temperature, seed, BINS)
    numbers: Numbers = dict(measured.numbers)
    right = correctness(margins)
    for name in ("accuracy", "accuracy_low", "accuracy_high"):
        del numbers[name]
    votes = [[2 * s - 1 for s in rating_scores(rated[item], sample.policy_side[item])] for item in enough]
    agreement = crossed_agreement(votes, [gains[i] for i in enough], [prompt_of(sample, i) for i in enough], level)
    numbers |= agreement.named("agreement")
    numbers |= _auroc(gain, won, prompts).named("auroc")
    if not np.isfinite(numbers["calibration_slope"] or 0.0):
        numbers["calibration_slope"] = None
    by_reward = float(correctness(gain).mean())
    return {
        "pairs": len(decided),
        "minimum": minimum,
        "undecided": len(rated) - len(enough),
        "numbers": numbers,
        "policy_preferred": {"judges": float(won.mean()), "reward_model": by_reward},
        "by_gap": list(_by_gap(right, [abs(2 * scores[item] - 1) for item in decided], prompts, level)),
        "by_gain": _by_gain(sample, scores, {i: raw_gain / temperature for i, raw_gain in gains.items()}, level),
        "bins": measured.bins["bins"],
    }


def reward_metrics(agreement: RewardAgreement | None) -> dict[str, float]:
    """Return the metrics for gates and MLflow; a gate on one that could not be measured fails."""
    if agreement is None:
        return {}
    numbers = agreement["numbers"]
    named = {f"human_eval/reward_{name}": numbers[of] for of, name in _CALIBRATION.items()}
    for name in ("agreement", "auroc"):
        named |= {f"human_eval/reward_{name}{end}": numbers[f"{name}{end}"] for end in ("", "_low", "_high")}
    return {"human_eval/reward_pairs": float(agreement["pairs"])} | {n: v for n, v in named.items() if v is not None}


def _gains(sample: Sample, items: Iterable[str], raw: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the raw reward of the policy's reply minus that of SFT's, by item."""
    sides = {item: sample.policy_side[item] for item in items}
    return {item: raw[item][side] - raw[item][OTHER_SIDE[side]] for item, side in sides.items()}


def _by_gain(
    sample: Sample, scores: Mapping[str, float], gains: Mapping[str, float], level: float
) -> list[dict[str, Any]]:
    quarters: list[dict[str, Any]] = []
    for part in np.array_split(sorted(gains, key=lambda item: (gains[item], item)), min(QUARTERS, len(gains))):
        items = [str(item) for item in part]
        win = clustered_proportion([scores[i] for i in items], [prompt_of(sample, i) for i in items], level)
        quarters.append({
            "gain_from": gains[items[0]], "gain_to": gains[items[-1]], "pairs": len(items),
            "win_rate": win.value, "low": win.low, "high": win.high,
        })  # fmt: skip
    return quarters


def _auroc(gain: Any, won: Any, prompts: list[str]) -> Interval:
    if won.all() or not won.any():
        return Interval(float("nan"), float("nan"), float("nan"))
    of = np.array(prompts)
    return clustered_auroc(gain[won], gain[~won], of[won].tolist(), of[~won].tolist())


def _by_gap(right: Any, gaps: list[float], prompts: list[str], level: float) -> Iterator[dict[str, Any]]:
    names = [next(name for name, least in GAPS if gap >= least - 1e-9) for gap in gaps]
    for name, _ in GAPS:
        inside = [i for i, other in enumerate(names) if other == name]
        if inside:
            value, low, high = clustered_proportion(right[inside], [prompts[i] for i in inside], level)
            yield {"gap": name, "pairs": len(inside), "accuracy": value, "low": low, "high": high}
