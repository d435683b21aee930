"""Backup, destroy, restore: the same bytes, and a rerun hits. With servers: tests/test_operations.py."""

import gc
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from tasks.tracking.registry import versions
from tests.conftest import Tether
from tests.faults.homes import Home, Moment

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "operations" / "backup.md").read_text()


def test_after_backup_destruction_and_restore_lineage_runs_and_registry_are_the_same_and_a_rerun_hits(
    tether_here: Tether, whole: tuple[Home, list[Moment]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "TETHER_STORE", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    home = whole[0].copy(tmp_path / "home").path
    (run,) = (path.name for path in (home / "runs").iterdir())
    asked = (("runs", "--json"), ("lineage", run, "--json"), ("lineage", "tether-policy/1", "--json"),
             ("status", "--json"), ("status", "--why", "--json"), ("store", "ls", "--json"),
             ("export", run, "--card"))  # fmt: skip

    def told() -> list[Any]:
        done = [tether_here(*command, home=home) for command in asked]
        assert [each.returncode for each in done] == [0] * len(asked), [each.stderr for each in done]
        return [each.stdout for each in done] + [[each._asdict() for each in versions(home)]]

    before = told()
    assert json.loads(before[0])[0]["run"] == run and before[-1], "models are registered"
    backup, restore = (
        block.replace("/backups", str(tmp_path)).split() for block in re.findall(r"```sh\ntether (.*)\n```", PAGE)
    )
    assert (backup[0], restore[0]) == ("backup", "restore")
    assert tether_here(*backup, home=home).returncode == 0
    shutil.rmtree(home)
    for each in gc.get_objects():  # MLflow's, of the commands before in this process, has the lost file open
        if issubclass(type(each), Engine):  # asks no object for its class: some warn then
            each.dispose()
    done = tether_here(*restore, home=home)
    assert done.returncode == 0, done.stderr
    assert told() == before
    Home(home).check()
    again = tether_here("run", "tiny", home=home)
    assert again.returncode == 0 and "Nothing was computed: every stage was found in the store." in again.stdout
    assert "MLflow does not have all" not in again.stdout and len(versions(home)) == len(before[-1])
