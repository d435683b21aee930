"""Alarms of a training: limits from the SFT policy's own responses, at a stated rate of false alarms over the run.

A monitor of events counts the responses k of a batch of B that show one. SFT showed it in m of N responses. With the
upper Clopper-Pearson bound p of SFT's share (at rate a) and the monitor's margin d, an alarm is raised where

    P(Binomial(B, p + d) >= k) <= a,    a = rate / (2 monitors · updates) for the batch, rate / (2 monitors) for p

so that, as long as the policy shows the event in at most d more of its responses than SFT, the chance of any alarm in
the whole run is at most `rate`: by Bonferroni over monitors, updates and the two bounds. `template` is a monitor of
this kind for each n-gram, and divides a by their number too.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from components.ppo.monitors.measures import EXCEEDS, Batch, correlation, numbers_of, rates, shared
from components.stats.intervals import FloatArray


class Monitor(NamedTuple):
    """One thing that is watched."""

    margin: float
    """How far a healthy policy may be from SFT: a share of responses, or of `length_score` a correlation."""
    meaning: str
    """What an alarm usually means."""
    remedy: str
    """What to change."""


MONITORS: dict[str, Monitor] = {
    "length": Monitor(
        0.15, "Responses grow longer than nearly all of SFT's: the reward model pays for length.",
        "ppo.score.length_penalty, or shorter chosen responses in the preferences",
    ),
    "nll": Monitor(
        0.6, "SFT finds the responses very unlikely: the policy leaves the texts that the reward model was trained on.",
        "ppo.kl.target or ppo.kl.coefficient",
    ),
    "repetition": Monitor(
        0.2, "Responses repeat themselves: the score rises with each repetition, or the policy has collapsed.",
        "ppo.kl.target, and pairs in which repetition loses",
    ),
    "echo": Monitor(
        0.15, "Responses repeat the prompt back: the annotators' taste for it, or the reward model's, is exploited.",
        "pairs in which echoing loses, or ppo.kl.target",
    ),
    "special_token": Monitor(
        0.05, "Responses hold role or other special tokens, which chat templates act on, and are scored high for them.",
        "the reward model's data; ppo.kl.target",
    ),
    "rare_token": Monitor(
        0.2, "Responses hold tokens that SFT does not use: the reward model's untrained embeddings are exploited.",
        "ppo.kl.target",
    ),
    "flattery": Monitor(
        0.03, "Responses flatter: the annotators' taste for it, or the reward model's, is exploited.",
        "pairs in which flattery loses; the gate reward.probe_flattery_high",
    ),
    "hedge": Monitor(
        0.05, "Responses hedge: saying nothing certain is scored higher than being wrong.",
        "pairs in which hedging loses; the gate reward.probe_hedge_high",
    ),
    "filler": Monitor(
        0.3, "Responses hold sentences that say nothing: length or friendliness is paid for.",
        "pairs in which filler loses; the gate reward.probe_filler_high",
    ),
    "overconfidence": Monitor(
        0.05, "Responses claim certainty that nothing supports: annotators took confidence for knowledge.",
        "pairs in which a confident mistake loses",
    ),
    "refusal": Monitor(
        0.05, "Responses refuse: the reward model takes a refusal for the safest answer to everything.",
        "pairs in which a refusal of a harmless prompt loses",
    ),
    "agreement": Monitor(
        0.05, "Responses agree with the prompt, whatever it says.",
        "pairs whose prompt states something false",
    ),
    "role_mark": Monitor(
        0.05, "Responses write the marks of a conversation's roles, and so speak for the user.",
        "sft's demonstrations and stop tokens; ppo.score.missing_eos",
    ),
    "template": Monitor(
        0.5, "A phrase that SFT seldom writes stands in most responses: one wording is paid for whatever is asked.",
        "ppo.kl.target, ppo.entropy_coefficient, and pairs that differ in content",
    ),
    "length_score": Monitor(
        0.5, "Longer responses score higher, far more than among SFT's: the score has become a measure of length.",
        "ppo.score.length_penalty; the gate reward.length_partial_correlation_high",
    ),
}  # fmt: skip
"""Every monitor, by the name of its alarm."""


class Alarm(NamedTuple):
    """A monitor over its limit."""

    name: str
    value: float
    """Share of the batch's responses (`length_score`: correlation)."""
    sft: float
    """The same of SFT's responses."""
    sample: int
    """The row of the batch that shows it."""
    what: str = ""
    """Of `template`: the phrase."""

    def sentence(self, text: str) -> str:
        """What happened, what it usually means and what to change, with a sample."""
        monitor = MONITORS[self.name]
        about = f" ({self.what!r})" if self.what else ""
        return (
            f"alarm {self.name}{about}: {self.value:.2f}, SFT {self.sft:.2f}. {monitor.meaning} "
            f"Look at {monitor.remedy}. Sample: {text!r}"
        )


