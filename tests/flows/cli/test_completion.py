"""The front of the command: its version, its help, and what a shell completes."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.gates.table import GATES
from flows.config.profiles import profile_names
from tasks.stages import PIPELINE

CALL = """
import sys
from flows.cli.__main__ import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "mlflow", "prefect", "pandas", "rich"} & set(sys.modules)
    assert not heavy, heavy
"""
IN_BASH = """
source <(_TETHER_COMPLETE=source_bash tether)
complete -p tether
COMP_WORDS=({words}) COMP_CWORD={at}
_tether_completion tether
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(tmp_path: Path) -> Any:
    """`complete(*words)`: what bash offers for the last of them, asked as its Tab key asks."""
    command = tmp_path / "bin" / "tether"
    command.parent.mkdir()
    (tmp_path / "call.py").write_text(CALL)
    command.write_text(f'#!/bin/sh\nPYTHONPATH={os.getcwd()} exec {sys.executable} {tmp_path / "call.py"} "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "TETHER_HOME": str(tmp_path / "home"),
    }

    def ask(*words: str) -> list[str]:
        script = IN_BASH.format(words=" ".join(f"'{word}'" for word in ("tether", *words)), at=len(words))
        done = subprocess.run(["bash", "--norc", "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        registered, *found = done.stdout.splitlines()
        assert registered == "complete -o default -F _tether_completion tether"
        return [line for line in found if line]

    return ask


def test_bash_completes_commands_profiles_stages_and_gates_and_imports_nothing_heavy(complete: Any) -> None:
    assert {"run", "rerun", "status"} <= set(complete(""))
    assert complete("run", "") == profile_names()
    assert complete("run", "de") == ["demo", "demo-long"]
    assert complete("rerun", "") == list(PIPELINE)
    assert complete("run", "tiny", "--refresh", "r") == ["reward"]
    assert complete("run", "tiny", "--waive", "ppo.") == [name for name in GATES if name.startswith("ppo.")]


def test_the_help_of_rerun_names_every_stage(tether_here: Any, tmp_path: Path) -> None:
    said = " ".join(tether_here("rerun", "--help", home=tmp_path / "home").stdout.split())
    assert f"{', '.join(PIPELINE[:-1])} or {PIPELINE[-1]}" in said
    assert "ppo, evaluation or human_eval" in said


def test_bash_completes_the_ids_of_this_homes_runs_newest_first(complete: Any, tmp_path: Path) -> None:
    assert complete("status", "") == []
    for run in ("20261101-000000-aaaa", "20261103-000000-bbbb", "20251103-000000-cccc"):
        (tmp_path / "home" / "runs" / run).mkdir(parents=True)
        (tmp_path / "home" / "runs" / run / "run.json").write_text("{}")
    (tmp_path / "home" / "runs" / "20261104-begun-only").mkdir()
    assert complete("status", "2026") == ["20261103-000000-bbbb", "20261101-000000-aaaa"]
    assert complete("rerun", "ppo", "--from", "2025") == ["20251103-000000-cccc"]


def test_the_version_is_the_distributions(tether: Any, tmp_path: Path) -> None:
    done = tether("--version", home=tmp_path / "home")
    assert (done.returncode, done.stdout) == (0, importlib.metadata.version("tether") + "\n")
    assert not (tmp_path / "home").exists()
