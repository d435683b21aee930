"""What became of a run with a fault: where it stopped, what was said, whether it did harm, whether its cause was named.

A line of the results is a dict; `Line` says what its fields mean.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TypedDict

from tests.planted.catalogue import STAGES, Fault
from tests.planted.copies import Ended, Tether

KEPT = re.compile(
    r"policy/(gold|sft_gold|proxy_reward|kl|reward_gain)(_low|_high)?|human_eval/(win_rate|fleiss_kappa|reward_agreement|"
    r"reward_ece)(_low|_high)?|reward/(accuracy|ece|temperature)(_low|_high)?|sft/loss(_low|_high)?"
)
"""The metrics of a line that are recorded."""
DEVIATIONS = 2.0
"""By how many standard deviations over undisturbed seeds gold must be below their mean to count as harm."""
_TRACE = "Traceback (most recent call last)"
_SELF_CHECK = re.compile(r"self-check (\S+) (?:failed|is in doubt)")
_WARNING = re.compile(r"^[\d:.]+ \| (?:WARNING|ERROR) \| (\S+) - (.*)$", re.MULTILINE)
_NOTED = re.compile(
    r"(\w+)(?:\.\w+)?: ((?:the same key gave different (bytes) before|not in its key, and different in run) .*)$",
    re.MULTILINE,
)
"""What a run says, and logs nowhere, of a stage with other bytes than before, or reused with other options."""
_PROGRESS = re.compile(r"^\s{2}\w+[\w.]* \d+/\d+ ", re.MULTILINE)


class Line(TypedDict, total=False):
    """One run with a fault, or an undisturbed one."""

    fault: str
    """Its name; empty for an undisturbed run."""
    digest: str
    """The fault's (`Fault.digest`)."""
    commit: str
    code: str
    """Digest of the packages' files (`copies.code_digest`): a line counts for every commit with the same code."""
    checks: str
    """Digest of the files with self-checks, gates and alarms (`copies.CHECKS`)."""
    size: list[str]
    """The options that make the demo small (`copies.SIZE`)."""
    date: str
    seed: int
    options: list[str]
    exit: int
    """Of the first command, before any gate was waived."""
    stopped_at: str
    """The stage at which the run stopped; empty if it ended."""
    gates: list[str]
    """The gates that stopped it, in the first command."""
    warned: list[str]
    """Gates that only warn and failed, alarms, and loggers that warned."""
    message: str
    """The last paragraph that a stopped run printed."""
    warnings: str
    """The warnings that it printed."""
    crashed: bool
    """Whether a stack trace was printed: it stopped by accident."""
    seconds: float
    """Processor seconds up to where the first command ended."""
    wall: float
    total: float
    """Processor seconds of all commands, with waived gates."""
    waived: list[str]
    """Gates that were then waived to see what the run would have been called."""
    end: str
    """How it ended with these gates waived: `passed`, or why not."""
    metrics: dict[str, float]
    """The final metrics of all stages."""
    digests: dict[str, str]
    """Stage to the first 12 digits of its artifact's digest, of the last command."""
    cached: list[str]
    """Of `twice`: the stages that the second run took from the store."""
    beside: "Line"
    """Metrics and digests of the undisturbed run of the same code, options and seed."""
    same: bool
    """Of `same` and `resume`: whether the bytes are those that they must be."""


