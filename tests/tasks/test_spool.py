"""No point is lost, doubled or out of order between a stage and the tracking store."""

import threading
import time

import pytest

from tasks.spool import Spool, curves, read_points, ship_file, unshipped


class Store:
    """A tracking store that can be away."""

    def __init__(self):
        self.points = []
        self.away = False
        self.calls = 0

    def __call__(self, points):
        self.calls += 1
        if self.away:
            raise ConnectionError("away")
        self.points.extend(points)

    @property
    def steps(self):
        return [point["step"] for point in self.points]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics" / "ppo.jsonl"


def test_points_arrive_in_order_and_once(path):
    store = Store()
    spool = Spool(path)
    spool.ship_to(store)
    for step in range(500):
        spool.append(step, {"a": step, "b": -step})
    assert spool.close() == 0
    assert store.steps == list(range(500))
    assert store.points[7]["metrics"] == {"a": 7.0, "b": -7.0}


def test_an_outage_keeps_the_points_and_a_later_shipment_adds_each_once(path, caplog):
    store = Store()
    store.away = True
    spool = Spool(path)
    spool.ship_to(store)
    for step in range(10):
        spool.append(step, {"a": step})
    assert spool.close() == 10
    assert "wait in" in caplog.text
    store.away = False
    assert ship_file(path, store) == 10
    assert ship_file(path, store) == 0
    assert store.steps == list(range(10))


def test_a_store_that_never_answers_does_not_hold_up_the_close(path):
    released = threading.Event()
    spool = Spool(path)
    spool.ship_to(lambda points: released.wait(30))
    spool.append(1, {"a": 1})
    began = time.monotonic()
    assert spool.close(timeout=0.2) == 1
    assert time.monotonic() - began < 5
    released.set()


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


def test_a_torn_last_line_is_neither_shipped_nor_glued_to_the_next(path):
    spool = Spool(path)
    spool.append(1, {"a": 1})
    spool.close()
    with path.open("a") as file:
        file.write('{"step": 2, "ti')
    assert [point["step"] for point in unshipped(path)[0]] == [1]
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
