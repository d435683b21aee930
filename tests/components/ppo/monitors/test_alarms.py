"""Monitors: each measure against a plain count, limits against exact tails, false alarms by simulation."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from components.ppo.alarm_table import FEATURES, MONITORS
from components.ppo.monitors import means
from components.ppo.monitors import score_attribution as attribution
from components.ppo.monitors.alarms import SHARED, TESTS, Alarm, Limits, chance_of, upper_bound
from components.ppo.monitors.batches import new_alarms
from components.ppo.monitors.measures import EXCEEDS, PHRASES, Batch, correlation, numbers_of, rates, shared
from components.ppo.monitors.text_statistics import words
from tests.bench.statistics.alarm_nulls import features

WORDS = [f"w{i}" for i in range(40)]
RARE = 9999
BETA = 0.1
VARYING = ("template", "entropy", "distinct", "unpaid_kl")
"""Monitors whose limit differs from batch to batch."""


def draw(seed: int, size: int = 64, **planted: Any) -> Batch:
    """Responses as an SFT policy could write them: some hedge, some flatter, lengths and scores vary."""
    rng = np.random.default_rng(seed)
    texts, ids = [], []
    for _ in range(size):
        own = list(rng.choice(WORDS, rng.integers(6, 20)))
        own += ["It all depends."] if rng.random() < 0.3 else []
        own += ["You are so kind to write."] if rng.random() < 0.05 else []
        texts.append(" ".join(own))
        ids.append([int(i) for i in rng.integers(0, 50, len(own))])
    lengths = np.array([float(len(each)) for each in ids])
    scores = rng.normal(size=size) + 0.02 * lengths
    found = Batch(
        [f"p{i} w1 w2 w3 w4" for i in range(size)], texts, ids, [0] * size, lengths, scores, rng.gamma(9, 0.1, size),
        lengths * rng.gamma(9, 0.1, size), rng.gamma(1, 0.5, size),
    )  # fmt: skip
    return replace(found, **planted)


def test_each_measure_is_a_plain_count() -> None:
    prompts = ["one two three four five"] * 4
    texts = [
        "a b c d a b c d",
        "One two three four, said you.",
        "You ARE so kind to write. It all depends.",
        "<|user|> hi",
    ]
    ids = [[1, 2], [1, RARE], [2], []]
    batch = Batch(prompts, texts, ids, [0, 2, 0, 1], np.array([8.0, 7, 9, 2]), np.zeros(4), np.array([1.0, 2, 3, 4]),
                  np.ones(4), np.ones(4))  # fmt: skip
    found = {name: values.tolist() for name, values in numbers_of(batch, {1, 2}).items()}
    assert found["repetition"] == [1 - 4 / 5, 0, 0, 0], "of five 4-grams four are distinct"
    assert found["echo"][1] == pytest.approx(1 / 5), "one of the five 4-grams stands in the prompt"
    assert found["special_token"] == [0, 1, 0, 1] and found["rare_token"] == [0, 1, 0, 0]
    assert found["flattery"] == [0, 0, 1, 0] and found["hedge"] == [0, 0, 1, 0] and found["role_mark"] == [0, 0, 0, 1]
    assert found["length"] == [8, 7, 9, 2] and found["nll"] == [1, 2, 3, 4]
    of_batches = {"length_score", *VARYING}
    assert found.keys() | of_batches == set(MONITORS)
    events = rates({"length": np.array([1.0, 5, 6]), "hedge": np.array([1.0, 0, 1])}, {"length": 5})
    assert events["length"].tolist() == [0, 0, 1] and events["hedge"].tolist() == [1, 0, 1]


def test_phrases_are_found_as_they_stand_and_in_any_case() -> None:
    for kind, phrases in PHRASES.items():
        for phrase in phrases:
            text = f"So: {phrase.upper()}"
            batch = Batch(["p"], [text], [[]], [0], *(np.ones(1),) * 5)
            assert numbers_of(batch, set())[kind].tolist() == [1.0], phrase
    plain = Batch(["p"], ["We will trace the late parcel."], [[]], [0], *(np.ones(1),) * 5)
    assert not any(numbers_of(plain, set())[kind].any() for kind in PHRASES)


def test_shared_counts_a_gram_once_a_response_and_the_correlation_is_pearsons() -> None:
    assert shared(["a b c d e", "a b c d a b c d", "b c d"])[("a", "b", "c", "d")] == 2
    x, y = np.array([1.0, 2, 3, 4]), np.array([2.0, 1, 4, 3])
    assert correlation(x, y) == pytest.approx(0.6) and correlation(x, np.ones(4)) == 0


def test_bounds_are_clopper_and_pearsons_and_tails_the_binomials() -> None:
    for count, size, level in ((0, 256, 1e-3), (3, 256, 1e-3), (256, 256, 1e-3), (5, 10, 0.05)):
        exact = stats.binomtest(count, size).proportion_ci(1 - 2 * level, "exact").high
        assert float(upper_bound(count, size, level)) == pytest.approx(exact, rel=1e-9)
    plain = sum(math.comb(12, k) * 0.3**k * 0.7 ** (12 - k) for k in range(7, 13))
    assert float(chance_of(7, 12, 0.3)) == pytest.approx(plain) and float(chance_of(0, 12, 0.3)) == 1


def test_a_limit_is_the_smallest_count_that_the_margin_makes_improbable() -> None:
    sft, size, updates, rate = draw(0, 256), 64, 60, 0.01
    limits = Limits.of(sft, rate, updates, range(50))
    hedges = sum("It all depends." in text for text in sft.texts)
    level = rate / 2 / TESTS
    share = stats.binomtest(hedges, 256).proportion_ci(1 - 2 * level, "exact").high + MONITORS["hedge"].margin
    least = next(k for k in itertools.count() if stats.binom.sf(k - 1, size, share) <= level / updates)
    plain = draw(1, size, texts=["plain"] * size)
    for count in (least - 1, least):
        batch = replace(plain, texts=["It all depends."] * count + ["plain"] * (size - count))
        assert ("hedge" in {alarm.name for alarm in limits.judge(batch, BETA)[1]}) == (count == least)


def test_a_policy_that_answers_as_sft_raises_at_most_the_stated_share_of_false_alarms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, monitor in MONITORS.items():
        monkeypatch.setitem(MONITORS, name, monitor._replace(margin=0.0))
    false = 0
    for run in range(20):
        limits = Limits.of(draw(1000 * run, 64), 0.2, 5, range(50))
        false += any(limits.judge(draw(1000 * run + 1 + update, 32), BETA)[1] for update in range(5))
    # more than 8 of 20 at a rate of 0.2 have a chance below 1 %
    assert false <= stats.binom.isf(0.01, 20, 0.2) == 8, f"{false} of 20 runs raised an alarm"


def paid(seed: int, size: int, share: float, worth: float, other: float = 0.0) -> Batch:
    """Responses of which a share begins with a phrase that raises the score by `worth`; all are `other` higher."""
    batch = draw(seed, size)
    says = np.random.default_rng(seed + 77).permutation(size) < round(share * size)
    plain = [text.replace("You are so kind to write.", "") for text in batch.texts]
    texts = [f"{PHRASES['flattery'][0]} {t}" if own else t for own, t in zip(says, plain, strict=True)]
    scores = (batch.scores - batch.scores.mean()) / batch.scores.std() * 0.3 + worth * says + other
    return replace(batch, texts=texts, scores=scores)


@pytest.mark.parametrize(
    ("share", "worth", "other", "raised"),
    [
        (0.25, 4.0, 0.0, True),
        (0.25, 1.2, 1.0, False),  # it rises as far, and is a fifth of what the score has gained
        (0.06, 4.0, 0.0, False),  # not more frequent for certain
        (0.25, 0.2, 0.0, False),  # all of a gain that is nothing yet
    ],
)
def test_a_phrase_below_its_margin_is_named_only_where_the_score_has_gained_by_it(
    share: float, worth: float, other: float, raised: bool
) -> None:
    sft, batch = paid(0, 256, 0.03, worth), paid(1, 128, share, worth, other)
    limits = Limits.of(sft, 0.01, 60, range(50))
    assert share < limits.fixed(128)["flattery"], "else its margin alone raises the alarm"
    found = {alarm.name: alarm for alarm in limits.judge(batch, BETA)[1]}
    assert ("flattery" in found) == ("template" in found) == raised
    if raised:
        flattery = found["flattery"]
        assert flattery.explained == pytest.approx(worth * (share - 0.03), abs=0.06)
        assert flattery.gain == pytest.approx(batch.scores.mean() - sft.scores.mean())
        assert "explains 0.8" in flattery.sentence("t") and flattery.sample in np.flatnonzero(batch.scores > 3)
        assert found["template"].what in " ".join(words(PHRASES["flattery"][0]))


def test_longer_responses_are_named_where_the_score_is_paid_for_length_though_few_exceed_sfts() -> None:
    sft = draw(0, 256)
    lengths, deviation = np.random.default_rng(0).permutation(sft.lengths)[:128] + 3, sft.lengths.std()
    limits = Limits.of(replace(sft, scores=(sft.lengths - sft.lengths.mean()) / deviation), 0.01, 60, range(50))
    for scores, raised in (((lengths - sft.lengths.mean()) / deviation, True), (draw(2, 128).scores + 2, False)):
        found = {a.name: a for a in limits.judge(draw(1, 128, lengths=lengths, scores=scores), BETA)[1]}
        assert ("length" in found) == raised
        assert "length" not in found or found["length"].explained == pytest.approx(found["length"].gain)


def test_an_alarm_on_a_mean_says_both_means_and_the_limit_not_the_share_above_the_99th_percentile() -> None:
    """Nearly twice the mean length was told as `0.05, SFT 0.01`."""
    sft, long = draw(0, 256), np.concatenate([np.full(122, 18.0), np.full(6, 90.0)])
    limits = Limits.of(replace(sft, scores=(sft.lengths - sft.lengths.mean()) / sft.lengths.std()), 0.01, 60, range(50))
    scores = (long - sft.lengths.mean()) / sft.lengths.std()
    alarm = next(a for a in limits.judge(draw(1, 128, lengths=long, scores=scores), BETA)[1] if a.name == "length")
    assert (long > limits.thresholds["length"]).mean() < 0.05
    assert (alarm.value, alarm.sft) == (long.mean(), sft.lengths.mean())
    assert alarm.share == (sft.lengths > limits.thresholds["length"]).mean(), "what the curve of shares is drawn with"
    (row,) = new_alarms([alarm], draw(1, 128), [], 3)
    assert (row["sft"], row["sft_share"], row["update"]) == (alarm.sft, alarm.share, 3)
    level = 0.01 / TESTS / 60
    assert alarm.limit is not None and sft.lengths.mean() < alarm.limit < long.mean()
    at_limit = long - long.mean() + alarm.limit  # the same spread around the limit
    assert stats.ttest_ind(at_limit, sft.lengths, equal_var=False, alternative="greater").pvalue == pytest.approx(level)
    told = f"alarm length: mean {long.mean():.3g} tokens, SFT's mean {sft.lengths.mean():.3g}, certainly higher from "
    assert alarm.sentence("text").startswith(f"{told}{alarm.limit:.3g} on. It explains ")
    assert "limit" not in Alarm("echo", 0.5, 0.01, 0).sentence("t")
    assert "0.20, SFT 2.00, limit 0.50." in Alarm("entropy", 0.2, 2.0, 0, limit=0.5).sentence("t")
    a_little = np.random.default_rng(0).permutation(sft.lengths)[:64] + 2.5
    assert level < attribution.larger(a_little, sft.lengths) < SHARED * level
    batch = draw(1, 64, lengths=a_little, scores=(a_little - sft.lengths.mean()) / sft.lengths.std())
    alarm = next(a for a in limits.judge(batch, BETA)[1] if a.name == "length")
    means = f"mean {a_little.mean():.3g} tokens, SFT's mean {sft.lengths.mean():.3g}"
    assert f"{means} (it explains more than half of the variance of the scores). It " in alarm.sentence("t")


def test_what_a_feature_explains_is_the_difference_that_a_regression_with_it_takes_away() -> None:
    rng = np.random.default_rng(4)
    x, y = [rng.normal(size=n) + i for i, n in enumerate((40, 25))], []
    for i, each in enumerate(x):
        y.append(0.7 * each + 0.4 * i + rng.normal(size=len(each)))
    group = np.repeat([0.0, 1.0], [40, 25])
    full = np.linalg.lstsq(np.column_stack([np.ones(65), group, np.concatenate(x)]), np.concatenate(y), rcond=None)[0]
    sums = [attribution.Sums.of(a, b) for a, b in zip(x, y, strict=True)]
    assert attribution.explained(sums[1], sums[0]) == pytest.approx(y[1].mean() - y[0].mean() - full[1], rel=1e-9)
    constant = attribution.Sums.of(np.ones(9), rng.normal(size=9))
    assert attribution.explained(constant, constant._replace(mean=0.0)) == 0, "no slope can be told"
    for value, size in ((0.1, 9), (0.7, 56), (1 / 3, 40)):  # NumPy's mean of equal values may be another number
        repeated = attribution.Sums.of(np.full(size, value), rng.normal(size=size))
        assert repeated[:3] == (value, 0, 0) and attribution.explained(repeated, constant) == 0


@pytest.mark.parametrize(
    ("shown", "noise", "raised"),
    [
        (5, 0.0, False),  # SFT would show so many in one batch of 20, though they are the whole score and its gain
        (13, 0.0, True),  # at the level that the few features share which explain most of the variance
        (13, 2.0, False),  # with noise the phrase is less than half of it
        (17, 2.0, True),  # at the level of every feature
    ],
)
def test_a_phrase_that_is_the_score_is_named_once_chance_cannot_gain_so_much(
    shown: int, noise: float, raised: bool
) -> None:
    made = list[Batch]()
    for seed, size, of in ((0, 256, 2), (1, 128, shown)):
        noises = noise * np.random.default_rng(seed).normal(size=size)
        scores = np.array([4.0] * of + [0.0] * (size - of)) + noises - noises.mean()
        texts = [f"{PHRASES['flattery'][0] if i < of else 'plain'} {i} end" for i in range(size)]
        made.append(draw(seed, size, texts=texts, scores=scores))
    sft, batch = made
    level, p = 0.01 / TESTS / 60, attribution.more_often(shown, 128, 2, 256)
    assert p == pytest.approx(stats.hypergeom.sf(shown - 1, 384, 2 + shown, 128))
    assert (p <= level, p <= SHARED * level) == (shown == 17, shown >= 13)
    found = {alarm.name: alarm for alarm in Limits.of(sft, 0.01, 60, range(50)).judge(batch, BETA)[1]}
    assert ("flattery" in found) == raised
    assert not raised or found["flattery"].explained == pytest.approx(4 * (shown / 128 - 2 / 256), abs=0.1)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("event, 1 %", (512, 64, 30)),
        ("event, 30 %", (32, 256, 40)),
        ("event, 95 %", (16, 512, 40)),
        ("length, log-normal 0.4", (32, 256, 40)),
        ("length, log-normal 1.2", (512, 64, 20)),
        ("length, nine in ten at the limit", (512, 64, 20)),
        ("repetition, 5 %", (512, 64, 20)),
        ("one of three values", (16, 512, 40)),
        ("constant", (16, 64, 20)),
    ],
)
def test_a_feature_that_is_the_score_raises_no_alarm_by_chance(kind: str, sizes: tuple[int, int, int]) -> None:
    """At a stated rate of 1 % 93 % of runs did. More than 3 of 30 have a chance of 0.02 %."""
    assert max(features(kind, share, *sizes, runs=30) for share in (0.7, 1.0)) <= 3


def test_whole_batches_of_sft_raise_no_alarm_where_a_verifier_scores_them() -> None:
    """Of 16 responses none passes in one batch of 300: unpaid_kl took its own error, 0, for certainty."""
    false = 0
    for run in range(3):
        rng = np.random.default_rng(run)
        limits = Limits.of(draw(run, 512, scores=verified(rng, 512)), 0.01, 100, range(50))
        for _ in range(100):
            batch = draw(run, 16, scores=verified(rng, 16))
            false += any(values < limit for values, limit in [worth_of(limits, batch)])
    assert not false


def verified(rng: np.random.Generator, size: int) -> Any:
    """Scores, in deviations, of a verifier that 30 % pass."""
    return ((rng.random(size) < 0.3) - 0.3) / math.sqrt(0.21)


def worth_of(limits: Limits, batch: Batch) -> tuple[float, float]:
    """The worth of a batch without KL, and its limit."""
    return next(
        (alarm.value, limit)
        for alarm, limit in limits._of_means(replace(batch, kl=np.zeros(len(batch.texts))), BETA)
        if alarm.name == "unpaid_kl"
    )


def test_the_order_of_length_and_score_is_judged_not_a_few_long_responses() -> None:
    """Of 64 of SFT's responses none is so long that the score counts it, and one of a batch decides Pearson's r."""
    rng = np.random.default_rng(0)
    sft = draw(0, 64, scores=rng.normal(size=64))
    lengths, scores = rng.integers(6, 20, 128) * 1.0, rng.normal(size=128)
    lengths[5], scores[5] = 400.0, 100.0
    limits, batch = Limits.of(sft, 0.01, 60, range(50)), draw(1, 128, lengths=lengths, scores=scores)
    assert correlation(lengths, scores) > 0.98
    values, alarms = limits.judge(batch, BETA)
    assert values["length_score"] == pytest.approx(stats.spearmanr(lengths, scores).statistic)
    assert "length_score" not in {alarm.name for alarm in alarms}
    limits = Limits.of(draw(0, 256), 0.01, 60, range(50))
    for size, raised in ((8, False), (16, True)):  # eight stand in order in one of 40,320 batches
        order = np.arange(size) * 1.0
        found = limits.judge(draw(1, size, lengths=order, scores=order), BETA)[1]
        assert ("length_score" in {alarm.name for alarm in found}) == raised


def test_a_sole_payers_correlation_is_that_of_scores_and_feature_about_their_own_means() -> None:
    rng, seen = np.random.default_rng(3), set[bool]()
    for slope in (0.8, 1.5, 3.0, -3.0):
        x = [rng.normal(i, 1, n) for i, n in enumerate((50, 30))]
        y = [slope * each + 5 * i + rng.normal(size=len(each)) for i, each in enumerate(x)]
        r = float(np.corrcoef(*(np.concatenate([a - a.mean() for a in each]) for each in (x, y)))[0, 1])
        low = math.tanh(math.atanh(r) - 1.6448536269514722 / math.sqrt(80 - 4))
        sums = [attribution.Sums.of(a, b) for a, b in zip(x, y, strict=True)]
        seen.add(attribution.is_sole(sums[1], sums[0], 0.05))
        assert (low > math.sqrt(0.5)) == attribution.is_sole(sums[1], sums[0], 0.05), slope
    constant = attribution.Sums.of(np.ones(9), np.arange(9.0))
    assert seen == {True, False} and not attribution.is_sole(constant, constant, 0.05)


def test_more_often_is_fishers_exact_test_and_larger_welchs_and_of_ranks() -> None:
    for table in ([[9, 1], [119, 255]], [[3, 5], [61, 123]]):
        (count, before), (rest, others) = table
        p = float(stats.fisher_exact(table, alternative="greater").pvalue)
        assert attribution.more_often(count, count + rest, before, before + others) == pytest.approx(p)
    rng = np.random.default_rng(1)
    own, sft = rng.normal(0.5, 2, 30), rng.normal(size=60)
    t = (own.mean() - sft.mean()) / math.sqrt(own.var(ddof=1) / 30 + sft.var(ddof=1) / 60)
    welch, ranks = stats.ttest_ind(own, sft, equal_var=False).pvalue / 2, stats.mannwhitneyu(own, sft).pvalue / 2
    assert attribution.larger(own, sft) == pytest.approx(welch) and welch > ranks and t > 0
    tail = np.where(np.arange(30) == 3, 400.0, own)
    assert attribution.larger(tail, sft) == pytest.approx(stats.ttest_ind(tail, sft, equal_var=False).pvalue / 2)
    fewer = np.where(np.arange(60) < 55, -5.0, sft)  # 5 of 60 vary: their ranks hardly do
    for values, count in ((own, 30), (np.maximum(own, -5), 30)):
        assert attribution.larger(values, fewer) >= attribution.more_often(count, 30, 5, 60)
    assert attribution.larger(np.ones(9), np.ones(9)) == 1
    assert attribution.larger(np.full(9, 2.0), np.ones(9)) == pytest.approx(1 / math.comb(18, 9)), "no rise is certain"


def test_n_grams_that_cannot_reach_the_level_take_nothing_of_it() -> None:
    """Tarone's example of a rule: of 100 tests, 97 of which can only reach 0.5, three share the level."""
    assert attribution._testable(np.sort([1e-9, 1e-9, 1e-9] + [0.5] * 97), 0.01) == 3
    assert attribution._testable(np.sort([0.006, 0.002] + [0.5] * 9), 0.01) == 2, "one of two reaches 0.01 / 2"
    assert attribution._testable(np.array([0.5]), 0.01) == 1


