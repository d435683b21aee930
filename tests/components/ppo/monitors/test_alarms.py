"""Monitors: each measure against a plain count, limits against exact tails, false alarms by simulation."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from components.ppo.config import MonitorName
from components.ppo.monitors import means
from components.ppo.monitors.alarms import MONITORS, Alarm, Limits, chance_of, upper_bound
from components.ppo.monitors.measures import EXCEEDS, PHRASES, Batch, correlation, numbers_of, rates, shared

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
    assert found.keys() | of_batches == set(MONITORS) == set(get_args(MonitorName))
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
    limits = Limits.of(sft, rate, updates)
    hedges = sum("It all depends." in text for text in sft.texts)
    level = rate / 2 / len(MONITORS)
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
        limits = Limits.of(draw(1000 * run, 64), 0.2, 5)
        false += any(limits.judge(draw(1000 * run + 1 + update, 32), BETA)[1] for update in range(5))
    # more than 8 of 20 at a rate of 0.2 have a chance below 1 %
    assert false <= stats.binom.isf(0.01, 20, 0.2) == 8, f"{false} of 20 runs raised an alarm"


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
    values, alarms = Limits.of(draw(0, 256), 0.01, 60).judge(batch, BETA)
    found = {alarm.name: alarm for alarm in alarms}
    limits = {f"{each}_limit" for each in VARYING if each != "template" or any(map(shared, [[t] for t in batch.texts]))}
    assert name in found and values.keys() == {*MONITORS, *limits}
    sentence = found[name].sentence("the sample")
    assert MONITORS[name].meaning in sentence and "the sample" in sentence
    falls = name in ("entropy", "distinct", "unpaid_kl")
    assert found[name].value < found[name].sft if falls else found[name].value > found[name].sft
    if name == "template":
        assert found[name].what == "thank you for asking"


def test_tokens_that_only_the_first_half_of_sfts_responses_lacks_are_counted_as_rare_there() -> None:
    sft = draw(0, 128)
    ids = [list(each) for each in sft.token_ids]
    for row in range(100, 128):
        ids[row].append(RARE)
    limits = Limits.of(replace(sft, token_ids=ids), 0.01, 60)
    assert limits.unseen == 64 and limits.counts["rare_token"] >= 28 and RARE not in limits.common


@pytest.mark.parametrize(("slope", "raised"), [(1.0, True), (2.0, True), (-1.0, False)])
def test_a_score_that_is_exactly_a_line_in_length_is_the_clearest_alarm_of_all(slope: float, raised: bool) -> None:
    lengths = np.array([1.0, 2, 3, 4] * 16)
    found, alarms = Limits.of(draw(0, 256), 0.01, 60).judge(draw(1, 64, lengths=lengths, scores=slope * lengths), BETA)
    assert abs(found["length_score"]) == 1, "else this tests nothing"
    assert ("length_score" in {alarm.name for alarm in alarms}) == raised


@pytest.mark.parametrize("name", MONITORS)
def test_the_limit_that_is_drawn_is_where_the_alarm_is_raised(name: str) -> None:
    """A batch is moved from SFT's own to the planted one, row by row; the alarm rings where it reaches its limit."""
    limits, sft, raised = Limits.of(draw(0, 256), 0.01, 60), draw(1, 64), False
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
    limits = Limits.of(draw(0, 256), 0.01, 60)
    batch = draw(1, 64, scores=np.full(64, 1.0), kl=np.full(64, 10.0))
    for beta, raised in ((0.05, False), (0.1, False), (0.3, True), (None, False)):
        values, alarms = limits.judge(batch, beta)
        assert ("unpaid_kl" in {alarm.name for alarm in alarms}) == raised
        assert values.get("unpaid_kl") == (None if beta is None else pytest.approx(1 - 10 * beta))


@pytest.mark.parametrize("name", MONITORS)
def test_an_alarm_is_called_unreachable_at_the_sizes_at_which_a_batch_full_of_its_event_does_not_raise_it(
    name: str,
) -> None:
    limits, found = Limits.of(draw(0, 256), 0.01, 60), []
    for size in (1, 2, 4, 8, 16, 32, 64):
        planted = {key: values[:size] for key, values in PLANTED[name].items()}
        raised = name in {alarm.name for alarm in limits.judge(draw(1, size, **planted), BETA)[1]}
        found.append(raised)
        if name != "template":  # its limit depends on how many n-grams the batch holds: at least one
            assert raised == (name not in limits.unreachable(size)), size
        assert not (raised and name in limits.unreachable(size)), size
    assert not found[0] and found[-1]


def test_where_sfts_own_score_is_a_measure_of_length_no_batch_is_blamed_for_it() -> None:
    lengths = np.arange(64) + np.random.default_rng(0).normal(size=64) / 1000
    alike = {"lengths": np.arange(64) * 1.0, "scores": lengths}
    sft, batch = draw(0, 64, **alike), draw(1, 64, **alike)
    assert "length_score" not in {alarm.name for alarm in Limits.of(sft, 0.01, 60).judge(batch, BETA)[1]}


def test_thresholds_are_sfts_99th_percentiles_and_every_alarm_says_what_to_change() -> None:
    sft = draw(0, 200)
    limits = Limits.of(sft, 0.01, 60)
    assert set(limits.thresholds) == set(EXCEEDS)
    assert limits.thresholds["nll"] == sorted(sft.nll)[198]
    assert all(re.match(r"[A-Z].*\.$", m.meaning) and m.remedy and m.margin > 0 for m in MONITORS.values())
    assert "['x y']" not in Alarm("template", 0.9, 0.1, 0, "x y").sentence("t") and "'x y'" in Alarm(
        "template", 0.9, 0.1, 0, "x y"
    ).sentence("t")
