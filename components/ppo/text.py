"""What can be seen of a response without a reward model: repetition, echo of the prompt. Words, not tokens."""

import re


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def repetition(text: str, n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before (0 where it has none)."""
    grams = _ngrams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def echo(prompt: str, response: str, n: int = 4) -> float:
    """Share of a response's n-grams that stand in the prompt (0 where it has none)."""
    grams, source = _ngrams(response, n), set(_ngrams(prompt, n))
    return sum(gram in source for gram in grams) / len(grams) if grams else 0.0
