"""What MLflow shows of where a model came from: external models, datasets, and a table of links."""

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
from tasks.tracking.pages import NoteRow

MODELS = {"sft": "sft", "reward": "reward", "ppo": "policy"}
"""Stage to the kind of model it makes (`model_name`)."""

JUDGE = "judge"
"""The kind of model that the sub-stage `reward.judge` makes, and what PPO calls it: no version of it is registered."""

MODEL_SOURCES = ("base", "previous_reward")
"""Inputs that are models and that no stage of the run made."""

READ_BY = dict.fromkeys(("data", "judge_data", *NAMED), "validate") | {"sample": "human_eval"}
"""Further inputs that are no models, and the stage whose page says more of them."""

DIGEST_SHOWN = 32
"""MLflow's dataset digests hold at most 36 characters; the whole is in a tag."""


def model_name(project: str, kind: str) -> str:
    """PROJECT-KIND, as models are called; what MLflow allows in an experiment's name but not in theirs becomes `-`."""
    prefix = re.sub(r"[^\w-]+", "-", project).strip("-")
    return f"{prefix or 'tether'}-{kind}"


class Lineage:
    """Edges between runs, models and datasets of one experiment; `sent` is of the run that is recorded."""

    def __init__(self, client: Any, sent: Sent) -> None:
        assert sent.experiment is not None
        self._client = client
        self._experiment = sent.experiment
        self._project = sent.project
        self._stages = sent.stages

    def model_name(self, stage: str) -> str:
        """Return the registered model of a stage."""
        return model_name(self._project, MODELS[stage])

    def output_model(self, done: Done, run: str) -> str | None:
        """Return the LoggedModel of what a stage made, or None for a stage that makes none."""
        kind = self._kind(done)
        if kind is None:
            return None
        record = done.record
        tags = {**done.tags, "tether.key": record.key, "tether.stage": done.shown, "tether.run": record.run}
        return self._model(kind, done.path, record.digest, run, tags)

    @staticmethod
    def _kind(done: Done) -> str | None:
        """Return the kind of model that a (sub-)stage makes, or None."""
        return JUDGE if done.record.stage == "reward.judge" else MODELS.get(done.shown) if done.final else None

    def link_inputs(self, done: Done, run: str, parent: str) -> None:
        """Write a run's inputs, models as models, the rest as datasets; external inputs are the parent run's too."""
        from mlflow.entities import LoggedModelInput

        models, datasets, sources = [], [], []
        for given in done.inputs:
            if given.stage in MODELS or (not given.stage and given.name in MODEL_SOURCES):
                kind = JUDGE if given.name == JUDGE else MODELS.get(given.stage, given.name)
                model = self._model(kind, given.path, given.digest, None, lineage_tags(given.lineage))
                models.append(LoggedModelInput(model_id=model))
            else:
                datasets.append(_dataset(given.name, given.digest, given.path, given.name))
                sources += [] if given.stage else [datasets[-1]]
        if done.shown == "validate":
            made = "data" if done.final else "judge_data"
            datasets.append(_dataset(made, done.record.digest, done.path, "output"))
            sources.append(datasets[-1])
        self._client.log_inputs(run, datasets=datasets, models=models or None)
        if sources:
            self._client.log_inputs(parent, datasets=sources)

    def link_output(self, run: str, model: str) -> None:
        """Write that a run gave a model (one model may be the output of several runs: of those that hit)."""
        from mlflow.entities import LoggedModelOutput

        outputs = self._client.get_run(run).outputs
        if outputs is not None and any(each.model_id == model for each in outputs.model_outputs):
            return  # a second time is refused
        self._client.log_outputs(run, [LoggedModelOutput(model, step=0)])

    def rows(self, done: Done, model: str | None) -> list[NoteRow]:
        """Return a stage's inputs, direct and upstream, and the `model` that it made, with links to their pages."""
        rows = []
        for given in done.inputs:
            named = given.name if given.stage else f"{given.name} ({given.path.name})"
            rows.append(NoteRow("input", named, given.digest, self._link(given.name, given.digest, given.stage)))
        direct = {given.digest for given in done.inputs}
        for name, digest in done.lineage.items():
            if digest not in direct:
                rows.append(NoteRow("further upstream", name, digest, self._link(name, digest)))
        kind = self._kind(done)
        made = model_name(self._project, kind) if kind is not None else done.shown
        name, link = (made, self.model_link(model)) if model else (done.shown, "")
        return [*rows, NoteRow("output", name, done.record.digest, link)]

    def find_model(self, digest: str) -> str | None:
        """Return the LoggedModel with an artifact's digest, or None."""
        return next((model.model_id for model in self._models(digest) if str(model.status) == "READY"), None)

    def _models(self, digest: str) -> list[Any]:
        return self._client.search_logged_models([self._experiment], f"tags.`lineage.digest`='{digest}'")

    def _link(self, name: str, digest: str, stage: str = "") -> str:
        """Return the page of an input: a model's own, else that of this run's stage that made it; empty where there is
        none.

        Further upstream the stage is not known, and goes by what the reader calls the input.
        """
        stage = stage or READ_BY.get(kind_of(name), name)
        if stage in MODELS or name in MODEL_SOURCES:
            model = self.find_model(digest)
            return self.model_link(model) if model else ""
        return run_link(self._experiment, self._stages[stage]) if stage in self._stages else ""

    def model_link(self, model: str) -> str:
        """Where MLflow's page of a model is, from its root."""
        return f"#/experiments/{self._experiment}/models/{model}?workflowType=machine_learning"

    def _model(self, kind: str, path: Path, digest: str, run: str | None, tags: Mapping[str, str]) -> str:
        """Return the LoggedModel of an artifact: found by its digest, else made."""
        for model in self._models(digest):
            if str(model.status) == "READY":
                return model.model_id
            # Its maker was killed before it was whole; nothing can be registered from it.
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
        return made.model_id


def log_attachments(client: Any, run: str, files: Mapping[str, Path]) -> None:
    """Log files under their own names below `attachments/`; one that the store has lost since is left out."""
    files = {name: path for name, path in files.items() if path.is_file()}
    if not files:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        client.log_artifacts(run, folder, "attachments")


def _dataset(name: str, digest: str, path: Path, context: str) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": path.resolve().as_uri()})
    dataset = Dataset(name=name, digest=digest[:DIGEST_SHOWN], source_type="local", source=source)
    tags = [InputTag("mlflow.data.context", context), InputTag("lineage.digest", digest)]
    return DatasetInput(dataset=dataset, tags=tags)
