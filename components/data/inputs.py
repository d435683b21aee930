"""Names of a run's data files: as inputs of a stage, and as sources of rows.

A single file of preferences is the input `preferences`, which is also its rows' source. Each of several files is the
input `preferences/LABEL`, and its rows' source is LABEL. Labels are in the artifact, and in the key by the input's
name.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from components.base.errors import UserError

T = TypeVar("T")

KINDS = ("preferences", "demonstrations", "prompts")
"""The kinds of data, as named in the config and in the inputs of `validate`."""
SUITE, DECONTAMINATE, DEPLOYMENT = "suite", "decontaminate", "deployment_prompts"
FURTHER = (SUITE, DECONTAMINATE, DEPLOYMENT)
"""Further inputs of `validate`: a user's expectations, and prompts with which the data are compared."""
FILES = (*KINDS, *FURTHER)
"""Fields of the config's `data` that name files."""
JUDGE = "judge_preferences"
"""Input with an independent judge's training data: one file, or `judge_preferences/LABEL` for each of several."""
NAMED = (*FILES, JUDGE)
"""Fields of the config's `data` that name files, including the one that only the judge's sub-stages read."""
REFERENCE = "reference"
"""The data of an earlier run, an artifact of `validate`: the preferences are compared with them."""
VOTES = "votes"
"""Inputs with people's scored judgements of earlier policies: `votes/1` is the `human_eval` artifact of round 1."""

_UNSAFE = re.compile(r"[^\w.-]+")
_OF_VOTES = re.compile(r"(votes|judged)-\d+")
"""The labels of the rows of `votes/1` and so on."""
_LONGEST = 120
"""Most characters of a label. MLflow allows at most 250 in a name, of which the label is a part."""


def values_of(named: str | Sequence[str] | None) -> list[str]:
    """Return the paths and hub names in a config field: none, one or several."""
    return [] if named is None else [named] if isinstance(named, str) else list(named)


def kind_of(name: str) -> str:
    """Return the kind of an input's data (`preferences`), from the input's name."""
    return name.partition("/")[0]


def label_of(name: str) -> str:
    """Return the source of an input's rows: its label, or its name if it is the only one of its kind."""
    return name.partition("/")[2] or name


def of_kind(inputs: Mapping[str, T], kind: str) -> dict[str, T]:
    """Return those of `inputs` that are of `kind`, sorted by name, so that their given order has no effect."""
    return {name: inputs[name] for name in sorted(inputs) if kind_of(name) == kind}


def refuse_unknown_sources(named: Iterable[str], inputs: Iterable[str]) -> None:
    """Refuse names in `data.sources` that are not a source of the preferences.

    Args:
        named: the sources' names in `data.sources`.
        inputs: the stage's inputs, by name. Without preferences the built-in task's are called `preferences`.

    Raises:
        UserError: the message lists the sources.
    """
    there = sorted(label_of(name) for name in inputs if kind_of(name) == "preferences") or ["preferences"]
    for name in named:
        if name not in there:
            names = "the only one is called preferences" if len(there) == 1 else f"there are {', '.join(there)}"
            raise UserError(
                f"data.sources names {name!r}, which is no source of data.preferences: {names}. Write, for example, "
                f"--set 'data.sources={{{there[0]}: {{weight: 2}}}}'."
            )


def refuse_same_bytes(kind: str, paths: Sequence[Path], digests: Sequence[str]) -> None:
    """Refuse files of `kind` of which two hold the same bytes.

    Args:
        digests: sha256 of each file (hex).

    Raises:
        UserError: two do; the message names them.
    """
    first: dict[str, Path] = {}
    for path, digest in zip(paths, digests, strict=True):
        if digest in first:
            raise UserError(
                f"data.{kind}: {first[digest]} and {path} hold the same bytes, so each row would stand there twice. "
                "Name one of them."
            )
        first[digest] = path


def names_file(label: str, path: Path) -> bool:
    """Return whether `label` is one that `input_names` could give a file among others."""
    whole = "/".join(_UNSAFE.sub("_", part) for part in path.parts if part != path.anchor)
    return f"/{whole}".endswith(f"/{label}")


def input_names(kind: str, paths: Sequence[Path], digests: Sequence[str]) -> list[str]:
    """Return the name of each file as an input: `kind` for a single one, else `kind/LABEL`.

    A label is the file's name. Files of the same name get as many parent folders as are needed to distinguish them. If
    that is not enough, for example because of characters that are not allowed, or if the rows of `data.votes` may have
    the label, the start of the file's sha256 follows.

    Args:
        paths: absolute paths.
        digests: sha256 of each file (hex); they differ.
    """
    if len(paths) == 1:
        return [kind]
    parts = [[_UNSAFE.sub("_", part) for part in path.parts if part != path.anchor] for path in paths]
    labels = [_shortest(path_parts, [other for other in parts if other is not path_parts]) for path_parts in parts]
    taken = {label for label in labels if labels.count(label) > 1 or _OF_VOTES.fullmatch(label)}
    return [
        f"{kind}/{label}-{digest[:8]}" if label in taken else f"{kind}/{label}"
        for label, digest in zip(labels, digests, strict=True)
    ]


def _shortest(parts: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return the shortest suffix of `parts` that is not a suffix of any other."""
    depth = next((n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others)), len(parts))
    return "/".join(parts[-depth:])[-_LONGEST:].lstrip("/")
