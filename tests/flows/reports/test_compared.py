"""Several runs on one page: shared axes, what differs, and nothing that a run's text could run."""

import base64
import json
import re
from pathlib import Path

import pytest

from components.base.errors import UserError
from flows.reports.compared import MOST, comparison, write_comparison
from tests.stored_run import HOSTILE, stored_run

RUNS = ("20260101-000000-aaaa", "20260102-000000-bbbb", "20260103-000000-cccc")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A run that a tighter gate stopped, between two that differ in β and take its artifacts."""
    stored_run(tmp_path, RUNS[0])
    stored_run(tmp_path, RUNS[1], changes=["ppo.kl.coefficient=0.5", "gates.ppo.kl=2.5"], by=RUNS[0])
    stored_run(tmp_path, RUNS[2], changes=["ppo.kl.coefficient=0"], by=RUNS[0])
    return tmp_path


def drawn(page: str) -> str:
    found = re.findall('src="data:image/svg\\+xml;base64,([^"]*)"', page)
    assert len(found) == 1
    return base64.b64decode(found[0]).decode()


def test_three_runs_share_one_picture_each_with_its_own_colour_and_dashes(home: Path) -> None:
    page = comparison(home, RUNS)
    svg = drawn(page)
    for run in RUNS:
        assert run in svg
        assert f"β of {run} goes from 0.2 to 0.17" in page, "for those who do not see it"
    dashes = set(re.findall("stroke-dasharray: ([^;]+);", svg))
    assert len(dashes) >= 2, "the first is solid"


def test_options_and_gates_that_differ_stand_run_by_run(home: Path) -> None:
    text = " ".join(re.sub("<[^>]+>", " ", comparison(home, RUNS)).split())
    assert "2 options differ." in text
    assert "ppo. kl. coefficient 0.1 0.5 0.0" in text or "ppo. kl. coefficient 0.1 0.5 0" in text
    assert "2.789 PASS 2.789 FAIL 2.789 PASS" in text
    assert "not judged" in text, "human_eval did not run where the gate stopped it"


def test_a_runs_name_is_text_and_nothing_else(home: Path) -> None:
    path = home / "runs" / RUNS[0] / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "<b>one</b>"}))
    page = comparison(home, RUNS[:2])
    assert "&lt;b&gt;one" in page and "<b>" not in page and HOSTILE not in page and "<script" not in page


def test_too_few_too_many_or_the_same_run_twice_are_refused_with_what_to_do(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "diff.html"
    for runs, said in ((RUNS[:1], "2 to 6 runs; 1 given"), ((*RUNS, *"abcd"), "2 to 6 runs; 7 given"),
                       ((RUNS[0], RUNS[0]), "named twice"), ((RUNS[0], "nothing"), "nothing")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            write_comparison(home, runs, target)
    assert MOST == 6 and not target.exists()
    with pytest.raises(UserError, match="a folder that exists"):
        write_comparison(home, RUNS[:2], tmp_path / "none" / "diff.html")
