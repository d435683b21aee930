"""The second half of human_eval: returned sheets, unblinded and scored."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.hashing import canonical_json
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.spreadsheet import write_csv
from components.human_eval.batch.halves import HELD_OUT, JUDGED_IN, PREFERENCES, may_train
from components.human_eval.config import ScoreJob
from components.human_eval.results.checks import (
    OTHER_SIDE,
    TIES,
    AttentionCheck,
    RaterChecks,
    attention_check,
    named_raters,
    prompt_of,
    rater_checks,
)
from components.human_eval.results.outcomes import equal_length, outcomes
from components.human_eval.results.reward_model import reward_agreement, reward_metrics
from components.human_eval.results.summary import by_stratum, item_score, per_rater, rating_scores, scored_ratings
from components.human_eval.returned_labels import Answers, Labels, Sample, rated_columns, rating_count
from components.human_eval.sheet import SIMULATED
from components.human_eval.sheet_checks import check_unblinding
from components.stats.annotator_votes import fleiss_kappa
from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.intervals import Interval, Numbers
from components.stats.raters import crossed_proportion, too_few_raters


def run(job: ScoreJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Score the filled sheet `inputs["sheet"]` (a file) of the sample `inputs["sample"]`.

    `inputs["scores"]` has the reward model's scores of the sample; without it the reward model is not compared.

    An item's score is the mean over its ratings of 1 (policy preferred), 1/2 (tie, both_bad) or 0. The win rate is the
    mean over rated items, with an interval over prompts and raters; repeated items are not in it. Writes `result.json`,
    `ratings.csv` (unblinded), and the rated pairs as data: `preferences.jsonl` and `judged.jsonl`. If kappa is
    undefined (a single rater, or only one kind of rating), it is not among the metrics, so that its gate fails.

    Raises:
        UserError: as for `Sample.ratings`.
    """
    level, seed, sample = job.human_eval.level, job.seed, Sample.open(inputs["sample"])
    answers = sample.answers(inputs["sheet"])
    labels = answers.ratings
    rated = rated_once(sample, labels, inputs["sheet"])
    scores = {item: item_score(ratings, sample.policy_side[item]) for item, ratings in rated.items()}
    win, kappa = _win_rate(sample, rated, level), agreement(sample, rated, level)
    bounds, won = _always_valid(sample, rated, scores, level), outcomes(scores.values())
    of_labels = label_metrics(sample, labels, rated)
    checks, attention = rater_checks(sample, labels, level), attention_check(sample, answers.attention, level, labels)
    criteria = {name: _criterion(sample, ratings, level) for name, ratings in answers.criteria.items()}
    even = equal_length(sample, scores, [prompt_of(sample, item) for item in scores], seed, level)
    reward = reward_agreement(sample, rated, job.human_eval.decides, inputs.get("scores"), seed, level)
    metrics = {
        **win.metrics("human_eval/win_rate"),
        **{f"human_eval/{name}": bound for name, bound in bounds.items()},
        **of_labels,
        **{f"human_eval/items_{name}": float(won[of]) for name, of in _OUTCOMES.items()},
        **checks.metrics(),
        **({} if attention is None else attention.lowest.metrics("human_eval/attention")),
        **_criteria_metrics(criteria),
        **reward_metrics(reward),
        **kappa.metrics("human_eval/fleiss_kappa"),
    }
    if even is not None:
        metrics |= Interval(even["win_rate"], even["low"], even["high"]).metrics("human_eval/win_rate_equal_length")
    result = {
        "judges": judged_by(sample, labels),
        "target": _TARGET,
        "level": level,
        "win_rate": win._asdict(),
        "interval_over": "prompts and raters",
        **bounds,
        "outcomes": {"items": won, "ratings": outcomes(score for *_, score in scored_ratings(sample, rated))},
        "equal_length": even,
        "reward_model": reward,
        **kappa.named("fleiss_kappa"),
        "criteria": criteria,
        "strata": by_stratum(sample, scores, level),
        **_label_counts(sample, labels, of_labels),
        **_rater_results(sample, answers, checks, attention, level),
        "key_sha256": sample.about["key_sha256"],
        "guidelines_sha256": sample.about.get("guidelines_sha256"),
    }
    check_unblinding(sample).write(out)
    _write(out / "artifact", sample, labels, rated, result)
    observe(len(rated), metrics, total=len(rated))
    return metrics


