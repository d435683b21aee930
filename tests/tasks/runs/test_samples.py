"""Samples that a stage shows while it computes: the text in the run's folder, Markdown and MLflow's table."""

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.runs.points import Spool, read_points
from tasks.runs.samples import SamplesFile, as_table, choice_of

HOSTILE = "fine\n== step 9 ==\n\x1b[31m| **x** |"


def point(step: int, response: str) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Policy."}, {"role": "user", "content": "Late?"}]
    sample = {"prompt": prompt, "response": response, "score": 1.25, "kl": 3.0}
    return {"step": step, "time": 1, "metrics": {"ppo/kl": 3.0}, "samples": [sample]}


def test_each_step_is_written_once_and_a_response_cannot_forge_a_step_or_command_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "ppo.txt"
    for _ in range(2):  # the second time as after a resumption
        shown = SamplesFile(path)
        for new in (point(4, "We will trace it."), point(8, HOSTILE), {"step": 5}, {"step": 6, "samples": []}):
            shown.add(new)
        shown.close()
    text = path.read_text()
    assert text.count("== step 4 ==") == 1 and "> Policy. Late?\n  We will trace it.\n" in text
    assert [each for each in text.splitlines() if each.startswith("==")] == ["== step 4 ==", "== step 8 =="]
    assert "score 1.25, kl 3" in text and "\x1b" not in text


def test_points_keep_samples_and_the_table_shows_them(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "ppo.jsonl")
    spool.append(4, {"ppo/kl": 1.0}, samples=point(4, "a")["samples"])
    spool.append(5, {"ppo/kl": 1.5}, samples=None)
    spool.append(8, {"ppo/kl": 2.0}, samples=point(8, HOSTILE)["samples"])
    spool.close()
    points = read_points(tmp_path / "ppo.jsonl")
    assert [("samples" in each) for each in points] == [True, False, True]
    table = json.loads(as_table(points))
    assert table["columns"] == ["step", "prompt", "response", "score", "kl"]
    assert [row[0] for row in table["data"]] == [4, 8] and table["data"][0][1] == "Policy.\nLate?"


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 99999, '{"reason": "Update 8 is published."}'])
def test_the_reason_of_a_choice_is_read_and_a_malformed_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "metadata.json").write_text(text)
    assert choice_of(tmp_path) == ("Update 8 is published." if "reason" in text else "")
    assert choice_of(tmp_path / "absent") == ""
