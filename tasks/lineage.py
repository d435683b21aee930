"""What MLflow shows of where a model came from: external models, datasets, versions, and a table of links."""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.result import Source, StageResult

logger = logging.getLogger(__name__)

MODELS = {"sft": "sft", "reward": "reward", "ppo": "policy"}
"""Stage to the kind of model it makes; registered as PROJECT-kind."""

DIGEST_SHOWN = 32
"""MLflow's dataset digests hold at most 36 characters; the whole is in a tag."""


class Lineage:
    """Edges between runs, models and datasets of one experiment."""

    def __init__(self, client: Any, experiment_id: str, project: str) -> None:
        self._client = client
        self._experiment = experiment_id
        self._project = project

    def model_name(self, stage: str) -> str:
        """The registered model of a stage."""
        return f"{self._project}-{MODELS[stage]}"

    def output_model(self, result: StageResult, run: str) -> str | None:
        """The LoggedModel of what a stage made (found by digest, else made), or None for a stage that makes none."""
        if result.name not in MODELS:
            return None
        tags = {f"lineage.{name}_digest": digest for name, digest in result.lineage.items()}
        tags |= {"tether.key": result.key, "tether.stage": result.name, "tether.run": result.record.run}
        return self._model(self.model_name(result.name), MODELS[result.name], result.path, result.digest, run, tags)

    def link_inputs(self, result: StageResult, run: str) -> list[tuple[str, str, str]]:
        """Write a run's inputs: models as models, the rest as datasets. Returns (name, digest, link) rows."""
        from mlflow.entities import LoggedModelInput

        models, datasets, rows = [], [], []
        for name, given in result.inputs.items():
            if self._is_model(name, given):
                model = self._input_model(name, given)
                models.append(LoggedModelInput(model_id=model))
                rows.append((name, given.digest, self.model_link(model)))
            else:
                datasets.append(_dataset(name, given.digest, given.path, name))
                rows.append((name, given.digest, ""))
        if result.name == "validate":
            datasets.append(_dataset("data", result.digest, result.path, "output"))
        self._client.log_inputs(run, datasets=datasets, models=models or None)
        return rows

    def link_output(self, run: str, model: str) -> None:
        """Write that a run gave a model (one model may be the output of several runs: of those that hit)."""
        from mlflow.entities import LoggedModelOutput

        self._client.log_outputs(run, [LoggedModelOutput(model, step=0)])

    def register(self, result: StageResult, model: str, run: str, alias: str) -> str:
        """The version of the registered model that holds `result` (made where new), with `alias` pointing at it."""
        name = self.model_name(result.name)
        found = self.version(result.name, result.digest)
        if found is None:
            tags = {f"lineage.{key}_digest": digest for key, digest in result.lineage.items()}
            tags |= {"lineage.digest": result.digest, "tether.key": result.key}
            if not self._client.search_registered_models(f"name='{name}'"):
                self._client.create_registered_model(name)
            text = f"Made by run `{result.record.run}`, artifact `{result.digest}`.\n\n{self.table(result, model)}"
            made = self._client.create_model_version(
                name, f"models:/{model}", run, tags=tags, description=text, model_id=model
            )
            found = str(made.version)
            # What the model's own page shows its versions from.
            self._client.set_logged_model_tags(
                model, {"mlflow.modelVersions": json.dumps([{"name": name, "version": made.version}])}
            )
        waived = ", ".join(verdict.name for verdict in result.verdicts if verdict.waived)
        self._client.set_model_version_tag(name, found, "tether.waived", waived or "none")
        self._client.set_registered_model_alias(name, alias, found)
        return found

    def version(self, stage: str, digest: str) -> str | None:
        """The newest registered version with an artifact's digest, or None."""
        found = self._client.search_model_versions(
            f"name='{self.model_name(stage)}' and tags.`lineage.digest`='{digest}'"
        )
        return max((str(each.version) for each in found), key=int, default=None)

    def promote(self, result: StageResult) -> str | None:
        """Point the policy's alias `champion` at the version that human_eval judged; None where there is none."""
        digest = result.lineage.get("ppo")
        version = self.version("ppo", digest) if digest else None
        if version is None:
            return None
        name = self.model_name("ppo")
        self._client.set_model_version_tag(name, version, "tether.judges", str(_judges(result)))
        self._client.set_registered_model_alias(name, "champion", version)
        return version

    def table(self, result: StageResult, model: str | None, rows: Iterable[tuple[str, str, str]] | None = None) -> str:
        """Markdown: inputs and output of a stage, linked."""
        lines = ["| | what | digest |", "|---|---|---|"]
        for name, digest, link in rows if rows is not None else self._rows(result):
            lines.append(f"| input | {f'[{name}]({link})' if link else name} | `{digest[:16]}` |")
        shown = f"[{self.model_name(result.name)}]({self.model_link(model)})" if model else result.name
        lines.append(f"| output | {shown} | `{result.digest[:16]}` |")
        return "\n".join(lines)

    def model_link(self, model: str) -> str:
        """Where MLflow's page of a model is, from its root."""
        return f"#/experiments/{self._experiment}/models/{model}?workflowType=machine_learning"

    def run_link(self, run: str) -> str:
        """Where MLflow's page of a run is, from its root."""
        return f"#/experiments/{self._experiment}/runs/{run}?workflowType=machine_learning"

    def _rows(self, result: StageResult) -> list[tuple[str, str, str]]:
        rows = []
        for name, given in result.inputs.items():
            link = self.model_link(self._input_model(name, given)) if self._is_model(name, given) else ""
            rows.append((name, given.digest, link))
        return rows

    def _is_model(self, name: str, given: StageResult | Source) -> bool:
        return given.name in MODELS if isinstance(given, StageResult) else name == "base"

    def _input_model(self, name: str, given: StageResult | Source) -> str:
        if isinstance(given, StageResult):
            tags = {f"lineage.{key}_digest": digest for key, digest in given.lineage.items()}
            return self._model(self.model_name(given.name), MODELS[given.name], given.path, given.digest, None, tags)
        return self._model(f"{self._project}-{name}", name, given.path, given.digest, None, {})

    def _model(self, name: str, kind: str, path: Path, digest: str, run: str | None, tags: Mapping[str, str]) -> str:
        found = self._client.search_logged_models([self._experiment], f"tags.`lineage.digest`='{digest}'")
        if found:
            return found[0].model_id
        import mlflow

        made = mlflow.create_external_model(
            name=name,
            source_run_id=run,
            model_type=kind,
            params={"artifact_uri": path.resolve().as_uri(), "artifact_digest": digest},
            tags={**tags, "lineage.digest": digest},
            experiment_id=self._experiment,
        )
        return made.model_id


def log_attachments(client: Any, run: str, files: Mapping[str, Path]) -> None:
    """Log files under their own names below `attachments/`."""
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

    dataset = Dataset(
        name=name,
        digest=digest[:DIGEST_SHOWN],
        source_type="local",
        source=json.dumps({"uri": path.resolve().as_uri()}),
    )
    tags = [InputTag("mlflow.data.context", context), InputTag("lineage.digest", digest)]
    return DatasetInput(dataset=dataset, tags=tags)


def _judges(result: StageResult) -> Any:
    return result.record.job.get("human_eval", {}).get("judges", "unknown")
