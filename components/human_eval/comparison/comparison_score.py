"""The second half of a comparison: unblind returned sheets; compute models' strengths and a table of every two
models."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.base.jsonl import write_json
from components.base.observe import Observe
from components.data.spreadsheet import write_csv
from components.human_eval.comparison.model_pairs import RESULT, input_name, models_of
from components.human_eval.config import ScoreJob
from components.human_eval.results.checks import named_raters, prompt_of, rater_checks
from components.human_eval.results.summary import per_rater, scored_ratings
from components.human_eval.returned_labels import Labels, Sample, rated_columns
from components.human_eval.unblinded_score import agreement, judged_by, label_metrics, rated_once, unblinded
from components.stats.paired import Inseparable, PairedScore, strengths
from components.stats.raters import FEWEST_RATERS, crossed_proportion, too_few_raters


def run(job: ScoreJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Score the filled sheet `inputs["sheet"]` (a file) of the sample `inputs["sample"]`.

    Strengths are those of the Bradley-Terry model with Davidson's ties (`components.stats.paired`), relative to the
    first model; each rating is a comparison, and `both_bad` is a tie. Intervals are over prompts, and also over raters
    if there are 8 or more. Repeated items are not used for strengths. Writes `ratings.csv` (unblinded) and
    `comparison.json`, which has

    - `models`: each one's strength in logits (0.4 against 0 wins 60 of 100 decided comparisons) with its interval, None
      if there is no finite estimate; `inseparable` then says why, and `better` and `worse` between whom;
    - `tie`: Davidson's nu; two equal models tie with probability nu / (2 + nu);
    - `pairs`: the ratings of every two models and the first one's win rate, ties 1/2, with its interval.

    Raises:
        UserError: as for `Sample.ratings`.
    """
    level, sample = job.human_eval.level, Sample.open(inputs["sample"])
    labels = sample.ratings(inputs["sheet"])
    rated = rated_once(sample, labels, inputs["sheet"])
    models, of = models_of(inputs["sample"])
    of_labels = label_metrics(sample, labels, rated)
    raters = int(of_labels["human_eval/raters"])
    pairs = list(_pair_rows(sample, rated, of, level))
    checks = rater_checks(sample, labels, level)
    result = {
        "judges": judged_by(sample, labels),
        "level": level,
        "items": len(rated),
        "raters": raters,
        "too_few_raters": too_few_raters(raters),
        "baseline": input_name(0),
        **_strengths(sample, rated, models, of, raters >= FEWEST_RATERS, level, job.seed),
        "pairs": pairs,
        "per_rater": list(per_rater(sample, labels, level)),
        "named_raters": named_raters(checks, None),
        "key_sha256": sample.about["key_sha256"],
    }
    write_json(out / "artifact" / RESULT, result)
    _write_unblinded(out / "artifact" / "ratings.csv", sample, labels, of)
    metrics = {
        **of_labels,
        "human_eval/models": float(models),
        **checks.metrics(),
        **agreement(sample, rated, level).metrics("human_eval/fleiss_kappa"),
    }
    for row in pairs:
        name = f"human_eval/win_rate_{row['first']}_{row['second']}"
        metrics |= {name: row["win_rate"], f"{name}_low": row["low"], f"{name}_high": row["high"]}
    for model in result["models"][1:]:
        interval = {"": model["strength"], "_low": model["low"], "_high": model["high"]}
        metrics |= {f"human_eval/strength_{model['model']}{end}": v for end, v in interval.items() if v is not None}
    observe(len(rated), metrics, total=len(rated))
    return metrics


def _strengths(
    sample: Sample, rated: Labels, models: int, of: Mapping[str, tuple[int, int]], over_raters: bool, level: float,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    made: list[PairedScore] = []
    prompts: list[str] = []
    raters: list[int] = []
    for item, rater, of_second in scored_ratings(sample, rated):
        made.append(PairedScore(*of[item], 1 - of_second))
        prompts.append(prompt_of(sample, item))
        raters.append(rater)
    names = [input_name(number) for number in range(models)]
    over = "prompts and raters" if over_raters else "prompts"
    try:
        fit = strengths(made, models, prompts, raters if over_raters else None, level=level, seed=seed)
    except Inseparable as error:
        none = [{"model": name, "strength": None, "low": None, "high": None} for name in names]
        return {
            "models": none, "tie": {}, "interval_over": over, "inseparable": str(error),
            "better": [names[n] for n in error.better], "worse": [names[n] for n in error.worse],
        }  # fmt: skip
    intervals = [interval.named("strength") for interval in fit.strength]
    fitted = [
        {"model": name, "strength": t["strength"], "low": t["strength_low"], "high": t["strength_high"]}
        for name, t in zip(names, intervals, strict=True)
    ]
    return {"models": fitted, "tie": fit.tie.named("nu"), "interval_over": over, "inseparable": None}


def _pair_rows(
    sample: Sample, rated: Labels, of: Mapping[str, tuple[int, int]], level: float
) -> Iterator[dict[str, Any]]:
    scores = [(item, rater, 1 - of_second) for item, rater, of_second in scored_ratings(sample, rated)]
    for two in sorted(set(of.values())):
        ratings = [(item, rater, score) for item, rater, score in scores if of[item] == two]
        if not ratings:
            continue
        items, raters, values = zip(*ratings, strict=True)
        win_rate = crossed_proportion(values, items, raters, [prompt_of(sample, item) for item in items], level)
        first, second = map(input_name, two)
        yield {
            "first": first, "second": second, "items": len(set(items)), "wins": values.count(1.0),
            "ties": values.count(0.5), "losses": values.count(0.0), "win_rate": win_rate.value, "low": win_rate.low,
            "high": win_rate.high,
        }  # fmt: skip


def _write_unblinded(path: Path, sample: Sample, labels: Labels, of: Mapping[str, tuple[int, int]]) -> None:
    """Write every item with its two models and its ratings as first, second, tie or both_bad."""
    columns = ["item", "repeats", "stratum", "prompt", "first", "second", "response_first", "response_second"]
    rows = []
    for item, cells in unblinded(sample, labels, "second", "first"):
        first, second = map(input_name, of[item])
        row = sample.responses[item]
        texts = {"response_first": row["sft"], "response_second": row["policy"]}
        rows.append({**cells, "first": first, "second": second, **texts})
    write_csv(path, [*columns, *rated_columns(labels)], rows)
