"""What a stage's progress shows beside its steps: when it will be done, how fast it goes, where it goes on from."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from tasks.execution.stage_progress import StageProgress


class Clock:
    """Seconds that pass as a test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shown() -> Callable[..., str]:
    """`shown([(seconds, point), ...])`: what is printed of points that come after so many seconds each."""

    def show(points: list[tuple[float, dict[str, Any]]], **options: Any) -> str:
        console, clock = Console(file=io.StringIO(), **{"width": 120, **options}), Clock()
        with StageProgress(console, "ppo", clock) as progress:
            for seconds, point in points:
                clock.now += seconds
                progress.show({"time": 0, "metrics": {}, **point})
        return console.file.getvalue()

    return show


def steps(*numbers: int, seconds: float = 20.0, total: int | None = 100, **more: Any) -> list[Any]:
    return [(seconds, {"step": step, **({} if total is None else {"total": total}), **more}) for step in numbers]


def test_a_plain_line_says_when_the_stage_will_be_done_and_its_tokens_a_second(shown: Callable[..., str]) -> None:
    points = steps(1, 2, 3, tokens=30_000, metrics={"ppo/kl": 1.25})
    assert shown(points).splitlines() == [
        "  ppo 1/100  ppo/kl 1.25",
        "  ppo 2/100  ETA 0:32:40  1,500 tokens/s  ppo/kl 1.25",
        "  ppo 3/100  ETA 0:32:20  1,500 tokens/s  ppo/kl 1.25",
    ]


def test_without_tokens_it_counts_steps_and_without_a_total_it_foretells_nothing(shown: Callable[..., str]) -> None:
    assert shown(steps(100, 200, total=None)).splitlines() == ["  ppo 100", "  ppo 200  5/s"]


def test_a_total_that_is_an_estimate_changes_and_the_pace_goes_on(shown: Callable[..., str]) -> None:
    points = [*steps(10, total=90), *steps(20, total=110), *steps(30)]
    assert shown(points).splitlines() == [
        "  ppo 10/90",
        "  ppo 20/110  ETA 0:03:00  0.5/s",
        "  ppo 30/100  ETA 0:02:20  0.5/s",
    ]


def test_the_last_step_has_no_time_to_come(shown: Callable[..., str]) -> None:
    assert shown(steps(99, 100)).splitlines() == ["  ppo 99/100", "  ppo 100/100  0.05/s"]


PHASES = [
    *steps(1, 2, tokens=30_000, total=2, metrics={"ppo/kl": 1.25}),
    (30.0, {"step": 0, "doing": "evaluating SFT on 8 held-out prompts", "total": 8}),
    (30.0, {"step": 4, "doing": "evaluating SFT on 8 held-out prompts", "total": 8}),
    (30.0, {"step": 0, "doing": "measuring [b]diversity[/b]"}),
]


def test_what_a_stage_does_after_its_steps_is_one_plain_line_for_each_phase(shown: Callable[..., str]) -> None:
    assert shown(PHASES).splitlines()[2:] == [
        "  ppo: evaluating SFT on 8 held-out prompts",
        "  ppo: measuring [b]diversity[/b]",
    ]


def test_on_a_terminal_what_a_stage_does_stands_in_place_of_its_rate_with_a_count_of_its_own(
    shown: Callable[..., str],
) -> None:
    def last(points: list[Any]) -> str:
        said = shown(points, force_terminal=True, color_system=None)
        return [line for line in said.replace("\x1b", "\n").splitlines() if "ppo" in line][-1]

    assert "1,500 tokens/s" in last(PHASES[:2])
    counted = last(PHASES[:4])
    assert "4/8 0:00:30" in counted and "evaluating SFT on 8 held-out prompts" in counted
    uncounted = last(PHASES)
    assert "measuring [b]diversity[/b]" in uncounted and "/" not in uncounted.partition("measuring")[0]
    assert "tokens/s" not in counted + uncounted and "kl" not in counted + uncounted


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_after_a_phase_have_their_own_total_and_pace_again(shown: Callable[..., str], terminal: bool) -> None:
    evaluating = [(1.0, {"step": 7, "total": 8, "doing": "evaluating the base model"})]
    said = shown([*evaluating, *steps(1, 2, tokens=30_000)], force_terminal=terminal).partition("base model")[2]
    assert "2/100" in said and "ETA 0:32:40  1,500 tokens/s" in said


@pytest.mark.parametrize("terminal", [False, True])
def test_a_resumed_stage_says_from_where_and_measures_its_pace_from_there(
    shown: Callable[..., str], terminal: bool
) -> None:
    replayed = steps(*range(1, 51), seconds=0.001, tokens=30_000)  # what the checkpoint holds, told at once
    said = shown(
        [*replayed, *steps(50, seconds=0, resumed=True), *steps(51, 52, tokens=30_000)], force_terminal=terminal
    )
    assert "ppo: resuming at step 50/100" in said
    after = said.partition("resuming")[2]
    assert "52/100" in after and "ETA 0:16:00  1,500 tokens/s" in after
    if not terminal:
        assert "ETA 0:16:20" not in after, "one step is no pace"


def test_a_bar_fits_a_terminal_of_80_columns(shown: Callable[..., str]) -> None:
    metrics = {f"ppo/metric_{i}": 1 / 3 for i in range(4)}
    said = shown(steps(10, 11, tokens=3e6, metrics=metrics), force_terminal=True, width=80, color_system=None)
    frames = [line for line in said.replace("\x1b", "\n").splitlines() if "11/100" in line]
    assert all(len(frame.removeprefix("[2K")) <= 80 for frame in frames)
    assert "ppo ━╸" in frames[-1] and "11/100 0:00:40 ETA 0:29:40  150,000 tokens/s ppo/metric_0…" in frames[-1]
