"""A stage is its folder, its entry in the registry and its line in rlhf.py; a gate is its record."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.runs.status import StageStatus, load_status

ROOT = Path(__file__).resolve().parent.parent

FOLDER = {
    "__init__.py": '"""A stage that counts lines."""\n',
    "config.py": '''"""Options of the toy stage."""

from components.base.settings import Settings


class ToyConfig(Settings):
    """What the toy stage counts."""

    weight: int = 1
    """How often a line counts."""


class ToyJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    toy: ToyConfig = ToyConfig()
    """Counting lines."""
''',
    "stage.py": '''"""Counts the lines of the pairs."""

from collections.abc import Callable, Mapping
from pathlib import Path

from components.data.tables.published import read_split
from components.toy.config import ToyJob


def run(job: ToyJob, inputs: Mapping[str, Path], out: Path, observe: Callable[..., None]) -> dict[str, float]:
    """Count the training pairs."""
    lines = job.toy.weight * len(read_split(inputs["data"] / "pairs.train"))
    (out / "artifact").mkdir()
    (out / "artifact" / "lines.txt").write_text(f"{lines}\\n")
    observe(1, {"toy/counted": lines}, total=1)
    return {"toy/lines": float(lines)}
''',
}
ENTRY = '    Stage("toy", "components.toy.stage", "components.toy.config:ToyJob", ()),\n'
STEP = '    stage("toy", data=data)\n'
GATES = '''"""Gates of the toy stage."""

from components.gates.gate import Gate
from components.gates.remedies import OptionChange, times

TOY_GATES = (
    Gate(
        "toy.lines", ">=", "the toy counted enough lines", interval="none",
        cause="There are few pairs.",
        remedy="Raise `toy.weight`.",
        changes=(OptionChange("toy.weight", times(2)),),
    ),
)  # fmt: skip
'''
PROFILE = """
extends: tiny
data: {generator: {demonstrations: 100, pairs: 200}}
toy: {weight: 2}
gates:
  toy: {lines: 1000000}
  extra: {toy: {few: {metric: toy/lines, op: "<=", threshold: 1000000, description: not too many lines}}}
"""


def insert(path: Path, before: str, line: str) -> None:
    """Put a line before the only place where `before` stands."""
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, line + before))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with a toy stage and a toy gate, added as CONTRIBUTING.md says."""
    folder = tmp_path_factory.mktemp("source")
    for package in ("flows", "tasks", "data_contracts", "components", "tests"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    toy = folder / "components" / "toy"
    toy.mkdir()
    for name, text in FOLDER.items():
        (toy / name).write_text(text)
    insert(folder / "tasks" / "stages.py", '    Stage("sft",', ENTRY)
    insert(folder / "flows" / "rlhf.py", "    # 2. SFT:", STEP)
    gates = folder / "components" / "gates"
    (gates / "built_in" / "toy_gates.py").write_text(GATES)
    imports = "from components.gates.built_in.toy_gates import TOY_GATES\n"
    insert(gates / "table.py", "from components.gates.built_in.validate_gates", imports)
    insert(gates / "table.py", "SFT_GATES + ", "TOY_GATES + ")
    (folder / "toy.yaml").write_text(PROFILE)
    return folder


@pytest.mark.whole
def test_a_toy_stage_and_a_toy_gate_are_run_judged_shown_and_cached(tether, source: Path, tmp_path: Path) -> None:
    def tether_there(*arguments: str) -> subprocess.CompletedProcess[str]:
        return tether(*arguments, home=tmp_path / "home", cwd=source, PYTHONPATH=str(source))

    def run(*options: str) -> tuple[str, dict[str, StageStatus]]:
        done = tether_there("run", "./toy.yaml", *options)
        assert done.returncode == 3, done.stdout + done.stderr
        return done.stderr, {each.name: each for each in load_status(tmp_path / "home").stages}

    # The gate fails: nothing after the toy starts.
    said, first = run()
    assert list(first) == ["validate", "toy", "sft", "reward", "ppo", "human_eval"]
    assert json.loads(tether_there("status", "--json").stdout) == load_status(tmp_path / "home").as_json()
    assert "toy.lines: toy/lines is " in said and "the toy counted enough lines" in said
    assert [each.state for each in first.values()] == ["passed", "gate_failed", *["not_run"] * 4]
    assert [(gate.name, gate.passed) for gate in first["toy"].gates] == [("toy.lines", False), ("toy.few", True)]
    assert first["toy"].metrics["toy/lines"] > 0 and first["toy"].mlflow_run and first["toy"].digest
    [folder] = (tmp_path / "home" / "runs").iterdir()
    for page in ("report.html", "report.md"):
        text = (folder / page).read_text().replace("<wbr>", "")
        assert "toy.lines" in text and "toy.few" in text and "<h3>toy</h3>" in text + "<h3>toy</h3>" * (page[-1] == "d")

    # It passes: the toy is taken from the store, and the next stage runs.
    _, second = run("--set", "gates.toy.lines=1", "--set", "gates.sft.loss=0")
    assert [each.state for each in second.values()] == ["cached", "cached", "gate_failed", *["not_run"] * 3]
    assert second["toy"].key == first["toy"].key

    # Its options and its code are in its key, and in no other's.
    with (source / "components" / "toy" / "stage.py").open("a") as file:
        file.write("\n\nCHANGED = True\n")
    _, third = run("--set", "toy.weight=3")
    assert [each.state for each in third.values()] == ["cached", "gate_failed", *["not_run"] * 4]
    assert third["toy"].metrics["toy/lines"] * 2 == first["toy"].metrics["toy/lines"] * 3
    changed = {change.name for change in load_status(tmp_path / "home").stage("toy").explained["toy"].changes}
    assert changed == {"toy.weight", "components/toy/stage.py"}


@pytest.mark.parametrize(
    "command",
    [["lint-imports", "--no-cache"], pytest.param(["pytest", "-q", "tests/components/gates"], marks=pytest.mark.whole)],
)
def test_the_layers_and_gates_hold_with_a_toy_stage(source: Path, command: list[str]) -> None:
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