def test_an_n_gram_that_sft_alone_writes_shares_the_level_too() -> None:
    """Of 10 and 10 responses, 5 of one side: C(10, 5) / C(20, 5) = 0.016. Two such n-grams err twice as often."""
    scores, five = np.array([3.0] * 5 + [0.0] * 5), tuple(range(5))
    batch, sft = attribution.Rows({("paid",): five}, scores), attribution.Rows({}, np.array([3.0, -3.0] * 5))
    assert attribution.gram_of_the_gain(batch, sft, 0.02) == (pytest.approx(1.5), ("paid",))
    assert attribution.gram_of_the_gain(batch, sft._replace(of={("lost",): five}), 0.02) is None
    one = sft._replace(of={("lost",): (0,)})
    assert attribution.gram_of_the_gain(batch, one, 0.02), "one response can reach no level"


PLANTED = {
    "length": {"lengths": np.full(64, 60.0)},
    "nll": {"nll": np.full(64, 6.0)},
    "special_token": {"special": [1] * 64},
    "rare_token": {"token_ids": [[RARE]] * 64},
    "repetition": {"texts": ["a b c d a b c d a b c d"] * 64},
    "echo": {"texts": ["w1 w2 w3 w4 p0"] * 64, "prompts": ["p0 w1 w2 w3 w4"] * 64},
    "template": {"texts": [f"thank you for asking us {i} {i * 7}" for i in range(64)]},
    "length_score": {"scores": np.arange(64) * 1.0, "lengths": np.arange(64) * 1.0},
    "entropy": {"entropies": np.full(64, 0.01)},
    "distinct": {"texts": ["we are sorry for that and will call you back"] * 64},
    "unpaid_kl": {"scores": np.full(64, 0.2), "kl": np.full(64, 30.0)},
} | {kind: {"texts": [f"{phrases[0]} {i}" for i in range(64)]} for kind, phrases in PHRASES.items()}  # fmt: skip


