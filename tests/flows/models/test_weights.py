"""Weights in MLflow: its own loader gives the model that `tether export` writes, from one copy, whole or not at all."""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from transformers import pipeline

from components.base.errors import TetherError
from components.store.store import ArtifactStore
from flows.models.model_export import export
from tasks.result import Input
from tasks.runs.journal import Done, Sent
from tasks.tracking import registered_weights
from tasks.tracking.mlflow_client import connect, experiment
from tasks.tracking.model_links import Lineage
from tasks.tracking.model_versions import Versions
from tasks.tracking.registered_weights import Weights, wanted

POLICY, REWARD = "tether-policy", "tether-reward"
ASKED = [{"role": "user", "content": "my parcel is late"}]


class Registry:
    """The policy and the reward model of a run, registered, in the MLflow of its home."""

    def __init__(self, home: Any, which: Any = "champion") -> None:
        self.home, self.which, self.client = home, which, connect(home.path)
        self.sent = Sent(project="tether", experiment=experiment(self.client, home.path, "tether"))
        self.run = self.client.create_run(self.sent.experiment).info.run_id
        self.register()

    @property
    def versions(self) -> Versions:
        """With nothing remembered."""
        return Versions(self.client, Weights(self.client, self.home.path, self.which))

    def register(self) -> None:
        """As a run does, the first one or one that hits."""
        store, records, lineage = ArtifactStore(self.home.path), self.home.records, Lineage(self.client, self.sent, {})
        given = [Input(name="reward", digest=records["reward"].digest, path=self.home.path, stage="reward")]
        for stage, name in (("reward", REWARD), ("ppo", POLICY)):
            record = records[stage]
            inputs = given if stage == "ppo" else []
            done = Done(
                time=1, record=record, path=store.path(record), run=self.home.run, user="ada",
                step=0, verdicts=[], inputs=inputs, attachments={},
            )  # fmt: skip
            model = lineage.output_model(done, self.run)
            assert model is not None
            self.versions.register(done, name, model, self.run, {})

    def promote(self, time: int) -> None:
        self.versions.promote(POLICY, "1", "ada", "it is good", time)

    def files(self) -> dict[str, tuple[int, int]]:
        """Inode and time of writing of what MLflow holds of models, by path."""
        root = self.home.path / "mlartifacts" / "models"
        found = {path.relative_to(root).as_posix(): path.stat() for path in root.rglob("*") if path.is_file()}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}

    def weights(self) -> list[str]:
        return [name for name in self.files() if name.endswith("/model/model.safetensors")]


