"""People's labels: a run that waits for them is finished by the sheet they fill in, and by nothing else."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

ITEMS = 16
LOST = 4
"""Items on which the filled sheet prefers SFT; the policy wins the others."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels") / "home"


def status(tether: Any, home: Path) -> dict[str, Any]:
    done = tether("status", "--json", home=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def waiting(tether: Any, home: Path) -> dict[str, Any]:
    done = tether(
        "run", "tiny", "--set", "human_eval.judges=people", "--set", f"human_eval.items={ITEMS}", home=home
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return status(tether, home)


@pytest.fixture(scope="module")
def sides(home: Path, waiting: dict[str, Any]) -> dict[str, str]:
    """Which side is the policy, by item: from the sealed key, which raters never see."""
    from components.artifacts import ArtifactStore

    sample = ArtifactStore(home).path(waiting["stages"][4]["digest"])
    return json.loads((sample / "key.json").read_text(encoding="utf-8"))["policy_side"]


def fill(empty: Path, sides: dict[str, str], target: Path, items: int = ITEMS) -> Path:
    """A sheet as three raters of one mind fill it in, for the first `items` rows."""
    with empty.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == ITEMS == len(sides)
    for number, row in enumerate(rows[:items]):
        policy = sides[row["item"].split("-")[0]]
        rating = policy if number >= LOST else {"a": "b", "b": "a"}[policy]
        row.update({name: rating for name in row if name.startswith("rating_")})
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return target


def test_a_run_that_people_judge_waits_and_its_sheet_does_not_tell_the_sides(
    home: Path, waiting: dict[str, Any], sides: dict[str, str]
) -> None:
    assert (waiting["state"], waiting["stages"][4]["state"]) == ("awaiting_labels", "awaiting_labels")
    sheet = (home / "runs" / waiting["run"] / "sheet.csv").read_text(encoding="utf-8-sig")
    header = next(csv.reader(sheet.splitlines()))
    assert header == ["item", "prompt", "response_a", "response_b", "rating_1", "rating_2", "rating_3"]
    assert set(sides.values()) == {"a", "b"}


def test_the_empty_sheet_and_one_half_filled_do_not_finish_it(
    tether: Any, home: Path, waiting: dict[str, Any], sides: dict[str, str], tmp_path: Path
) -> None:
    empty = home / "runs" / waiting["run"] / "sheet.csv"
    done = tether("human-eval", "score", str(empty), home=home)
    assert (done.returncode, "holds no rating yet" in done.stdout + done.stderr) == (2, True)

    half = tether("human-eval", "score", str(fill(empty, sides, tmp_path / "half.csv", ITEMS // 2)), home=home)
    assert half.returncode == 3, half.stdout + half.stderr
    assert "human_eval.labels_complete" in half.stdout + half.stderr


def test_the_filled_sheet_gives_the_win_rate_that_people_meant(
    tether: Any, home: Path, waiting: dict[str, Any], sides: dict[str, str], tmp_path: Path
) -> None:
    filled = fill(home / "runs" / waiting["run"] / "sheet.csv", sides, tmp_path / "filled.csv")
    done = tether("human-eval", "score", str(filled), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = status(tether, home)
    assert scored["run"] == waiting["run"]
    human = scored["stages"][4]
    assert human["state"] == "passed"
    assert human["metrics"]["human_eval/win_rate"] == pytest.approx(1 - LOST / ITEMS)
    assert human["metrics"]["human_eval/win_rate_low"] < 0.75 < human["metrics"]["human_eval/win_rate_high"]
    assert human["metrics"]["human_eval/fleiss_kappa"] == pytest.approx(1)
    assert human["metrics"]["human_eval/labels_complete"] == 1
    assert [s["digest"] for s in scored["stages"][:4]] == [s["digest"] for s in waiting["stages"][:4]]
