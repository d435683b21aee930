"""Write model cards in the hub's format (https://huggingface.co/docs/hub/model-cards) from the records of a model."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.base.nested import group
from components.base.text import markdown as words
from components.base.text import markdown_code as span
from components.data.inputs import JUDGE as JUDGE_DATA
from components.data.inputs import label_of, of_kind, values_of
from components.gates.text import number, outcome, rule
from components.store.records import Record
from flows.data.pretrained import MODELS as FETCHED
from flows.models.card_loading import loading
from flows.models.card_metrics import arguments, interval, measured
from flows.models.facts import OF_JUDGE, SHOWN, ModelFacts, facts_of_run
from flows.reports.facts import code_name
from flows.reports.terminal import model_votes_note, price, simulated_note
from tasks.execution.context import RunContext
from tasks.tracking.links import JUDGE

UNKNOWN_LICENCE = "unknown"
"""The hub's word for it. The licence of people's data is not recorded, so whoever publishes the model must know it."""

DEMOTED = "**Demoted**"
"""The text that marks a demotion in the history of a version (`tasks.tracking.promotion.state_lines`)."""

_GENERATES, _SCORES = "text-generation", "text-classification"
TASKS = {"sft": _GENERATES, "policy": _GENERATES, "reward": _SCORES, JUDGE: _SCORES}
_TAGS = {"policy": "ppo", "reward": "reward-model", JUDGE: "reward-model"}
_ABOUT = {
    "sft": "A language model fine-tuned on demonstrations: the start, the reference and the baseline of PPO.",
    "reward": "A reward model: a scalar score of a response to a prompt, trained on preference pairs (Bradley-Terry).",
    JUDGE: "A reward model that only judges: it was trained on other pairs than the rewarding model, and PPO's "
    "evaluations use it to test whether the policy has improved.",
    "policy": "A language model trained by PPO to maximise a learned reward, with a KL penalty towards its SFT model.",
}


def card(facts: ModelFacts) -> str:
    """Return the card of a model: YAML for the hub, then Markdown for people.

    Raises:
        UserError: an imported record has content that no stage writes.
    """
    try:
        return _card(facts)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        if not any(record.imported for record in facts.made):
            raise
        raise UserError(
            f"{facts.name} has no card: an imported record in its lineage has content that no stage writes "
            f"({type(error).__name__}: {error}). Do not trust it; compute the model here."
        ) from error


def _card(facts: ModelFacts) -> str:
    title = facts.name + "".join(f" version {each.version}" for each in facts.versions[:1])
    lines = [
        "---", front_matter(facts), "---", "", f"# {title}", "", *_warnings(facts), _ABOUT[facts.kind], "",
        *loading(facts), *_made_of(facts), *_options(facts), *_measured(facts), *_gates(facts), *_limits(facts),
        *_provenance(facts),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def write_cards(ctx: RunContext) -> None:
    """Write a card into `runs/<run>/cards/` for each model that passed the gates. MLflow gets the cards from there."""
    folder = ctx.folder / "cards"
    for facts in facts_of_run(ctx.home, ctx.run, [result.record for result in ctx.results.values()]):
        make_folder(folder)
        write_whole(folder / f"{facts.name}.md", card(facts))


def front_matter(facts: ModelFacts) -> str:
    """Return the card's metadata as YAML, as `huggingface_hub.ModelCard` reads it, including evaluation results."""
    # Written here, because importing it from huggingface_hub would import the hub's client.
    from huggingface_hub.repocard_data import EvalResult, ModelCardData

    name, hubs = _data_name(facts), _hub_names(facts)
    results = [
        EvalResult(
            task_type=TASKS[facts.kind],
            dataset_type=hubs[0] if hubs == [name] else "custom",
            dataset_name=name,
            dataset_split="test",
            dataset_revision=facts.record.inputs.get("judge_data" if facts.kind == JUDGE else "data"),
            metric_type=each.metric,
            metric_name=each.what,
            metric_value=each.value,
            metric_args=arguments(each),
        )
        for each in measured(facts)
        if each.stage in (SHOWN.get(facts.record.stage, facts.record.stage), "human_eval")
    ]
    base, generated = _base(facts), _is_generated(facts)
    licence = base.licence if base else "Apache-2.0" if generated else None
    return ModelCardData(
        license=licence.lower() if licence and generated else UNKNOWN_LICENCE,
        language="en" if generated else None,
        library_name="transformers",
        pipeline_tag=TASKS[facts.kind],
        tags=["tether", "rlhf", _TAGS.get(facts.kind, facts.kind), *(["rlaif"] if _model_votes(facts) else [])],
        base_model=base.hub if base else None,
        datasets=hubs or None,
        model_name=facts.name,
        eval_results=results,
    ).to_yaml()


