"""`make install`: uv looks where pip is told to look, and pip installs what uv cannot."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.install import uv_environment

INSTALL = Path(__file__).parents[1] / "infra" / "install.py"
CONFIG = """\
:env:.find-links='/opt/wheels /more'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='\\nfile:///a\\nhttps://b/simple'
global.find-links='/old'
global.index-url='https://old/simple'
install.index-url='https://mirror/simple?a=b'
"""


def test_uv_looks_where_pips_configuration_says() -> None:
    environment = {"HOME": "/h", "SSL_CERT_FILE": "/own.crt"}
    assert uv_environment(CONFIG, environment) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_FIND_LINKS": "/opt/wheels,/more", "SSL_CERT_FILE": "/own.crt",
        "UV_INDEX": "file:///a https://b/simple", "UV_DEFAULT_INDEX": "https://mirror/simple?a=b", "HOME": "/h",
    }  # fmt: skip


def program(path: Path, text: str) -> None:
    """Write a shell program that notes its arguments beside the environment, and then does `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "${{0##*/}} $*" >> {path.parents[2]}/calls\n{text}\n')
    path.chmod(0o755)


@pytest.mark.parametrize("uv", [None, "exit 0", "exit 1"], ids=["no uv", "uv", "uv fails"])
def test_pip_installs_what_uv_does_not(tmp_path: Path, uv: str | None) -> None:
    venv, tools = tmp_path / "venv", tmp_path / "on" / "path"
    program(venv / "bin" / "python", 'case "$*" in *uv.lock*) exit 1;; esac')
    tools.mkdir(parents=True)
    if uv:
        program(tools / "uv", uv)
    command = [sys.executable, str(INSTALL), str(venv)]
    process = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)})
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("Installing Tether into ")
    calls = (tmp_path / "calls").read_text().splitlines()
    by_pip = [call for call in calls if call.startswith("python") and " install " in call and "uv.lock" not in call]
    by_uv = [call for call in calls if call.startswith("uv pip install")]
    assert (len(by_uv), len(by_pip)) == {None: (0, 3), "exit 0": (3, 0), "exit 1": (1, 3)}[uv]
    line = {None: "pip cannot get uv", "exit 0": "half a minute", "exit 1": "uv could not install"}[uv]
    assert line in process.stdout
    hashed = [call for call in by_pip or by_uv if "requirements.lock" in call]
    assert len(hashed) == 1 and "--require-hashes" in hashed[0]


def test_a_failed_installation_keeps_its_exit_code(tmp_path: Path) -> None:
    program(tmp_path / "venv" / "bin" / "python", "exit 1")
    command = [sys.executable, str(INSTALL), str(tmp_path / "venv")]
    assert subprocess.run(command, env={"PATH": ""}).returncode == 1
