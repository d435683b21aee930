"""`tether eval`: evaluate any language model on tasks and probes, as a run's stage `evaluation` does."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.nested import group
from components.base.observe import Observe
from components.base.text import markdown
from components.gates.gate_text import number
from components.models.runtime import activate
from components.store.graph import Graph
from components.store.store import ArtifactStore
from flows.config.profiles import Override, apply_overrides
from flows.config.run_config import RunConfig, check_config
from flows.data.evaluation_inputs import evaluation_inputs
from flows.models.compared_models import find_language_model
from tasks.result import Input
from tasks.stages import STAGES


def evaluate(home: Path, name: str, options: Sequence[Override], observe: Observe) -> dict[str, Any]:
    """Evaluate a model on `evaluation.tasks` and `evaluation.probes` and return what `tether eval --json` prints.

    Nothing is stored. The `generation` is that of the run that computed the model, or the defaults for a folder.

    Raises:
        UserError: there is no such language model, or as the stage for its tasks, probes and options.
    """
    try:
        model = find_language_model(home, name, "eval")
    except UserError as error:
        raise UserError(f"{error} A reward model is evaluated with --suite FILE.") from error
    config = _config(home, model, options)
    inputs = evaluation_inputs(config, home, {})
    from components.evaluation.comparison import read_measured, score_interval  # loads scipy

    activate(config.runtime)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        _place(model, f"eval {name}", bool(config.evaluation.probes), work / "model")
        for kind, sources in inputs.items():
            files = {label: source.path for label, source in sources.items()}
            stage = STAGES[f"evaluation.policy_{kind}s"]
            stage.load_run()(config.stage_job(stage), {"model": work, **files}, work / kind, observe)
            rows += [
                {"kind": kind, "name": one.name, "metric": one.metric, "higher_is_better": one.higher_is_better,
                 "items": len(one.values), **score_interval(one).named("score"), "score": one.score}
                for one in read_measured(kind, work / kind / "artifact")
            ]  # fmt: skip
    generation = config.generation.model_dump(mode="json") | {"sampling": config.evaluation.sampling}
    return {"model": name, "digest": model.digest, "generation": generation, "results": rows}


def _config(home: Path, model: Input, options: Sequence[Override]) -> RunConfig:
    for path, _ in options:
        unread = path[0] not in ("evaluation", "generation", "runtime", "seed")
        if unread or path[:2] in (("evaluation", "margin"), ("evaluation", "margins")):
            what = "evaluation (without margins), generation or runtime, or the seed"
            raise UserError(f"--set {'.'.join(path)}: it has no effect on eval. Set options of {what}.")
    records = Graph.of(ArtifactStore(home)).node(model.digest).records if model.stored else ()
    values: dict[str, JsonValue] = {"generation": dict(group(records[0].job, "generation"))} if records else {}
    return check_config(apply_overrides(values, options), source="eval").resolved(with_ppo=False)


def _place(model: Input, named_by: str, probed: bool, place: Path) -> None:
    """Link a model's folder, or write it there as `sft.base` reads it: a GGUF file, or one that can't answer yet."""
    from transformers import AutoTokenizer

    from components.models.folders import load_base, save_model
    from components.models.weights import load_from

    folder = (model.path / "model" if (model.path / "model").is_dir() else model.path).absolute()
    if not (rewrite := any(folder.glob("*.gguf"))) and probed and not model.stored:
        tokenizer = load_from(AutoTokenizer, folder, named_by)
        rewrite = tokenizer.chat_template is None or tokenizer.pad_token is None
    if rewrite:
        save_model(*load_base(folder, named_by, trained=False), place)
    else:
        place.symlink_to(folder)


def text(result: Mapping[str, Any]) -> str:
    """Return the result of `evaluate` as a Markdown table."""
    generation = result["generation"]
    how = "at temperature {temperature:g}" if generation["sampling"] == "sampled" else "greedily"
    answered = f" Probes are answered {how.format(**generation)}, in up to {generation['max_new_tokens']} tokens."
    is_probed = any(row["kind"] == "probe" for row in result["results"])
    lines = [f"{result['model']} (sha256 {result['digest'][:12]}).{answered if is_probed else ''}", ""]
    lines += ["| task or probe | metric | items | score | 95 % interval |", "|---|---|---:|---:|---|"]
    for row in result["results"]:
        name = f"{row['kind']} {markdown(row['name'])} | {markdown(row['metric'])}"
        better = "higher is better" if row["higher_is_better"] else "lower is better"
        ends = "unknown" if row["score_high"] is None else f"{number(row['score_low'])} to {number(row['score_high'])}"
        lines.append(f"| {name}, {better} | {row['items']} | {number(row['score'])} | {ends} |")
    return "\n".join(lines)
