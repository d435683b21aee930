"""Alarms during training: limits from the SFT policy's own responses, at a given rate of false alarms per run.

A monitor of events counts the k of a batch's B responses that show an event. SFT showed it in m of N responses. With p
the upper Clopper-Pearson bound of SFT's share and d the monitor's margin, an alarm is raised where

    P(Binomial(B, p + d) >= k) <= a,    a = rate / (2 monitors · updates) for the batch, rate / (2 monitors) for p

So if the policy's share of such responses exceeds SFT's by at most d, the probability of any alarm in the whole run is
at most `rate`, by Bonferroni over monitors, updates and the two bounds. `template` is one such monitor for each n-gram,
and divides a by their number too. The monitors in components/ppo/monitors/means.py compare one number of the batch with
SFT's at the same levels.

Margins are wide, since a healthy policy changes too. A feature that the score pays for need not wait for its margin: a
monitor of `FEATURES` also raises its alarm where the feature explains most of what the score has gained, and is more
frequent than in SFT's responses for certain, with no margin (`score_attribution`). `monitors` above counts two tests of
each such feature: the second ones belong to those features alone that explain more than half of the variance of the
scores for certain.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from components.ppo.alarm_table import FEATURES, MONITORS
from components.ppo.monitors import means
from components.ppo.monitors.measures import EXCEEDS, Batch, numbers_of, rank_correlation, rates, shared
from components.ppo.monitors.score_attribution import (
    Rows,
    features_of_the_gain,
    gram_of_the_gain,
    larger_from,
    more_often,
)
from components.stats.intervals import FloatArray

TESTS = len(MONITORS) + 2 * len(FEATURES)
"""Number of tests that share the rate of false alarms: a feature that the score pays for has two more."""
SHARED = len(FEATURES) / 2
"""Of these tests, those of features that explain most of the scores' variance, and as many of such n-grams."""
RANKS = math.sqrt(1.06)
"""Standard deviation of Fisher's z of Spearman's rho, times sqrt(n - 3) (Fieller, Hartley, Pearson 1957, Biometrika
44:470)."""


class Alarm(NamedTuple):
    """An alarm that a batch raised."""

    name: str
    value: float
    """The batch's value, which was tested: a share of its responses, for `length_score` a correlation, for a measure of
    `EXCEEDS` that the score has gained by its mean, else a number of the batch."""
    sft: float
    """The same of SFT's responses."""
    sample: int
    """A row of the batch that shows the event."""
    what: str = ""
    """For `template`: the phrase."""
    explained: float | None = None
    """The score's gain from it (SFT deviations) if that raised the alarm; None if its margin did."""
    gain: float = 0.0
    """The score's whole gain, SFT deviations."""
    limit: float | None = None
    """Of a mean or another number of the batch: the value at which the alarm is raised; None for a share."""
    share: float | None = None
    """SFT's share of responses that show the event, where `sft` is a mean instead; else None."""
    sole: bool = False
    """Whether it is certain only at the level that the few features share which explain most of the variance of the
    scores."""

    def sentence(self, text: str) -> str:
        """Return a text: what happened, what it usually means and what to change, with the sample `text`."""
        monitor = MONITORS[self.name]
        about = f" ({self.what!r})" if self.what else ""
        paid = (
            "" if self.explained is None
            else f" It explains {self.explained:.2f} of the {self.gain:.2f} SFT deviations that the score has gained."
        )  # fmt: skip
        return (
            f"alarm {self.name}{about}: {self._tested()}.{paid} {monitor.meaning} "
            f"Look at {monitor.remedy}. Sample: {text!r}"
        )

    def _tested(self) -> str:
        """Return the numbers that were compared."""
        nearly = " (it explains more than half of the variance of the scores)" if self.sole else ""
        if self.explained is not None and self.name in EXCEEDS:
            limit = "" if self.limit is None else f", certainly higher from {self.limit:.3g} on"
            return f"mean {self.value:.3g} {EXCEEDS[self.name]}, SFT's mean {self.sft:.3g}{limit}{nearly}"
        limit = "" if self.limit is None else f", limit {self.limit:.2f}"
        return f"{self.value:.2f}, SFT {self.sft:.2f}{limit}{nearly}"


