"""Say in one sentence how a run ended, and what to do next: the beginning of its report."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from components.base.nested import flatten
from components.base.text import counted
from components.gates.candidacy import unjudged, why_no_alias
from components.gates.gate import Gate
from components.gates.gate_text import number, outcome, rule
from components.gates.judging import Verdict
from components.gates.margins import margin, tightness
from components.gates.methods import is_used
from components.gates.remedies import TETHER, Setting, rerun_from
from components.gates.table import GATES
from components.human_eval.sheet import RATERS
from tasks.runs.awaited_labels import LabelProgress
from tasks.runs.status import RunStatus, StageStatus
from tasks.stages import PIPELINE

TIGHTENING = frozenset(
    gate.name for gate in GATES.values()
    if gate.group == "policy" and gate.name != "policy.kl_floor" and any(c.option in TETHER for c in gate.changes)
)  # fmt: skip
"""The gates on the published policy whose advice tightens the tether, which helps none where KL is below its floor."""


class Step(NamedTuple):
    """One thing to do next."""

    text: str
    command: str = ""
    """A shell command; empty if no command does it."""


class RunVerdict(NamedTuple):
    """How a run ended, and what to do next."""

    sentence: str
    steps: list[Step]


def run_verdict(
    status: RunStatus, values: Mapping[str, JsonValue], labels: LabelProgress | None = None, policy: str = "",
    decision: str = "",
) -> RunVerdict:  # fmt: skip
    """Return the verdict on a run.

    Args:
        status: the run's status.
        values: its config, nested.
        labels: the progress of its labels, if it waits for them.
        policy: the registered name of its policy, such as `tether-policy`.
        decision: what MLflow's registry decided about its aliases; empty before.
    """
    options = flatten(values)
    stage = next((row for row in status.stages if row.state == status.state), None)
    match status.state:
        case "gate_failed":
            failed = [(row, gate) for row in status.stages for gate in row.gates if gate.stops]
            return RunVerdict(_failed(failed), _after_gates(status, [gate for _, gate in failed], options))
        case "awaiting_labels":
            progress = f" At the last check, {labels.text} were in." if labels else ""
            score = f"tether people score {RATERS} --run {status.run}"
            return RunVerdict(
                f"Waits for people's labels.{progress}",
                [
                    Step("Serve the page on which people judge:", f"tether people page {status.run} --rater NAME"),
                    Step("Or score the files that raters filled in, from the run's folder:", score),
                ],
            )
        case "failed" | "interrupted" | "running" if stage is not None:
            word = {"failed": "failed", "interrupted": "was interrupted", "running": "is running"}[stage.state]
            steps = [] if stage.state == "running" else [_again(status, stage.name)]
            return RunVerdict(f"The stage {stage.name} {word}.", steps)
        case "not_run":
            return RunVerdict("No stage has run.", [])
    return RunVerdict(_ended(status, values), _after(status, values, options, policy, decision))


def _failed(failed: Sequence[tuple[StageStatus, Verdict]]) -> str:
    if not failed:
        return "Stopped by a gate."
    stage, first = failed[0]
    bound = rule(first).replace("<=", "≤").replace(">=", "≥")
    what = f"{first.metric} is {number(first.value)} and must be {bound}"
    apart = margin(first, stage.metrics).text
    several = (
        f"{len(failed)} gates failed. The first, {first.name}" if len(failed) > 1 else f"the gate {first.name} failed"
    )
    return f"Stopped at {stage.name}: {several}: {what}; it is {apart}."


def _after_gates(status: RunStatus, gates: Sequence[Verdict], options: Mapping[str, JsonValue]) -> list[Step]:
    if not gates:
        return []
    method, steps, settings = str(options.get("policy.method", "ppo")), [], list[Setting]()
    used = {name: value for name, value in options.items() if is_used(method, name)}
    floor, below = _kl_below_its_floor(status)
    slack = [] if floor is None else [verdict for verdict in gates if verdict.name in TIGHTENING]
    for verdict in gates if floor is None or not slack else [*gates, floor]:
        if (gate := GATES.get(verdict.name)) is not None:
            is_slack = verdict in slack
            of_gate = {name: value for name, value in used.items() if not (is_slack and name in TETHER)}
            setting = gate.setting(verdict.value, verdict.threshold, of_gate)
            settings += [] if setting is None else [setting]
            command = "" if setting is not None else _of_run(gate.command, status.run)
            advice = gate.cause, _remedy(gate, method, is_slack), below if is_slack else ""
            steps.append(Step(f"{gate.name}: {' '.join(filter(None, advice))}{_change(setting)}", command))
    settings = list(dict.fromkeys(settings))
    if settings:
        start = rerun_from([setting.option for setting in settings], PIPELINE)
        sets = " ".join(f"--set {shlex.quote(setting.assignment)}" for setting in settings)
        steps.append(Step("Try it:", f"tether rerun {start} --from {status.run} {sets}"))
    waived = " ".join(f"--waive {shlex.quote(gate.name)}" for gate in gates)
    stage = next(stage.name for stage in status.stages if gates[0] in stage.gates)
    waive = f"tether rerun {stage} --from {status.run} {waived} --because TEXT"
    return [*steps, Step("Or accept it, with your name and reason on record:", waive)]


def _kl_below_its_floor(status: RunStatus) -> tuple[Verdict | None, str]:
    """Return the verdict of `policy.kl_floor`, and a sentence, if KL itself is below the floor and not only its lower
    end; otherwise None."""
    for stage in status.stages:
        for verdict in stage.gates:
            kl, floor = stage.metrics.get("policy/kl"), verdict.threshold
            if verdict.name == "policy.kl_floor" and kl is not None and isinstance(floor, float) and kl < floor:
                return verdict, f"KL ({number(kl)}) is below its floor ({number(floor)}): do not tighten the tether."
    return None, ""


def _remedy(gate: Gate, method: str, is_slack: bool) -> str:
    """Return the sentences of a gate's remedy that name no option of `ppo` which the method refuses; if the tether
    `is_slack` of those only the ones that name none of its options."""
    sentences = re.split(r"(?<=\.) (?=[A-Z`])", gate.remedy)
    usable = [s for s in sentences if all(is_used(method, name) for name in re.findall(r"`(ppo\.[\w.]+)", s))]
    return " ".join(s for s in usable if not (is_slack and any(f"`{option}`" in s for option in TETHER)))


def _of_run(command: str, run: str) -> str:
    return re.sub(r"^tether rerun ([\w.]+)", rf"tether rerun \1 --from {run}", command).replace(" RUN", f" {run}")


def _change(setting: Setting | None) -> str:
    if setting is None:
        return ""
    before = number(setting.before) if isinstance(setting.before, (int, float)) else setting.before
    return f" Here {setting.option} is {before}; try {setting.assignment.partition('=')[2]}."


def _again(status: RunStatus, stage: str) -> Step:
    before = [stage_before.name for stage_before in status.stages if stage_before.name != stage and stage_before.digest]
    if not before:
        return Step("Run it again; what was computed is kept:", f"tether run {shlex.quote(status.profile)}")
    return Step("Continue from what was computed:", f"tether rerun {stage} --from {status.run}")


def _ended(status: RunStatus, values: Mapping[str, JsonValue]) -> str:
    verdicts = [(gate, margin(gate, stage.metrics)) for stage in status.stages for gate in stage.gates]
    verdicts = sorted((pair for pair in verdicts if pair[0].threshold is not None), key=lambda pair: tightness(*pair))
    waived = [gate.name for gate, _ in verdicts if gate.waived]
    skipped = [gate.name for gate, _ in verdicts if outcome(gate) == "SKIPPED"]
    warned = [gate.name for gate, _ in verdicts if outcome(gate) == "WARN"]
    passed = [(gate, room) for gate, room in verdicts if gate.passed]
    text = (
        f"Passed: all {len(passed)} judged gates hold"
        if not waived and not skipped
        else f"{len(passed)} of {len(verdicts)} judged gates hold"
    )
    text += _not_judged(status, values)
    if waived:
        text += f"; waived: {', '.join(waived)}"
    if skipped:
        text += f"; not judged, because their stage was skipped: {', '.join(skipped)}"
    if warned:
        text += f"; warned, without stopping the run: {', '.join(warned)}"
    if not verdicts:
        return f"No gate was judged{_not_judged(status, values)}."
    if passed and passed[0][1].slack:
        text += f". The tightest is {passed[0][0].name}, {passed[0][1].text}"
    return f"{text}."


def _not_judged(status: RunStatus, values: Mapping[str, JsonValue]) -> str:
    """Return the gates that are off, in words: first what a candidate for promotion has to be judged on."""
    unset = [gate for stage in status.stages for gate in stage.gates if gate.threshold is None]
    off = [gate.name for gate in unset if not gate.within]
    lacking = unjudged(values, _measured(status))
    words = [one.what for one in lacking] + [f"{gate.name} ({rule(gate)})" for gate in unset if gate.within]
    others = [name for name in off if not any(name in one.gates for one in lacking)]
    if others:
        words.append(f"{counted(len(others), 'gate')} that are off" if len(others) > 3 else ", ".join(others))
    return f"; not judged: {', '.join(words)}" if words else ""


def _measured(status: RunStatus) -> set[str]:
    return {name for stage in status.stages for name in stage.metrics}


def _after(
    status: RunStatus, values: Mapping[str, JsonValue], options: Mapping[str, JsonValue], policy: str, decision: str
) -> list[Step]:
    lacking = next((stage.name for stage in status.stages if stage.state == "not_run"), "")
    if lacking:
        return [Step(f"It ended before {lacking}. To continue:", f"tether rerun {lacking} --from {status.run}")]
    steps = []
    if options.get("human_eval.judges") == "simulated":
        command = f"tether rerun human_eval --from {status.run} --set human_eval.judges=people"
        steps.append(Step("Its judges are simulated. To have people judge it:", command))
    name = policy or "tether-policy"
    if decision:
        steps.append(Step(f"In MLflow's registry, {decision}"))
    elif why := why_no_alias(values, _measured(status)):
        steps.append(Step(f"Its policy is not a candidate for promotion: {why}."))
    elif any(gate.withheld or (gate.waived and not gate.skipped) for stage in status.stages for gate in stage.gates):
        steps.append(Step("It does not become champion by itself. To promote it:", f"tether promote {name}/VERSION"))
    else:
        steps.append(Step(f"Its policy becomes champion if there is none or if it beats {name}@champion."))
    return [*steps, Step("To write it as a Hugging Face folder:", f"tether export {status.run} FOLDER")]
