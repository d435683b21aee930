"""Imported results are marked, and no run promotes what rests on them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from components.store.store import ArtifactStore
from flows.models.alias_changes import promoted
from tasks.retention.run_archive import export_run, import_results


def test_only_a_person_promotes_what_rests_on_an_import(
    pipeline: Any, client: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_mlflow: Path
) -> None:
    ctx, _ = pipeline()
    export_run(ArtifactStore(home), ctx.run, tmp_path / "run.tar")
    shutil.rmtree(home)
    shutil.copy(empty_mlflow, tmp_path / "fresh.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'fresh.db'}")  # it keeps the old one open
    import_results(ArtifactStore(home), tmp_path / "run.tar")
    again, results = pipeline()
    assert all(result.cached and result.record.imported for result in results.values())
    mlflow = client()
    assert mlflow.get_registered_model("tether-policy").aliases == {}
    found = mlflow.get_model_version("tether-policy", "1")
    assert found.tags["tether.imported"] == again.run and "**Imported**" in found.description
    _, changed = pipeline(value=2)  # computed here, from imported data and sft
    assert not changed["ppo"].cached and changed["ppo"].imported
    assert mlflow.get_registered_model("tether-policy").aliases == {}
    assert mlflow.get_registered_model("tether-sft").aliases == {}
    (home / "mlflow.db").touch()  # without one there would be no registry to ask
    assert promoted(home, "tether-policy/2", "ada", "looked at it") == "tether-policy/2 is champion now."
    assert mlflow.get_registered_model("tether-policy").aliases == {"champion": 2}