_TARGET = (
    "share of items on which the policy is preferred to SFT; a tie or both_bad counts a half; mean over raters first"
)
_OUTCOMES = {"won": "wins", "tied": "ties", "lost": "losses"}
"""Maps the end of a metric's name to the name in `outcomes`."""


def _always_valid(sample: Sample, rated: Labels, scores: Mapping[str, float], level: float) -> dict[str, float]:
    """Return the lower bounds of the win rate that hold at every look, by name."""
    order, alpha = sorted(scores), (1 - level) / 2
    by_rater = [rating_scores(rated[item], sample.policy_side[item]) for item in order]
    return {
        "always_valid_low": float(always_valid_low([scores[item] for item in order], alpha)[-1]),
        "always_valid_low_of_people": float(always_valid_low_of_people(by_rater, alpha)[-1]),
    }


def _criteria_metrics(criteria: Mapping[str, Numbers]) -> dict[str, float]:
    return {
        f"human_eval/{name}_{measure}": number
        for name, numbers in criteria.items()
        for measure, number in numbers.items()
        if measure.startswith("win_rate") and number is not None
    }


def _label_counts(sample: Sample, labels: Labels, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the entries of `result.json` that count labels; `metrics` are those of `label_metrics`."""
    return {
        **{name: metrics[f"human_eval/{name}"] for name in ("ties", "both_bad", "labels_complete")},
        "too_few_raters": too_few_raters(int(metrics["human_eval/raters"])),
        "items": int(metrics["human_eval/items"]),
        "items_sampled": sum(item not in sample.repeat_of for item in labels),
        "items_repeated": len(sample.repeat_of),
        "ratings": {"given": rating_count(labels, sample.raters), "asked": sample.raters * len(labels)},
    }


def _rater_results(
    sample: Sample, answers: Answers, checks: RaterChecks, attention: AttentionCheck | None, level: float
) -> dict[str, Any]:
    """Return the entries of `result.json` about the raters."""
    return {
        "position_bias": checks.position_bias and dict(zip(("value", "high"), checks.position_bias, strict=True)),
        "self_agreement": checks.self_agreement and checks.self_agreement._asdict(),
        "raters_alike": checks.alike,
        "attention": attention and {"items": len(sample.attention), **attention.lowest._asdict()},
        "raters": list(per_rater(sample, answers.ratings, level, answers.seconds, attention)),
        "named_raters": named_raters(checks, attention),
    }


def _write(artifact: Path, sample: Sample, labels: Labels, rated: Labels, result: Mapping[str, Any]) -> None:
    write_json(artifact / "result.json", result)
    _write_unblinded(artifact / "ratings.csv", sample, labels)
    for name, half in ((PREFERENCES, True), (HELD_OUT, False)):
        part = {item: ratings for item, ratings in rated.items() if may_train(sample.responses[item]["prompt"]) is half}
        write_rows(artifact / name, _preferences(sample, part))


def _win_rate(sample: Sample, rated: Labels, level: float) -> Interval:
    """Return the policy's win rate with its interval over prompts and raters."""
    items, raters, values = zip(*scored_ratings(sample, rated), strict=True)
    return crossed_proportion(values, items, raters, [prompt_of(sample, item) for item in items], level)


def _criterion(sample: Sample, labels: Labels, level: float) -> Numbers:
    """Return the number of items with an answer to one criterion, and over these the policy's win rate by it (ties
    1/2) with its interval and the share of ties; None if nobody answered."""
    rated = {item: ratings for item, ratings in labels.items() if item not in sample.repeat_of and any(ratings)}
    every = [answer for ratings in rated.values() for answer in ratings if answer]
    win = _win_rate(sample, rated, level) if rated else Interval(math.nan, math.nan, math.nan)
    ties = every.count("tie") / len(every) if every else None
    return {"items": len(rated), **win.named("win_rate"), "ties": ties}


def judged_by(sample: Sample, labels: Labels) -> str:
    """Return `simulated` if the ratings are those of the simulated judges, else `people`."""
    file = sample.folder / SIMULATED
    return "simulated" if file.exists() and sample.ratings(file) == labels else "people"


def rated_once(sample: Sample, labels: Labels, sheet: Path) -> Labels:
    """Return the rated items without those that repeat others.

    Raises:
        UserError: there is none.
    """
    rated = {item: ratings for item, ratings in labels.items() if item not in sample.repeat_of and any(ratings)}
    if not rated:
        raise UserError(f"{sheet}: only items that repeat others are rated. Rate the others too.")
    return rated


def label_metrics(sample: Sample, labels: Labels, rated: Labels) -> dict[str, float]:
    """Return how many labels there are of how many raters, and the shares of ties among them."""
    every = [rating for ratings in rated.values() for rating in ratings if rating]
    return {
        "human_eval/labels_complete": rating_count(labels, sample.raters) / (sample.raters * len(labels)),
        "human_eval/items": float(len(rated)),
        "human_eval/raters": float(sum(map(any, zip(*rated.values(), strict=True)))),
        "human_eval/ties": every.count("tie") / len(every),
        "human_eval/both_bad": every.count("both_bad") / len(every),
    }


def agreement(sample: Sample, rated: Labels, level: float) -> Interval:
    """Return Fleiss' kappa of the rated items, with its interval over prompts."""
    votes = [[ratings.count(value) for value in sample.about["ratings"]] for ratings in rated.values()]
    return fleiss_kappa(votes, [prompt_of(sample, item) for item in rated], level=level)


def unblinded(sample: Sample, labels: Labels, policy: str, sft: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every item with its cells `item`, `repeats`, `stratum` and `prompt`, and each rating as the author's name,
    tie or both_bad."""
    for item, ratings in labels.items():
        side, row = sample.policy_side[item], sample.responses[item]
        named = {"": "", **dict(zip(TIES, TIES, strict=True)), side: policy, OTHER_SIDE[side]: sft}
        yield item, {
            "item": item, "repeats": sample.repeat_of.get(item, ""), "stratum": row["stratum"],
            "prompt": canonical_json(row["prompt"]),
            **{name: named[r] for name, r in zip(rated_columns(labels), ratings, strict=True)},
        }  # fmt: skip


def _write_unblinded(path: Path, sample: Sample, labels: Labels) -> None:
    """Write every item with its authors, its ratings and its score."""
    columns = ["item", "repeats", "stratum", "prompt", "sft", "policy", "policy_side", *rated_columns(labels), "score"]
    rows = []
    for item, cells in unblinded(sample, labels, "policy", "sft"):
        side, row, ratings = sample.policy_side[item], sample.responses[item], labels[item]
        score = str(item_score(ratings, side)) if any(ratings) else ""
        rows.append({**cells, "sft": row["sft"], "policy": row["policy"], "policy_side": side, "score": score})
    write_csv(path, columns, rows)


def _preferences(sample: Sample, rated: Labels) -> Iterator[dict[str, object]]:
    """Yield the rated pairs as rows of votes, with sides as they were shown; `both_bad` is a vote for neither."""
    for item, ratings in rated.items():
        row = sample.responses[item]
        sides = (row["policy"], row["sft"]) if sample.policy_side[item] == "a" else (row["sft"], row["policy"])
        votes = [
            {"annotator": name, "label": rating}
            for name, rating in zip(rated_columns(rated), ratings, strict=True)
            if rating
        ]
        yield {
            "prompt": row["prompt"], "a": sides[0], "b": sides[1], "votes": votes, "category": row["category"],
            JUDGED_IN: sample.about["key_sha256"][:8],
        }  # fmt: skip
