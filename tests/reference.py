"""Pages of the docs that are written: the reference and advice on gates and alarms from the code, and an index.

python -m tests.reference            # `make reference`: write docs/reference/, guide/troubleshooting/, decisions.md
python -m tests.reference --check    # `make check`: exit 1 where a page is stale
"""

import argparse
import functools
import html
import re
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

from components.gates.gate import Gate
from components.gates.methods import DIRECT_METHODS, USED_BY
from components.gates.remedies import Formula, OptionChange
from components.gates.self_checks import SELF_CHECKS
from components.gates.table import GATES, MAIN_METRICS
from components.ppo.alarm_table import CHOSEN, MONITORS, Monitor
from flows.cli.__main__ import app
from flows.config.run_config import RunConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "reference"
ADVISED = DOCS / "guide" / "troubleshooting"
FOOT = "\n*Written from the code by `make reference`; do not edit.*\n"


def cell(text: str) -> str:
    """`text` on one line of a Markdown table.

    A pipe becomes `&#124;`: GitHub drops the backslash of an escaped one in code, the site shows it. A code span would
    show the entity as it is written, so a span with a pipe becomes an HTML element.
    """
    line = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"`([^`]*)`", _span, line).replace("|", "&#124;")


def _span(code: re.Match[str]) -> str:
    return f"<code>{html.escape(code[1], quote=False)}</code>" if "|" in code[1] else code[0]


def table(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cell(each) for each in row) + " |" for row in rows)]) + "\n"


def commands() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# Commands\n",
        "Exit codes: 0 done, 2 a mistake in what was asked, 3 a failed gate, 1 an error of ours.\n",
    ]
    for name, command in _commands(get_command(app), "tether"):
        context = command.make_context(name, [], resilient_parsing=True)
        parts.append(f"## {name}\n\n    {name} {' '.join(command.collect_usage_pieces(context))}\n")
        parts.append((command.help or "").replace("\b\n", "").strip() + "\n")
        shown = (each for each in command.params if not getattr(each, "hidden", False))
        records = [record for each in shown if (record := each.get_help_record(context))]
        if records:
            parts.append(table(("argument or option", "what it is"), ((f"`{each}`", text) for each, text in records)))
    return "\n".join(parts)


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    for each, under in sorted(getattr(command, "commands", {}).items()):
        if getattr(under, "hidden", False):
            continue
        if hasattr(under, "commands"):
            yield from _commands(under, f"{name} {each}")
        else:
            yield f"{name} {each}", under


def options() -> str:
    """Every option of a config, with its type, default and docstring."""
    text = [
        "# Options\n",
        "Set an option in a profile, as nested YAML, or on the command line, as `--set KEY=VALUE`. "
        "`tether show-config PROFILE` prints a profile with every default. Options that are *not keyed* "
        "change no result: a new value recomputes nothing, and a stage that is taken from the store names those that "
        "differ from the run that computed it.\n",
    ]
    for name, field in RunConfig.model_fields.items():
        models = list(_models(field.annotation))
        text.append(f"## {name}\n")
        text.append(_docs(field, models[0] if models else None) + "\n")
        if rows := list(_options(name, models, set())):
            text.append(table(("option", "type", "default", "what it is"), iter(rows)))
        elif not models:
            text.append(f"Type: {_type(field.annotation)}; default: {_default(field)}.\n")
    return "\n".join(text)


def option_names() -> set[str]:
    """The dotted name of every option and group of options."""
    found = set(RunConfig.model_fields)
    for name, field in RunConfig.model_fields.items():
        found |= {row[0].strip("`") for row in _options(name, list(_models(field.annotation)), set())}
    return found


def _docs(field: FieldInfo, model: type[BaseModel] | None) -> str:
    return field.description or ((model.__doc__ or "") if model else "")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The config classes that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not Literal:
        for each in get_args(annotation):
            yield from _models(each)


def _options(path: str, models: list[type[BaseModel]], above: set[type[BaseModel]]) -> Iterator[tuple[str, ...]]:
    seen = set[tuple[str, str | None]]()
    for model in models:
        if model in above:
            continue
        for name, field in model.model_fields.items():
            under = list(_models(field.annotation))
            key = f"{path}.{name}"
            if (key, field.description) in seen:  # members of a union share some options, and others by name alone
                continue
            seen.add((key, field.description))
            unkeyed = field.json_schema_extra == {"keyed": False}
            words = (field.description or "") + (" *Not keyed.*" if unkeyed else "")
            yield f"`{key}`", _type(field.annotation), "" if under else _default(field), words
            several = {get_origin(each) for each in (field.annotation, *get_args(field.annotation))} & {
                list,
                tuple,
                dict,
            }
            yield from _options(f"{key}[]" if several else key, under, above | {model})


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in arguments))
    if origin in (list, tuple, dict):
        kind = {list: "list", tuple: "list", dict: "mapping"}[origin]
        of = dict.fromkeys(_type(each) for each in (arguments[1:] if origin is dict else arguments) if each is not ...)
        return f"{kind} of {' or '.join(of)}" if of else kind
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "group"
    known = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}
    return known.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={}) if not field.is_required() else None
    if field.is_required():
        return "must be given"
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if value is None:
        return "`null`"
    if value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list | dict) and not value:
        return "none"
    return f"`{value}`"


