"""A reward model from SmolLM2-135M on UKPConvArg1, judged on topics it never saw, against what length alone says.

    python tests/bench/ukp.py --data ../shared/data/ukpconvarg1/pairs.jsonl.gz --pairs 3000 --fold 0   # and 1, 2, 3
    python tests/bench/ukp.py --data ../shared/data/ukpconvarg1/pairs.jsonl.gz --pairs 3000            # pools the four

Data: Habernal and Gurevych, ACL 2016: which of two arguments on a topic is the more convincing, by five people. The
label is the plurality's, ties dropped. A topic is a prompt, both stances of it; the 16 topics make 4 folds of about as
many pairs. Of the other folds' topics 2 are kept for the temperature and `--pairs` pairs are drawn from the rest to
train on; what is judged is every pair of the fold's own topics. The training is our reward stage's.

Beside the accuracy stands that of length alone (words; longer or shorter wins, as the training pairs say), their
difference with a bootstrap over topics, and the mean of the accuracies on pairs that the longer and that the shorter
argument won: length alone gets 0.50 there. A fold is a JSON file of `--out` and is not run again with the same options;
one that is cut short goes on from its last checkpoint. Without `--fold` the missing ones are run and all are pooled.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from components.data.formats.pairs import parse_pair
from components.data.readers import read_source
from components.reward.evaluation.baselines import length_baseline
from components.stats.calibration.measure import calibration, correctness, fit_temperature
from components.stats.intervals import FloatArray, Interval
from components.training.loop import seeded

FOLDS, CALIBRATION_TOPICS = 4, 2
RESAMPLES = 10_000
LONGEST_PROMPT, LONGEST_ARGUMENT = 96, 192
"""Tokens, template and EOS included; the longest argument has 110 words."""
ECE_BAR, SLOPE_BAR = 0.05, (0.8, 1.25)
"""DESIGN.md: the error, or within its null; the recalibration slope."""


class Argued(NamedTuple):
    """A decided pair; `row` has `prompt`, `chosen` and `rejected`."""

    topic: str
    row: dict[str, Any]

    @property
    def words(self) -> int:
        """Words of the chosen argument less those of the rejected."""
        return len(self.row["chosen"].split()) - len(self.row["rejected"].split())


def read_pairs(path: Path) -> list[Argued]:
    """The pairs of the file that have a winner, in its order."""
    pairs = []
    for raw in read_source(path):
        row = parse_pair(raw, "votes", path.name, max_characters=100_000)
        if row.item is not None and not row.problems:
            pairs.append(Argued(raw.data["prompt"], row.item))
    return pairs


def fold_of_topic(topics: Sequence[str], folds: int = FOLDS) -> dict[str, int]:
    """A fold for each topic, from the topic of every pair: the largest one left goes to the fold with fewest pairs."""
    sizes, out = [0] * folds, {}
    for topic, pairs in sorted(Counter(topics).items(), key=lambda item: (-item[1], item[0])):
        out[topic] = sizes.index(min(sizes))
        sizes[out[topic]] += pairs
    return out


def split(pairs: Sequence[Argued], fold: int, wanted: int, seed: int) -> dict[str, list[Argued]]:
    """The fold's `train` (a sample of `wanted`), `calibration` and `test` pairs; no two share a topic.

    Raises:
        ValueError: fewer pairs to draw from than are wanted.
    """
    folds = fold_of_topic([p.topic for p in pairs])
    others = sorted(topic for topic, f in folds.items() if f != fold)
    kept = set(seeded(seed, "ukp", "calibration", fold).sample(others, CALIBRATION_TOPICS))
    rest = [p for p in pairs if folds[p.topic] != fold and p.topic not in kept]
    if len(rest) < wanted:
        raise ValueError(f"--pairs {wanted}: fold {fold} has {len(rest)} pairs to train on")
    return {
        "train": seeded(seed, "ukp", "train", fold).sample(rest, wanted),
        "calibration": [p for p in pairs if p.topic in kept],
        "test": [p for p in pairs if folds[p.topic] == fold],
    }


def run_fold(options: argparse.Namespace, pairs: Sequence[Argued], fold: int) -> dict[str, Any]:
    """Train on a fold and score its calibration and test pairs, or take both from `options.out`."""
    names = ("pairs", "seed", "learning_rate", "batch", "epochs", "device", "dtype", "threads")
    given = {name: getattr(options, name) for name in names}
    kept, work = options.out / f"fold-{fold}.json", options.out / f"fold-{fold}"
    if kept.exists() and (found := json.loads(kept.read_text()))["given"] == given:
        return dict(found)
    begun = work / "given.json"
    if work.exists() and (not begun.exists() or json.loads(begun.read_text()) != given):
        shutil.rmtree(work)  # of other options
    work.mkdir(parents=True, exist_ok=True)
    begun.write_text(json.dumps(given), "utf-8")
    parts, began = split(pairs, fold, options.pairs, options.seed), time.perf_counter()
    scored = train_and_score(options, parts, work)
    seconds = time.perf_counter() - began
    by_length, rule = length_baseline(*([p.words for p in parts[name]] for name in ("train", "test")))
    rows = [
        {"topic": p.topic, "words": p.words, "margin": float(margin), "by_length": float(right)}
        for p, margin, right in zip(parts["test"], scored["test"], by_length, strict=True)
    ]
    found = {
        "given": given, "fold": fold, "seconds": seconds, "rule": rule, "test": rows,
        "temperature": fit_temperature(scored["calibration"]),
        "counts": {name: len(part) for name, part in parts.items()},
    }  # fmt: skip
    kept.write_text(json.dumps(found) + "\n", "utf-8")
    shutil.rmtree(work)
    return found


def train_and_score(
    options: argparse.Namespace, parts: Mapping[str, Sequence[Argued]], work: Path
) -> dict[str, FloatArray]:
    """Train on `parts["train"]`, resuming from `work`; the margins (n,) of the calibration and the test pairs."""
    from recipe import train_reward_model  # beside this script; the unit tests import it by another

    from components.models.config import GenerationConfig
    from components.models.folders import frozen, load_base, save_model
    from components.models.runtime import Runtime, activate
    from components.reward.config import RewardConfig, RewardJob
    from components.reward.pairs import encode_pairs
    from components.reward.scoring import score_sequences

    runtime = Runtime(device=options.device, dtype=options.dtype, threads=options.threads).resolve()
    activate(runtime)
    config = RewardConfig(
        learning_rate=options.learning_rate, batch_size=options.batch, micro_batch_size=options.batch,
        epochs=options.epochs, checkpoint_every=options.checkpoint_every,
    )  # fmt: skip
    generation = GenerationConfig(max_prompt_tokens=LONGEST_PROMPT, max_new_tokens=LONGEST_ARGUMENT)
    job = RewardJob(seed=options.seed, runtime=runtime, generation=generation, reward=config)
    model, tokenizer = load_base(options.model)
    save_model(model, tokenizer, work / "base")
    del model
    rows = {name: [p.row for p in part] for name, part in parts.items()}
    pairs = {name: encode_pairs(tokenizer, part, generation) for name, part in rows.items()}

    def observe(step: int, metrics: Mapping[str, float], total: int | None = None, **_: Any) -> None:
        shown = ", ".join(f"{metrics[f'reward/{name}']:.3f}" for name in ("train_loss", "train_accuracy"))
        print(f"step {step} of {total}: loss, accuracy {shown}", file=sys.stderr)

    trained = frozen(train_reward_model(job, work / "base", pairs["train"], tokenizer.pad_token_id, work, observe))
    judged = {name: pairs[name] for name in ("calibration", "test")}
    # An argument stands in many pairs and is scored once.
    texts = list(dict.fromkeys(tuple(ids) for part in judged.values() for p in part for ids in (p.chosen, p.rejected)))
    scores = dict(zip(texts, score_sequences(trained, tokenizer.pad_token_id, texts, runtime).tolist(), strict=True))
    return {
        name: np.array([scores[tuple(p.chosen)] - scores[tuple(p.rejected)] for p in part])
        for name, part in judged.items()
    }


def share_over_topics(
    hits: Sequence[FloatArray], counts: Sequence[FloatArray], codes: NDArray[np.int64], seed: int
) -> Interval:
    """The mean over K kinds of sum(hits) / sum(counts), with a 95 % percentile bootstrap that draws whole topics.

    Args:
        hits, counts: K arrays (n,): of each pair, what it adds to the numerator and the denominator of a kind.
        codes: topic 0..C-1 of each pair (n,).
    """
    sums = [np.bincount(codes, weights=values) for values in (*hits, *counts)]

    def statistic(*columns: FloatArray, axis: int = -1) -> FloatArray:
        totals = [column.sum(axis) for column in columns]
        return np.mean([a / b for a, b in zip(totals[: len(hits)], totals[len(hits) :], strict=True)], axis=0)

    found = bootstrap(
        sums, statistic, paired=True, vectorized=True, method="percentile", n_resamples=RESAMPLES,
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return Interval(float(statistic(*sums)), float(found.low), float(found.high))


def judge(folds: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """All that is said of the test pairs of some folds, each fold at its own temperature; intervals are over topics."""
    rows = [row | {"logit": row["margin"] / fold["temperature"]} for fold in folds for row in fold["test"]]
    topics = sorted({row["topic"] for row in rows})
    codes = np.array([topics.index(row["topic"]) for row in rows])
    words, margins, by_length = (np.array([r[name] for r in rows]) for name in ("words", "margin", "by_length"))
    right, every = correctness(margins), np.ones(len(rows))
    longer, shorter = (words > 0).astype(float), (words < 0).astype(float)

    def shares(*kinds: tuple[FloatArray, FloatArray]) -> Interval:
        return share_over_topics([h for h, _ in kinds], [c for _, c in kinds], codes, seed)

    return {
        "pairs": len(rows), "topics": len(topics),
        "accuracy": shares((right, every)), "length": shares((by_length, every)),
        "gain": shares((right - by_length, every)),
        "longer": shares((right * longer, longer)), "shorter": shares((right * shorter, shorter)),
        "balanced": shares((right * longer, longer), (right * shorter, shorter)),
        "calibration": calibration([r["logit"] for r in rows], codes.tolist(), temperature=1.0, seed=seed).numbers,
    }  # fmt: skip


def report(folds: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, a fold a line, and what the folds say together."""
    titles = (
        "fold",
        "pairs",
        "accuracy",
        "length alone",
        "longer wins",
        "shorter wins",
        "temperature",
        "ECE",
        "minutes",
    )
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for fold in folds:
        found = judge([fold])
        cells = [f"{found[name].value:.3f}" for name in ("accuracy", "length", "longer", "shorter")]
        cells += [f"{fold['temperature']:.2f}", f"{found['calibration']['ece']:.3f}", f"{fold['seconds'] / 60:.0f}"]
        lines.append(f"| {fold['fold']} | {found['pairs']} | {' | '.join(cells)} |")
    pooled = judge(folds)

    def said(name: str) -> str:
        found = pooled[name]
        return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"

    gain, kept = pooled["gain"], pooled["calibration"]
    verdict = "better than" if gain.low > 0 else "worse than" if gain.high < 0 else "a tie with"
    within = kept["ece"] <= max(ECE_BAR, kept["ece_null_95"])
    slope = SLOPE_BAR[0] <= kept["calibration_slope"] <= SLOPE_BAR[1]
    slopes = "" if kept["slope_low"] is None else f" [{kept['slope_low']:.2f}, {kept['slope_high']:.2f}]"
    return "\n".join([
        *lines, "",
        f"{pooled['pairs']} pairs of {pooled['topics']} topics, 95 % intervals over topics ({len(folds)} folds):",
        f"accuracy {said('accuracy')}, length alone {said('length')}, difference {gain.value:+.3f} "
        f"[{gain.low:+.3f}, {gain.high:+.3f}]: {verdict} length alone",
        f"longer wins {said('longer')}, shorter wins {said('shorter')}, their mean {said('balanced')} "
        f"(> 0.50 {'met' if pooled['balanced'].low > 0.5 else 'MISSED'})",
        f"after temperature: ECE {kept['ece']:.3f}, null's 95th percentile {kept['ece_null_95']:.3f} "
        f"({'met' if within else 'MISSED'}); slope {kept['calibration_slope']:.2f}{slopes} "
        f"({'met' if slope else 'MISSED'}); Brier {kept['brier']:.3f}, log loss {kept['log_loss']:.3f}",
    ])  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--data", type=Path, required=True, help="ukpconvarg1/pairs.jsonl.gz")
    parser.add_argument("--model", type=Path, default=home / "models" / "smollm2", help="from `tether fetch smollm2`")
    parser.add_argument("--fold", type=int, choices=range(FOLDS), default=None, help="run this one alone")
    parser.add_argument("--pairs", type=int, default=3000, help="training pairs of a fold")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16, help="pairs an optimiser step")
    parser.add_argument("--learning-rate", type=float, default=2e-5, help="peak; linear warm-up and decay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="optimiser steps; 1.6 GB each, two are kept")
    parser.add_argument("--out", type=Path, default=home / "ukp", help="a JSON file a fold, and its checkpoints")
    return parser.parse_args()


def main() -> None:
    """Run what is missing; print the folds, together where all are there."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = read_pairs(options.data)
    wanted = range(FOLDS) if options.fold is None else [options.fold]
    print(report([run_fold(options, pairs, fold) for fold in wanted]))


if __name__ == "__main__":
    main()
