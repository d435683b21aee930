"""`tether eval`: evaluate any language model on tasks and probes, as a run's stage `evaluation` does."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.nested import group
from components.base.observe import Observe
from components.base.text import markdown
from components.data.inputs import kind_of
from components.gates.gate_text import number
from components.models.runtime import activate
from components.store.graph import Graph
from components.store.store import ArtifactStore
from flows.config.profiles import Override, apply_overrides
from flows.config.run_config import RunConfig, check_config
from flows.data.evaluation_inputs import probe_inputs, refuse_unknown_names, task_inputs
from flows.models.compared_models import find_language_model
from tasks.result import Input
from tasks.stages import STAGES

READ = ("evaluation", "generation", "runtime", "seed")
"""The options, and groups of them, that an evaluation of one model reads."""


def evaluate(home: Path, name: str, options: Sequence[Override], observe: Observe) -> dict[str, Any]:
    """Evaluate a model on `evaluation.tasks` and `evaluation.probes` and return what `tether eval --json` prints.

    Nothing is stored. Responses are sampled with the `generation` of the run that computed the model, unless `options`
    set another; for a folder with its defaults.

    Raises:
        UserError: there is no such language model, or as the stage for its tasks, probes and options.
    """
    try:
        model = find_language_model(home, name, "eval")
    except UserError as error:
        raise UserError(f"{error} A reward model is evaluated with --suite FILE.") from error
    config = _config(home, model, options)
    inputs = task_inputs(config, {}) | probe_inputs(config, {})
    refuse_unknown_names(config, inputs)
    from components.evaluation.comparison import read_probes, read_tasks, score_interval  # loads scipy

    activate(config.runtime)
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        inner = model.path / "model"
        (work / "model").symlink_to((inner if inner.is_dir() else model.path).absolute())
        for kind, read in (("tasks", read_tasks), ("probes", read_probes)):
            files = {label: source.path for label, source in inputs.items() if kind_of(label) == kind}
            if files:
                stage = STAGES[f"evaluation.policy_{kind}"]
                stage.load_run()(config.stage_job(stage), {"model": work, **files}, work / kind, observe)
                measured += read(work / kind / "artifact")
    return {
        "model": name,
        "digest": model.digest,
        "generation": config.generation.model_dump(mode="json"),
        "sampling": config.evaluation.sampling,
        "results": [
            {"kind": one.kind, "name": one.name, "metric": one.metric, "higher_is_better": one.higher_is_better,
             "items": len(one.values), **score_interval(one).named("score")} | {"score": one.score}
            for one in measured
        ],
    }  # fmt: skip


def _config(home: Path, model: Input, options: Sequence[Override]) -> RunConfig:
    for path, _ in options:
        if path[0] not in READ or path[:2] in (("evaluation", "margin"), ("evaluation", "margins")):
            raise UserError(
                f"--set {'.'.join(path)}: it has no effect on eval. Set options of evaluation (without margins), of "
                "generation or of runtime, or the seed."
            )
    records = Graph.of(ArtifactStore(home)).node(model.digest).records if model.stored else ()
    values = {"generation": dict(group(records[0].job, "generation"))} if records else {}
    return check_config(apply_overrides(values, options), source="eval").resolved(with_ppo=False)


def text(result: Mapping[str, Any]) -> str:
    """Return the result of `evaluate` as a Markdown table."""
    generation = result["generation"]
    probed = any(row["kind"] == "probe" for row in result["results"])
    how = "sampled at temperature {temperature:g}" if result["sampling"] == "sampled" else "greedy"
    responses = f" Responses to probes: {how.format(**generation)}, up to {generation['max_new_tokens']} tokens."
    return "\n".join([
        f"{result['model']} (sha256 {result['digest'][:12]}).{responses if probed else ''}",
        "",
        "| task or probe | metric | items | score | 95 % interval |",
        "|---|---|---:|---:|---|",
        *(f"| {' | '.join(_cells(row))} |" for row in result["results"]),
    ])  # fmt: skip


def _cells(row: Mapping[str, Any]) -> list[str]:
    better = "" if row["kind"] == "probe" else ", higher is better" if row["higher_is_better"] else ", lower is better"
    ends = "unknown" if row["score_high"] is None else f"{number(row['score_low'])} to {number(row['score_high'])}"
    metric = "violations, share" if row["kind"] == "probe" else f"{markdown(row['metric'])}{better}"
    return [f"{row['kind']} {markdown(row['name'])}", metric, str(row["items"]), number(row["score"]), ends]