# -- what it was made of -----------------------------------------------------------------------------------------------


class _Base(NamedTuple):
    """The pretrained model that training started from."""

    name: str
    licence: str | None = None
    hub: str | None = None


def _base(facts: ModelFacts) -> _Base | None:
    """Return the pretrained model; None if the model was trained from scratch."""
    if not any("base" in record.inputs for record in facts.made):
        return None
    named = str(group(facts.config, "sft").get("base") or "a pretrained model")
    fetched = FETCHED.get(named)
    return _Base(fetched.hub or named, fetched.licence, fetched.hub) if fetched else _Base(Path(named).name)


def _pairs_of(facts: ModelFacts) -> tuple[Record | None, str]:
    """Return the record that validated the model's pairs (for a judge, the judge's pairs), and the name of that
    input."""
    if facts.kind == JUDGE:
        return facts.stages_of.get("validate.judge"), JUDGE_DATA
    return facts.stages_of.get("validate"), "preferences"


def _is_generated(facts: ModelFacts) -> bool:
    """Return whether the pairs are those of the built-in task."""
    data, kind = _pairs_of(facts)
    return data is not None and not of_kind(data.inputs, kind)


def _data_name(facts: ModelFacts) -> str:
    """Return the name of the preference data."""
    if _is_generated(facts):
        return "Tether's support desk (simulated)"
    hubs = _hub_names(facts)
    named = [each if each in hubs else Path(each).name for each in _preferences(facts)]
    labels = [label_of(name) for name in _inputs_of_preferences(facts)]
    return " and ".join(named if len(set(named)) == len(named) else labels)


def _hub_names(facts: ModelFacts) -> list[str]:
    """Return the hub names of the preference data that were downloaded from the hub."""
    paths = [facts.paths.get(digest) for digest in _inputs_of_preferences(facts).values()]
    fetched = [path.name for path in paths if path is not None and path.parent.name == "datasets"]
    hubs = [named for named in _preferences(facts) if re.fullmatch(r"[\w.-]+/[\w.-]+", named)]
    return [named for named in hubs if any(file.startswith(f"{named.replace('/', '--')}--") for file in fetched)]


def _preferences(facts: ModelFacts) -> list[str]:
    """Return the preference data as the config names them, or the paths they were read from."""
    named = values_of(cast("str | list[str] | None", group(facts.config, "data").get(_pairs_of(facts)[1])))
    read = _inputs_of_preferences(facts)
    return named or [str(facts.paths.get(digest, label_of(name))) for name, digest in read.items()]


def _inputs_of_preferences(facts: ModelFacts) -> dict[str, str]:
    """Return the digest of each file of preferences, by input name."""
    data, kind = _pairs_of(facts)
    return of_kind(data.inputs, kind) if data is not None else {}


