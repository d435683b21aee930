"""Each bench starts, and each command that the docs or the Makefile give for one exists with its options."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.base.jsonl import read_rows
from tests.bench.gpu.gpu import STEPS
from tests.bench.operations.orchestration import WRAPPED
from tests.bench.tools import ROOT

BENCHES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in Path(__file__).parent.rglob("*.py")
    if "argument_parser(__doc__)" in path.read_text(encoding="utf-8") and path.name != Path(__file__).name
)
PAGES = [ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


def help_of(bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", [bench, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(bench).main()
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_starts_and_has_the_options_of_written_commands(
    bench: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(bench, monkeypatch, capsys)
    for page in PAGES:
        written = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(rf"-m {re.escape(bench)}(?![\w.])(.*?)(?:`|#|$)", written, re.MULTILINE):
            for option in re.findall(r" (--[a-z][a-z0-9-]*)", command):
                assert f" {option}" in text, f"{page.relative_to(ROOT)}: {bench} has no {option}"


def test_a_written_command_names_a_bench_that_exists() -> None:
    written = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in PAGES
        for name in re.findall(r"-m (tests\.bench\.[\w.]+)", page.read_text(encoding="utf-8"))
    }
    assert written and {(page, name) for page, name in written if name not in BENCHES} == set()


@pytest.mark.parametrize(("where", "name"), [(where, name) for where, name, _ in WRAPPED])
def test_what_orchestration_times_exists(where: str, name: str) -> None:
    module, _, owner = where.partition(":")
    holder = importlib.import_module(module)
    assert callable(getattr(getattr(holder, owner) if owner else holder, name))


@pytest.mark.parametrize(
    ("bench", "options"),
    [
        ("tests.bench.statistics.raters", ["--simulations", "1", "--part", "checks"]),
        ("tests.bench.statistics.alarm_simulation", ["--seeds", "0", "--planted", "1"]),
        ("tests.bench.trl.direct", ["--quick"]),
    ],
)
def test_a_bench_prints_its_lines(
    bench: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [bench, *options])
    monkeypatch.chdir(ROOT)
    importlib.import_module(bench).main()
    assert len(capsys.readouterr().out.splitlines()) >= 2


SLOW = {"graphs", "repeated", "updates", "sanitized", "direct", "sharded"}
"""Steps that take a minute or more on a CPU."""


@pytest.mark.whole
@pytest.mark.parametrize(
    "steps", [STEPS.keys() - SLOW - {"pairs"}, pytest.param(SLOW, marks=pytest.mark.long)], ids=["quick", "slow"]
)
def test_each_step_on_a_gpu_starts_on_a_cpu(steps: set[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.gpu.gpu", "--device", "cpu", "--quick", "--seconds", "1000"]
    command += ["--out", str(tmp_path), "--steps", *(step for step in STEPS if step in steps)]
    ended = subprocess.run(command, cwd=ROOT, check=False)
    rows = read_rows(tmp_path / "gpu.jsonl")
    assert ended.returncode == 0 and {row["step"] for row in rows} == steps
    assert all(row["found"] for row in rows if row["step"] != "real")
