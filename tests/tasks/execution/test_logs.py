"""Log lines as JSON: each parses, says of which run and stage it is, and holds no secret."""

import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.execution import logs, stage_progress
from tasks.execution.runner import run_stage

SECRET = "geheim-4711-correct-horse"
FIELDS = {"time", "level", "logger", "message", "run", "stage", "flow_run", "worker", "pid", "exception"}

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """JSON lines are switched on; `lines()` gives what was written since it was last called. Nothing else may be."""
    monkeypatch.setenv(logs.VARIABLE, "json")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    for name, value in logs.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logs, "_about", {"run": None, "stage": None, "flow_run": None})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    root, level = logging.getLogger(), logs.logger.level
    before, root.handlers[:] = list(root.handlers), []  # others' go to files of pytest's that are closed by now
    logging.captureWarnings(False)  # a test before may have left it on, with pytest's own way of showing restored
    logs.install()

    def read() -> list[dict[str, Any]]:
        out, err = capsys.readouterr()
        assert out == ""
        return [json.loads(line) for line in err.splitlines()]

    yield read
    logging.captureWarnings(False)
    root.handlers[:] = before
    logs.logger.setLevel(level)


def test_what_is_said_in_a_stage_has_its_run_and_stage_and_what_is_said_after_it_the_run(
    start: Any, kit: Any, lines: Lines, toy_source: Path
) -> None:
    toy_source.write_text(
        toy_source.read_text().replace("    calls = ", "    import logging, threading\n    talk()\n    calls = ")
        + "\n\ndef talk():\n    import logging, threading, warnings\n"
        "    thread = threading.Thread(target=logging.getLogger('someone.else').error, args=('two\\nlines',))\n"
        "    thread.start(), thread.join(), warnings.warn('odd data')\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with start(console=stage_progress.output()) as ctx:
            run_stage(kit.toy("ppo"), kit.ToyJob(), {}, ctx)
            found = lines()
            ctx.say("over")
    assert all(set(each) == FIELDS and each["run"] == ctx.run and each["stage"] == "ppo" for each in found)
    said = {each["message"]: each for each in found}
    assert any(each.startswith("ppo: computing") for each in said) and any("  ppo 3/3" in each for each in said)
    assert said["two\nlines"]["logger"] == "someone.else" and said["two\nlines"]["level"] == "ERROR"
    assert any("odd data" in each for each in said), "of the module warnings"
    assert {datetime.fromisoformat(each["time"]).utcoffset().total_seconds() for each in found} == {0}  # type: ignore[union-attr]
    (after,) = lines()
    assert (after["message"], after["run"], after["stage"]) == ("over", ctx.run, None)


def test_neither_message_nor_exception_holds_a_secret(lines: Lines) -> None:
    try:
        raise ValueError(f"no http://me:{SECRET}@host")
    except ValueError:
        logging.getLogger("library").exception("could not use %s", SECRET)
    thread = threading.Thread(target=lambda: 1 / len(SECRET[:0]), name="breaks")
    thread.start()
    thread.join()
    first, second = lines()
    assert SECRET not in json.dumps([first, second])
    assert first["message"] == "could not use ***" and first["exception"].endswith("ValueError: no http://host")
    assert second["level"] == "CRITICAL" and "ZeroDivisionError" in second["exception"], "of a thread"


def test_a_librarys_own_handler_is_taken_from_it_and_its_lines_are_said_once(lines: Lines) -> None:
    library = logging.getLogger("library.with.handler")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    logs.take_over()
    library.warning("once")
    (line,) = lines()
    assert (line["message"], line["logger"]) == ("once", library.name)


def test_a_flow_runs_line_has_its_flow_run_and_worker(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT__WORKER_NAME", "host-gpu")
    logging.getLogger("prefect.of.flow").error("one", extra={"flow_run_id": "f-1"})
    logs.bind(flow_run="f-2")
    logs.logger.info("two")
    assert [(each["flow_run"], each["worker"]) for each in lines()] == [("f-1", "host-gpu"), ("f-2", "host-gpu")]


def test_a_mistake_of_the_user_is_one_json_line_and_a_format_that_there_is_not_is_one(
    tether: Any, tmp_path: Path
) -> None:
    done = tether("status", "nothing", home=tmp_path, TETHER_LOG_FORMAT="json")
    line = json.loads(done.stderr)
    assert done.returncode == 2 and done.stdout == "" and set(line) == FIELDS
    assert line["level"] == "ERROR" and line["message"].startswith("tether: there is no run nothing")
    done = tether("status", home=tmp_path, TETHER_LOG_FORMAT="jsn")
    assert (done.returncode, done.stderr) == (
        2,
        "tether: TETHER_LOG_FORMAT = jsn: no such format. Set it to text or json.\n",
    )
