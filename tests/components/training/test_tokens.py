"""Token lists come back from their file one by one, and whoever holds them holds 12 bytes a list."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.training.tokens import TokenLists, TokenWriter, chunks, lengths_of

LISTS = [[1, 2, 3], [], [2**31 - 1], list(range(500)), [7]]


def written(lists: list[list[int]], folder: Path | None) -> TokenLists:
    writer = TokenWriter(folder)
    for each in lists:
        writer.append(each)
    return writer.written()


@pytest.mark.parametrize("on_disk", [True, False])
def test_lists_come_back_by_index_slice_and_choice(tmp_path: Path, on_disk: bool) -> None:
    found = written(LISTS, tmp_path if on_disk else None)
    assert list(found) == LISTS and len(found) == 5 and found[-1] == [7]
    assert found.lengths.tolist() == lengths_of(found[:]).tolist() == [3, 0, 1, 500, 1]  # type: ignore[union-attr]
    assert list(found[1:4:2]) == LISTS[1:4:2] and list(found[::-1]) == LISTS[::-1]
    assert list(found.choose(np.array([3, 0, 0]))[1:]) == [LISTS[0], LISTS[0]]
    assert list(written([], tmp_path if on_disk else None)) == []
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    with pytest.raises(IndexError):
        found[5]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=9))
def test_any_lists_are_the_same_in_a_file_and_in_memory(lists: list[list[int]]) -> None:
    assert list(written(lists, Path("/tmp"))) == list(written(lists, None)) == lists


def test_a_list_longer_than_what_is_written_together_is_whole(tmp_path: Path) -> None:
    long = list(range(600_000))
    assert list(written([[1], long, [2]], tmp_path)) == [[1], long, [2]]


def test_tokens_in_a_file_are_not_in_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        found = written([list(range(1000))] * 3000, tmp_path)
        assert tracemalloc.get_traced_memory()[0] < 300_000, "3 million tokens"
    finally:
        tracemalloc.stop()
    assert sum(map(len, found)) == 3_000_000


def test_rows_are_taken_in_chunks_of_a_thousand_at_most() -> None:
    assert [len(each) for each in chunks(range(2500))] == [1000, 1000, 500]
    assert [len(each) for each in chunks(range(25), 10)] == [10, 10, 5] and list(chunks([], 0)) == []
