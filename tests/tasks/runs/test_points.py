"""A point is written down once, whatever its writer goes through."""

import pytest

from tasks.runs.points import Spool, curves, points_after, read_points


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics" / "ppo.jsonl"


def test_a_repeated_step_keeps_its_first_value_and_new_metrics_are_added(path):
    spool = Spool(path)
    spool.append(1, {"a": 1})
    spool.append(1, {"a": 2, "b": 3})
    spool.close()
    assert curves(read_points(path)) == {"a": [(1, 1.0)], "b": [(1, 3.0)]}


def test_opening_again_remembers_what_was_there(path):
    for _ in range(2):
        spool = Spool(path)
        spool.append(1, {"a": 1})
        spool.close()
    assert len(read_points(path)) == 1


def test_a_torn_last_line_is_neither_read_nor_glued_to_the_next(path):
    spool = Spool(path)
    spool.append(1, {"a": 1})
    spool.close()
    with path.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [point["step"] for point in points_after(path, 0)[0]] == [1]
    assert len(read_points(path)) == 1
    spool = Spool(path)
    spool.append(2, {"a": 2})
    spool.close()
    assert [point["step"] for point in read_points(path)] == [1, 2]


def test_nan_is_a_point_like_any_other(path):
    spool = Spool(path)
    spool.append(1, {"a": float("nan")})
    spool.close()
    assert str(read_points(path)[0]["metrics"]["a"]) == "nan"


def test_curves_are_in_order_of_steps():
    points = [{"step": 2, "metrics": {"a": 2}}, {"step": 1, "metrics": {"a": 1, "b": 5}}]
    assert curves(points) == {"a": [(1, 1), (2, 2)], "b": [(1, 5)]}


@pytest.mark.parametrize("line", ["", "[]", "null", "5", '{"step": 2}', '{"step": "2", "time": 1, "metrics": {}}'])
def test_a_damaged_line_is_left_out_of_the_curves_and_said(path, line, caplog):
    spool = Spool(path)
    spool.append(1, {"a": 1})
    spool.append(2, {"a": 2})
    spool.close()
    first, second = path.read_text().splitlines()
    path.write_text("\n".join((first, line, second)) + "\n")
    assert [point["step"] for point in read_points(path)] == [1, 2]
    assert "1 damaged lines are left out" in caplog.text
    assert points_after(path, 0)[1] == path.stat().st_size
