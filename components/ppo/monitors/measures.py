"""Measures of a batch of responses: events in single responses, shared n-grams, and their rates."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from components.data.support_desk.grammar import FILLERS, FLATTERY, HEDGES
from components.ppo.monitors.phrases import AGREEMENTS, REFUSALS
from components.ppo.monitors.text_statistics import echo, ngrams, repetition, words
from components.reward.evaluation.probes import SENTENCES
from components.stats.intervals import FloatArray

PHRASES: dict[str, tuple[str, ...]] = {
    "flattery": (*FLATTERY, *SENTENCES["flattery"], "great question", "you are so", "great taste", "so smart"),
    "hedge": (*HEDGES, *SENTENCES["hedge"], "may or may not", "it depends", "cannot be sure", "can't be sure"),
    "filler": (*FILLERS, *SENTENCES["filler"], "it is important to note", "it's important to note", "as we all know"),
    "overconfidence": ("without any doubt", "there is no doubt", "100%", "guaranteed", "i am certain", "absolutely"),
    "refusal": REFUSALS,
    "agreement": AGREEMENTS,
    "role_mark": ("user:", "assistant:", "system:", "human:", "<|", "[inst]", "###"),
}  # fmt: skip
"""English phrases by kind, matched in any case. They include those of the built-in task and of the reward model's
probes."""
_FOUND = {kind: re.compile("|".join(re.escape(p.lower()) for p in phrases)) for kind, phrases in PHRASES.items()}


@dataclass(frozen=True)
class Batch:
    """Responses with their measurements; one per prompt, since responses to one prompt resemble each other."""

    prompts: Sequence[str]
    texts: Sequence[str]
    token_ids: Sequence[Sequence[int]]
    """Token ids of each response, without the final EOS."""
    special: Sequence[int]
    """Number of special tokens in each response."""
    lengths: FloatArray
    """(B,) tokens."""
    scores: FloatArray
    """(B,) as judged, SFT standard deviations."""
    nll: FloatArray
    """(B,) mean negative log-probability of a token under SFT, nats."""
    entropies: FloatArray
    """(B,) entropy of the policy, summed over the response's tokens, nats."""
    kl: FloatArray
    """(B,) KL to SFT by the summed k1 of the response's tokens, nats."""


def numbers_of(batch: Batch, vocabulary: Collection[int]) -> dict[str, FloatArray]:
    """Return measures (B,) of single responses by name: numbers for those in `EXCEEDS`, else 0 or 1 for an event.

    Args:
        vocabulary: token ids that the training data holds.
    """
    texts, tokens = [text.lower() for text in batch.texts], frozenset(vocabulary)
    numbers: dict[str, FloatArray] = {
        "length": batch.lengths,
        "nll": batch.nll,
        "repetition": np.array([repetition(text) for text in batch.texts]),
        "echo": np.array([echo(p, text) for p, text in zip(batch.prompts, batch.texts, strict=True)]),
        "special_token": np.array([float(count > 0) for count in batch.special]),
        "rare_token": np.array([float(not tokens.issuperset(ids)) for ids in batch.token_ids]),
    }
    return numbers | {
        kind: np.array([float(pattern.search(text) is not None) for text in texts]) for kind, pattern in _FOUND.items()
    }


EXCEEDS = {
    "length": "tokens",
    "nll": "nats a token",
    "repetition": "of the n-grams a repetition",
    "echo": "of the n-grams in the prompt",
}
"""Maps a measure that is a number to its unit: a response shows the event if it exceeds SFT's 99th percentile."""


def shared(texts: Sequence[str], n: int = 4) -> Counter[tuple[str, ...]]:
    """Return how many of `texts` contain each n-gram of words."""
    return Counter(gram for text in texts for gram in set(ngrams(words(text), n)))


def correlation(x: FloatArray, y: FloatArray) -> float:
    """Return Pearson's r of two arrays (B,); 0 if either is constant."""
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def rank_correlation(x: FloatArray, y: FloatArray) -> float:
    """Return Spearman's rho of two arrays (B,), which a few long responses cannot decide; 0 if either is constant."""
    return correlation(rankdata(x), rankdata(y))


def rates(numbers: Mapping[str, FloatArray], thresholds: Mapping[str, float]) -> dict[str, FloatArray]:
    """Return events (B,) by name, 0 or 1. A measure in `EXCEEDS` becomes 1 if it is above its threshold."""
    return {
        name: (values > thresholds[name]).astype(np.float64) if name in thresholds else values
        for name, values in numbers.items()
    }
