"""docs/trust.md: which planted faults are noticed, by what and where, from the recorded lines."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from components.ppo.monitors.batches import FALSE_ALARMS
from tests.planted import outcome
from tests.planted.catalogue import HOW, ROOT, Fault, read
from tests.planted.copies import SIZE
from tests.planted.outcome import Line
from tests.reference import table

PAGE = ROOT / "docs" / "trust.md"
INTRODUCTION = """\
# How far the checks can be trusted

Tether's checks, gates and alarms are tested with planted faults: plausible mistakes of a programmer or a team, put
one at a time into a copy of the code, the data or the config. `make planted` runs the demo with each and records
what noticed it. This page is written from the recorded lines (`tests/planted/results.jsonl`): of each fault the newest,
with its commit. Lines of an older commit say what was noticed then. The faults were listed before any check was written
against them.
"""
COLUMNS = """\
## What the columns mean

- **Harm**: gold falls by 2 standard deviations of the undisturbed seeds below their mean (below the undisturbed run, if
  fewer than three seeds have the fault's own options); or a number in report, gate or card is false by more than its
  interval; or a promise is broken (same bytes, right cache, held-out data is held out, rated texts are the policy's,
  raters are blind). It is unknown if the run stopped before it could be measured; then the page says what was expected
  when the list was written, and the counts take that. Gold is measured by the code with the fault.
- **Caught by**: the gates or the self-check that stopped the run, another `check` (an error that says what is wrong), a
  `crash` (a stack trace), a refused `config`, or an alarm or warning; gates, alarms and warnings only if no undisturbed
  run has them.
- **By**: `cause` if the error or warning, or the name of a gate that stopped the run, has a word of the fault's
  cause (`word` in `tests/planted/faults.yaml`, written before the message) and came no later than the stage where
  the fault should be named; else `symptom`. A word can also appear by chance.
- **Seconds**: of a processor, from the start of the stage with the fault to where the run stopped or ended.
- **Gold, KL, win rate, called**: what the run would have reported with the failed gates waived. `passed` means that
  the run ends. A failed check can't be waived.
"""
ADDING = """\
## How to add one

Add an entry to `tests/planted/faults.yaml`; `tests/planted/catalogue.py` says what its fields mean. `before` must
occur exactly once in the file. A fault in data is a function in `tests/planted/transforms.py`. Write `word` from
the cause, before you look at any message. How a fault is run:
"""
COMMANDS = """
`make check` fails where a fault no longer applies. `make planted ARGS="--only NAME"` runs one, and
`make planted ARGS="--seeds 0-19"` the undisturbed seeds. Both continue where they were interrupted."""


class Row(NamedTuple):
    """A fault with what its newest line says."""

    fault: Fault
    line: Line
    by: list[str]
    stage: str
    harm: str
    why: str
    named: bool
    """Whether it was caught at the right stage by a message with its cause."""

    @property
    def caught(self) -> bool:
        """Return whether anything stopped it or raised an alarm."""
        return bool(self.by)

    @property
    def harmful(self) -> bool:
        """Return whether it did harm; if it was stopped before that could be measured, whether harm was expected."""
        return self.harm == "yes" or (self.harm == "unknown" and self.fault.harm == "yes")

    @property
    def harm_text(self) -> str:
        """Return the harm with its reason; if it is unknown, also what was expected."""
        expected = f" (expected: {self.fault.harm})" if self.harm == "unknown" else ""
        return f"{self.harm}{expected}: {self.why}"


def rows_of(faults: Sequence[Fault], lines: Sequence[Line]) -> list[Row]:
    """Return a row for each fault that has a line of its present digest."""
    undisturbed = [line for line in lines if not line["fault"]]
    newest = {line["digest"]: line for line in lines}
    found = []
    for fault in faults:
        if (line := newest.get(fault.digest())) is None:
            continue
        alike = [other for other in undisturbed if (other["options"], other["size"]) == (line["options"], line["size"])]
        by, stage = outcome.caught_by(line, alike)
        harm, why = outcome.harm(fault, line, undisturbed)
        named = outcome.is_named(fault, line, alike) and outcome.at_right_stage(fault, stage)
        found.append(Row(fault, line, by, stage, harm, why, named))
    return found


def shares(rows: Sequence[Row]) -> str:
    """Return the sentences with the numbers that the project promises."""
    harmful, unknown = [row for row in rows if row.harmful], sum(row.harm == "unknown" for row in rows)
    expected = sum(row.harmful and row.harm == "unknown" for row in rows)
    caught, named = sum(row.caught for row in harmful), sum(row.named for row in rows)
    none = sum(row.harm == "no" for row in rows)
    return (
        f"Of {len(rows)} faults {len(harmful) - expected} did harm, {none} did none, and of {unknown} it is "
        f"unknown (stopped early, or too few seeds); {expected} of these were expected to when the list was written. "
        f"Of the {len(harmful)} that did harm or were expected to, {caught} were stopped or raised an alarm. Of all, "
        f"{named} of {len(rows)} were named: stopped or alarmed at the right stage, by a message with a word of the "
        "cause."
    )


def _result(row: Row) -> tuple[str, ...]:
    by = ", ".join(f"`{name}`" for name in row.by) or "nothing"
    how = "cause" if row.named else "symptom" if row.caught else "-"
    end = row.line["end"] if row.line.get("waived") or not row.line["exit"] else "-"
    numbers = [f"{row.line['metrics'][name]:.2f}" if name in row.line["metrics"] else "-" for name in (
        "policy/gold", "policy/kl", "human_eval/win_rate")]  # fmt: skip
    seconds = f"{row.line['seconds']:.0f}"
    commit = row.line["commit"][:8]
    return row.fault.name, row.harm_text, by, row.stage or "-", how, seconds, *numbers, end, commit


def text_of(faults: Sequence[Fault], lines: Sequence[Line]) -> str:
    """Return the page."""
    rows, undisturbed = rows_of(faults, lines), [line for line in lines if not line["fault"]]
    plain = [line for line in undisturbed if not line["options"] and line["size"] == [*SIZE]]
    return "\n".join([*_head(faults, rows, plain), *_tables(rows, plain), *_foot(faults, rows)]) + "\n"


def _head(faults: Sequence[Fault], rows: Sequence[Row], plain: Sequence[Line]) -> Iterator[str]:
    days = sorted({row.line["date"] for row in rows} | {line["date"] for line in plain})
    yield INTRODUCTION
    measured = f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days) or "no date yet"
    yield f"Measured on {measured}: {len(rows)} of {len(faults)} faults and {len(plain)} undisturbed seeds.\n"
    kinds = Counter(fault.kind for fault in faults)
    heads = "Kind", "Faults", "Measured", "Do harm", "Of these caught", "Named"
    yield table(heads, (_counts(kind, count, rows) for kind, count in kinds.items()))
    if rows:
        yield shares(rows) + "\n"
    yield COLUMNS


def _counts(kind: str, faults: int, rows: Sequence[Row]) -> tuple[str, ...]:
    own = [row for row in rows if row.fault.kind == kind]
    harmful = [row for row in own if row.harmful]
    counts = faults, len(own), len(harmful), sum(row.caught for row in harmful), sum(row.named for row in own)
    return (kind, *map(str, counts))


def _tables(rows: Sequence[Row], plain: Sequence[Line]) -> Iterator[str]:
    heads = "Fault", "Harm", "Caught by", "At", "By", "Seconds", "Gold", "KL", "Win rate", "Called", "Commit"
    for kind in dict.fromkeys(row.fault.kind for row in rows):
        yield f"## {kind.capitalize()}\n"
        yield table(heads, (_result(row) for row in rows if row.fault.kind == kind))
        yield from (f"- `{row.fault.name}`: {row.fault.what}" for row in rows if row.fault.kind == kind)
        yield ""
    yield "## False alarms and power\n"
    golds = [line["metrics"]["policy/gold"] for line in plain if "policy/gold" in line["metrics"]]
    spread = f", deviation {stdev(golds):.2f}" if len(golds) > 1 else ""
    gold = f" Gold: mean {fmean(golds):.2f}{spread}." if golds else ""
    stopped = sum(line["exit"] != 0 for line in plain)
    yield f"{stopped} of {len(plain)} undisturbed runs stopped, each with another seed.{gold}\n"
    alarms, caught = outcome.false_alarms(plain), Counter(name for row in rows for name in row.by)
    first = Counter(row.by[0] for row in rows if row.by)
    names = sorted({*alarms, *caught}, key=lambda name: (-alarms.get(name, 0), -caught[name], name))
    yield table(
        (
            "Gate, alarm, check or warning",
            "Undisturbed runs",
            "Faults caught",
            "First or alone",
        ),
        (
            (f"`{name}`", f"{alarms.get(name, 0)} of {len(plain)}", str(caught[name]), str(first[name]))
            for name in names
        ),
    )
    yield "What is not in this table was raised by no run. Stated rates: all alarms of a healthy run together are false"
    yield f"with probability {FALSE_ALARMS:g} at most (`ppo.monitors`), and an interval of a gate misses in 1 of 20.\n"


def _foot(faults: Sequence[Fault], rows: Sequence[Row]) -> Iterator[str]:
    yield "## What nothing catches\n"
    silent = [row for row in rows if not row.caught]
    yield from (f"- `{row.fault.name}` ({row.harm_text})" for row in silent)
    yield "" if silent else "Every fault that was run was stopped or raised an alarm.\n"
    missing = [fault for fault in faults if fault.name not in {row.fault.name for row in rows}]
    if missing:
        yield f"## Not measured yet\n\n{len(missing)} of {len(faults)} faults.\n"
        for kind, count in Counter(fault.kind for fault in missing).items():
            names = ", ".join(f"<code>{fault.name}</code>" for fault in missing if fault.kind == kind)
            yield f"<details><summary>{count} of {kind}</summary>{names}</details>"
        yield ""
    yield ADDING
    yield from (f"- `{how}`: {what}." for how, what in HOW.items())
    yield COMMANDS


def write(lines: Sequence[Line], path: Path = PAGE) -> None:
    """Write the page."""
    path.write_text(text_of(read(), lines), encoding="utf-8")