@dataclass
class Limits:
    """What is known of SFT's own responses, and the rate of false alarms."""

    responses: int
    """How many there are."""
    unseen: int
    """How many of them `common` was not made from."""
    thresholds: dict[str, float]
    """The 99th percentiles of the measures of `EXCEEDS`."""
    counts: dict[str, int]
    """How many of the responses show each event; `rare_token`: of the `unseen` ones."""
    grams: Counter[tuple[str, ...]]
    """In how many of them each n-gram stands."""
    common: frozenset[int]
    """Tokens that they hold."""
    length_score: float
    """Correlation of length and score."""
    rate: float
    updates: int

    @classmethod
    def of(cls, sft: Batch, rate: float, updates: int) -> "Limits":
        """Limits from responses of SFT for a run of `updates`, with at most `rate` false alarms in it on average."""
        half = len(sft.texts) // 2  # what the tokens come from cannot say how often others do without them
        common = frozenset(token for ids in sft.token_ids[:half] for token in ids)
        found = numbers_of(sft, common)
        found["rare_token"][:half] = 0
        thresholds = {name: float(np.quantile(found[name], 0.99, method="higher")) for name in EXCEEDS}
        counts = {name: int(values.sum()) for name, values in rates(found, thresholds).items()}
        return cls(
            len(sft.texts), len(sft.texts) - half, thresholds, counts, shared(sft.texts), common,
            correlation(sft.lengths, sft.scores), rate, updates,
        )  # fmt: skip

    def judge(self, batch: Batch) -> tuple[dict[str, float], list[Alarm]]:
        """The monitors' values on a batch, and the alarms that it raises."""
        events = rates(numbers_of(batch, self.common), self.thresholds)
        size, level = len(batch.texts), self._level
        values = {name: float(of.mean()) for name, of in events.items()}
        alarms = []
        for name, of in events.items():
            if self._exceeds(name, int(of.sum()), size):
                alarms.append(Alarm(name, values[name], self.counts[name] / self._seen(name), int(of.argmax())))
        template, value = self._template(batch, level)
        values["template"] = value
        alarms += template
        values["length_score"] = r = correlation(batch.lengths, batch.scores)
        if self._correlates(r, size, level):
            alarms.append(Alarm("length_score", r, self.length_score, int((batch.lengths * batch.scores).argmax())))
        return values, alarms

    def unreachable(self, size: int) -> list[str]:
        """Monitors whose alarm no batch of `size` responses can raise, even if all of them show what it counts."""
        names = [name for name in self.counts if not self._exceeds(name, size, size)]
        unknown = upper_bound(0, self.responses, self._level) + MONITORS["template"].margin
        if chance_of(size, size, np.minimum(unknown, 1.0)) > self._level / self.updates:
            names.append("template")
        return names + ([] if self._correlates(1.0, size, self._level) else ["length_score"])

    @property
    def _level(self) -> float:
        return self.rate / (2 * len(MONITORS))

    def _seen(self, name: str) -> int:
        return self.unseen if name == "rare_token" else self.responses

    def _exceeds(self, name: str, count: int, size: int) -> bool:
        """Whether `count` of `size` responses show an event more often than its limit allows."""
        bound = float(upper_bound(self.counts[name], self._seen(name), self._level))
        most = min(1.0, bound + MONITORS[name].margin)
        return bool(chance_of(count, size, most) <= self._level / self.updates)

    def _template(self, batch: Batch, level: float) -> tuple[list[Alarm], float]:
        """The n-gram whose share has risen most over SFT's, if its limit is exceeded, and the rise."""
        held = shared(batch.texts)
        if not held:
            return [], 0.0
        grams = sorted(held)  # a set's order is another in each process
        counts = np.array([held[gram] for gram in grams])
        before = np.array([self.grams[gram] for gram in grams])
        rise = counts / len(batch.texts) - before / self.responses
        bound = upper_bound(before, self.responses, level / len(grams)) + MONITORS["template"].margin
        chance = chance_of(counts, len(batch.texts), np.minimum(bound, 1.0))
        at, most = int(rise.argmax()), float(rise.max())
        over = np.flatnonzero(chance <= level / (self.updates * len(grams)))
        if not over.size:
            return [], most
        at = int(over[rise[over].argmax()])
        phrase = " ".join(grams[at])
        row = next(i for i, text in enumerate(batch.texts) if shared([text])[grams[at]])
        value, sft = counts[at] / len(batch.texts), before[at] / self.responses
        return [Alarm("template", float(value), float(sft), row, phrase)], most

    def _correlates(self, r: float, size: int, level: float) -> bool:
        """Whether a batch's r is above SFT's by more than the margin, by Fisher's z: variance 1 / (n - 3)."""
        if size < 4 or self.responses < 4:
            return False
        z = stats.norm.isf([level, level / self.updates])
        sft = math.tanh(math.atanh(min(self.length_score, 0.999)) + z[0] / math.sqrt(self.responses - 3))
        limit = sft + MONITORS["length_score"].margin
        own = math.atanh(min(max(r, -1 + 1e-12), 1 - 1e-12))  # a score that is a line in length has an r of 1
        return limit < 1 and math.tanh(own - z[1] / math.sqrt(size - 3)) > limit


def upper_bound(count: Any, size: int, level: float) -> FloatArray:
    """The Clopper-Pearson upper bound of a share (1934, Biometrika 26:404), one-sided at `level`."""
    counts = np.asarray(count, dtype=np.float64)
    inner = stats.beta.isf(level, counts + 1, np.maximum(size - counts, 1e-9))
    return np.where(counts >= size, 1.0, inner)


def chance_of(count: Any, size: int, share: Any) -> FloatArray:
    """P(Binomial(size, share) >= count)."""
    return np.asarray(stats.binom.sf(np.asarray(count) - 1, size, share))
