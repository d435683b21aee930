import pytest

from tests.bench import orchestration
from tests.bench.orchestration import INSIDE, NEXT, TASKS, Clock, Clocks, table, timed


@pytest.fixture
def clock():
    times = iter(range(0, 100, 10))
    return Clock("rest", began=-5, now=lambda: next(times))


def test_a_moment_counts_to_the_innermost_part_alone(clock):
    clock.enter("stage")
    clock.enter("publish")
    clock.leave()
    clock.leave()
    clock.turn("end")
    assert clock.seconds == {"rest": 5 + 10, "stage": 10 + 10, "publish": 10}
    assert clock.part == "end"


def test_what_a_call_takes_counts_to_its_part_though_it_raises():
    clocks = Clocks()

    def fail():
        raise KeyError

    with pytest.raises(KeyError):
        timed(clocks, fail, "keys")()
    assert clocks.clock.part == "rest" and set(clocks.clock.seconds) == {"rest", "keys"}


def test_after_the_pipeline_the_flow_is_at_its_end():
    clocks = Clocks()
    timed(clocks, timed(clocks, lambda: None, TASKS), "Prefect")()
    assert NEXT[TASKS] in clocks.clock.seconds


def test_the_table_adds_up_to_the_wall_time():
    shown = table(10.0, {INSIDE: 6.0, "MLflow": 3.0, "rest": 1.0}, {"imports": 2.0}).splitlines()
    assert [line.split()[-2] for line in shown] == ["10.0", "6.0", "4.0", "3.0", "1.0", "2.0"]


@pytest.mark.servers  # an embedded one
@pytest.mark.long
def test_a_tiny_runs_moments_are_all_accounted_for_and_its_parts_are_met(tmp_path):
    wall, main, beside = orchestration.measured_run("tiny", tmp_path / "home")
    assert sum(main.values()) == pytest.approx(wall, abs=0.2)
    parts = {part for _, _, part in orchestration.WRAPPED} | {INSIDE, orchestration.START, orchestration.END}
    assert parts <= set(main), "a part that nothing runs through any more measures nothing"
    assert main[INSIDE] > 1 and main["embedded Prefect: start"] > 1 and beside
    again, hits, _ = orchestration.measured_run("tiny", tmp_path / "home")
    assert INSIDE not in hits and orchestration.PREFECT not in hits and again < wall
