"""Compare the rounds of `tether iterate`: do reward model and policy improve from people's votes?"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from components.base.errors import UserError
from components.gates.text import number
from flows.reports.terminal import STYLES
from tasks.execution.drawing import BLUE, GREY, ORANGE, PURPLE, RED, legend, line, new_figure, panel, steps_axis, svg
from tasks.execution.progress import cell, say
from tasks.runs.status import RunStatus, load_readable, load_status


class Round(NamedTuple):
    """A run as a round. Round 0 is the run whose policy people judged first."""

    run: str
    round: int
    votes_from: str
    """The run whose policy was judged last before this round; empty for round 0."""
    state: str
    judged_before: float | None
    """Share of all pairs judged so far, on prompts that are never trained on, for which the previous round's reward
    model agrees with most raters; None for round 0."""
    judged: float | None
    """The same share for this round's reward model."""
    agreement: float | None
    """Agreement of the reward model with the judges of this round's own batch."""
    win_rate: float | None
    """Win rate of the policy against SFT, from the judges of its own batch."""
    gold: float | None
    """The true score, if known."""
    kl: float | None
    """KL to SFT, nats a response."""

    @classmethod
    def of(cls, status: RunStatus) -> "Round":
        """Return a run as a round, with the metrics of its stages."""
        metrics = {name: value for stage in status.stages for name, value in stage.metrics.items()}
        named = (
            "reward/judged_previous", "reward/judged", "human_eval/reward_agreement", "human_eval/win_rate", "ppo/gold",
            "ppo/kl",
        )  # fmt: skip
        place = int(status.origin.get("round", 0))
        parent = status.origin.get("votes", "")
        return cls(status.run, place, parent, status.state, *(metrics.get(name) for name in named))


def rounds_up_to(home: Path, status: RunStatus) -> list[Round]:
    """Return the rounds that led to a run, and the run itself, oldest first; empty if the run is not a later round."""
    found = [status]
    while (parent := found[-1].origin.get("votes")) and parent not in {each.run for each in found}:
        try:
            found.append(load_status(home, parent))
        except UserError:  # removed or damaged: show the rounds that are known
            break
    return [Round.of(each) for each in reversed(found)] if status.origin.get("votes") else []


def all_rounds(home: Path) -> list[list[Round]]:
    """Return each first run with the later rounds that began from it, newest first. Runs without later rounds are left
    out."""
    statuses = {each.run: each for each in load_readable(home)[0]}
    groups: dict[str, list[RunStatus]] = {}
    for status in statuses.values():
        first, seen = status.run, {status.run}
        while (parent := statuses[first].origin.get("votes")) in statuses and parent not in seen:
            first = parent
            seen.add(first)
        groups.setdefault(first, []).append(status)
    several = [each for each in groups.values() if any("votes" in status.origin for status in each)]
    newest_first = sorted(several, key=lambda each: max(status.started for status in each), reverse=True)
    return [sorted(map(Round.of, each), key=lambda one: (one.round, one.run)) for each in newest_first]


COLUMNS = {
    "judged_before": "judged before", "judged": "judged", "agreement": "own batch", "win_rate": "win rate",
    "gold": "gold", "kl": "KL",
}  # fmt: skip
"""Maps a field of a round to the heading of its column."""


def print_rounds(console: Console, groups: Iterable[Sequence[Round]]) -> None:
    """Print each group as a table."""
    groups = list(groups)
    if not groups:
        say(console, "There are no later rounds yet; `tether iterate RUN` starts one from the votes on a run's policy.")
    for group in groups:
        shown = Table(box=None, pad_edge=False)
        for head in ("round", "run", "state"):
            shown.add_column(head, no_wrap=True)
        for head in COLUMNS.values():
            shown.add_column(head, justify="right")
        for each in group:
            values = [getattr(each, name) for name in COLUMNS]
            told = [cell("" if value is None else number(value)) for value in values]
            shown.add_row(str(each.round), cell(each.run), cell(each.state, STYLES.get(each.state, "red")), *told)
        console.print(shown)


def rounds_chart(rounds: Sequence[Round]) -> bytes:
    """Draw agreement and win rate, gold score (if known) and KL by round as SVG; empty for fewer than two rounds."""
    if len(rounds) < 2:
        return b""

    def curve(name: str) -> list[tuple[float, float]]:
        values = [(float(each.round), getattr(each, name)) for each in rounds]
        return [(x, value) for x, value in values if value is not None and math.isfinite(value)]

    figure = new_figure(4.5)
    share_axis, gold_axis, kl_axis = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    panel(share_axis, "share")
    dots: dict[str, Any] = {"marker": "o", "markersize": 4}
    line(share_axis, curve("judged"), BLUE, "reward model agrees, prompts that never train", **dots)
    around = {"marker": "o", "markersize": 8, "markerfacecolor": "none"}  # visible even if both values are equal
    line(share_axis, curve("judged_before"), GREY, "that of the round before, same pairs", style="--", **around)
    line(share_axis, curve("win_rate"), PURPLE, "policy wins against SFT", **dots)
    line(panel(gold_axis, "gold score"), curve("gold"), ORANGE, "gold score (simulated truth)", **dots)
    line(panel(kl_axis, "KL to SFT, nats", zero=True), curve("kl"), RED, "KL", **dots)
    steps_axis(kl_axis, "round")
    legend(share_axis)
    return svg(figure, "The rounds side by side")