def _made_of(facts: ModelFacts) -> Iterator[str]:
    priced = bool(facts.costs)
    yield from (
        "## What it was made of", "", f"| | artifact | computed by | seed | code |{' cost |' if priced else ''}",
        f"|---|---|---|---|---|{'---:|' if priced else ''}",
    )  # fmt: skip
    for record in facts.made:
        by = f" by {words(facts.users[record.run])}" if record.run in facts.users else ""
        seed, code = str(record.job.get("seed", "")), code_name(record.environment.get("code", {}))
        cost = f" {words(_money(facts.costs.get(record.digest, {}))) or 'not known'} |" if priced else ""
        yield (
            f"| {words(record.stage)} | {span(record.digest[:16])} | run {words(record.run)}{by}, "
            f"{words(record.started[:19])} UTC{', imported' if record.imported else ''} "
            f"| {words(seed)} | {words(code)} |{cost}"
        )
    if priced:
        yield from ("", _total(facts))
    yield from ("", "| source | sha256 | licence |", "|---|---|---|")
    if _is_generated(facts):
        yield "| generated by Tether's seeded support desk | | Apache-2.0 |"
    for node in (node for node in facts.upstream if not node.records):
        base, path = _base(facts) if "base" in node.names else None, facts.paths.get(node.digest)
        shown = base.name if base else path.name if path else ""
        named = words(", ".join(node.names)) + (f": {words(shown)}" if shown else "")
        yield f"| {named} | {span(node.digest)} | {(base and base.licence) or 'not known to Tether'} |"
    yield ""


def _money(costs: Mapping[str, float]) -> str:
    """Return costs by currency as text."""
    return " and ".join(price(cost, currency) for currency, cost in costs.items())


def _total(facts: ModelFacts) -> str:
    """Return a sentence with the total cost of computing the model and everything it was made of."""
    currencies = {currency for costs in facts.costs.values() for currency in costs}
    total = {name: math.fsum(costs.get(name, 0.0) for costs in facts.costs.values()) for name in sorted(currencies)}
    lacking = [record.stage for record in facts.made if record.digest not in facts.costs]
    without = f", without {', '.join(lacking)}, whose cost is not known" if lacking else ""
    return words(f"Computing it cost {_money(total)} in all{without}.")


def _options(facts: ModelFacts) -> Iterator[str]:
    if not facts.options:
        return
    yield from ("## Options that differ from the profile", "", "| option | here | in the profile |", "|---|---|---|")
    for name, option in facts.options.items():
        value, default = (words(json.dumps(each, ensure_ascii=False)) for each in (option.value, option.default))
        yield f"| {span(name)} | {value} | {default} |"
    yield ""


# -- what is known of it -----------------------------------------------------------------------------------------------


def _warnings(facts: ModelFacts) -> Iterator[str]:
    """Yield the warnings for the top of the card."""
    if facts.failures:
        yield (
            f"> **This model failed**, as run {words(facts.run)} judged it:"
            if facts.run
            else "> **This model was not judged:**"
        )
        yield from (f"> - {words(reason)}" for reason in facts.failures)
        yield ""
    if any(record.imported for record in facts.made):
        yield from (
            "> This model, or something it was made of, was computed in another home and imported; nothing here was "
            "verified by computing it again.",
            "",
        )
    for line in (line for each in facts.versions for line in each.life if DEMOTED in line):
        yield from (f"> {line.removeprefix('- ')}", "")
    for waiver in facts.waivers:
        yield from (
            f"> Gate {span(waiver.gate)} failed and was waived by {words(waiver.user)}: {words(waiver.reason)}", ""
        )  # fmt: skip
    if _is_generated(facts):
        yield from (f"> {simulated_note(True, _judges(facts) == 'people')}", "")
    if voted := _model_votes(facts):
        yield from (f"> {words(voted)}", "")


def _model_votes(facts: ModelFacts) -> str:
    """Return the sentence on votes by models among the preferences; empty if people cast all votes."""
    data = facts.stages_of.get("validate")
    return model_votes_note(data.metrics) if data is not None else ""


