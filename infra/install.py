"""Install Tether into a virtual environment: by uv, which takes seconds, and by pip where uv cannot.

    python infra/install.py .venv

torch comes first, alone and without a hash: an index has a build of it for each kind of GPU. All else must have a hash
of infra/requirements.lock. uv is the one on the PATH, or pip puts the one of infra/uv.lock into VENV/uv.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

INFRA = Path(__file__).parent
TORCH = "torch==2.13.0"
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX", "cert": "SSL_CERT_FILE", "trusted-host": "UV_INSECURE_HOST", "proxy": "ALL_PROXY",
}  # fmt: skip
"""pip's options of where packages come from, and the variables that tell uv the same."""


def uv_environment(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which uv looks for packages where pip does, since uv does not read pip's configuration.

    Args:
        pip_config: what `pip config list` prints, such as `global.find-links='/opt/wheels'`.
        environment: variables of this process; uv's own win.
    """
    values: dict[str, str] = {}
    pairs = [line.partition("=")[::2] for line in pip_config.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):  # as pip reads them: a later one replaces an earlier one
        for name, value in pairs:
            if name.startswith(section):
                values[name.removeprefix(section)] = str(ast.literal_eval(value))
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip: the best version of all indexes
    for name, variable in UV_NAMES.items():
        if name in values:
            separator = "," if name == "find-links" else " "
            variables[variable] = separator.join(values[name].split())
    return variables | dict(environment)


def uv_program(python: str, folder: Path) -> str | None:
    """Return the path of uv, which pip installs into `folder` if there is none; None where pip cannot."""
    if on_path := shutil.which("uv"):
        return on_path
    program = folder / "bin" / "uv"
    if not program.exists():
        options = ["--no-deps", "--require-hashes", "--retries", "1", "--target", str(folder)]
        subprocess.run([python, *PIP, *options, "--requirement", str(INFRA / "uv.lock")], stderr=subprocess.DEVNULL)
    return str(program) if program.exists() else None


def packages() -> list[list[str]]:
    """Return the arguments of the three installations, which pip and uv share."""
    return [
        ["--constraint", str(INFRA / "constraints.txt"), TORCH],
        ["--no-deps", "--require-hashes", "--requirement", str(INFRA / "requirements.lock")],
        ["--no-deps", "--no-build-isolation", "--editable", str(INFRA.parent)],
    ]


def main() -> int:
    """Install, and return the exit code."""
    folder = Path(sys.argv[1])
    python = str(folder / "bin" / "python")
    print(f"Installing Tether into {folder}: 2 GB, half a minute with uv, some minutes with pip.", flush=True)
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if uv := uv_program(python, folder / "uv"):
        config = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
        environment = uv_environment(config, os.environ)
        command = [uv, "pip", "install", "--quiet", "--python", python]
        if all(subprocess.run([*command, *each], env=environment).returncode == 0 for each in packages()):
            return 0
        print("uv could not install all of it; pip does so now, which takes some minutes.", flush=True)
    else:
        print("pip cannot get uv here and installs by itself, which takes some minutes.", flush=True)
    return next((code for each in packages() if (code := subprocess.run([python, *PIP, *each]).returncode)), 0)


if __name__ == "__main__":
    sys.exit(main())