@dataclass
class Limits:  # long: a statistic of SFT's responses for each kind of alarm
    """Statistics of SFT's own responses, and the rate of false alarms."""

    responses: int
    """How many SFT responses there are."""
    thresholds: dict[str, float]
    """The 99th percentiles of the measures of `EXCEEDS`."""
    counts: dict[str, int]
    """How many of the responses show each event."""
    grams: Counter[tuple[str, ...]]
    """How many of the responses contain each n-gram."""
    known: frozenset[int]
    """Tokens that the training data holds."""
    length_score: float
    """Rank correlation of length and score."""
    texts: tuple[str, ...]
    numbers: dict[str, FloatArray]
    """The measures (N,) of `FEATURES`."""
    rows: Rows
    """In which of them each n-gram stands, and their scores."""
    entropy: means.Estimate
    """Mean entropy of the policy at a token, nats."""
    score: means.Estimate
    """Mean score, SFT deviations."""
    rate: float
    updates: int
    _known: dict[int, means.Estimate] = field(default_factory=dict)

    @classmethod
    def of(cls, sft: Batch, rate: float, updates: int, vocabulary: Iterable[int]) -> "Limits":
        """Compute limits from SFT responses for a run of `updates`, with any false alarm at probability `rate` or
        less.

        Args:
            vocabulary: token ids that the training data holds; a response with another one has a rare token.
        """
        tokens = frozenset(vocabulary)
        numbers = numbers_of(sft, tokens)
        thresholds = {name: float(np.quantile(numbers[name], 0.99, method="higher")) for name in EXCEEDS}
        counts = {name: int(values.sum()) for name, values in rates(numbers, thresholds).items()}
        return cls(
            len(sft.texts), thresholds, counts, shared(sft.texts), tokens, rank_correlation(sft.lengths, sft.scores),
            tuple(sft.texts), {name: numbers[name] for name in FEATURES if name in numbers},
            Rows.find(sft.texts, sft.scores), means.entropy(sft), means.mean(sft.scores), rate, updates,
        )  # fmt: skip

    def judge(self, batch: Batch, beta: float | None) -> tuple[dict[str, float], list[Alarm]]:
        """Return the monitors' values on a batch, and the alarms that it raises.

        A limit that varies from batch to batch is among the values, as `NAME_limit`; `fixed` returns the others.

        Args:
            beta: coefficient of KL, SFT deviations per nat; None if it is in another unit or of another KL.
        """
        numbers = numbers_of(batch, self.known)
        events = rates(numbers, self.thresholds)
        size, level = len(batch.texts), self._level
        values = {name: float(of.mean()) for name, of in events.items()}
        alarms = []
        for name, of in events.items():
            if self._exceeds(name, int(of.sum()), size):
                alarms.append(Alarm(name, values[name], self.counts[name] / self.responses, int(of.argmax())))
        template, value, limit = self._template(batch, level)
        values |= {"template": value} | ({} if limit is None else {"template_limit": limit})
        alarms += template
        values["length_score"] = r = rank_correlation(batch.lengths, batch.scores)
        if self._correlates(r, size, level):
            alarms.append(Alarm("length_score", r, self.length_score, int((batch.lengths * batch.scores).argmax())))
        for alarm, limit in self._of_means(batch, beta):
            values |= {alarm.name: alarm.value, f"{alarm.name}_limit": limit}
            alarms += [alarm._replace(limit=limit)] if alarm.value < limit else []
        names = {alarm.name for alarm in alarms}
        paid = self._of_features(batch, numbers)
        return values, alarms + [alarm for alarm in paid if alarm.name not in names]

    def _of_features(self, batch: Batch, numbers: Mapping[str, FloatArray]) -> Iterator[Alarm]:
        """Yield the alarms of `FEATURES`: features that explain most of the score's gain, and are more frequent for
        certain."""
        size, level = len(batch.texts), self._feature_level
        if min(size, self.responses) < means.LEAST:
            return
        gain, sole_level = float(batch.scores.mean() - self.rows.scores.mean()), SHARED * level
        paid = features_of_the_gain(numbers, batch.scores, self.numbers, self.rows.scores, level, sole_level)
        for name, (gained, sole) in paid.items():
            policy, sft, is_number = numbers[name], self.numbers[name], name in EXCEEDS
            limit = larger_from(policy, sft, level) if is_number and not sole else None
            share = self.counts[name] / self.responses if is_number else None
            both = float(policy.mean()), float(sft.mean())
            yield Alarm(name, *both, int(policy.argmax()), "", gained, gain, limit, share, sole)
        attribution = gram_of_the_gain(Rows.find(batch.texts, batch.scores), self.rows, level, sole_level)
        if attribution is not None:
            gained, gram = attribution
            rows = [row for row, text in enumerate(batch.texts) if shared([text])[gram]]
            before = self.grams[gram] / self.responses
            yield Alarm("template", len(rows) / size, before, rows[0], " ".join(gram), gained, gain)

    def _of_means(self, batch: Batch, beta: float | None) -> Iterator[tuple[Alarm, float]]:
        """Yield each monitor of `means` as the alarm that it would raise, with the limit below which it raises it."""
        size = min(len(batch.texts), self.responses)
        if size < means.LEAST:
            return
        at = self._level / self.updates
        policy, texts = means.entropy(batch), batch.texts[:size]
        lowest = int((batch.entropies / np.maximum(batch.lengths, 1)).argmin())
        yield Alarm("entropy", policy.value, self.entropy.value, lowest), policy.limit(self._least("entropy"), at)
        policy, its = means.distinct(texts), self._distinct(size)
        limit, value = math.exp(policy.limit(math.log(self._least("distinct", size)), at)), math.exp(policy.value)
        alike = means.most_alike(texts) if value < limit else 0
        yield Alarm("distinct", value, math.exp(its.value), alike), limit
        if beta is not None:
            policy = means.worth(batch, beta)
            # Few scores of a verifier may all be equal by chance: their own error, 0, is no certainty.
            spread = self.score.error * math.sqrt(self.responses / len(batch.texts))
            either = policy, policy._replace(error=spread, freedom=self.score.freedom)
            worst = int((batch.scores - beta * batch.kl).argmin())
            least = self.score.low(self._level) - MONITORS["unpaid_kl"].margin
            limit = min(estimate.limit(least, at) for estimate in either)
            yield Alarm("unpaid_kl", policy.value, self.score.value, worst), limit

    def _distinct(self, size: int) -> means.Estimate:
        """Estimate `means.distinct` for `size` SFT responses."""
        if size not in self._known:
            self._known[size] = means.distinct_of_parts(self.texts, size)
        return self._known[size]

    def _least(self, name: str, size: int = 0) -> float:
        """Return the bound below which the batch's true value certainly lies if the alarm `name` is raised."""
        share, level = 1 - MONITORS[name].margin, self._level
        return share * (self.entropy.low(level) if name == "entropy" else math.exp(self._distinct(size).low(level)))

    def fixed(self, size: int) -> dict[str, float]:
        """Return the limits that are the same for every batch of `size`: from this value on, a monitor raises its
        alarm.

        A monitor whose alarm no such batch can raise is left out.
        """
        limits = dict[str, float]()
        for name, count in self.counts.items():
            most = min(1.0, float(upper_bound(count, self.responses, self._level)) + MONITORS[name].margin)
            over = np.flatnonzero(chance_of(np.arange(size + 1), size, most) <= self._level / self.updates)
            limits |= {name: float(over[0]) / size} if over.size else {}
        if self._correlates(1.0, size, self._level):
            z = float(stats.norm.isf(self._level / self.updates))
            limit = self._most_correlated(self._level)
            limits["length_score"] = math.tanh(math.atanh(limit) + z * RANKS / math.sqrt(size - 3))
        return limits

    def unreachable(self, size: int) -> list[str]:
        """Return the monitors whose alarm no batch of `size` responses can raise, even if all show the event."""
        few = min(size, self.responses) < means.LEAST
        names = [name for name in self.counts if not self._exceeds(name, size, size)]
        unknown = upper_bound(0, self.responses, self._level) + MONITORS["template"].margin
        if chance_of(size, size, np.minimum(unknown, 1.0)) > self._level / self.updates:
            names.append("template")
        names = [name for name in names if few or not self._can_explain_the_gain(name, size)]
        names += ["unpaid_kl"] if few else []
        names += ["entropy"] if few or self._least("entropy") <= 0 else []
        names += ["distinct"] if few or self._least("distinct", min(size, self.responses)) <= 1 / size else []
        return names + ([] if self._correlates(1.0, size, self._level) else ["length_score"])

    @property
    def _level(self) -> float:
        return self.rate / (2 * TESTS)

    @property
    def _feature_level(self) -> float:
        """Of a test at an update: it has one bound, where a limit with a margin has two."""
        return 2 * self._level / self.updates

    def _can_explain_the_gain(self, name: str, size: int) -> bool:
        """Whether a batch of `size` responses that all show what `name` counts is certain of more than SFT shows."""
        if name in EXCEEDS:
            return name in FEATURES
        before = 0 if name == "template" else self.counts[name]
        return name in FEATURES and more_often(size, size, before, self.responses) <= self._feature_level

    def _exceeds(self, name: str, count: int, size: int) -> bool:
        """Return whether `count` of `size` responses show an event more often than its limit allows."""
        bound = float(upper_bound(self.counts[name], self.responses, self._level))
        most = min(1.0, bound + MONITORS[name].margin)
        return bool(chance_of(count, size, most) <= self._level / self.updates)

    def _template(self, batch: Batch, level: float) -> tuple[list[Alarm], float, float | None]:
        """Return the alarm of an n-gram above its limit, the largest rise over SFT's share, and a new n-gram's limit.

        The last is the share at which an n-gram that SFT never writes raises the alarm; None if no share does.
        """
        counter, size = shared(batch.texts), len(batch.texts)
        if not counter:
            return [], 0.0, None
        grams = sorted(counter)  # the order of a set differs between processes
        counts = np.array([counter[gram] for gram in grams])
        before = np.array([self.grams[gram] for gram in grams])
        rise = counts / size - before / self.responses
        margin, allowed = MONITORS["template"].margin, level / (self.updates * len(grams))
        bound = upper_bound(before, self.responses, level / len(grams)) + margin
        chance = chance_of(counts, size, np.minimum(bound, 1.0))
        new = min(1.0, float(upper_bound(0, self.responses, level / len(grams))) + margin)
        raising = np.flatnonzero(chance_of(np.arange(size + 1), size, new) <= allowed)
        limit = float(raising[0]) / size if raising.size else None
        at, most = int(rise.argmax()), float(rise.max())
        over = np.flatnonzero(chance <= allowed)
        if not over.size:
            return [], most, limit
        at = int(over[rise[over].argmax()])
        phrase = " ".join(grams[at])
        row = next(i for i, text in enumerate(batch.texts) if shared([text])[grams[at]])
        value, sft = counts[at] / size, before[at] / self.responses
        return [Alarm("template", float(value), float(sft), row, phrase)], most, limit

    def _correlates(self, r: float, size: int, level: float) -> bool:
        """Return whether a batch's r certainly exceeds SFT's by more than the margin, by Fisher's z of ranks, with half
        a step of r as correction for continuity: few responses stand in order by chance."""
        if size < 4 or self.responses < 4:
            return False
        limit = self._most_correlated(level)
        last = 1 - 6 / (size**3 - size)
        z_of_batch = math.atanh(min(max(r, -last), last))
        z = float(stats.norm.isf(level / self.updates))
        return limit < 1 and math.tanh(z_of_batch - z * RANKS / math.sqrt(size - 3)) > limit

    def _most_correlated(self, level: float) -> float:
        """Return the bound above which the batch's true r certainly lies if the alarm `length_score` is raised."""
        z = float(stats.norm.isf(level))
        sft = math.tanh(math.atanh(min(self.length_score, 0.999)) + z * RANKS / math.sqrt(self.responses - 3))
        return sft + MONITORS["length_score"].margin


def upper_bound(count: Any, size: int, level: float) -> FloatArray:
    """Return the Clopper-Pearson upper bound of a share (1934, Biometrika 26:404), one-sided at `level`."""
    counts = np.asarray(count, dtype=np.float64)
    inner = stats.beta.isf(level, counts + 1, np.maximum(size - counts, 1e-9))
    return np.where(counts >= size, 1.0, inner)


def chance_of(count: Any, size: int, share: Any) -> FloatArray:
    """Return P(Binomial(size, share) >= count)."""
    return np.asarray(stats.binom.sf(np.asarray(count) - 1, size, share))