def measured(tether: Tether, ended: Ended) -> Line:
    """Return what a command and the run that it began tell about themselves."""
    status = tether.status(ended.run) if ended.run else {"stages": []}
    stages = [stage for stage in status["stages"] if stage["state"] != "not_run"]
    verdicts = [verdict for stage in stages for verdict in stage.get("gates", ())]
    failed = [v for v in verdicts if not (v["passed"] or v.get("waived") or v.get("skipped"))]
    stopping = [v["name"] for v in failed if not v.get("warn_only")]
    metadata = tether.artifact(ended.run, "ppo", "metadata.json") if stages else None
    alarms = json.loads(metadata or "{}").get("alarms", [])
    warned = [v["name"] for v in failed if v.get("warn_only")] + [f"alarm {alarm['name']}" for alarm in alarms]
    noted = [(f"{'bytes' if of else 'options'} of {stage}", text) for stage, text, of in _NOTED.findall(ended.output)]
    warnings = [*_WARNING.findall(ended.output), *noted]
    last = stages[-1] if stages else {"name": "validate", "state": "failed"}
    message = _last_paragraph(ended.output) if ended.code else ""
    return Line(
        exit=ended.code, stopped_at=last["name"] if ended.code else "", gates=stopping,
        warned=list(dict.fromkeys([*warned, *(_source(logger, text) for logger, text in warnings)])), message=message,
        warnings="\n".join(text for _, text in warnings)[:4000], crashed=_TRACE in ended.output,
        seconds=round(ended.cpu, 1), wall=round(ended.seconds, 1),
        metrics={n: v for stage in stages for n, v in stage.get("metrics", {}).items() if v is not None},
        digests={stage["name"]: stage["digest"][:12] for stage in stages if stage.get("digest")},
    )  # fmt: skip


def _source(logger: str, text: str) -> str:
    """Return what warned: a self-check by its name, else the logger."""
    check = _SELF_CHECK.search(text)
    return f"self-check {check[1]}" if check else logger


def _last_paragraph(output: str) -> str:
    """Return what a command said at its end: from `tether: ` on, or the last lines of a stack trace."""
    at = output.rfind("\ntether: ")
    if at >= 0:
        return _PROGRESS.sub("", output[at + 1 :]).strip()[:4000]
    return "\n".join(output.strip().splitlines()[-6:])[:4000]


def caught_by(line: Line, undisturbed: Sequence[Line]) -> tuple[list[str], str]:
    """Return what stopped the run or warned, and the stage; both empty if nothing did.

    A gate, alarm or warning counts only if no undisturbed run has it. What stopped the run and is no gate is called by
    the name of its self-check, or `check`, `crash` or `config` by its exit code.
    """
    usual = {name for other in undisturbed for name in (*other["warned"], *other["gates"])}
    new, gates = ([name for name in line[which] if name not in usual] for which in ("warned", "gates"))  # type: ignore
    if line["exit"] == 3 and gates:
        return [*gates, *new], line["stopped_at"]
    if line["exit"] not in (0, 3):
        check = _SELF_CHECK.search(line["message"])
        kind = "crash" if line["crashed"] else "config" if line["exit"] == 2 else "check"
        return [f"self-check {check[1]}" if check else kind, *new], line["stopped_at"]
    return new, _stage_of(new)


def _stage_of(names: Iterable[str]) -> str:
    """Return the stage whose gate, alarm or logger comes first among `names`."""
    groups = {"policy": "ppo", "alarm": "ppo", "data_contracts": "validate"}
    found = [part for name in names for part in re.split(r"[ .]", name)]
    stages = [groups.get(part, part) for part in found]
    return min((stage for stage in stages if stage in STAGES), key=STAGES.index, default="ppo" if stages else "")


def is_named(fault: Fault, line: Line, undisturbed: Sequence[Line]) -> bool:
    """Return whether the error that stopped the run, or a new warning, has a word of the cause.

    Of failed gates only the names are read: what they say is the same for every cause.
    """
    usual = {text for other in undisturbed for text in other["warnings"].splitlines()}
    new = "\n".join(text for text in line["warnings"].splitlines() if text not in usual)
    said = " ".join(line["gates"]) if line["exit"] == 3 else line["message"]
    return caught_by(line, undisturbed)[0] != [] and fault.is_named_in(f"{said}\n{new}")


def at_right_stage(fault: Fault, stage: str) -> bool:
    """Return whether a fault was caught at a stage no later than where it should be named."""
    return stage in STAGES and STAGES.index(stage) <= STAGES.index(fault.stage_named)


