"""The second half of a comparison: unblind returned sheets; compute models' strengths and a table of every two
models."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from components.base.errors import UserError
from components.base.hashing import canonical_json
from components.base.jsonl import write_json
from components.base.observe import Observe
from components.data.spreadsheet import write_csv
from components.human_eval.comparison.pairs import RESULT, input_name, models_of
from components.human_eval.config import ScoreJob
from components.human_eval.labels import Labels, Sample, asked, given
from components.human_eval.results.checks import TIES, named_raters, prompt_of, rater_checks
from components.human_eval.results.summary import per_rater, rating_score
from components.human_eval.score import judged_by
from components.human_eval.sheet import rating_columns
from components.stats.intervals import Numbers
from components.stats.paired import Inseparable, PairedScore, strengths
from components.stats.raters import FEWEST_RATERS, crossed_proportion, too_few_raters
from components.stats.votes import fleiss_kappa


class ModelStrength(TypedDict):
    """A model's strength; `strength` and its ends are None if they have no finite estimate."""

    model: str
    strength: float | None
    """log(pi / pi of the baseline), in logits: 0.4 against 0 wins 60 of 100 decided comparisons."""
    low: float | None
    high: float | None


class PairRow(TypedDict):
    """Two models' ratings: `win_rate` is the first model's, ties 1/2, with an interval over prompts and raters."""

    first: str
    second: str
    items: int
    wins: int
    ties: int
    losses: int
    win_rate: float
    low: float
    high: float


class Fitted(TypedDict):
    """The models' strengths, fitted to the comparisons."""

    models: list[ModelStrength]
    tie: Numbers
    """Davidson's nu: two equal models tie with probability nu / (2 + nu)."""
    interval_over: str
    inseparable: str | None
    """Why there are no strengths; None if there are."""
    better: NotRequired[list[str]]
    worse: NotRequired[list[str]]


class ComparisonResult(Fitted):
    """The content of `comparison.json`."""

    judges: str
    level: float
    items: int
    raters: int
    too_few_raters: str | None
    baseline: str
    pairs: list[PairRow]
    per_rater: list[dict[str, object]]
    named_raters: list[str]
    key_sha256: str


