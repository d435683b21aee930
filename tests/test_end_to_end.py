"""The real command on the tiny profile: a whole run, then what a change recomputes, then people's labels.

The tests of this file go on from each other's home, in order; the first one does the computing.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

STAGES = ["validate", "sft", "reward", "ppo", "human_eval"]
HEAVY = {"torch", "transformers", "prefect", "great_expectations", "matplotlib"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("end_to_end") / "home"


@pytest.fixture(scope="module")
def first(tether, home: Path) -> dict[str, Any]:
    """The status of one whole run from nothing."""
    done = tether("run", "tiny", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "simulated" in done.stdout
    return status(tether, home)


def status(tether, home: Path) -> dict[str, Any]:
    done = tether("status", "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def digests(shown: dict[str, Any]) -> list[str]:
    return [stage["digest"] for stage in shown["stages"]]


def states(shown: dict[str, Any]) -> list[str]:
    return [stage["state"] for stage in shown["stages"]]


def test_a_run_from_nothing_passes_every_stage_and_gate(first: dict[str, Any], home: Path) -> None:
    assert list(first) == ["run", "profile", "state", "seconds", "stages"]
    assert (first["profile"], first["state"]) == ("tiny", "passed")
    assert [stage["name"] for stage in first["stages"]] == STAGES
    for stage in first["stages"]:
        assert list(stage) == [
            "name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates",
        ]  # fmt: skip
        assert (stage["state"], stage["cached"]) == ("passed", False)
        assert len(stage["key"]) == len(stage["digest"]) == 64
        assert stage["mlflow_run"] and stage["metrics"] and stage["gates"]
        for gate in stage["gates"]:
            assert list(gate) == ["name", "metric", "value", "op", "threshold", "passed", "waived"]
    page = (home / "runs" / first["run"] / "report.md").read_text()
    assert "ppo.kl" in page and first["stages"][3]["digest"] in page


def test_the_same_again_computes_nothing_and_imports_no_framework(tether, home: Path, first: dict[str, Any]) -> None:
    done = tether("run", "tiny", home=home, python=("-X", "importtime"))
    assert done.returncode == 0, done.stdout
    assert "Nothing was computed" in done.stdout
    assert not {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()} & HEAVY
    again = status(tether, home)
    assert states(again) == ["cached"] * 5
    assert again["state"] == "cached" and again["run"] != first["run"]
    assert digests(again) == digests(first)
    assert again["seconds"] < 20


def test_a_threshold_alone_recomputes_nothing_and_stops_what_is_below(
    tether, home: Path, first: dict[str, Any]
) -> None:
    done = tether("run", "tiny", "--set", "gates.ppo.kl=-1", home=home)
    assert done.returncode == 3
    assert "ppo.kl: ppo/kl_high is" in done.stderr and "must be <= -1" in done.stderr
    shown = status(tether, home)
    assert states(shown) == ["cached", "cached", "cached", "gate_failed", "not_run"]
    assert [stage["cached"] for stage in shown["stages"]] == [True, True, True, True, False]
    assert shown["state"] == "gate_failed"


def test_a_waived_gate_lets_the_run_through_and_says_so(tether, home: Path, first: dict[str, Any]) -> None:
    waiver = ("--waive", "ppo.kl", "--because", "to see the sheet")
    done = tether("run", "tiny", "--set", "gates.ppo.kl=-1", *waiver, home=home)
    assert done.returncode == 0, done.stderr
    assert "to see the sheet" in done.stdout
    shown = status(tether, home)
    assert states(shown) == ["cached", "cached", "cached", "waived", "cached"]
    assert [gate["name"] for gate in shown["stages"][3]["gates"] if gate["waived"]] == ["ppo.kl"]


def test_a_rerun_computes_its_stage_alone_where_the_bytes_come_out_the_same(
    tether, home: Path, first: dict[str, Any]
) -> None:
    done = tether("rerun", "reward", "--from", first["run"], home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = status(tether, home)
    assert states(shown) == ["cached", "cached", "passed", "cached", "cached"]
    assert digests(shown) == digests(first)


def test_a_ppo_field_recomputes_ppo_and_what_follows_and_people_finish_the_run(
    tether, home: Path, first: dict[str, Any]
) -> None:
    changes = ("--set", "ppo.clip_range=0.1", "--set", "human_eval.judges=people")
    done = tether("run", "tiny", *changes, home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    waiting = status(tether, home)
    assert states(waiting) == ["cached", "cached", "cached", "passed", "awaiting_labels"]
    assert digests(waiting)[:3] == digests(first)[:3]
    assert digests(waiting)[3] != digests(first)[3]

    empty = home / "runs" / waiting["run"] / "sheet.csv"
    assert f"tether human-eval score {empty} --run {waiting['run']}" in done.stdout
    with empty.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row.update({name: "ab"[number % 2] for name in row if name.startswith("rating_")})
    filled = home.parent / "filled.csv"
    with filled.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    done = tether("human-eval", "score", str(filled), "--run", waiting["run"], home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = status(tether, home)
    assert scored["run"] == waiting["run"]
    assert scored["stages"][4]["state"] == "passed"
    assert scored["stages"][4]["metrics"]["human_eval/labels_complete"] == 1
    assert digests(scored)[:4] == digests(waiting)[:4]


def test_the_same_seed_gives_the_same_bytes_in_a_fresh_home(tether, tmp_path: Path, first: dict[str, Any]) -> None:
    done = tether("run", "tiny", home=tmp_path / "another home", PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stdout + done.stderr
    other = status(tether, tmp_path / "another home")
    assert digests(other) == digests(first)
    assert [stage["key"] for stage in other["stages"]] == [stage["key"] for stage in first["stages"]]
