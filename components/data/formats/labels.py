"""The meaning of a label: which of two responses it prefers, or whether a single one is desirable.

Some data sets count responses from 0 and others from 1, so 1 may mean the first or the second response. The meaning of
a number, or of true and false for two responses, is therefore never guessed; `data.label_values` must give it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from components.data.rows import BadRow, RawRow, blank, shown
from components.data.words import label_key

KTO: Final = "KTO"
"""The format of demonstrations with a label."""
_KTO_FIELDS = ("kto_tag", "label")
KTO_FLAGS = (
    "desirable", "is_desirable", "is_safe", "is_correct", "correct", "is_good", "is_helpful", "is_chosen",
    "is_preferred", "chosen", "accepted", "thumbs_up", "liked",
)  # fmt: skip
"""Fields that are labels too where they hold true or false."""
WORDS = frozenset(
    "true false 0 1 -1 desirable undesirable good bad chosen rejected accepted positive negative correct "
    "incorrect safe unsafe helpful unhelpful harmless harmful thumbs_up thumbs_down up down like dislike pass fail "
    "+ -".split()
)
"""Labels that say whether a response is desirable. The meaning of those other than `_SINGLE`'s is not guessed."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_SIDES = {
    **dict.fromkeys(("a", "a1", "model_a", "response_a", "assistant_a", "first"), "first"),
    **dict.fromkeys(("b", "a2", "model_b", "response_b", "assistant_b", "second"), "second"),
    **dict.fromkeys(("equal", "tie", "tied", "draw", "both_good", "both_bad"), "equal"),
    **dict.fromkeys(("tie (bothbad)", "bothbad", "both bad"), "equal"),
}
_SINGLE = {"true": True, "desirable": True, "false": False, "undesirable": False}


def side_of(label: Any) -> str:
    """Return the field of `Ballot` for which a vote counts.

    Raises:
        BadRow: the vote is unknown.
    """
    side = _SIDES.get(label_key(label))
    if side is None:
        text = f"vote {shown(label)}, expected a, b (also model_a, first and the like), tie or both_bad"
        raise BadRow("votes_valid", f"{text}; say what others mean with data.label_values, as {{'1': a, '2': b}}")
    return side


def is_side(label: Any) -> bool:
    """Return whether a label is one of those that say which of two responses is better, or left and the like."""
    return label_key(label) in {*_SIDES, "left", "right", "same", "neither", "both", "one", "two"}


def is_tie(label: Any) -> bool:
    """Return whether a label says that neither of two responses is better; it may be a list with a number for each."""
    if isinstance(label, list):
        return len(label) == 2 and isinstance(label[0], int | float) and label[0] == label[1]
    return _SIDES.get(label_key(label)) == "equal"


def meant(value: Any, label_values: Mapping[str, str]) -> Any:
    """Return the meaning that `data.label_values` gives to a label's value, else the value itself."""
    return label_values.get(label_key(value), value) if value is not None else None


def looks_like_kto(rows: Sequence[RawRow]) -> bool:
    """Return whether most labels of rows with one response judge it: true or false, 0 or 1, good or bad.

    Other words among them, such as neutral, are then labels without a known meaning. Other numbers mean that the labels
    are ratings or classes.
    """
    values = (_kto_label(row.data)[1] for row in rows if row.problem is None)
    labels = [label_key(label) for label in values if not _is_blank(label)]
    others = [label for label in labels if label not in WORDS]
    return 2 * len(others) < len(labels) and not any(map(_NUMBER.fullmatch, others))


def is_kto_row(data: Mapping[str, object]) -> bool:
    """Return whether a row has a single response with a label that judges it."""
    single = data.keys() & {"completion", "response", "output", "messages", "conversations"}
    return bool(single) and "chosen" not in data and looks_like_kto([RawRow(1, data)])


def desirable(data: Mapping[str, object], label_values: Mapping[str, str], labelled: bool) -> bool | None:
    """Return whether the label of a demonstration says that it is desirable; None if it has no label.

    Args:
        labelled: whether the file's labels are KTO's. In other files a label that is neither true nor false is ignored.

    Raises:
        BadRow: the label is a number or another value without a known meaning.
    """
    name, label = _kto_label(data)
    if _is_blank(label):
        if labelled:
            raise BadRow(
                "fields_present",
                f"`{name}` is empty; elsewhere it says whether to imitate a row: label it or leave it out",
            )
        return None
    wanted = _SINGLE.get(label_key(meant(label, label_values)))
    if wanted is None and labelled:
        text = f"`{name}` is {shown(label)}, expected true (desirable) or false (undesirable); say what it means with "
        raise BadRow("fields_present", f"{text}data.label_values, as {{'1': desirable, '0': undesirable}}")
    return wanted


def _is_blank(label: object) -> bool:
    return label is None or blank(str(label)) or label != label  # pandas writes NaN for a missing value


def _kto_label(data: Mapping[str, object]) -> tuple[str, object]:
    """Return the field that judges a single response, and its value, which is None if there is none."""
    there = [name for name in (*_KTO_FIELDS, *KTO_FLAGS) if name in data]
    named = next((name for name in _KTO_FIELDS if data.get(name) is not None), (there or _KTO_FIELDS)[0])
    if label_key(data.get(named)) not in WORDS:
        named = next((name for name in KTO_FLAGS if label_key(data.get(name)) in ("true", "false")), named)
    return named, data.get(named)
