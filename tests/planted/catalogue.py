"""The list of planted faults: what its fields mean, and whether each fault still applies to today's code.

python -m tests.planted.catalogue    # part of `make check`: exit 1 with a line for each fault that no longer applies

A fault is a plausible mistake of a programmer or a team. It replaces one text in one file of the project (`file`,
`before`, `after`), or changes the rows of a data file by a `transform` of tests/planted/transforms.py.
"""

import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.planted import transforms

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("faults.yaml")
KINDS = (
    "data and labels", "splits", "template and prompts", "sft", "reward", "ppo", "sampling", "resume", "cache and keys",
    "judging and people", "infrastructure",
)  # fmt: skip
STAGES = ("validate", "sft", "reward", "ppo", "human_eval")
HOW = {
    "rerun": "the stage is computed again on the undisturbed run's earlier stages, so that only it has the fault",
    "run": "a whole run, for data and config",
    "resume": "as `rerun`, but killed in the middle and continued",
    "same": "as `rerun`, twice; both must give the same bytes",
    "twice": "a run, and then another with the options `again`, other data (`swap`) or other code (`edit_again`)",
}
HARM = ("yes", "no", "unsure")
PROMISES = ("same bytes", "right cache", "held-out", "rated texts", "blind")
LEAST, LEAST_DATA, MOST_DIRECT = 60, 8, 4
"""Fewest faults; fewest in data or config; most in direct methods."""


@dataclass(frozen=True)
class Fault:  # a row of faults.yaml
    """One planted fault."""

    name: str
    kind: str
    stage: str
    """The first stage that computes with the fault."""
    stage_named: str
    """The last stage at which it should be named: later, people or compute are spent on it."""
    file: str
    """Path in the project; or `preferences` or `demonstrations`, for a `transform`."""
    word: str
    """Words of the cause, a regular expression in any case: a message that names the cause contains one."""
    harm: str
    """Whether it was expected to do harm when it was written: yes, no or unsure."""
    what: str
    """What it does, in a sentence."""
    before: str = ""
    after: str = ""
    transform: str = ""
    how: str = "rerun"
    set: tuple[str, ...] = ()
    """Further options of both the undisturbed run and this one."""
    again: tuple[str, ...] = ()
    """Options of the second run of `twice`."""
    swap: str = ""
    """The data file that the second run of `twice` finds changed, at the same size."""
    edit_again: str = ""
    """Another fault's name, whose edit the second run of `twice` has in addition."""
    damage: str = ""
    """The stage of whose stored weights a byte is flipped before the run."""
    false_number: str = ""
    """The metric that the fault makes false."""
    promise: str = ""
    """The promise that the fault breaks."""

    @property
    def direct(self) -> bool:
        """Return whether it is in a direct method."""
        return any(option.startswith("policy.method=") for option in self.set)

    @property
    def in_data(self) -> bool:
        """Return whether it is in data or config."""
        return bool(self.transform) or not self.file.endswith(".py")

    def digest(self) -> str:
        """Return 12 hex digits that change with whatever the runner plants."""
        source = Path(transforms.__file__).read_text(encoding="utf-8") if self.transform else ""
        planted = {name: value for name, value in asdict(self).items() if name not in ("word", "harm", "what")}
        return hashlib.sha256((json.dumps(planted, sort_keys=True) + source).encode()).hexdigest()[:12]

    def is_named_in(self, text: str) -> bool:
        """Return whether a message contains a word of the cause."""
        return re.search(self.word, text, re.IGNORECASE) is not None


def read(path: Path = LIST) -> list[Fault]:
    """Return the faults of the list. Raises TypeError for an unknown or a missing field."""
    rows = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    lists = ({name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows)
    return [Fault(**row) for row in lists]


def edited(source: str, fault: Fault) -> str:
    """Return a file's text with the fault. Raises ValueError unless `before` occurs exactly once."""
    count = source.count(fault.before)
    if count != 1:
        raise ValueError(f"`before` occurs {count} times in {fault.file}, and must occur once")
    return source.replace(fault.before, fault.after)


def problems(faults: Iterable[Fault], root: Path = ROOT) -> Iterator[str]:
    """Yield a line for everything that is wrong with the list or with a fault of it."""
    faults = list(faults)
    for name, count in Counter(fault.name for fault in faults).items():
        if count > 1:
            yield f"{name}: {count} faults have this name"
    names = {fault.name for fault in faults}
    for fault in faults:
        yield from (f"{fault.name}: {problem}" for problem in _of_one(fault, names, root))
    sizes = (
        (len(faults) >= LEAST, f"{len(faults)} faults, fewer than {LEAST}"),
        (sum(fault.in_data for fault in faults) >= LEAST_DATA, f"fewer than {LEAST_DATA} faults in data or config"),
        (sum(fault.direct for fault in faults) <= MOST_DIRECT, f"more than {MOST_DIRECT} faults in direct methods"),
        ({fault.kind for fault in faults} == {*KINDS}, f"a kind has no fault: {', '.join(KINDS)}"),
    )
    yield from (problem for holds, problem in sizes if not holds)


def _of_one(fault: Fault, names: set[str], root: Path) -> Iterator[str]:
    allowed: dict[str, Any] = {
        "kind": KINDS, "stage": STAGES, "stage_named": STAGES, "how": HOW, "harm": HARM, "promise": ("", *PROMISES),
        "edit_again": ("", *names), "damage": ("", *STAGES), "swap": ("", *transforms.FILES),
    }  # fmt: skip
    for field, values in allowed.items():
        if getattr(fault, field) not in values:
            yield f"{field} is {getattr(fault, field)!r}, and may be {', '.join(filter(None, values))}"
    if not re.fullmatch(r"[a-z0-9_]+", fault.name) or not fault.what.endswith("."):
        yield "a name is lower-case words with underscores, and `what` a sentence"
    try:
        re.compile(fault.word)
    except re.error as error:
        yield f"word is not a regular expression: {error}"
    if fault.kind in KINDS and not fault.word:
        yield "it has no word of its cause"
    if fault.how == "twice" and not (fault.again or fault.swap or fault.edit_again):
        yield "a fault of `twice` needs again, swap or edit_again"
    if fault.transform or fault.file in transforms.FILES:
        if fault.transform not in transforms.FILES.get(fault.file, {}):
            yield f"tests/planted/transforms.py has no transformation {fault.transform!r} of {fault.file}"
        return
    yield from _of_edit(fault, root)


def _of_edit(fault: Fault, root: Path) -> Iterator[str]:
    path = root / fault.file
    if not path.is_file():
        yield f"there is no file {fault.file}"
        return
    if fault.after == fault.before:
        yield "`after` equals `before`"
    try:
        changed = edited(path.read_text(encoding="utf-8"), fault)
        if path.suffix == ".py":
            ast.parse(changed)
        else:
            yaml.safe_load(changed)
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        yield f"{error}. Change the fault to what the same mistake would be in today's code."


def main() -> int:
    """Print what is wrong with the list; return 1 if anything is."""
    found = list(problems(read()))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
