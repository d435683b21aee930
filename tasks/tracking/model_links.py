"""Show in MLflow what a model was made of: external models, datasets, and a table of links."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.data.inputs import NAMED, kind_of
from tasks.runs.journal import Done, Sent, lineage_tags
from tasks.tracking.address import run_link
from tasks.tracking.mlflow_notes import NoteRow

MODELS = {"sft": "sft", "reward": "reward", "ppo": "policy"}
"""Maps a stage to the kind of model it trains (`model_name`)."""

JUDGE = "judge"
"""The kind of model that the sub-stage `reward.judge` trains, and PPO's name for it. It is never registered."""

MODEL_SOURCES = ("base", "previous_reward")
"""Inputs that are models from outside the run."""

READ_BY = dict.fromkeys(("data", "judge_data", *NAMED), "validate") | {"sample": "human_eval"}
"""Maps further inputs, which are not models, to the stage whose page shows more of them."""

DIGEST_SHOWN = 32
"""Characters of a dataset's digest. MLflow allows at most 36; a tag has the whole digest."""


def model_name(project: str, kind: str) -> str:
    prefix = re.sub(r"[^\w-]+", "-", project).strip("-")
    return f"{prefix or 'tether'}-{kind}"


def _kind(done: Done) -> str | None:
    """Return the kind of model that a stage makes; None if it makes none."""
    return JUDGE if done.record.stage == "reward.judge" else MODELS.get(done.group) if done.ends_group else None


class Lineage:
    """Edges between runs, models and datasets of one experiment."""

    def __init__(self, client: Any, sent: Sent, models: dict[str, str]) -> None:
        """`models`: ids of LoggedModels by the digests of their artifacts; those that are looked for are added."""
        assert sent.experiment is not None
        self._known = models
        self._client = client
        self._experiment = sent.experiment
        self._project = sent.project
        self._stages = sent.stages

    def output_model(self, done: Done, run: str) -> str | None:
        """Return the id of the LoggedModel for a stage's result; None if the stage makes no model."""
        record, kind = done.record, _kind(done)
        if kind is None:
            return None
        tags = {**done.tags, "tether.key": record.key, "tether.stage": done.group, "tether.run": record.run}
        return self._model(kind, done.path, record.digest, run, tags)

    def link_inputs(self, done: Done, run: str, parent: str) -> None:
        """Log a run's inputs, models as models and the rest as datasets. The parent run gets external datasets too."""
        from mlflow.entities import LoggedModelInput

        models, datasets, sources = [], [], []
        for source in done.inputs:
            if source.stage in MODELS or (not source.stage and source.name in MODEL_SOURCES):
                kind = JUDGE if source.name == JUDGE else MODELS.get(source.stage, source.name)
                model = self._model(kind, source.path, source.digest, None, lineage_tags(source.lineage))
                models.append(LoggedModelInput(model_id=model))
            else:
                datasets.append(_dataset(source.name, source.digest, source.path, source.name, source.hub))
                sources += [] if source.stage else [datasets[-1]]
        if done.group == "validate":
            made = "data" if done.ends_group else "judge_data"
            datasets.append(_dataset(made, done.record.digest, done.path, "output"))
            sources.append(datasets[-1])
        self._client.log_inputs(run, datasets=datasets, models=models or None)
        if sources:
            self._client.log_inputs(parent, datasets=sources)

    def link_output(self, run: Any, model: str) -> None:
        """Log that a run of MLflow produced a model. Several runs can have the same model, because of hits."""
        from mlflow.entities import LoggedModelOutput

        if run.outputs is not None and any(output.model_id == model for output in run.outputs.model_outputs):
            return  # MLflow refuses a second time
        self._client.log_outputs(run.info.run_id, [LoggedModelOutput(model, step=0)])

    def rows(self, done: Done, model: str | None) -> list[NoteRow]:
        """Return a stage's direct and upstream inputs, and the `model` it made, with links to their pages."""
        rows = []
        for source in done.inputs:
            named = source.name if source.stage else f"{source.name} ({source.hub or source.path.name})"
            rows.append(NoteRow("input", named, source.digest, self._link(source.name, source.digest, source.stage)))
        direct = {source.digest for source in done.inputs}
        for name, digest in done.lineage.items():
            if digest not in direct:
                rows.append(NoteRow("further upstream", name, digest, self._link(name, digest)))
        kind = _kind(done)
        made = model_name(self._project, kind) if kind is not None else done.group
        name, link = (made, self.model_link(model)) if model else (done.group, "")
        return [*rows, NoteRow("output", name, done.record.digest, link)]

    def find_model(self, digest: str) -> str | None:
        """Return the id of the LoggedModel with an artifact's digest; None if there is none."""
        if digest not in self._known:
            ready = [model.model_id for model in self._models(digest) if str(model.status) == "READY"]
            if not ready:
                return None
            self._known[digest] = ready[0]
        return self._known[digest]

    def _models(self, digest: str) -> list[Any]:
        return self._client.search_logged_models([self._experiment], f"tags.`lineage.digest`='{digest}'")

    def _link(self, name: str, digest: str, stage: str = "") -> str:
        """Return an input's page. For upstream inputs the stage is not known, and is derived from the input's name."""
        stage = stage or READ_BY.get(kind_of(name), name)
        if stage in MODELS or name in MODEL_SOURCES:
            model = self.find_model(digest)
            return self.model_link(model) if model else ""
        return run_link(self._experiment, self._stages[stage]) if stage in self._stages else ""

    def model_link(self, model: str) -> str:
        """Return the address of a model's page, relative to MLflow's root."""
        return f"#/experiments/{self._experiment}/models/{model}?workflowType=machine_learning"

    def _model(self, kind: str, path: Path, digest: str, run: str | None, tags: Mapping[str, str]) -> str:
        if (existing := self.find_model(digest)) is not None:
            return existing
        for model in self._models(digest):
            # Its creator was killed before it was complete, so nothing can be registered from it.
            self._client.delete_logged_model(model.model_id)
        import mlflow

        made = mlflow.create_external_model(
            name=model_name(self._project, kind),
            source_run_id=run,
            model_type=kind,
            params={"artifact_uri": path.resolve().as_uri(), "artifact_digest": digest},
            tags={**tags, "lineage.digest": digest},
            experiment_id=self._experiment,
        )
        self._known[digest] = made.model_id
        return made.model_id


def log_attachments(client: Any, run: str, files: Mapping[str, Path]) -> None:
    """Log files under their names in `attachments/`; files that are no longer in the store are left out."""
    files = {name: path for name, path in files.items() if path.is_file()}
    if not files:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        client.log_artifacts(run, folder, "attachments")


def _dataset(name: str, digest: str, path: Path, context: str, hub: str = "") -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": path.resolve().as_uri()})
    dataset = Dataset(name=name, digest=digest[:DIGEST_SHOWN], source_type="local", source=source)
    tags = [InputTag("mlflow.data.context", context), InputTag("lineage.digest", digest)]
    if hub:
        tags.append(InputTag("tether.hub", hub))
    return DatasetInput(dataset=dataset, tags=tags)
