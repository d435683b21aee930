"""Write model cards in the hub's format (https://huggingface.co/docs/hub/model-cards) from the records of a model."""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template, TemplateError
from pydantic import JsonValue

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.base.nested import group
from components.base.text import markdown, markdown_code
from components.data.inputs import JUDGE as JUDGE_DATA
from components.data.inputs import label_of, of_kind, values_of
from components.data.support_desk.task import SIMULATED
from components.gates.gate_text import number, outcome, rule
from components.gates.table import MAIN_METRICS
from components.store.store import Record
from flows.data.pretrained import MODELS as FETCHED
from flows.models.model_facts import OF_JUDGE, SHOWN, ModelFacts, facts_of_run
from flows.reports.run_facts import code_name
from flows.reports.terminal import SIMULATED_DATA, model_votes_note
from tasks.execution.context import RunContext
from tasks.tracking.model_links import JUDGE

UNKNOWN_LICENCE = "unknown"
"""The hub's word for it. The licence of people's data is not recorded, so whoever publishes the model must know it."""

DEMOTED = "**Demoted**"
"""The text that marks a demotion in the history of a version (`tasks.tracking.model_versions.state_lines`)."""

_SCORES, _GENERATES = "text-classification", "text-generation"
_TAGS = {"reward": "reward-model", JUDGE: "reward-model"}


def card(facts: ModelFacts) -> str:
    """Return the card of a model: YAML for the hub, then Markdown for people.

    Raises:
        UserError: an imported record has content that no stage writes.
    """
    try:
        return _template().render(_context(facts))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, TemplateError) as error:
        if not any(record.imported for record in facts.made):
            raise
        raise UserError(
            f"{facts.name} has no card: an imported record in its lineage has content that no stage writes "
            f"({type(error).__name__}: {error}). Do not trust it; compute the model here."
        ) from error


def write_cards(ctx: RunContext) -> None:
    """Write a card into `runs/<run>/cards/` for each model that passed the gates. MLflow gets the cards from there."""
    folder = ctx.folder / "cards"
    for facts in facts_of_run(ctx.home, ctx.run, [result.record for result in ctx.results.values()]):
        make_folder(folder)
        write_whole(folder / f"{facts.name}.md", card(facts))


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {
        "words": lambda value: markdown(str(value)), "code": markdown_code, "number": number, "outcome": outcome,
        "rule": rule, "interval": interval,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "code_of": lambda record: code_name(record.environment.get("code", {})),
    }  # fmt: skip
    return environment.get_template("card.md.jinja")


def _context(facts: ModelFacts) -> dict[str, Any]:
    job, metrics, votes = facts.record.job, measured(facts), facts.stages_of.get("validate")
    options = group(job, SHOWN.get(facts.record.stage, facts.record.stage))
    reward, data = facts.stages_of.get("reward"), _Preferences.of(facts)
    judges = (facts.promoted or {}).get("judges") or group(facts.config, "human_eval").get("judges", "unknown")
    votes_of_models = "" if votes is None else model_votes_note(votes.metrics)
    prefix = "reward/judge_" if facts.kind == JUDGE else "reward/"
    return {
        "metadata": _metadata(facts, data, bool(votes_of_models)),
        "facts": facts,
        "data": data,
        "options": options,
        "generation": group(job, "generation"),
        "template": _template_notes(facts),
        "scores": facts.kind in ("reward", JUDGE),
        # without objectives one head, which has no name
        "weights": dict(sorted(group(job, "reward", "objectives").items())) or {"": 1.0},
        "scale": {n: facts.record.metrics.get(f"{prefix}{n}", math.nan) for n in ("shift", "scale", "temperature")},
        "sources": _sources(facts),
        "measured": metrics,
        "names": [metric.metric for metric in metrics],
        "null_ece": None if reward is None else reward.metrics.get("reward/ece_null_95"),
        "judge": facts.stages_of.get(OF_JUDGE),
        "judges": judges,
        "simulated": SIMULATED_DATA if judges == "people" else SIMULATED,
        "votes_of_models": votes_of_models,
        "demotions": [
            line.removeprefix("- ") for version in facts.versions for line in version.life if DEMOTED in line
        ],
        "evaluation": tasks_and_probes(facts),
        "off": [gate.name for gate in facts.gates if outcome(gate) == "OFF"],
    }


