"""Name what a row says beside the fields that its format reads, at every depth."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain

from components.data.formats.labels import KTO, KTO_FLAGS
from components.data.formats.pairs import SIDE_SCORES, SINGLE_VOTES, tied_by
from components.data.formats.public import reads
from components.data.formats.public_fields import ReadingOptions, Shape, prompt_fields
from components.data.formats.transcripts import SYSTEMS, is_empty
from components.data.rows import RawRow

_EARLIER = " ".join(("history", *SYSTEMS))
_SCORES = " ".join(chain(*SIDE_SCORES))
_OF_PAIRS = f"category source margin {_SCORES} votes votes_chosen votes_rejected judged_in {_EARLIER}"
_OF_VOTES = "prompt stance a b votes votes_a votes_b votes_equal votes_tie votes_both_bad label vote"
_SINGLE = "prompt response completion output instruction input context instances messages conversations"
_FIELDS = {
    "transcripts": f"prompt chosen rejected {_OF_PAIRS}",
    "strings": f"prompt chosen rejected {_OF_PAIRS}",
    "conversational": f"prompt chosen rejected {_OF_PAIRS}",
    "votes": f"{_OF_VOTES} model_a model_b {_OF_PAIRS}",
    SINGLE_VOTES: f"{_OF_VOTES} model_a model_b annotator {_OF_PAIRS}",
    "ranking": f"prompt responses ranks scores {_OF_PAIRS}",
    "response": f"prompt response completion output {_EARLIER}",
    "instruction": f"instruction input context instances response completion output {_EARLIER}",
    "conversation": f"messages conversations {_EARLIER}",
    "transcript": f"text {_EARLIER}",
    KTO: f"{_SINGLE} text label kto_tag {' '.join(KTO_FLAGS)} {_EARLIER}",
    "prompts": f"prompt stance category {_EARLIER}",
}
"""The fields that each format reads. Pairs also read fields that start with `votes_`; labelling needs `id`."""
_INSIDE = frozenset(
    "role from content value text parts type weight response answer rank messages post article subreddit title "
    "full_text annotator label vote input output user_id status".split()
)
"""The fields of objects inside of columns that a format reads."""


def used_by(
    rows: Sequence[RawRow], kind: str, name: str, shape: Shape | None, options: ReadingOptions
) -> Callable[[str], bool]:
    """Return a function that says whether a file's rows of a format use a column.

    Args:
        rows: the file's first rows.
        kind: the kind of data.
        name: the format, or the one to which `shape` converts the rows.
    """
    readable = [row.data for row in rows if row.problem is None]
    prompts = {field for data in readable for field in prompt_fields(data)}
    ties = {tied_by(data) for data in readable} if kind == "preferences" and name != "votes" else set()

    @cache
    def used(column: str) -> bool:
        if column in ties:
            return True
        if shape is not None:
            return reads(shape, column, options, prompts)
        return column in _FIELDS[name].split() or (kind == "preferences" and column.startswith("votes_"))

    return used


def unread(data: Mapping[str, object], used: Callable[[str], bool], score: str | None) -> set[str]:
    """Return the columns of a row, and the fields inside of them (`prompt[].name`), that hold something and are not
    read; `score` is the name of the score that is compared."""
    inside = _INSIDE if score is None else _INSIDE | {"annotations", score, "Rating"}
    fields = {column for column, value in data.items() if not is_empty(value) and not used(column)}
    for column in data.keys() - fields:
        if not isinstance(data[column], str) and (column != "votes" or isinstance(data[column], list)):
            fields.update(_within(data[column], column, inside))
    return fields


def _within(value: object, path: str, inside: frozenset[str]) -> Iterator[str]:
    if isinstance(value, list):
        for element in value:
            yield from _within(element, f"{path}[]", inside)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in inside or name.endswith("score"):
                yield from _within(inner, f"{path}.{name}", inside)
            elif not is_empty(inner):
                yield f"{path}.{name}"