@pytest.fixture(scope="module")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database without anything in it: making one takes seconds."""
    home = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        connect(home)
    return home / "mlflow.db"


@pytest.fixture
def registry(make_home: Any, empty_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def make(*settings: str, **options: Any) -> Registry:
        home = make_home(*settings)
        shutil.copy(empty_mlflow, home.path)
        return Registry(home, **options)

    return make


def test_a_champion_answers_from_mlflow_as_its_exported_folder_does_and_is_copied_once(
    registry: Any, tmp_path: Path
) -> None:
    there = registry()
    assert there.weights() == [], "a candidate's are not copied"
    there.promote(2)
    before = there.files()
    assert len(there.weights()) == 2
    there.versions.demote(POLICY, "1", "ada", "it echoes", 3)
    there.promote(4)
    there.register()
    assert there.files() == before, "no second copy for a second promotion, or for a run that hits"

    export(there.home.path, f"{there.home.run}/ppo", tmp_path / "out", allow_failed=True)
    loaded = mlflow.transformers.load_model(f"models:/{POLICY}@champion")
    exported = pipeline("text-generation", str(tmp_path / "out"))
    greedy = {"do_sample": False, "max_new_tokens": 24}
    assert loaded(ASKED, **greedy) == exported(ASKED, **greedy)
    for name, value in exported.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    assert loaded.model.generation_config.to_dict() == exported.model.generation_config.to_dict()
    page = there.client.get_model_version(POLICY, "1").description
    assert f'mlflow.transformers.load_model("models:/{POLICY}/1")' in page

    export(there.home.path, f"{there.home.run}/reward", tmp_path / "reward", allow_failed=True)
    scorer = mlflow.transformers.load_model(f"models:/{REWARD}/1")
    its_folder = pipeline("text-classification", str(tmp_path / "reward"))
    assert scorer("my parcel", function_to_apply="none") == its_folder("my parcel", function_to_apply="none")
    assert scorer.model.config.score_scale == its_folder.model.config.score_scale


def test_a_copy_that_is_interrupted_leaves_no_champion_and_no_half_and_the_next_one_completes_it(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = registry()
    before = there.files()
    copy = registered_weights.copy_model

    def cut(artifact: Path, record: Any, out: Path, link: bool = False) -> None:
        copy(artifact, record, out, link)
        raise KeyboardInterrupt

    monkeypatch.setattr(registered_weights, "copy_model", cut)
    with pytest.raises(KeyboardInterrupt):
        there.promote(2)
    assert there.files() == before
    assert "champion" not in there.client.get_registered_model(POLICY).aliases
    monkeypatch.setattr(registered_weights, "copy_model", copy)
    monkeypatch.setattr(registered_weights, "_mlmodel", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        there.promote(2)
    with pytest.raises(mlflow.MlflowException, match="transformers"):
        mlflow.transformers.load_model(f"models:/{POLICY}/1")
    monkeypatch.undo()
    there.promote(2)
    assert mlflow.transformers.load_model(f"models:/{POLICY}@champion").task == "text-generation"


def test_who_may_change_policies_alone_promotes_one_though_its_reward_model_is_refused(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = registry()
    update, upload = there.client.update_model_version, there.client.set_logged_model_tags
    reward = there.client.get_model_version(REWARD, "1").source.removeprefix("models:/")

    def only_policies(name: str, *args: Any) -> Any:
        if name == REWARD:
            raise mlflow.MlflowException("Permission denied", error_code=PERMISSION_DENIED)
        return update(name, *args)

    def only_its_files(model: str, tags: Any) -> Any:
        if model == reward:
            raise mlflow.MlflowException("Permission denied", error_code=PERMISSION_DENIED)
        return upload(model, tags)

    monkeypatch.setattr(there.client, "update_model_version", only_policies)
    there.promote(2)
    assert there.client.get_registered_model(POLICY).aliases["champion"] in (1, "1")
    monkeypatch.setattr(there.client, "set_logged_model_tags", only_its_files)
    there.client.delete_logged_model_tag(reward, "tether.weights")
    assert there.versions.copy_weights(POLICY, "1") == ""


def test_all_and_none_are_taken_at_their_word_and_a_run_says_which(registry: Any) -> None:
    there = registry("mlflow.weights=all", which="all")
    assert wanted(there.home.path, there.home.run) == "all"
    assert wanted(there.home.path, "a-run-that-is-gone") == "champion"
    assert len(there.weights()) == 2
    none = Versions(there.client, Weights(there.client, there.home.path, "none"))
    assert none.copy_weights(POLICY, "1") == ""


def test_a_store_that_lost_the_model_does_not_stop_a_promotion_which_says_so(
    registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    there = registry(which="none")
    there.which = "champion"
    record = there.home.records["ppo"]
    (ArtifactStore(there.home.path).objects / record.files["model/model.safetensors"]).unlink()
    assert "does not have them" in there.versions.copy_weights(POLICY, "1")
    there.promote(2)
    assert there.client.get_registered_model(POLICY).aliases["champion"] in (1, "1")
    assert f"the weights of {POLICY}/1 are not in MLflow" in caplog.text
    assert "load_model" not in there.client.get_model_version(POLICY, "1").description


def test_a_store_whose_file_is_another_than_its_record_says_gives_mlflow_nothing(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = registry()

    def damaged(*_: Any, **__: Any) -> None:
        raise TetherError("model.safetensors was not copied as it is in the store.")

    monkeypatch.setattr(registered_weights, "copy_model", damaged)
    assert "was not copied" in there.versions.copy_weights(POLICY, "1")
    assert there.weights() == []


def test_mlflows_client_copies_weights_with_the_description_last(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, sent = registry(), []
    real_many, real_one = there.client.log_model_artifacts, there.client.log_model_artifact
    monkeypatch.setattr(there.client, "log_model_artifacts", lambda *args: (sent.append("parts"), real_many(*args))[1])
    monkeypatch.setattr(there.client, "log_model_artifact", lambda *args: (sent.append("last"), real_one(*args))[1])
    there.promote(2)
    assert sent == ["parts", "last"] * 2
    assert mlflow.transformers.load_model(f"models:/{POLICY}@champion").task == "text-generation"
    held = [there.home.path / "mlartifacts" / "models" / name for name in there.weights()]
    assert len(held) == 2 and not any(path.is_symlink() for path in held), "copies, not links into the store"
    with sqlite3.connect(there.home.path / "mlflow.db") as database:
        (kept,) = database.execute("select count(*) from logged_model_tags where tag_key = 'tether.weights'").fetchone()
    assert kept == 2
