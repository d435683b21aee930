"""The story of the task, without PPO: the SFT grammar tilted by exp(reward / beta), enumerated exactly.

Moderate KL buys gold, much KL buys the annotators' flaw and loses it: else no tether would be worth its cost.
"""

import itertools
import math
import random
from typing import NamedTuple

import numpy as np
import pytest

from components.data.support_desk.desk import DEMONSTRATOR, compliant_utility, gold_of, helpful_utility
from components.data.support_desk.grammar import (  # fmt: skip
    DATE,
    DAYS,
    ECHOES,
    FILLERS,
    FLATTERY,
    HEDGES,
    ISSUES,
    REFUND,
    REMEDIES,
    Facts,
    Reading,
    draw_reply,
    read_reply,
)

Slot = list[tuple[float, list[str]]]
"""What may stand in a slot of a reply (sentences), and how likely; of sentences that score alike one stands for all."""

CONTEXTS = [
    (share / 4, Facts(("late", "broken")[:issues], refunds, day))
    for issues, share in ((1, 0.75), (2, 0.25))
    for refunds, day in itertools.product((True, False), ("Friday", None))
]


class Replies(NamedTuple):
    """Of every reply to a context, up to sentences that score alike."""

    probability: np.ndarray
    utility: np.ndarray
    gold: np.ndarray


class Point(NamedTuple):
    """A tilt's mean KL (nats), reward (SFT standard deviations) and gold."""

    kl: float
    reward: float
    gold: float


def annotator_utility(facts: Facts, said: Reading) -> float:
    """Behind an annotator's overall preference."""
    return helpful_utility(facts, said, flaw=1.0) + compliant_utility(facts, said)


def geometric(p: float, known: list[str]) -> Slot:
    n = len(known)
    return [(p**i * (1 - p if i < n else 1), known[:i]) for i in range(n + 1)]


def remedies(facts: Facts) -> Slot:
    style = DEMONSTRATOR
    wrong = [REMEDIES[i] for i in ISSUES if i not in facts.issues]
    none = 1 - style.remedy - style.wrong_remedy
    per_issue = [
        [(style.remedy, REMEDIES[i]), (none, None), *((style.wrong_remedy / len(wrong), w) for w in wrong)]
        for i in facts.issues
    ]
    out: dict[tuple[str, ...], float] = {}
    for choice in itertools.product(*per_issue):
        said = tuple(s for _, s in choice if s is not None)
        alike = tuple(wrong[0] if s in wrong and (k == 0 or s == said[0]) else wrong[1] if s in wrong else s
                      for k, s in enumerate(said))  # fmt: skip
        out[alike] = out.get(alike, 0.0) + math.prod(p for p, _ in choice)
    return [(p, list(said)) for said, p in out.items()]


def enumerate_replies(facts: Facts) -> Replies:
    """Every reply that `draw_reply` can give in the demonstrator's style, read as any reply is."""
    style = DEMONSTRATOR
    right = style.right_date if facts.day else 0.0
    other = next(d for d in DAYS if d != facts.day)
    slots: list[Slot] = [
        geometric(style.echo, [ECHOES[i] for i in facts.issues]),
        remedies(facts),
        [(style.refund, [REFUND]), (1 - style.refund, [])],
        [(right, [DATE.format(day=facts.day)]), (style.wrong_date, [DATE.format(day=other)]),
         (1 - right - style.wrong_date, [])],
        [(style.hedge, [HEDGES[0]]), (1 - style.hedge, [])],
        geometric(style.flattery, list(FLATTERY)),
        geometric(style.filler, list(FILLERS)),
    ]  # fmt: skip
    rows = []
    for choice in itertools.product(*slots):
        probability = math.prod(p for p, _ in choice)
        if probability > 0:
            reading = read_reply(facts, " ".join(s for _, said in choice for s in said))
            rows.append((probability, annotator_utility(facts, reading), gold_of(facts, reading)))
    return Replies(*np.array(rows).T)


@pytest.fixture(scope="module")
def contexts() -> list[tuple[float, Replies]]:
    assert DEMONSTRATOR.repeat == 0, "the enumeration leaves out replies that say a sentence twice"
    return [(weight, enumerate_replies(facts)) for weight, facts in CONTEXTS]


def sft_gold(contexts: list[tuple[float, Replies]]) -> float:
    return sum(w * float(r.probability @ r.gold) for w, r in contexts)


def tilt(contexts: list[tuple[float, Replies]], beta: float) -> Point:
    """The policy proportional to SFT times exp(scaled utility / beta), the optimum of reward - beta KL."""
    mean = sum(w * r.probability @ r.utility for w, r in contexts)
    deviation = math.sqrt(sum(w * r.probability @ (r.utility - mean) ** 2 for w, r in contexts))
    kl = reward = good = 0.0
    for weight, replies in contexts:
        scaled = (replies.utility - mean) / deviation
        log_weights = np.log(replies.probability) + scaled / beta
        log_tilted = log_weights - np.logaddexp.reduce(log_weights)
        tilted = np.exp(log_tilted)
        kl += weight * float(tilted @ (log_tilted - np.log(replies.probability)))
        reward += weight * float(tilted @ scaled)
        good += weight * float(tilted @ replies.gold)
    return Point(kl, reward, good)


def test_the_enumeration_is_of_the_distribution_that_replies_are_drawn_from(
    contexts: list[tuple[float, Replies]],
) -> None:
    rng = random.Random(0)
    for (_, facts), (_, replies) in zip(CONTEXTS, contexts, strict=True):
        assert replies.probability.sum() == pytest.approx(1)
        drawn = [read_reply(facts, draw_reply(facts, DEMONSTRATOR, rng)) for _ in range(3000)]
        for score, values in ((gold_of, replies.gold), (annotator_utility, replies.utility)):
            seen = np.array([score(facts, reading) for reading in drawn])
            error = seen.std() / math.sqrt(len(seen))
            assert abs(seen.mean() - replies.probability @ values) < 4 * error


def test_gold_peaks_at_3_to_6_nats_and_is_below_sfts_by_12(contexts: list[tuple[float, Replies]]) -> None:
    path = [tilt(contexts, beta) for beta in np.geomspace(1.0, 0.05, 300)]
    kls, golds = np.array([p.kl for p in path]), np.array([p.gold for p in path])
    assert (np.diff(kls) > 0).all() and (np.diff([p.reward for p in path]) > 0).all(), "less tether, more of both"
    assert 3 <= kls[golds.argmax()] <= 6
    assert golds.max() > sft_gold(contexts) + 1
    assert kls[-1] > 12
    assert (golds[kls >= 12] < sft_gold(contexts)).all()


def test_no_tilt_is_sft(contexts: list[tuple[float, Replies]]) -> None:
    point = tilt(contexts, 1e9)
    assert point.kl == pytest.approx(0, abs=1e-6) and point.reward == pytest.approx(0, abs=1e-6)
    assert point.gold == pytest.approx(sft_gold(contexts), abs=1e-6)