def harm(fault: Fault, line: Line, undisturbed: Sequence[Line]) -> tuple[str, str]:
    """Return `yes`, `no` or `unknown`, and the reason, by the rule of `docs/trust.md`.

    Args:
        undisturbed: runs of several seeds, for the deviation of gold. If there are fewer than three with the options
            of `line`, the deviation is that of the demo's own options, and the mean the gold of `line["beside"]`.
    """
    base = line["beside"]
    if fault.promise:
        return _broken_promise(fault, line, base)
    name = fault.false_number
    if name and name in line["metrics"] and name in base["metrics"]:
        value, right, width = line["metrics"][name], base["metrics"][name], _half_width(name, base, undisturbed)
        if abs(value - right) > width:
            return "yes", f"{name} is {value:.3g}, and {right:.3g} ± {width:.2g} undisturbed"
    golds, plain = (golds_of(undisturbed, options, line["size"]) for options in (line["options"], []))
    gold = line["metrics"].get("policy/gold")
    if gold is None or len(plain) < 2:
        return "unknown", "no gold was measured" if gold is None else "too few undisturbed seeds"
    many = len(golds) > 2
    limit = (fmean(golds) if many else base["metrics"]["policy/gold"]) - DEVIATIONS * stdev(golds if many else plain)
    if gold < limit:
        return "yes", f"gold {gold:.2f}, below {limit:.2f}"
    return "no", f"gold {gold:.2f}, not below {limit:.2f}"


def golds_of(undisturbed: Iterable[Line], options: Sequence[str], size: Sequence[str]) -> list[float]:
    """Return the gold of the undisturbed runs with these options, of this size."""
    alike = (line["metrics"] for line in undisturbed if (line["options"], line["size"]) == (options, size))
    return [metrics["policy/gold"] for metrics in alike if "policy/gold" in metrics]


def _broken_promise(fault: Fault, line: Line, base: Line) -> tuple[str, str]:
    if fault.promise == "same bytes":
        if "same" not in line:
            return "unknown", "it stopped before the bytes could be compared"
        return ("no", "the bytes are the same") if line["same"] else ("yes", "the bytes differ")
    if fault.promise == "right cache":
        if "cached" not in line:
            return "unknown", "it stopped before the second run"
        hit = fault.stage in line["cached"]
        return ("yes", "another option's result was taken from the store") if hit else ("no", "it was computed again")
    changed = line["digests"].get(fault.stage) != base["digests"].get(fault.stage)
    if fault.stage not in line["digests"]:
        return "unknown", f"{fault.stage} stopped before it had a result"
    broken = f"the promise `{fault.promise}` is broken"
    return ("yes", broken) if changed else ("no", f"{fault.stage} has the undisturbed run's bytes")


def _half_width(name: str, base: Line, undisturbed: Sequence[Line]) -> float:
    """Return half of a metric's interval in the undisturbed run; without one, 2 deviations over the seeds."""
    low, high = (base["metrics"].get(f"{name}_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        return (high - low) / 2
    values = [other["metrics"][name] for other in undisturbed if name in other["metrics"]]
    return DEVIATIONS * stdev(values) if len(values) > 1 else math.inf


def false_alarms(undisturbed: Sequence[Line]) -> Mapping[str, int]:
    """Return how many undisturbed runs each gate stopped or warned in, and each alarm and logger."""
    counts: dict[str, int] = {}
    for line in undisturbed:
        for name in {*line["gates"], *line["warned"], *(["check"] if line["exit"] not in (0, 3) else [])}:
            counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def kept(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that the page needs, rounded."""
    return {name: float(f"{value:.5g}") for name, value in metrics.items() if KEPT.fullmatch(name)}


def document(line: Line) -> str:
    """Return a line as JSON, with the metrics that the page needs."""
    return json.dumps({**line, "metrics": kept(line["metrics"])}, ensure_ascii=False, sort_keys=True)
