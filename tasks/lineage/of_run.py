"""Build the graph of what a run's stages were made of, from the run's folder."""

from collections.abc import Iterable, Mapping, Sequence

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
    stages = {each.group: each for each in done}  # a stage is represented by its last part
    boxes: dict[str, Box] = {}
    arrows: list[tuple[str, str]] = []
    for stage in stages:
        parts = [each for each in done if each.group == stage]
        given = {one.digest: one for each in parts for one in each.inputs if one.stage != stage}
        outside = [one for one in given.values() if not one.stage]
        for box in _external(stage, outside):
            boxes[box.id] = box
            arrows.append((box.id, stage))
        for one in given.values():
            if one.stage:
                arrows.append((one.stage, stage))
                boxes.setdefault(one.stage, Box(one.stage, TITLES.get(one.stage, one.stage), (one.digest[:DIGITS],)))
        last = next((each for each in parts if each.ends_group), stages[stage])
        boxes.pop(stage, None)
        boxes[stage] = _box(last, [verdict for each in parts for verdict in each.verdicts], named or {})
    return Diagram(list(boxes.values()), arrows)


def _box(done: Done, verdicts: Sequence[Verdict], named: Mapping[str, str]) -> Box:
    digest = done.record.digest
    lines = (*([named[digest]] if digest in named else []), digest[:DIGITS])
    verdict, state = judged(verdicts) if done.ends_group else ("not finished", "warned")
    title = TITLES.get(done.group, done.group).replace("_", " ")
    return Box(done.group, title, lines, verdict, state)


def judged(verdicts: Iterable[Verdict]) -> tuple[str, State]:
    """Return the combined verdict of a stage's gates in a few words, and its state."""
    found = [verdict for verdict in verdicts if verdict.threshold is not None]
    for word, state, those in (
        ("failed", "failed", [each for each in found if each.stops]),
        ("withheld", "warned", [each for each in found if each.withheld]),
        ("waived", "warned", [each for each in found if each.waived]),
        ("warned", "warned", [each for each in found if not each.passed and each.warn_only]),
    ):
        if those:
            more = f" and {len(those) - 1} more" if len(those) > 1 else ""
            return f"{word}: {those[0].name.partition('.')[2] or those[0].name}{more}", state  # type: ignore[return-value]
    return (f"{len(found)} gate{'s' if len(found) > 1 else ''} passed", "passed") if found else ("", "none")


def _external(stage: str, given: Sequence[Input]) -> list[Box]:
    """Return boxes for files and models from outside the run; many files of a kind share one box."""
    kinds: dict[str, list[Input]] = {}
    for one in given:
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
