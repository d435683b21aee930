"""Store weights of registered models in MLflow, where `mlflow.transformers.load_model` finds them.

A model's artifacts in MLflow:

model/       what `tether export` writes, without card and lineage
components/  the tokenizer, where MLflow looks for it
MLmodel      written last: a model that has it is complete

A model is one artifact in the store, so one copy serves all its versions and all runs that reuse it.
"""

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from components.base.errors import TetherError, UserError
from components.store.records import Record
from components.store.store import ArtifactStore, Miss
from tasks.model_folder import SCALE, copy_model, place_of
from tasks.runs.config import run_values

Which = Literal["champion", "all", "none"]

TAG = "tether.weights"
"""A tag of a model: the digest of the artifact whose weights MLflow has completely."""
_EXTERNAL = "mlflow.model.isExternal"
_TIMEOUT, _PATIENT = "MLFLOW_HTTP_REQUEST_TIMEOUT", "600"
"""Seconds that a server may take to store a file of weights; other calls get a few seconds."""
_MODEL, _TOKENIZER = "model", "tokenizer"


def wanted(home: Path, run: str) -> Which:
    """Return the run's option `mlflow.weights`, or the default if run or option is missing."""
    with suppress(UserError):
        group = run_values(home, run).get("mlflow")
        if isinstance(group, dict) and group.get("weights") in ("all", "none"):
            return group["weights"]  # type: ignore[return-value]
    return "champion"


class Weights:
    """Copies weights from a home's store into its MLflow."""

    def __init__(self, client: Any, home: Path, which: Which) -> None:
        self._client, self._home, self.which = client, home, which

    def has(self, model: str) -> bool:
        tags = self._client.get_logged_model(model).tags
        return TAG in tags and tags[TAG] == tags.get("lineage.digest", "")

    def put(self, model: str) -> str:
        """Copy the weights of a LoggedModel into MLflow, which does not have them (`has`).

        If the call is interrupted, MLflow has no description that `load_model` accepts, and the next call continues.

        Returns:
            Why MLflow can't have them; empty if it has them.

        Raises:
            Exception: MLflow does not answer or refuses, or the disk is full.
        """
        logged = self._client.get_logged_model(model)
        digest = logged.tags.get("lineage.digest", "")
        store = ArtifactStore(self._home)
        record = store.lookup(logged.tags["tether.key"], digest) if "tether.key" in logged.tags else Miss("no key")
        if isinstance(record, Miss):
            return f"the store of this home does not have them ({record.reason})"
        if "config.json" not in map(place_of, record.files):
            return "the artifact holds no model of transformers"
        try:
            self._upload(logged, store.path(record), record)
        except TetherError as error:
            return str(error)
        if _EXTERNAL in logged.tags:
            self._client.delete_logged_model_tag(model, _EXTERNAL)
        self._client.set_logged_model_tags(model, {TAG: digest})
        return ""

    def _upload(self, model: Any, artifact: Path, record: Record) -> None:
        """Copy with MLflow's client, without a further copy of the weights here."""
        with tempfile.TemporaryDirectory() as folder, _patient():
            parts = Path(folder) / "parts"
            (parts / _MODEL).mkdir(parents=True)
            copy_model(artifact, record, parts / _MODEL, link=True)
            _copy_tokenizer(parts / _MODEL, parts / "components" / _TOKENIZER)
            address = urlparse(model.artifact_location)
            if address.scheme in ("", "file"):  # what an interrupted copy left is write-protected, as the store's files
                for name in os.listdir(parts):
                    shutil.rmtree(Path(unquote(address.path)) / name, ignore_errors=True)
            self._client.log_model_artifacts(model.model_id, str(parts))
            last = Path(folder) / "MLmodel"
            last.write_text(_mlmodel(model, record, parts / _MODEL), encoding="utf-8")
            self._client.log_model_artifact(model.model_id, str(last))


def _copy_tokenizer(model: Path, out: Path) -> None:
    """Copy everything that `AutoTokenizer` reads from a model's folder: all files except weights and sampling."""
    out.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name not in ("generation_config.json", SCALE):
            shutil.copyfile(file, out / file.name)


def _mlmodel(model: Any, record: Record, folder: Path) -> str:
    """Return MLflow's description of a model for `load_model`, with the transformers classes that read the folder."""
    from mlflow.models import Model

    rewards = record.stage == "reward" or (folder / SCALE).is_file()
    task, kind = ("text-classification", "SequenceClassification") if rewards else ("text-generation", "CausalLM")
    described = Model(
        artifact_path=model.artifact_location,
        model_uuid=model.model_id,
        model_id=model.model_id,
        run_id=model.source_run_id,
        utc_time_created=record.started,
        metadata={"tether.digest": record.digest, "tether.key": record.key},
    )
    described.add_flavor(
        "transformers",
        transformers_version=importlib.metadata.version("transformers"),
        task=task,
        instance_type="TextClassificationPipeline" if rewards else "TextGenerationPipeline",
        source_model_name=model.name,
        pipeline_model_type=f"AutoModelFor{kind}",
        model_binary=_MODEL,
        components=[_TOKENIZER],
        tokenizer_type="AutoTokenizer",
        code=None,
    )
    return str(described.to_yaml())


@contextmanager
def _patient() -> Iterator[None]:
    """Give a server longer to store a file, unless the user has set MLflow's timeout."""
    before = os.environ[_TIMEOUT]
    if before == "3":
        os.environ[_TIMEOUT] = _PATIENT
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before