def gates() -> str:
    """Every gate: what it judges, and how."""
    text = [
        "# Gates\n",
        "A gate compares one metric with the threshold that the profile gives it under `gates.GROUP.NAME`; `null` "
        "switches it off. `--waive GROUP.NAME --because TEXT` lets a run pass it, and records who did and why.\n",
    ]
    for group in dict.fromkeys(gate.group for gate in GATES.values()):
        members = [gate for gate in GATES.values() if gate.group == group]
        text.append(f"## {group}\n")
        if (stage := members[0].stage) != group:
            text.append(f"They judge the metrics that the stage `{stage}` records.\n")
        rows = ((f"`{gate.name}`", _rule(gate), gate.description) for gate in members)
        text.append(table(("gate", "holds where", "what it says"), rows))
        pages = dict.fromkeys(map(_page, members))
        links = (f"[{_OF.get(page, f'a gate of {group}')}](../guide/troubleshooting/{page})" for page in pages)
        text.append(f"What to do when one of them fails: {', '.join(links)}\n")
    return "\n".join(text)


def _rule(gate: Gate) -> str:
    rule = f"`{gate.metric}` is {gate.op} the threshold"
    if gate.op == "between":
        both = gate.interval == "both"
        what = f"`{gate.metric}_low` and `{gate.metric}_high` lie" if both else f"`{gate.metric}` lies"
        rule = f"{what} between the thresholds"
    if isinstance(gate.or_within, str):
        rule += f", or <= `{gate.or_within}`"
    elif gate.or_within:
        rule += f", or between `{gate.or_within[0]}` and `{gate.or_within[1]}`"
    return rule + (" (warns)" if gate.warn_only else "") + (" (off if not measured)" if gate.if_measured else "")


def metrics() -> str:
    """The main metrics, by stage."""
    text = [
        "# Metrics\n",
        "The metrics to look at first. `tether status RUN --json` and MLflow have all of them. A mean, share or gain "
        "has its 95 % interval beside it, as `NAME_low` and `NAME_high`.\n",
    ]
    for stage, found in MAIN_METRICS.items():
        text.append(f"## {stage}\n")
        text.append(table(("metric", "what it is", "unit"), ((f"`{m.name}`", m.words, m.unit) for m in found)))
    return "\n".join(text)


def self_checks() -> str:
    """Every self-check: what it compares, and where to look."""
    rows = ((f"`{n}`", check.compares, f"{check.suspect[0].upper()}{check.suspect[1:]}. Look at {check.look_at}.")
            for n, check in SELF_CHECKS.items())  # fmt: skip
    return "\n".join([
        "# Self-checks\n",
        "A self-check compares what a stage is about to trust with a plain computation of the same thing: see [what "
        "they are for](../guide/self_checks.md).\n",
        table(("self-check", "what it compares", "what a failure usually means"), rows),
    ])  # fmt: skip


def failed_gates(of: str, gates: Iterable[Gate]) -> str:
    """What to do where one of `gates` fails, a section a gate."""
    text = [
        f"# When {of} fails\n",
        "`tether status RUN --why` and the report show the value beside the threshold, and the report has the command "
        "that tries the changes below, with numbers of that run. Stages after a failed gate do not run. "
        "[How to change, waive or switch off a gate](../troubleshooting.md#a-gate-failed)\n",
    ]
    for gate in gates:
        text.append(f"## {gate.name}\n\n{_sentence(gate.description)} It holds where {_rule(gate)}.\n")
        text.append(f"- Means: {gate.cause}\n- Change: {gate.remedy}\n- Try: {_attempts(gate)}\n")
    return "\n".join(text)


def _attempts(advised: Gate | Monitor) -> str:
    """The options that a gate or an alarm advises to change, and its command."""
    attempts = [_attempt(change) for change in advised.changes] + ([f"`{advised.command}`"] if advised.command else [])
    return "; or ".join(attempts)


def _attempt(change: OptionChange) -> str:
    """The option and its value, in words where it is computed from the run's own."""
    value = change.value.words if isinstance(change.value, Formula) else f"`{str(change.value).lower()}`"
    value += "" if change.if_zero is None else f", or {change.if_zero:g} if it is 0"
    condition = change.when
    if change.option.startswith("policy."):
        condition = "policy.method", " or ".join(USED_BY.get(change.option, DIRECT_METHODS))
    where = "" if condition is None else f" (where `{condition[0]}` is {condition[1] or 'not set'})"
    return f"`{change.option}`: {value}{where}"


