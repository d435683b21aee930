import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.words import words_of
from data_contracts.findings import near
from data_contracts.findings.near import (
    PERMUTATIONS,
    Sketches,
    band_rows,
    first_equal,
    near_earlier,
    runs_of_words,
    signatures,
)


def test_runs_of_words_fold_case_and_space_and_a_short_text_is_one_run():
    assert runs_of_words("The  Cat\nsat down", 3) == ["the cat sat", "cat sat down"]
    assert runs_of_words("Hi there", 3) == ["hi there"] and runs_of_words("", 3) == [""]


def test_a_script_without_spaces_is_cut_into_characters():
    assert runs_of_words("\u4f60\u597d\uff0cabc \u4e16", 3) == ["\u4f60 \u597d ,abc", "\u597d ,abc \u4e16"], "NFKC"
    assert words_of("\ud55c\uad6d \uc0ac\ub78c") == ["\ud55c\uad6d", "\uc0ac\ub78c"], "Korean has spaces"
    assert len(words_of("\u0e2a\u0e27\u0e31")) == len(words_of("\u304b\u306a\u30ab")) == 3


def test_an_emoji_is_a_word_with_its_variation_and_skin_tone():
    assert words_of("fine\U0001f44d\U0001f3fd\u2764\ufe0f ok") == ["fine", "\U0001f44d\U0001f3fd", "\u2764\ufe0f", "ok"]
    assert words_of("a \u2192 b - c") == ["a", "\u2192", "b", "-", "c"]


@pytest.mark.parametrize("first", [None, 0x4E00, 0x1F400], ids=["words", "Chinese", "emoji"])
def test_near_duplicates_are_found_in_texts_with_and_without_spaces(first):
    rng = random.Random(3)
    alphabet = [f"w{i}" for i in range(900)] if first is None else [chr(first + i) for i in range(560)]

    def text(words):
        return (" " if first is None else "").join(words)

    originals = [[rng.choice(alphabet) for _ in range(150)] for _ in range(50)]
    copies = [[*each[:70], rng.choice(alphabet), *each[71:]] for each in originals]
    found = near_earlier(signatures([runs_of_words(text(each), 3) for each in originals + copies]), 0.9)
    assert (found[:50] == -1).all() and (found[50:] == np.arange(50)).sum() >= 45


def sets(jaccard, size, rng):
    """Two sets of `size` elements in all, of which `jaccard` are common."""
    names = [f"w{rng.random()}" for _ in range(size)]
    common = round(jaccard * size)
    one = names[: common + (size - common) // 2]
    return one, names[:common] + names[len(one) :]


def test_equal_shares_of_signatures_estimate_jaccard_without_bias():
    rng = random.Random(0)
    pairs = [sets(0.7, 100, rng) for _ in range(300)]
    one, other = (signatures([pair[side] for pair in pairs]) for side in (0, 1))
    found = (one == other).mean(1)
    error = np.sqrt(0.7 * 0.3 / PERMUTATIONS)
    assert found.mean() == pytest.approx(0.7, abs=4 * error / np.sqrt(300)) and found.std() < 1.5 * error


@pytest.mark.parametrize(("jaccard", "least", "most"), [(0.97, 0.9, 1), (0.75, 0, 0.06), (0.4, 0, 0)])
def test_near_texts_are_found_and_distant_ones_are_not(jaccard, least, most):
    rng = random.Random(1)
    pairs = [sets(jaccard, 200, rng) for _ in range(200)]
    found = near_earlier(signatures([s for pair in pairs for s in pair]), 0.9)
    assert (found[::2] == -1).all(), "the first of two is never the later one"
    right = found[1::2] == np.arange(0, 400, 2)
    assert least <= right.mean() <= most and ((found[1::2] == -1) | right).all()


@given(st.floats(0.3, 1.0))
@settings(deadline=None)
def test_bands_find_texts_of_the_wanted_similarity_in_95_of_100_cases(jaccard):
    rows = band_rows(jaccard)
    assert rows == 1 or 1 - (1 - jaccard**rows) ** (PERMUTATIONS // rows) >= 0.95


def test_no_texts_have_no_signatures():
    assert near_earlier(signatures([]), 0.9).shape == (0,)


def test_sketches_in_a_file_give_the_same_copies_part_by_part_and_in_any_order(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    found = rng.integers(0, 2**32, (90, PERMUTATIONS), np.uint32)
    for copy, original in ((17, 3), (40, 3), (60, 59), (89, 0)):
        found[copy] = found[original]
        found[copy, :4] = 7
    order = rng.permutation(90)[:70]
    whole, chosen = near_earlier(found, 0.9), near_earlier(found[order], 0.9, among=50)
    assert [int(whole[place]) for place in (17, 40, 60, 89)] == [3, 17, 59, 0] and (whole >= 0).sum() == 4
    assert (chosen >= 0).any()
    written = Sketches(tmp_path / "sketches")
    for part in np.split(found, [10, 11, 80]):
        written.append(part)
    for places in ([], [3], [5, 4, 6], [0, 39, 39, 20], [0, 39, 40, 80], [*range(90)]):
        assert np.array_equal(written[np.array(places, np.int64)], found[places])
    monkeypatch.setattr(near, "AT_ONCE", 7)
    assert np.array_equal(near_earlier(written, 0.9), whole)
    assert np.array_equal(near_earlier(written, 0.9, among=50, order=order), chosen)
    assert near_earlier(Sketches(tmp_path / "none"), 0.9).shape == (0,)


@given(st.lists(st.integers(0, 9)))
def test_the_first_equal_value_is_the_earliest_in_any_order(values):
    assert first_equal(np.array(values, np.uint64)).tolist() == [values.index(value) for value in values]


def test_equal_values_are_found_in_at_most_41_bytes_a_value():
    values = np.random.default_rng(0).integers(0, 2**64, 100_000, np.uint64)
    tracemalloc.start()
    first_equal(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 41 * len(values)
