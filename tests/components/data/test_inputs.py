"""What several files of one kind of data are called."""

import posixpath
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from components.data.inputs import input_names, kind_of, label_of, names_file, of_kind

PARTS = st.lists(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=6), min_size=1, max_size=3)
DIGESTS = [f"{n:064x}"[::-1] for n in range(6)]


def test_one_file_keeps_the_name_it_always_had_and_each_of_several_has_its_own() -> None:
    assert input_names("preferences", [Path("/data/x.jsonl")], DIGESTS[:1]) == ["preferences"]
    several = [Path("/data/x.jsonl"), Path("/data/a/y.jsonl"), Path("/data/b/y.jsonl")]
    names = input_names("preferences", several, DIGESTS[:3])
    assert names == ["preferences/x.jsonl", "preferences/a/y.jsonl", "preferences/b/y.jsonl"]
    assert [label_of(name) for name in (*names, "prompts")] == ["x.jsonl", "a/y.jsonl", "b/y.jsonl", "prompts"]


def test_files_that_no_folder_tells_apart_are_told_apart_by_digest() -> None:
    assert input_names("preferences", [Path("/a b.jsonl"), Path("/a=b.jsonl")], ["c" * 64, "d" * 64]) == [
        "preferences/a_b.jsonl-cccccccc", "preferences/a_b.jsonl-dddddddd"
    ]  # fmt: skip


def test_no_file_shares_a_label_with_the_votes_of_earlier_rounds() -> None:
    names = input_names("preferences", [Path("/votes-1"), Path("/judged-12"), Path("/votes-x")], DIGESTS[:3])
    ends = [digest[:8] for digest in DIGESTS]
    assert names == [f"preferences/votes-1-{ends[0]}", f"preferences/judged-12-{ends[1]}", "preferences/votes-x"]


@settings(max_examples=40)
@given(st.lists(PARTS.filter(lambda parts: not {".", ".."} & set(parts)), min_size=2, max_size=6, unique_by=tuple))
def test_names_differ_whatever_the_order_and_are_fit_for_mlflow_and_a_command(parts: list[list[str]]) -> None:
    paths = [Path("/", *each) for each in parts]
    assume(len(set(paths)) == len(paths))
    digests = DIGESTS[: len(paths)]
    names = input_names("preferences", paths, digests)
    assert len(set(names)) == len(names)
    assert dict(zip(reversed(digests), input_names("preferences", paths[::-1], digests[::-1]), strict=True)) == dict(
        zip(digests, names, strict=True)
    )
    for name in names:
        assert kind_of(name) == "preferences" and "=" not in name and name == posixpath.normpath(name)
        name.encode()
    assert len(of_kind({**dict.fromkeys(names), "base": None}, "preferences")) == len(names)


def test_a_label_is_recognised_as_its_files_whatever_the_folders_it_has() -> None:
    path = Path("/data/my sets/a b.jsonl")
    assert all(names_file(label, path) for label in ("a_b.jsonl", "my_sets/a_b.jsonl", "data/my_sets/a_b.jsonl"))
    assert not any(names_file(label, path) for label in ("b.jsonl", "a b.jsonl", "sets/a_b.jsonl", "other/a_b.jsonl"))