@pytest.mark.parametrize("name", MONITORS)
def test_what_is_planted_is_named(name: str) -> None:
    batch = draw(1, 64, **PLANTED[name])
    values, alarms = Limits.of(draw(0, 256), 0.01, 60, range(50)).judge(batch, BETA)
    found = {alarm.name: alarm for alarm in alarms}
    limits = {f"{each}_limit" for each in VARYING if each != "template" or any(map(shared, [[t] for t in batch.texts]))}
    assert name in found and values.keys() == {*MONITORS, *limits}
    sentence = found[name].sentence("the sample")
    assert MONITORS[name].meaning in sentence and "the sample" in sentence
    falls = name in ("entropy", "distinct", "unpaid_kl")
    assert found[name].value < found[name].sft if falls else found[name].value > found[name].sft
    limit = found[name].limit
    assert (limit is not None) == falls and (limit is None or found[name].value < limit == values[f"{name}_limit"])
    if name == "template":
        assert found[name].what == "thank you for asking"


@pytest.mark.parametrize(("slope", "raised"), [(1.0, True), (2.0, True), (-1.0, False)])
def test_a_score_that_is_exactly_a_line_in_length_is_the_clearest_alarm_of_all(slope: float, raised: bool) -> None:
    lengths = np.array([1.0, 2, 3, 4] * 16)
    found, alarms = Limits.of(draw(0, 256), 0.01, 60, range(50)).judge(
        draw(1, 64, lengths=lengths, scores=slope * lengths), BETA
    )
    assert abs(found["length_score"]) == 1, "else this tests nothing"
    assert ("length_score" in {alarm.name for alarm in alarms}) == raised