def _metadata(facts: ModelFacts, data: "_Preferences", by_models: bool) -> str:
    """Return the card's metadata as YAML, as `huggingface_hub.ModelCard` reads it, including evaluation results."""
    # Rendered here, because importing ModelCard would import the hub's client.
    from huggingface_hub.repocard_data import EvalResult, ModelCardData

    task = _SCORES if facts.kind in ("reward", JUDGE) else _GENERATES
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data.hubs[0] if data.hubs == [data.name] else "custom",
            dataset_name=data.name,
            dataset_split="test",
            dataset_revision=facts.record.inputs.get("judge_data" if facts.kind == JUDGE else "data"),
            metric_type=metric.metric,
            metric_name=metric.what,
            metric_value=metric.value,
            metric_args={"measured_on": metric.n}
            | {name: end for name, end in zip(("low_95", "high_95"), metric.interval, strict=True) if end is not None},
        )
        for metric in measured(facts)
        if metric.stage in (SHOWN.get(facts.record.stage, facts.record.stage), "human_eval")
    ]
    base = _Base.of(facts)
    licence = base.licence if base else "Apache-2.0" if data.generated else None
    return ModelCardData(
        license=licence.lower() if licence and data.generated else UNKNOWN_LICENCE,
        language="en" if data.generated else None,
        library_name="transformers",
        pipeline_tag=task,
        tags=["tether", "rlhf", facts.method or _TAGS.get(facts.kind, facts.kind), *(["rlaif"] if by_models else [])],
        base_model=base.hub if base else None,
        datasets=data.hubs or None,
        model_name=facts.name,
        eval_results=results,
    ).to_yaml()


class _Base(NamedTuple):
    """The pretrained model that training started from."""

    name: str
    licence: str | None = None
    hub: str | None = None

    @classmethod
    def of(cls, facts: ModelFacts) -> "_Base | None":
        """Return the pretrained model; None if the model was trained from scratch."""
        if not any("base" in record.inputs for record in facts.made):
            return None
        name = str(group(facts.config, "sft").get("base") or "a pretrained model")
        fetched = FETCHED.get(name)
        return cls(fetched.hub or name, fetched.licence, fetched.hub) if fetched else cls(Path(name).name)


class _Preferences(NamedTuple):
    """The pairs that a model was trained and measured on (a judge's own pairs)."""

    name: str
    hubs: list[str]
    """Those of the files that were downloaded from the hub, by their names there."""
    generated: bool
    """Whether the built-in task made them."""

    @classmethod
    def of(cls, facts: ModelFacts) -> "_Preferences":
        """Return the pairs behind a model."""
        stage, kind = ("validate.judge", JUDGE_DATA) if facts.kind == JUDGE else ("validate", "preferences")
        record = facts.stages_of.get(stage)
        inputs = {} if record is None else of_kind(record.inputs, kind)
        sources = values_of(cast("str | list[str] | None", group(facts.config, "data").get(kind)))
        sources = sources or [str(facts.paths.get(digest, label_of(name))) for name, digest in inputs.items()]
        paths = [facts.paths.get(digest) for digest in inputs.values()]
        files = [path.name for path in paths if path is not None and path.parent.name == "datasets"]
        hubs = [
            name for name in sources if re.fullmatch(r"[\w.-]+/[\w.-]+", name)
            and any(file.startswith(f"{name.replace('/', '--')}--") for file in files)
        ]  # fmt: skip
        if record is not None and not inputs:
            return cls("Tether's support desk (simulated)", hubs, generated=True)
        names = [name if name in hubs else Path(name).name for name in sources]
        labels = [label_of(name) for name in inputs]
        return cls(" and ".join(names if len(set(names)) == len(names) else labels), hubs, generated=False)


