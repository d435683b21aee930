"""A run's name and tags, given by the user. They are not part of any key."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from components.base.errors import UserError, refuse_credentials

LONGEST_NAME = 100
LONGEST_TAG = 60
LONGEST_VALUE = 200
_TAG = re.compile(r"\w[\w.:-]*(/\w[\w.:-]*)*")  # MLflow accepts neither a//b nor a/../b
_TAKEN = ("mlflow.", "tether.", "lineage.", "cache_hit", "cached_from")


class Label(NamedTuple):
    """A run's name and tags. A tag without a value has an empty one."""

    name: str = ""
    tags: Mapping[str, str] = {}

    @classmethod
    def of(cls, name: str | None, tags: Iterable[str] = ()) -> "Label":
        """Return the label from `--name` and each `--tag` (`key=value` or `key`).

        Raises:
            UserError: one of them is empty, too long, given twice, or can't be shown on one line.
        """
        values: dict[str, str] = {}
        for tag in tags:
            key, _, value = (part.strip() for part in tag.partition("="))
            if not _TAG.fullmatch(key) or len(key) > LONGEST_TAG or key.startswith(_TAKEN):
                raise UserError(
                    f"--tag {tag!r}: a tag is KEY=VALUE or KEY; KEY has at most {LONGEST_TAG} letters, digits and "
                    f"_ . : / -, begins with a letter or digit, as after each /, and not with {' or '.join(_TAKEN)}"
                )
            if key in values:
                raise UserError(f"--tag {tag!r}: {key} is given twice. Give each tag once.")
            values[key] = one_line(f"--tag {key}", value, LONGEST_VALUE)
        if name is not None and not name.strip():
            raise UserError("--name: the name is empty. Give a text, or leave the option out.")
        return cls(one_line("--name", (name or "").strip(), LONGEST_NAME), values)

    @property
    def written(self) -> list[str]:
        """Return the tags in the form in which they are given: `key=value` or `key`."""
        return [f"{key}={value}" if value else key for key, value in self.tags.items()]


def one_line(what: str, text: str, longest: int) -> str:
    """Return `text` unchanged if it may be recorded.

    Raises:
        UserError: it is longer than `longest` characters, contains a secret, or can't be shown on one line. The message
            names `what`, the place where it was given.
    """
    if not text.isprintable():
        raise UserError(f"{what}: {text!r} holds a line break or another character that can't be shown. Remove it.")
    refuse_credentials(what, text)
    if len(text) > longest:
        raise UserError(f"{what}: {len(text)} characters are too many; at most {longest} are kept.")
    return text


UNNAMED = Label()
