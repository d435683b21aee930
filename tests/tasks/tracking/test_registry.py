import mlflow
import pytest

from components.base.errors import UserError
from tasks.tracking.registry import find_version, versions


def test_a_registry_in_another_sqlite_file_than_the_homes_is_asked_and_none_is_made(tmp_path, monkeypatch):
    elsewhere = tmp_path / "team" / "runs of us.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{elsewhere}?timeout=60")
    assert versions(tmp_path / "home") == [] and not elsewhere.exists(), "a look makes no database"
    elsewhere.parent.mkdir()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{elsewhere}")
    client.create_registered_model("tether-policy")
    client.create_model_version("tether-policy", "file:///nowhere", tags={"lineage.digest": "abc"})
    assert [each.digest for each in versions(tmp_path / "home")] == ["abc"]
    assert find_version(tmp_path / "home", "tether-policy/1").digest == "abc"
    elsewhere.write_text("no database")
    with pytest.raises(UserError, match=r"runs of us\.db is damaged"):
        versions(tmp_path / "home")