def _sources(facts: ModelFacts) -> Iterator[dict[str, str]]:
    for node in (node for node in facts.upstream if not node.records):
        base, path = _Base.of(facts) if "base" in node.names else None, facts.paths.get(node.digest)
        title = base.name if base else path.name if path else ""
        name = ", ".join(node.names) + (f": {title}" if title else "")
        yield {"name": name, "digest": node.digest, "licence": (base and base.licence) or "not known to Tether"}


def _template_notes(facts: ModelFacts) -> Sequence[str]:
    options: Mapping[str, JsonValue] = next((group(r.job, "sft") for r in facts.made if r.stage == "sft"), {})
    variables = group(options, "template_variables").items()
    notes = [f"`{name}` is {markdown(json.dumps(value))} unless you pass another value" for name, value in variables]
    return notes + ["a system message is put before the first question"] * bool(options.get("system_in_question"))


def tasks_and_probes(facts: ModelFacts) -> str:
    """Return the sentence on a policy's evaluation beside its SFT model; empty if there is none."""
    stage = facts.stages.get("evaluation") if facts.kind == "policy" else None
    if stage is None:
        return ""
    if not facts.evaluation:
        return f"Tasks and probes: there is no result ({stage.state.replace('_', ' ')})."

    def described(row: Mapping[str, Any]) -> str:
        end = "unknown upper end" if row["high"] is None else f"upper end {number(row['high'])}"
        return f"{row['kind']} {row['name']} {number(row['difference'])} ({end}, margin {number(row['margin'])})"

    names = ", ".join(row["name"] for row in facts.evaluation)
    failed = "; ".join(described(row) for row in facts.evaluation if not row["passed"])
    worst = described(max(facts.evaluation, key=lambda row: row["difference"]))
    text = f"Tasks and probes: evaluated beside its SFT model on {names}. The worst drop is {worst}."
    return f"{text} {f'Failed: {failed}' if failed else 'None failed'}."


class CardMetric(NamedTuple):
    """One metric on the card."""

    stage: str
    metric: str
    what: str
    value: float
    interval: tuple[float | None, float | None]
    """Ends of the 95 % interval, clustered by prompt; None for an end that is not recorded."""
    n: str
    """The data it was measured on, for example `844 pairs`."""


def measured(facts: ModelFacts) -> list[CardMetric]:
    """Return the finite metrics of a model and of the stages it was made by."""
    records = facts.stages_of
    rows = []
    for stage, main in MAIN_METRICS.items():
        metrics: Mapping[str, float | None] = records[stage].metrics if stage in records else {}
        if stage == "reward" and OF_JUDGE in records:
            metrics = {**records[OF_JUDGE].metrics, **metrics}
        elif stage == "human_eval":  # applies to the policy only, and comes from the run that judges it
            metrics = facts.stages[stage].metrics if stage in facts.stages and facts.kind == "policy" else {}
        for metric, what in ((fact.name, fact.text) for fact in main if fact.card):
            if (value := metrics.get(metric)) is not None and math.isfinite(value):
                ends = metrics.get(f"{metric}_low"), metrics.get(f"{metric}_high")
                n = _count(metric, stage, metrics, records)
                rows.append(CardMetric(stage, metric, what, value, ends, n))
    return rows


def _count(metric: str, stage: str, metrics: Mapping[str, float | None], records: Mapping[str, Record]) -> str:
    data = records["validate"].metrics if "validate" in records else {}
    match stage:
        case "sft":
            return f"up to {group(records['sft'].job, 'sft')['evaluate']} held-out demonstrations or prompts"
        case "reward":
            pairs = "reward/judge_test_pairs" if metric.startswith("reward/judge_") else "reward/test_pairs"
            return f"{metrics.get(pairs, math.nan):.0f} pairs"
        case "human_eval":
            return f"{metrics.get('human_eval/items', math.nan):.0f} items"
        case "ppo":
            numbers = (group(records["ppo"].job, "ppo")["evaluate"], data.get("data/prompts_test"))
            return f"{min(n for n in numbers if isinstance(n, int | float)):.0f} prompts"
    return ""


def interval(metric: CardMetric) -> str:
    """Return the 95 % interval as text; empty if none is recorded."""
    low, high = metric.interval
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    return f"from {number(low)}" if low is not None else f"up to {number(high)}" if high is not None else ""