def run(job: ScoreJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Score the filled sheet `inputs["sheet"]` (a file) of the sample `inputs["sample"]`.

    Strengths are those of the Bradley-Terry model with Davidson's ties (`components.stats.paired`), relative to the
    first model; each rating is a comparison, and `both_bad` is a tie. Intervals are over prompts, and also over raters
    if there are 8 or more. Repeated items are not used for strengths. Writes `comparison.json` and `ratings.csv`
    (unblinded).

    Raises:
        UserError: as for `Sample.ratings`.
    """
    level, sample = job.human_eval.level, Sample.open(inputs["sample"])
    labels = sample.ratings(inputs["sheet"])
    rated = {item: each for item, each in labels.items() if item not in sample.repeat_of and any(each)}
    if not rated:
        raise UserError(f"{inputs['sheet']}: only items that repeat others are rated. Rate the others too.")
    models, of = models_of(inputs["sample"])
    raters = sum(any(each[i] for each in rated.values()) for i in range(sample.raters))
    pairs = list(_pair_rows(sample, rated, of, level))
    checks = rater_checks(sample, labels, level)
    every = [rating for each in rated.values() for rating in each if rating]
    votes = [[each.count(value) for value in sample.about["ratings"]] for each in rated.values()]
    kappa = fleiss_kappa(votes, [prompt_of(sample, item) for item in rated], level=level)
    result: ComparisonResult = {
        "judges": judged_by(sample, labels),
        "level": level,
        "items": len(rated),
        "raters": raters,
        "too_few_raters": too_few_raters(raters),
        "baseline": input_name(0),
        **_strengths(sample, rated, models, of, raters >= FEWEST_RATERS, level, job.seed),
        "pairs": pairs,
        "per_rater": [dict(each) for each in per_rater(sample, labels, level)],
        "named_raters": named_raters(checks, None),
        "key_sha256": sample.about["key_sha256"],
    }
    write_json(out / "artifact" / RESULT, result)
    write_unblinded(out / "artifact" / "ratings.csv", sample, labels, of)
    metrics = {
        "human_eval/items": float(len(rated)),
        "human_eval/raters": float(raters),
        "human_eval/models": float(models),
        "human_eval/labels_complete": given(labels, sample.raters) / asked(labels, sample.raters),
        "human_eval/ties": every.count("tie") / len(every),
        "human_eval/both_bad": every.count("both_bad") / len(every),
        **checks.metrics(),
        **kappa.metrics("human_eval/fleiss_kappa"),
    }
    for row in pairs:
        name = f"human_eval/win_rate_{row['first']}_{row['second']}"
        metrics |= {name: row["win_rate"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
    for each in result["models"][1:]:
        found = {"": each["strength"], "_low": each["low"], "_high": each["high"]}
        metrics |= {f"human_eval/strength_{each['model']}{end}": v for end, v in found.items() if v is not None}
    observe(len(rated), metrics, total=len(rated))
    return metrics


def _strengths(
    sample: Sample, rated: Labels, models: int, of: Mapping[str, tuple[int, int]], over_raters: bool, level: float,
    seed: int,
) -> Fitted:  # fmt: skip
    made: list[PairedScore] = []
    prompts: list[str] = []
    raters: list[int] = []
    for item, rater, score in _scores(sample, rated):
        made.append(PairedScore(*of[item], score))
        prompts.append(prompt_of(sample, item))
        raters.append(rater)
    names = [input_name(number) for number in range(models)]
    over = "prompts and raters" if over_raters else "prompts"
    try:
        found = strengths(made, models, prompts, raters if over_raters else None, level=level, seed=seed)
    except Inseparable as error:
        none: list[ModelStrength] = [{"model": name, "strength": None, "low": None, "high": None} for name in names]
        return {
            "models": none, "tie": {}, "interval_over": over, "inseparable": str(error),
            "better": [names[n] for n in error.better], "worse": [names[n] for n in error.worse],
        }  # fmt: skip
    told = [each.named("strength") for each in found.strength]
    each: list[ModelStrength] = [
        {"model": name, "strength": t["strength"], "low": t["strength_low"], "high": t["strength_high"]}
        for name, t in zip(names, told, strict=True)
    ]
    return {"models": each, "tie": found.tie.named("nu"), "interval_over": over, "inseparable": None}


def _scores(sample: Sample, rated: Labels) -> Iterator[tuple[str, int, float]]:
    """Yield item, rater and the first model's score of each rating."""
    for item, each in rated.items():
        for rater, rating in enumerate(each):
            if rating:
                yield item, rater, 1 - rating_score(rating, sample.policy_side[item])


def _pair_rows(sample: Sample, rated: Labels, of: Mapping[str, tuple[int, int]], level: float) -> Iterator[PairRow]:
    scores = list(_scores(sample, rated))
    for two in sorted(set(of.values())):
        own = [(item, rater, score) for item, rater, score in scores if of[item] == two]
        if not own:
            continue
        items, raters, values = zip(*own, strict=True)
        found = crossed_proportion(values, items, raters, [prompt_of(sample, item) for item in items], level)
        first, second = map(input_name, two)
        yield {
            "first": first, "second": second, "items": len(set(items)), "wins": values.count(1.0),
            "ties": values.count(0.5), "losses": values.count(0.0), "win_rate": found.value, "low": found.low,
            "high": found.high,
        }  # fmt: skip


def write_unblinded(path: Path, sample: Sample, labels: Labels, of: Mapping[str, tuple[int, int]]) -> None:
    """Write every item with its two models, and each rating as first, second, tie or both_bad."""
    columns = ["item", "repeats", "stratum", "prompt", "first", "second", "response_first", "response_second"]
    names: Sequence[str] = rating_columns(sample.raters)
    rows = []
    for item, each in labels.items():
        side, row = sample.policy_side[item], sample.responses[item]
        named = {"": "", **dict(zip(TIES, TIES, strict=True)), side: "second", "b" if side == "a" else "a": "first"}
        first, second = map(input_name, of[item])
        rows.append({
            "item": item, "repeats": sample.repeat_of.get(item, ""), "stratum": row["stratum"],
            "prompt": canonical_json(row["prompt"]), "first": first, "second": second, "response_first": row["sft"],
            "response_second": row["policy"], **{n: named[r] for n, r in zip(names, each, strict=True)},
        })  # fmt: skip
    write_csv(path, [*columns, *names], rows)
