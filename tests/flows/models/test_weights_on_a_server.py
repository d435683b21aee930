"""Weights behind an MLflow server that stores files for its clients: who knows its address loads what is exported."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from flows.models.model_export import export
from tasks.tracking.mlflow_client import connect
from tests.flows.models.test_weights import ASKED, POLICY, REWARD, Registry
from tests.servers import MlflowServer, clean_environment
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

CONSUMER = """
import json, sys
import mlflow, torch
from transformers import pipeline

policy_uri, reward_uri, policy_folder, reward_folder, asked = sys.argv[1:]
asked = json.loads(asked)
greedy = {"do_sample": False, "max_new_tokens": 24}

policies = mlflow.transformers.load_model(policy_uri), pipeline("text-generation", policy_folder)
said = [each(asked, **greedy)[0]["generated_text"] for each in policies]
sampled = [(torch.manual_seed(3), each(asked))[1][0]["generated_text"] for each in policies]
scorers = mlflow.transformers.load_model(reward_uri), pipeline("text-classification", reward_folder)
scores = [each("my parcel", function_to_apply="none") for each in scorers]

def same(one, other):
    a, b = one.model.state_dict(), other.model.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

print(json.dumps({
    "said": said, "sampled": sampled, "scores": scores, "weights": [same(*policies), same(*scorers)],
    "scale": [each.model.config.score_scale for each in scorers],
    "generation": [each.model.generation_config.to_dict() for each in policies],
    "ours": sorted(set(sys.modules) & {"components", "tasks", "flows", "data_contracts"}),
}))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    folder = tmp_path / "server"
    folder.mkdir()
    server = MlflowServer(folder).start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")  # this machine may be busy; a run would try again
    try:
        yield server
    finally:
        server.kill()


def stored(server: MlflowServer) -> dict[str, tuple[int, int]]:
    """Size and time of writing of what the server holds of models, by path."""
    found = {path: path.stat() for path in server.artifacts.rglob("*") if path.is_file() and "/models/" in str(path)}
    return {path.relative_to(server.artifacts).as_posix(): (s.st_size, s.st_mtime_ns) for path, s in found.items()}


def weights(server: MlflowServer) -> list[str]:
    return [path for path in stored(server) if path.endswith("/model/model.safetensors")]


def test_whoever_knows_the_servers_address_loads_the_champion_and_its_reward_model_as_they_are_exported(
    server: MlflowServer, make_home: Any, tmp_path: Path
) -> None:
    there = Registry(make_home())
    assert weights(server) == [], "a candidate's are not copied"
    there.promote(2)
    before = stored(server)
    assert len(weights(server)) == 2
    there.versions.demote(POLICY, "1", "ada", "it echoes", 3)
    there.promote(4)
    there.register()
    assert stored(server) == before, "once each"
    assert not (there.home.path / "mlartifacts").exists(), "the server has them, not the home"

    folders = [tmp_path / "policy", tmp_path / "reward"]
    for stage, folder in zip(("ppo", "reward"), folders, strict=True):
        export(there.home.path, f"{there.home.run}/{stage}", folder, allow_failed=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked = [f"models:/{POLICY}@champion", f"models:/{REWARD}/1", *map(str, folders), json.dumps(ASKED)]
    done = subprocess.run(
        [sys.executable, "-c", CONSUMER, *asked], cwd=elsewhere, capture_output=True, text=True, timeout=PATIENCE * 120,
        env={**clean_environment(), "MLFLOW_TRACKING_URI": server.uri, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] == [True, True]
    for name in ("said", "sampled", "scores", "scale", "generation"):
        loaded, exported = found[name]
        assert loaded == exported, name
    assert found["said"][0][-1]["content"] and found["scale"][0]["scale"] == 2.0
    assert found["ours"] == [], "Tether is not needed to use its models"


def test_a_server_that_dies_before_the_description_leaves_no_champion_and_the_next_promotion_completes_it(
    server: MlflowServer, make_home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Registry(make_home())
    real = there.client.log_model_artifact

    def dies(*given: Any) -> None:
        server.kill()
        real(*given)

    monkeypatch.setattr(there.client, "log_model_artifact", dies)
    with pytest.raises(mlflow.MlflowException):
        there.promote(2)
    assert len(weights(server)) == 1
    server.start()
    there.client = connect(there.home.path)
    assert "champion" not in there.client.get_registered_model(POLICY).aliases
    with pytest.raises(mlflow.MlflowException):
        mlflow.transformers.load_model(f"models:/{POLICY}/1")
    there.promote(2)
    assert mlflow.transformers.load_model(f"models:/{POLICY}@champion").task == "text-generation"
