"""The measurement of a GPU: its comparisons find what differs, and a step that fails does not hide the others."""

import json
import sys
from pathlib import Path

import pytest

from components.models.runtime import Gpu, Gpus
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


@pytest.mark.parametrize(
    ("name", "limit", "says"),
    [
        ("NVIDIA H100 80GB HBM3", ["--bandwidth", "3.35e+12"], ""),
        ("NVIDIA H200", ["--bandwidth", "4.8e+12"], ""),
        ("NVIDIA H100 PCIe", [], "the limits are an H200's"),
    ],
)
def test_throughput_is_held_against_the_bandwidth_of_the_gpu_that_is_here_and_a_size_left_out_is_told(
    name: str, limit: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 was held against an H200's bandwidth, which is 43 % higher, and a size without a model was not shown."""
    asked: list[str] = []

    def answered(bench: Bench, *arguments: str) -> str:
        asked.extend(arguments)
        return "135m left out: no model\n1b, full, bfloat16, shared: 1.0 samples/s\nelse"

    monkeypatch.setattr(gpu, "usable_gpus", lambda: Gpus((Gpu(name, (9, 0)),), "13.0", ""))
    monkeypatch.setattr(Bench, "python", answered)
    said = gpu.throughput(Bench("cuda", False, tmp_path))
    assert [part for at, part in enumerate(asked) if "--bandwidth" in (part, asked[at - 1])] == limit
    assert "135m left out" in said and "1.0 samples/s" in said and "else" not in said.split("; ")
    assert says in said and ("limits" in said) == bool(says)


def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of the bench with these arguments, on a machine without a GPU."""
    why = "there is no GPU's device file (/dev/nvidia0, /dev/dxg)"
    monkeypatch.setattr(gpu, "usable_gpus", lambda: Gpus((), "13.0", why))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_without_a_gpu_nothing_is_measured_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "STEPS", {"first": lambda bench: pytest.fail("a step ran")})
    code, out, err = table(monkeypatch, capsys, "--out", str(tmp_path))
    assert (code, out) == (2, "") and err.startswith("No GPU: there is no GPU's device file (/dev/nvidia0, /dev/dxg).")


def test_a_dry_run_finds_a_program_that_does_not_start_and_an_option_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--size', type=int)\np.parse_args()\n1 / 0\n"
    )
    steps = {
        "fine": lambda bench: bench.python(str(script), "--size", "3"),
        "gone": lambda bench: bench.python(str(script), "--rows", "3"),
        "wrong": lambda bench: bench.python(str(script), "--size", "many"),
        "missing": lambda bench: bench.python(str(tmp_path / "none.py")),
    }
    monkeypatch.setattr(gpu, "STEPS", steps)
    code, out, _ = table(monkeypatch, capsys, "--dry-run", "--out", str(tmp_path))
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("No GPU: ") and lines[0].endswith("Nothing is measured.")
    assert lines[4].endswith("| not measured: script.py starts and has its options |")
    assert "**failed**" in lines[5] and "has no option --rows" in lines[5]
    assert all("**failed**" in line and "ended with exit code 2" in line for line in lines[6:]) and len(lines) == 8
