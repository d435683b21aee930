"""The measurement of a GPU: its comparisons find what differs, and a step that fails does not hide the others."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench import gpu
from tests.bench.gpu import Bench, Failed, largest_difference, losses, unlike


def test_curves_are_compared_step_by_step_and_only_where_they_have_the_same_steps() -> None:
    assert largest_difference([2.0, 1.0002], [2.0, 1.0]) == pytest.approx(2e-4)
    with pytest.raises(Failed, match="curves of 1 and 2 steps"):
        largest_difference([2.0], [2.0, 1.0])
    with pytest.raises(Failed, match="0 and 0"):
        largest_difference([], [])


def test_another_digest_is_named_by_its_stage() -> None:
    one = {"sft": "a", "reward": "b", "ppo": "c"}
    assert unlike(one, one) == [] and unlike(one, one | {"reward": "d"}) == ["reward"]


def test_losses_are_read_from_the_run_and_other_rows_of_its_metrics_are_not(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "20260101-000000-0000" / "metrics" / "sft.jsonl"
    file.parent.mkdir(parents=True)
    rows = [
        {"step": 1, "metrics": {"sft/train_loss": 3.0}},
        {"step": 1, "metrics": {}},
        {"step": 2, "metrics": {"sft/train_loss": 2.0}},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert losses(tmp_path, "sft") == [3.0, 2.0]


def test_a_step_that_fails_is_named_with_its_log_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> str:
        return bench.run(sys.executable, "-c", "import sys; sys.exit('no GPU here')")

    def works(bench: Bench) -> str:
        return bench.run(sys.executable, "-c", "print('ran on', 1)").strip()

    monkeypatch.setattr(gpu, "STEPS", {"first": fails, "second": works})
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="1"):
        gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert "**failed**" in lines[2] and str(tmp_path / "first.log") in lines[2]
    assert lines[3].startswith("| second | ") and lines[3].endswith(" | ran on 1 |")
    assert "no GPU here" in (tmp_path / "first.log").read_text()