_OF = {
    "probes.md": "a probe of the reward model",
    "judge.md": "a gate of the independent judge",
    "policy.md": "a gate of the policy",
    "responses.md": "a gate of the policy's responses",
}
"""Titles of the pages of advice that are not of a whole stage."""
_OF_RESPONSES = {
    f"policy.{name}"
    for name in (
        "repetition", "echo", "distinct", "dissimilarity", "entropy_ratio", "length_ratio", "ended", "special_tokens",
        "violations_excess", "rule_violations_excess",
    )
}  # fmt: skip


def _page(gate: Gate) -> str:
    """The page of advice that a gate is on: its stage's, or that of a group of gates."""
    if gate.name.startswith("reward.probe_") and gate.op == "<=":
        return "probes.md"
    if gate.short.startswith("judge_"):
        return "judge.md"
    return "responses.md" if gate.name in _OF_RESPONSES else f"{gate.group}.md"


def _advised() -> dict[str, list[Gate]]:
    """Page to its gates."""
    pages = dict[str, list[Gate]]()
    for gate in GATES.values():
        pages.setdefault(_page(gate), []).append(gate)
    return pages


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def alarms() -> str:
    """What to do where a policy's training raises an alarm, a section an alarm."""
    text = [
        "# When a policy's training raises an alarm\n",
        "PPO compares each batch with SFT's own responses. An alarm is raised once the share of responses that show "
        "something is certainly above SFT's share by more than the margin, or once that something explains most of "
        "the score's gain and is certainly more frequent. It is a "
        "warning, unless `ppo.monitors.stop_on` names it: then it stops the run. "
        "[How the alarms work](../training.md#alarms). Methods that train on pairs raise [chosen](#chosen) alone.\n",
    ]
    for name, monitor in MONITORS.items():
        none = ", or none where it explains most of the score's gain" if monitor.is_feature else ""
        text.append(f"## {name}\n\nIt counts {monitor.counts}. Margin: {monitor.margin:g}{none}.\n")
        text.append(_meaning(monitor))
    text.append(f"## chosen\n\nIt counts {CHOSEN.counts}. `policy.stop_on_alarm` lets it stop the run.\n")
    return "\n".join([*text, _meaning(CHOSEN)])


def _meaning(monitor: Monitor) -> str:
    return f"- Means: {monitor.meaning}\n- Change: {monitor.remedy}.\n- Try: {_attempts(monitor)}\n"


def decisions() -> str:
    """The index of the decisions: the pages of docs/decisions/ with their sections.

    Raises:
        ValueError: a page does not begin with a title and a sentence, or a section has no date.
    """
    text = [
        "# Decisions\n",
        "What was decided where the design left room: decision, reason, what was measured, what was dropped. Newest "
        "first within a section. Write a new decision into the page of its subject, then run `make reference`.\n",
    ]
    for path in sorted((DOCS / "decisions").glob("*.md")):
        page = path.read_text()
        begin = re.match(r"# (.+)\n\n(.+)\n", page)
        heads = re.findall(r"^## (.+)$", page, re.M)
        if not begin or not heads:
            raise ValueError(f"{path}: begin it with `# Title`, a blank line and a sentence, then its sections")
        if undated := [each for each in heads if not re.search(r"\((since )?\d{4}-\d\d-\d\d\)$", each)]:
            raise ValueError(f"{path}: {undated[0]}: end the heading with its date, as (2026-11-24)")
        text.append(f"## [{begin[1]}](decisions/{path.name})\n\n{begin[2]}\n")
        text.append("\n".join(f"- [{each}](decisions/{path.name}#{slug(each)})" for each in heads) + "\n")
    return "\n".join(text)


def slug(head: str) -> str:
    """The anchor of a heading, as MkDocs and GitHub make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head)
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain.lower())).strip("-")


PAGES = {
    "commands.md": commands, "options.md": options, "gates.md": gates, "metrics.md": metrics,
    "self_checks.md": self_checks,
}  # fmt: skip
"""Pages of the reference, by file name."""
ADVICE_PAGES = {
    name: functools.partial(failed_gates, _OF.get(name, f"a gate of {gates[0].group}"), gates)
    for name, gates in _advised().items()
} | {"alarms.md": alarms}
"""Pages of advice, by file name."""
WRITTEN = {FOLDER / name: page for name, page in PAGES.items()} | {
    ADVISED / name: page for name, page in ADVICE_PAGES.items()
}
WRITTEN[DOCS / "decisions.md"] = decisions
"""Every page that is written from the code, by path."""


def main() -> None:
    """Write the pages, or say which are stale."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check = asked.parse_args().check
    stale = []
    for path, page in WRITTEN.items():
        text = page().rstrip() + "\n" + FOOT
        if check and (not path.exists() or path.read_text() != text):
            stale.append(path.relative_to(DOCS).as_posix())
        elif not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        raise SystemExit(f"docs: the code has changed since {', '.join(stale)} was written. Run `make reference`.")


if __name__ == "__main__":
    main()
