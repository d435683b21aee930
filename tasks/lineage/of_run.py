"""Build the graph of what a run's stages were made of, from the run's folder."""

from collections.abc import Iterable, Mapping, Sequence

from components.base.text import counted
from components.data.inputs import kind_of, label_of
from components.gates.judging import Verdict
from tasks.lineage.picture import Box, Diagram, State
from tasks.result import Input
from tasks.runs.journal import Done

TITLES = {"validate": "data", "reward": "reward model", "ppo": "policy"}
"""Names for results that people call something other than the stage."""
FEW = 3
"""The largest number of files of one kind that get a box each; more are drawn as one box."""
DIGITS = 12
"""Number of characters shown of a digest."""


def graph_of(done: Sequence[Done], named: Mapping[str, str] | None = None) -> Diagram:
    """Return the graph of a run's results so far, oldest first. `named` maps a digest to a further name of the
    artifact, such as `tether-policy version 2`."""
    stages = {part.group: part for part in done}  # a stage is represented by its last part
    boxes: dict[str, Box] = {}
    arrows: list[tuple[str, str]] = []
    for stage in stages:
        parts = [part for part in done if part.group == stage]
        sources = {one.digest: one for part in parts for one in part.inputs if one.stage != stage}
        outside = [one for one in sources.values() if not one.stage]
        for box in _external(stage, outside):
            boxes[box.id] = box
            arrows.append((box.id, stage))
        for one in sources.values():
            if one.stage:
                arrows.append((one.stage, stage))
                boxes.setdefault(one.stage, Box(one.stage, TITLES.get(one.stage, one.stage), (one.digest[:DIGITS],)))
        last = next((part for part in parts if part.ends_group), stages[stage])
        boxes.pop(stage, None)
        boxes[stage] = _box(last, [verdict for part in parts for verdict in part.verdicts], named or {})
    return Diagram(list(boxes.values()), arrows)


def _box(done: Done, verdicts: Sequence[Verdict], named: Mapping[str, str]) -> Box:
    digest = done.record.digest
    lines = (*([named[digest]] if digest in named else []), digest[:DIGITS])
    verdict, state = verdict_in_short(verdicts) if done.ends_group else ("not finished", "warned")
    title = TITLES.get(done.group, done.group).replace("_", " ")
    return Box(done.group, title, lines, verdict, state)


def verdict_in_short(verdicts: Iterable[Verdict]) -> tuple[str, State]:
    """Return the combined verdict of a stage's gates in a few words, and its state."""
    with_bound = [verdict for verdict in verdicts if verdict.threshold is not None]
    for word, state, those in (
        ("failed", "failed", [gate for gate in with_bound if gate.stops]),
        ("withheld", "warned", [gate for gate in with_bound if gate.withheld]),
        ("waived", "warned", [gate for gate in with_bound if gate.waived]),
        ("warned", "warned", [gate for gate in with_bound if not gate.passed and gate.warn_only]),
    ):
        if those:
            more = f" and {len(those) - 1} more" if len(those) > 1 else ""
            return f"{word}: {those[0].name.partition('.')[2] or those[0].name}{more}", state  # type: ignore[return-value]
    return (f"{counted(len(with_bound), 'gate')} passed", "passed") if with_bound else ("", "none")


def _external(stage: str, inputs: Sequence[Input]) -> list[Box]:
    """Return boxes for files and models from outside the run; many files of a kind share one box."""
    kinds: dict[str, list[Input]] = {}
    for one in inputs:
        kinds.setdefault(kind_of(one.name), []).append(one)
    boxes = []
    for kind, those in kinds.items():
        if len(those) > FEW:
            boxes.append(Box(f"{stage}/{kind}", kind, (f"{len(those)} files",), external=True))
            continue
        for one in those:
            file = one.path.name if label_of(one.name) == one.name else label_of(one.name)
            boxes.append(Box(one.digest, kind.replace("_", " "), (file, one.digest[:DIGITS]), external=True))
    return boxes
