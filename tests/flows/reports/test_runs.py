"""`tether runs`: every run on a line, the newest first, whatever became of one of them."""

import io
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.gates.judging import Verdict
from flows.reports.runs import listed, print_runs, selected
from tasks.runs.run_label import Label
from tasks.runs.status import StatusFile

STAGES = ("validate", "ppo", "human_eval")


def begin(
    home: Path, run: str, started: str, label: Label = Label(), profile: str = "tiny",  # noqa: B008
    gates: Sequence[Verdict] = (), **states: str,
) -> None:  # fmt: skip
    status = StatusFile.start(home / "runs" / run, run, profile, STAGES, label=label)
    for stage, state in states.items():
        metrics = {"ppo": {"policy/kl": 2.5, "policy/kl_high": 9.0}, "human_eval": {"human_eval/win_rate": 0.625}}
        status.update(stage, state=state, metrics=metrics.get(stage, {}), gates=list(gates))
    status.finish()
    path = home / "runs" / run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": started}))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Three runs whose ids do not sort as they were started, and a damaged one, the newest."""
    passed = {"validate": "passed", "ppo": "passed", "human_eval": "passed"}
    begin(tmp_path, "b-old", "2024-05-01T08:00:00.000000+00:00", validate="failed")
    tags = Label("night 1", {"seed": "1", "baseline": ""})
    begin(tmp_path, "c-mid", "2026-11-20T08:00:00.000000+00:00", tags, "demo", **passed)
    begin(tmp_path, "a-new", "2026-11-21T08:00:00.000000+00:00", Label("", {"seed": "2"}), **passed)
    (tmp_path / "runs" / "d-torn").mkdir()
    (tmp_path / "runs" / "d-torn" / "run.json").write_text('{"run": "d-torn", "prof')
    return tmp_path


def table(home: Path, width: int = 80, limit: int = 20, tags: Sequence[str] = ()) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    every = listed(home)
    print_runs(console, selected(every, tags), limit, len(every), home)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_script_gets_every_run_with_exactly_these_fields_newest_first(tether: Any, home: Path) -> None:
    done = tether("runs", "--json", home=home)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert [each["run"] for each in runs] == ["d-torn", "a-new", "c-mid", "b-old"]
    assert runs[2] | {"seconds": None} == {
        "run": "c-mid", "name": "night 1", "profile": "demo", "state": "passed",
        "started": "2026-11-20T08:00:00.000000+00:00", "seconds": None, "kl": 2.5, "win_rate": 0.625,
        "tags": {"seed": "1", "baseline": ""},
    }  # fmt: skip
    assert isinstance(runs[2]["seconds"], float)
    torn = {name: value for name, value in runs[0].items() if name != "started"}
    assert torn == {
        "run": "d-torn", "name": "", "profile": "", "state": "damaged", "seconds": None, "kl": None, "win_rate": None,
        "tags": {},
    }  # fmt: skip


def test_the_table_fits_80_columns_and_names_what_it_leaves_out(home: Path) -> None:
    lines = table(home)
    assert lines[0].split() == "run state when name tags KL win rate seconds".split()
    assert "c-mid  passed  " in lines[3] and "night 1 seed=1 baseline 2.5    0.625" in lines[3]
    assert "2024-05-01" in lines[4] and max(map(len, lines)) <= 80
    assert table(home, limit=1)[-1] == "1 of 4 runs; --limit 4 shows all."


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_cuts_names_first_and_never_an_id(home: Path, width: int) -> None:
    long = Label("x" * 90, {f"tag-{i}": "v" * 20 for i in range(4)})
    begin(home, "20261122-080000-aaaa", "2026-11-22T08:00:00.000000+00:00", long, validate="gate_failed")
    lines = table(home, width)
    assert max(map(len, lines)) <= width and all(lines)
    assert lines[2].startswith("20261122-080000-aaaa") and len(lines) == 6
    assert ("gate_failed" in lines[2]) == (width >= 40) and ("…" in lines[2]) == (width >= 60)


def test_a_run_that_gates_stopped_names_these_gates_and_none_that_is_waived_or_warns(
    tether: Any, tmp_path: Path
) -> None:
    def failed(name: str, **more: Any) -> Verdict:
        return Verdict(name=name, metric="policy/kl", value=9.0, op="<=", threshold=6.5, passed=False, **more)

    waived, warns = failed("policy.length_ratio", waived=True), failed("ppo.ratio_max", warn_only=True)
    gates = [failed("policy.kl"), waived, warns, failed("policy.repetition")]
    begin(tmp_path, "stopped", "2026-11-22T08:00:00.000000+00:00", gates=gates, ppo="gate_failed")
    assert " policy.kl, policy.repetition 2.5 " in table(tmp_path, 100)[1]
    (run,) = json.loads(tether("runs", "--json", home=tmp_path).stdout)
    assert run["failed_gates"] == ["policy.kl", "policy.repetition"]


def test_colours_are_for_terminals_alone(home: Path) -> None:
    assert "\x1b" not in "\n".join(table(home))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    print_runs(console, listed(home), 20, 4, home)
    assert "\x1b[31mfailed" in console.file.getvalue()


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        (["seed"], ["a-new", "c-mid"]),
        (["seed=1"], ["c-mid"]),
        (["seed", "baseline"], ["c-mid"]),
        (["seed="], []),
        (["seed = 1"], ["c-mid"]),
        (["baseline="], ["c-mid"]),
    ],
)
def test_runs_are_found_by_tag(home: Path, tags: list[str], found: list[str]) -> None:
    assert [each.run for each in selected(listed(home), tags)] == found


def test_an_empty_home_says_how_to_begin_and_is_not_made(tether: Any, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "start one with `tether run demo`" in tether("runs", home=home).stdout
    assert tether("runs", "--json", home=home).stdout == "[]\n"
    assert not home.exists()
    begin(tmp_path, "r", "2026-11-21T08:00:00.000000+00:00")
    assert table(tmp_path, tags=["seed"]) == [f"No run in {tmp_path} matches."]


def test_a_run_of_today_is_told_by_the_hour(tmp_path: Path) -> None:
    now = datetime.now().astimezone()
    begin(tmp_path, "r", now.isoformat())
    assert f"today {now:%H}" in table(tmp_path)[1]


def test_a_thousand_runs_take_a_second_or_two(tmp_path: Path) -> None:
    begin(tmp_path, "r", "2026-11-21T08:00:00.000000+00:00", validate="passed")
    text = (tmp_path / "runs" / "r" / "run.json").read_text()
    for number in range(1000):
        (tmp_path / "runs" / f"r{number}").mkdir()
        (tmp_path / "runs" / f"r{number}" / "run.json").write_text(text.replace('"r"', f'"r{number}"'))
    began = time.process_time()
    assert len(listed(tmp_path)) == 1001
    assert time.process_time() - began < 2
