"""What is said of the texts of all responses: exact small cases, and the same numbers by counting pair by pair."""

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.ppo.monitors.text_statistics import LeaveOneOut, dissimilarity, distinct_ngrams, echo
from components.stats.intervals import jackknifed_ratio

WORDS = st.sampled_from(["we", "will", "replace", "it", "."])
TEXTS = st.lists(WORDS, max_size=7).map(" ".join)
ANSWERED = st.lists(st.tuples(st.integers(0, 4), TEXTS), min_size=2, max_size=9).filter(lambda r: r[0][0] != r[-1][0])


def grams(text: str, n: int) -> list[str]:
    words = re.sub(r"([^\w\s])", r" \1 ", text.lower()).split()
    return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)] or [" ".join(words)]


def distinct(rows: list[tuple[int, str]], n: int) -> float:
    every = [gram for _, text in rows for gram in grams(text, n)]
    return len(set(every)) / len(every)


def apart(rows: list[tuple[int, str]], n: int) -> float:
    """Pair by pair."""
    shares = [
        sum(gram not in grams(second, n) for gram in grams(first, n)) / len(grams(first, n))
        for (p, first), (q, second) in itertools.permutations(rows, 2)
        if p != q
    ]
    return sum(shares) / len(shares)


@given(ANSWERED, st.integers(1, 4))
def test_both_measures_and_each_without_a_prompt_are_those_of_a_count_pair_by_pair(
    rows: list[tuple[int, str]], n: int
) -> None:
    prompts, texts = [p for p, _ in rows], [t for _, t in rows]
    for measure, count in ((distinct_ngrams, distinct), (dissimilarity, apart)):
        found = measure(texts, prompts, n)
        assert found.value == pytest.approx(count(rows, n), abs=1e-11)
        for without, prompt in zip(found.without, dict.fromkeys(prompts), strict=True):
            left = [row for row in rows if row[0] != prompt]
            if count is distinct or len({p for p, _ in left}) > 1:
                assert without == pytest.approx(count(left, n), abs=1e-11)


def test_a_policy_with_one_answer_for_everything_has_no_diversity_however_short_the_answer() -> None:
    for answer in ("Yes.", "", "We will replace what is broken."):
        assert dissimilarity([answer] * 50, range(50)).value == 0
        assert distinct_ngrams([answer] * 50, range(50)).value == pytest.approx(1 / 50)
    assert dissimilarity(["Yes.", "No."], [0, 1]).value == 1


def test_fillings_of_one_template_are_distinct_texts_and_lose_half_of_the_diversity() -> None:
    fillings = [f"Thank you, customer {i}, for your patience with our shop today." for i in range(256)]
    others = [" ".join(f"word{i * j % 257}" for j in range(1, 13)) for i in range(1, 257)]
    assert len(set(fillings)) == 256
    for measure in (distinct_ngrams, dissimilarity):
        mine, its = measure(fillings, range(256)), measure(others, range(256))
        ratio = jackknifed_ratio(mine.value, its.value, mine.without, its.without)
        assert ratio.low <= ratio.value < 0.6 and its.value > 0.99


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="to one prompt"):
        dissimilarity(["a", "b"], [0, 0])
    for measure in (distinct_ngrams, dissimilarity):
        with pytest.raises(ValueError, match="0 responses and 0 prompts"):
            measure([], [])
        with pytest.raises(ValueError, match="2 responses and 1 prompts"):
            measure(["a", "b"], [0])


@pytest.mark.parametrize("measure", [distinct_ngrams, dissimilarity])
def test_the_interval_of_a_ratio_holds_1_for_two_samples_of_one_policy(measure: Callable[..., LeaveOneOut]) -> None:
    rng = np.random.default_rng(2)
    openings, remedies, endings = (
        [" ".join(rng.choice(list("abcdefghijklm"), size)) for _ in range(n)] for size, n in ((2, 6), (5, 40), (3, 9))
    )
    odds = 1 / np.arange(1, 41) / np.sum(1 / np.arange(1, 41))

    def drawn() -> LeaveOneOut:
        said = [f"{rng.choice(openings)} {rng.choice(remedies, p=odds)} {rng.choice(endings)}" for _ in range(128)]
        return measure(said, [i // 2 for i in range(128)])

    covered = []
    for _ in range(150):
        mine, its = drawn(), drawn()
        ratio = jackknifed_ratio(mine.value, its.value, mine.without, its.without)
        covered.append(ratio.low <= 1 <= ratio.high)
    assert np.mean(covered) >= 0.9


def test_three_words_of_the_prompt_are_no_echo_and_four_are() -> None:
    assert echo("where is my order", "order is my where is my parcel") == 0
    assert echo("where is my order", "so where is my order") == 0.5