def _measured(facts: ModelFacts) -> Iterator[str]:
    yield from ("## What was measured", "", "| | value | 95 % interval | measured on |", "|---|---:|---|---|")
    for each in measured(facts):
        yield f"| {each.what} (`{each.metric}`) | {number(each.value)} | {interval(each)} | {each.n} |"
    yield ""
    reward = facts.stages_of.get("reward")
    if reward is not None and (null := reward.metrics.get("reward/ece_null_95")) is not None:
        yield from (f"A perfectly calibrated reward model's ECE would be below {number(null)} in 95 of 100 tests.", "")
    if facts.kind == "policy" and (judge := facts.stages_of.get(OF_JUDGE)) is not None:
        pairs = number(judge.metrics.get("reward/judge_pairs"))
        yield from (
            f"An independent judge, artifact {span(judge.digest[:16])}, was trained on {pairs} pairs of its own. It "
            "was never used as a reward, only in evaluations.", "",
        )  # fmt: skip
    if facts.kind == "policy" and "human_eval/win_rate" in [each.metric for each in measured(facts)]:
        yield from (f"Judges of the win rate: {words(_judges(facts))}.", "")


def _judges(facts: ModelFacts) -> str:
    return str((facts.promoted or {}).get("judges") or group(facts.config, "human_eval").get("judges", "unknown"))


def _gates(facts: ModelFacts) -> Iterator[str]:
    yield from (
        "## Gates", "", f"As judged in run {words(facts.run)}." if facts.run else "No run here has judged it.", "",
        "| gate | outcome | metric | value | rule |", "|---|---|---|---:|---|",
    )  # fmt: skip
    for gate in facts.gates:
        named = f"| {words(gate.name)} | {outcome(gate)} | {span(gate.metric)} |"
        yield f"{named} {number(gate.value)} | {rule(gate)} |"
    yield ""


def _limits(facts: ModelFacts) -> Iterator[str]:
    """Yield what the model was not tested for, derived from how it was trained and evaluated."""
    generation = group(facts.record.job, "generation")
    yield from ("## Limits", "")
    measured_on = words(_data_name(facts))
    yield f"- Measured only on the held-out split of {measured_on}: on no other domain, language or benchmark."
    yield "- Not tested for safety, bias, privacy or adversarial prompts."
    if generation:
        yield (
            f"- Trained and measured on prompts of up to {generation['max_prompt_tokens']} tokens and responses of up "
            f"to {generation['max_new_tokens']}, sampled at temperature {generation['temperature']:g}, without top-k "
            "or top-p."
        )
    if facts.kind in ("reward", JUDGE):
        yield "- Its scores compare responses to the same prompt; across prompts they mean little."
        yield "- It learned its annotators' preferences, including their mistakes and biases (length, flattery)."
        if _model_votes(facts):
            yield "- Some annotators are models: it also learned their errors and their position and length biases."
    if facts.kind == "policy":
        yield "- It maximises a learned reward, which is reliable only near the SFT model (see the KL above)."
        if "win_rate" not in str([each.metric for each in measured(facts)]):
            yield "- Nobody has compared its responses with the SFT model's yet."
    if off := [gate.name for gate in facts.gates if outcome(gate) == "OFF"]:
        yield f"- Gates that were off: {words(', '.join(off))}."
    yield ""


def _provenance(facts: ModelFacts) -> Iterator[str]:
    record = facts.record
    code = words(code_name(record.environment.get("code", {})))
    yield from ("## Provenance", "", f"- artifact {span(record.digest)}, key {span(record.key)}, code {code}")
    libraries = ", ".join(f"{name} {version}" for name, version in record.parts.get("libraries", {}).items())
    yield f"- computed with {words(libraries)}, Python {words(record.environment.get('python', 'unknown'))}"
    yield "- on " + words(", ".join(f"{name} {value}" for name, value in group(record.job, "runtime").items()))
    for each in facts.versions:
        aliases = f" ({', '.join(each.aliases)})" if each.aliases else ""
        yield f"- registered as {each.name} version {each.version}{aliases}"
        yield from (f"  {line}" for line in each.life)
    if promoted := facts.promoted:
        when = f" on {promoted['at']}" if "at" in promoted else ""
        run = f" in run {promoted['run']}" if "run" in promoted else ""
        by, judges = promoted.get("by", "someone unknown"), promoted.get("judges", "?")
        yield f"- {words(f'promoted by {by}{when}{run}, judges: {judges}')}"
    yield f"- `tether lineage {record.digest[:16]}` prints its whole lineage; `tether reproduce` computes it again"
    yield ""