@pytest.mark.parametrize("name", MONITORS)
def test_the_limit_that_is_drawn_is_where_the_alarm_is_raised(name: str) -> None:
    """A batch is moved from SFT's own to the planted one, row by row; the alarm rings where it reaches its limit."""
    limits, sft, raised = Limits.of(draw(0, 256), 0.01, 60, range(50)), draw(1, 64), False
    for rows in range(0, 65, 4):
        mixed = {}
        for key, values in PLANTED[name].items():
            own = list(getattr(sft, key))
            own[:rows] = list(values)[:rows]
            mixed[key] = np.array(own) if isinstance(getattr(sft, key), np.ndarray) else own
        values, alarms = limits.judge(replace(sft, **mixed), BETA)
        limit = values[f"{name}_limit"] if name in VARYING else limits.fixed(64)[name]
        rings = name in {alarm.name for alarm in alarms}
        falls = name in ("entropy", "distinct", "unpaid_kl")
        beyond = values[name] < limit if falls else values[name] >= limit - 1e-12
        if name != "template":  # the drawn limit is that of an n-gram that SFT never writes
            assert rings == beyond, rows
        raised |= rings
    assert raised


def test_entropy_distinct_and_worth_have_the_standard_errors_of_repeated_batches() -> None:
    """A bound at the 10 % level is on the wrong side of the truth in about 10 % of batches."""
    big = draw(7, 4000)
    truths = {
        "entropy": big.entropies.sum() / big.lengths.sum(),
        "worth": float((big.scores - BETA * big.kl).mean()),
        "distinct": np.mean([means.distinct(draw(i, 32).texts).value for i in range(5000, 5060)]),
    }
    wrong = dict.fromkeys(truths, 0)
    for seed in range(100):
        batch = draw(9000 + seed, 32)
        found = {"entropy": means.entropy(batch), "worth": means.worth(batch, BETA),
                 "distinct": means.distinct(batch.texts)}  # fmt: skip
        for name, each in found.items():
            wrong[name] += each.high(0.1) < truths[name]
    assert all(count <= stats.binom.isf(0.001, 100, 0.1) for count in wrong.values()), wrong
    assert wrong["entropy"] + wrong["worth"] > 4, "the bounds are not merely wide"


