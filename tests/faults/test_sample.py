"""What `.ci/run` leaves out on one commit it runs on another, and each sample has something of everything."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.faults.homes import STAGES, Moment
from tests.faults.sample import SHARE, TESTS, chosen, half_of_the_files
from tests.faults.test_faults import CASES
from tests.faults.test_kills import EACH, draw

MOMENTS: list[Moment] = [
    (stage, phase, nth)
    for stage in STAGES
    for phase in EACH
    if not (
        (phase in ("checkpoint", "record") and stage == "validate") or (phase == "checkpoint" and stage == "human_eval")
    )
    for nth in range(1, 4)
]
"""As an undisturbed run has them: not every stage has every phase."""


class Item(NamedTuple):
    """What a sample asks of a test."""

    nodeid: str
    kind: str | None

    def get_closest_marker(self, name: str) -> Any:
        return SimpleNamespace(args=(self.kind,)) if self.kind is not None else None


class Located(NamedTuple):
    """A test of a file."""

    path: Path
    name: int


def items() -> list[Any]:
    """The faults as pytest has them, and a test that is of no kind."""

    kinds = [(f"{kind}-{number}", kind) for kind, cases in CASES.items() for number in range(len(cases))]
    return [Item(name, kind) for name, kind in [*kinds, ("alone", None)]]


def test_a_sample_has_some_of_each_kind_and_the_samples_of_other_commits_the_rest() -> None:
    every = items()
    seen: set[str] = set()
    for commit in range(100):
        names = {item.nodeid for item in chosen(every, f"commit {commit}")}
        seen |= names
        assert "alone" in names
        for kind, cases in CASES.items():
            assert len([name for name in names if name.startswith(kind)]) == -(-len(cases) // SHARE)
    assert seen == {item.nodeid for item in every}


def test_the_same_commit_has_the_same_sample() -> None:
    every = items()
    assert chosen(every, "a") == chosen(every, "a") and chosen(every, "a") != chosen(every, "b")


def test_each_folder_of_slow_tests_has_half_of_its_files_in_a_sample_whole_and_the_rest_in_others() -> None:
    files = {"": ["test_a.py", "test_b.py", "test_c.py"], "flows": ["flows/x/test_d.py", "flows/test_e.py"]}
    paths = [TESTS / file for found in files.values() for file in found]
    every: list[Any] = [Located(path, name) for path in paths for name in range(2)]
    seen: set[Any] = set()
    for commit in range(50):
        drawn = [item for item in every if item in half_of_the_files(every, f"commit {commit}")]
        seen |= {item.path for item in drawn}
        assert len(drawn) == 2 * (2 + 1) and len({item.path for item in drawn}) == 3
        assert len({item.path for item in drawn if item.path.is_relative_to(TESTS / "flows")}) == 1
    assert seen == set(paths)


def test_ten_kills_reach_every_stage_and_phase_and_those_of_other_commits_every_moment() -> None:
    seen: set[Moment] = set()
    for commit in range(200):
        kills = [moment for chain in draw(MOMENTS, f"commit {commit}", 2) for moment in chain]
        assert [stage for stage, _, _ in kills] == [*STAGES, *STAGES]
        assert {phase for _, phase, _ in kills} == EACH
        seen |= set(kills)
    assert seen == set(MOMENTS)
    assert draw(MOMENTS, "a", 12) == draw(MOMENTS, "a", 12) != draw(MOMENTS, "b", 12)
