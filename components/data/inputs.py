"""What the files of a run's data are called: as inputs of a stage, and where one of their rows is named.

One file of preferences is the input `preferences`, and so are its rows' source and file. Each of several is the input
`preferences/LABEL`; its rows come from LABEL. A label stands in the artifact, and with the input's name in the key.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

KINDS = ("preferences", "demonstrations", "prompts")
"""What data a run reads, as the config and the inputs of `validate` call it."""
SUITE, DECONTAMINATE, DEPLOYMENT = "suite", "decontaminate", "deployment_prompts"
BESIDE = (SUITE, DECONTAMINATE, DEPLOYMENT)
"""What `validate` reads beside them: a user's expectations, and prompts that the data are compared with."""
FILES = (*KINDS, *BESIDE)
"""Fields of the config's `data` that name files."""
JUDGE = "judge_preferences"
"""What an independent judge learns from: one file, or `judge_preferences/LABEL` for each of several."""
NAMED = (*FILES, JUDGE)
"""Fields of the config's `data` that name files, those that only the judge's sub-stages read too."""
REFERENCE = "reference"
"""The data of an earlier run, an artifact of `validate`: the preferences are compared with them."""
VOTES = "votes"
"""What people said of earlier policies, scored (`votes/1` is the first round's): an artifact of `human_eval` each."""

_UNSAFE = re.compile(r"[^\w.-]+")
_LONGEST = 120
"""Characters of a label: a name that MLflow keeps has at most 250, with what stands around it."""


def values_of(named: str | Sequence[str] | None) -> list[str]:
    """The paths and hub names that a config field has: none, one or several."""
    return [] if named is None else [named] if isinstance(named, str) else list(named)


def kind_of(name: str) -> str:
    """The kind of data that an input holds (`preferences`), from its name."""
    return name.partition("/")[0]


def label_of(name: str) -> str:
    """What the rows of an input are said to come from: its label, or its name where the input is the only one."""
    return name.partition("/")[2] or name


def of_kind(inputs: Mapping[str, T], kind: str) -> dict[str, T]:
    """Those of `inputs` that hold `kind`, sorted by name: the order in which they were given changes nothing."""
    return {name: inputs[name] for name in sorted(inputs) if kind_of(name) == kind}


def input_names(kind: str, paths: Sequence[Path], digests: Sequence[str]) -> list[str]:
    """The name of each file as an input: `kind` alone for one, else `kind/LABEL`.

    A label is the file's name. Files of the same name get as many folders before it as tell them apart; where that is
    not enough, as for characters that no label may hold, the beginning of the file's sha256 follows.

    Args:
        paths: absolute paths.
        digests: sha256 of each file (hex); they differ.
    """
    if len(paths) == 1:
        return [kind]
    parts = [[_UNSAFE.sub("_", part) for part in path.parts if part != path.anchor] for path in paths]
    labels = [_shortest(own, [other for other in parts if other is not own]) for own in parts]
    return [
        f"{kind}/{label}" if labels.count(label) == 1 else f"{kind}/{label}-{digest[:8]}"
        for label, digest in zip(labels, digests, strict=True)
    ]


def _shortest(own: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """The shortest end of `own` that no other ends in."""
    depth = next((n for n in range(1, len(own)) if all(each[-n:] != own[-n:] for each in others)), len(own))
    return "/".join(own[-depth:])[-_LONGEST:].lstrip("/")