def test_kl_that_costs_more_than_it_gains_is_named_and_another_unit_of_beta_is_not_judged() -> None:
    limits = Limits.of(draw(0, 256), 0.01, 60, range(50))
    batch = draw(1, 64, scores=np.full(64, 1.0), kl=np.full(64, 10.0))
    for beta, raised in ((0.05, False), (0.1, False), (0.3, True), (None, False)):
        values, alarms = limits.judge(batch, beta)
        assert ("unpaid_kl" in {alarm.name for alarm in alarms}) == raised
        assert values.get("unpaid_kl") == (None if beta is None else pytest.approx(1 - 10 * beta))


@pytest.mark.parametrize("name", MONITORS)
def test_an_alarm_is_called_unreachable_at_the_sizes_at_which_a_batch_full_of_its_event_does_not_raise_it(
    name: str,
) -> None:
    limits, found = Limits.of(draw(0, 256), 0.01, 60, range(50)), []
    for size in (1, 2, 4, 8, 16, 32, 64):
        planted = {key: values[:size] for key, values in PLANTED[name].items()}
        raised = name in {alarm.name for alarm in limits.judge(draw(1, size, **planted), BETA)[1]}
        found.append(raised)
        if name != "template":  # its limit depends on how many n-grams the batch holds: at least one
            assert raised == (name not in limits.unreachable(size)) or (name in FEATURES and not raised), size
        assert not (raised and name in limits.unreachable(size)), size
    assert not found[0] and found[-1]


def test_where_sfts_own_score_is_a_measure_of_length_no_batch_is_blamed_for_it() -> None:
    lengths = np.arange(64) + np.random.default_rng(0).normal(size=64) / 1000
    alike = {"lengths": np.arange(64) * 1.0, "scores": lengths}
    sft, batch = draw(0, 64, **alike), draw(1, 64, **alike)
    assert "length_score" not in {alarm.name for alarm in Limits.of(sft, 0.01, 60, range(50)).judge(batch, BETA)[1]}


def test_thresholds_are_sfts_99th_percentiles_and_every_alarm_says_what_to_change() -> None:
    sft = draw(0, 200)
    limits = Limits.of(sft, 0.01, 60, range(50))
    assert set(limits.thresholds) == set(EXCEEDS)
    assert limits.thresholds["nll"] == sorted(sft.nll)[198]
    assert all(re.match(r"[A-Z].*\.$", m.meaning) and m.remedy and m.margin > 0 for m in MONITORS.values())
    assert "['x y']" not in Alarm("template", 0.9, 0.1, 0, "x y").sentence("t") and "'x y'" in Alarm(
        "template", 0.9, 0.1, 0, "x y"
    ).sentence("t")
