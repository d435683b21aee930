"""Which commit runs, and whether it was changed since."""

import subprocess
from pathlib import Path

from components.keys.code_version import code_version


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_change_to_our_packages_is_dirty_and_one_beside_them_is_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("flows", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = code_version(tmp_path)
    assert (clean["commit"], clean["dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "docs" / "file.py").write_text("x = 2\n")
    code_version.cache_clear()
    assert code_version(tmp_path)["dirty"] is False
    (tmp_path / "flows" / "file.py").write_text("x = 2\n")
    code_version.cache_clear()
    assert code_version(tmp_path)["dirty"] is True


def test_a_folder_within_somebody_elses_checkout_is_none_of_it(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "installed").mkdir()
    found = code_version(tmp_path / "installed")
    assert (found["commit"], found["dirty"]) == (None, None)
