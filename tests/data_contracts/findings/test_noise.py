"""The share of flipped labels: the fit against another one, on scores and on texts whose flips are known."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from data_contracts.findings.noise import LEAST_PAIRS, LabelNoise, flip_rate, label_noise
from tests.bench.statistics.noise import estimates, judged_pairs

DATA = Path(os.environ.get("TETHER_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


def scores(flips, n=4000, seed=0, scale=1.7):
    """Scores of a model whose logits are `scale` times too small, and labels flipped at a rate."""
    rng = np.random.default_rng(seed)
    logit = rng.normal(0, 4, n)
    side = np.where(rng.random(n) < expit(logit), 1.0, -1.0)
    return logit / scale * np.where(rng.random(n) < flips, -side, side)


@pytest.mark.parametrize("flips", [0.0, 0.1, 0.3])
def test_the_fit_is_that_of_a_free_search_and_its_interval_holds_the_planted_share(flips):
    found = scores(flips)
    value, low, high = flip_rate(found, np.arange(len(found)))

    def loss(at):
        share = expit(at[0]) / 2
        return -np.log(share + (1 - 2 * share) * expit(np.exp(at[1]) * found)).sum()

    best = min((minimize(loss, [start, 0.0], method="Nelder-Mead") for start in (-4.0, 0.0)), key=lambda r: r.fun)
    share = expit(best.x[0]) / 2
    assert value == pytest.approx(share, abs=0.005) and low <= flips <= high and high - low < 0.1
    for end in (low, high):
        if end:
            start = np.log(2 * end / (1 - 2 * end))
            at_end = minimize(lambda at, start=start: loss([start, at[0]]), [0.0]).fun
            assert 2 * (at_end - best.fun) < 3.9, "both ends are within 3.84 of the best fit, to the grid's step"


def test_too_few_pairs_and_scores_that_say_nothing_give_no_estimate():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["one", "two", "three", "four"], 6)) for _ in range(2 * LEAST_PAIRS)]
    few = range(LEAST_PAIRS - 1)
    assert label_noise(texts[: len(few)], texts[LEAST_PAIRS : LEAST_PAIRS + len(few)], 0, few) is None
    accuracy = label_noise(texts[:LEAST_PAIRS], texts[LEAST_PAIRS:], 0, range(LEAST_PAIRS))
    assert isinstance(accuracy, float) and 0.4 < accuracy < 0.6


def test_copies_of_every_pair_widen_the_interval_as_fewer_pairs_do():
    """Four copies of 2,000 scores say what 2,000 do: taken for 8,000 pairs, the interval would be half as wide."""
    once = scores(0.2, n=2000)
    value, low, high = flip_rate(once, np.arange(2000))
    copies = flip_rate(np.repeat(once, 4), np.repeat(np.arange(2000), 4))
    assert copies == pytest.approx((value, low, high), abs=0.009)
    taken_for_single = flip_rate(np.repeat(once, 4), np.arange(8000))
    assert taken_for_single[2] - taken_for_single[1] < 0.7 * (high - low)


def test_rankings_that_are_reversed_whole_are_found():
    """Read 0.00 [0.00, 0.02] while a ranking's pairs stood in several folds."""
    (found,) = estimates("rankings, whole", 0.2, [0])
    assert found.low <= 0.2 <= found.high and found.value > 0.1
    (clean,) = estimates("rankings, whole", 0.0, [0])
    assert clean.value < 0.03 and clean.low == 0.0


def test_a_file_of_reversed_rankings_is_reported_with_its_noise(validate, tmp_path):
    judged = judged_pairs("rankings, whole", 1800, 0.2, np.random.default_rng(3))
    rows = [{"prompt": f"Question {prompt} of the day?", "chosen": chosen, "rejected": rejected}
            for chosen, rejected, prompt in zip(*judged, strict=True)]  # fmt: skip
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = validate(tmp_path / "out", {"preferences": file})
    by_prompt = label_noise(judged.chosen, judged.rejected, 0, judged.prompts)
    assert isinstance(by_prompt, LabelNoise) and by_prompt.low <= 0.2 <= by_prompt.high
    assert metrics["data/label_noise_low"] <= 0.2 <= metrics["data/label_noise_high"]
    assert metrics["data/label_noise"] > 0.1


def test_a_single_prompt_gives_no_estimate():
    judged = judged_pairs("single pairs", LEAST_PAIRS, 0.2, np.random.default_rng(0))
    assert label_noise(judged.chosen, judged.rejected, 0, ["the only one"] * len(judged.chosen)) is None


@pytest.mark.real_data
@pytest.mark.parametrize("flips", [0.0, 0.1, 0.3])
def test_flips_planted_in_real_pairs_are_estimated_within_the_interval(flips):
    """Pairs of UKPConvArg1 on whose better side all annotators agree, so that next to none is flipped to begin with."""
    path = DATA / "ukpconvarg1/pairs.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path} is absent (set TETHER_DATA to the folder of real data)")
    pairs = []
    for line in gzip.decompress(path.read_bytes()).splitlines():
        row = json.loads(line)
        counts = Counter(vote["label"] if isinstance(vote, dict) else vote for vote in row["votes"])
        (answer, most), *_ = counts.most_common()
        if most == len(row["votes"]) and answer in ("a", "a1", "b", "a2"):
            sides = (row["a"], row["b"]) if answer in ("a", "a1") else (row["b"], row["a"])
            pairs.append((*sides, f"{row['prompt']} {row['stance']}"))
    assert len(pairs) > 3000
    flipped = np.random.default_rng(3).random(len(pairs)) < flips
    turned = [(b, a, prompt) if flip else (a, b, prompt) for (a, b, prompt), flip in zip(pairs, flipped, strict=True)]
    chosen, rejected, prompts = map(list, zip(*turned, strict=True))
    found = label_noise(chosen, rejected, 0, prompts)
    assert isinstance(found, LabelNoise) and found.low <= flipped.mean() <= found.high
    assert found.high - found.low < 0.1
