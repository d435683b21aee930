"""`tether data probes check`: what is wrong with a probe's file, else what is in it."""

import math
from collections import Counter
from typing import Any

from components.base.text import counted, line
from components.evaluation.probe_prompts import examine_probe, probe_path, rule_agreement
from components.evaluation.probe_rules import RULES
from components.gates.gate_text import number


def probe_check(file: str) -> dict[str, Any]:
    """Return what `tether data probes check --json` prints of a file.

    `file`, `problems` and `warnings` (texts), and without problems `probe` (its name), `rule`, `prompts` (their
    number), `turns` (prompts of several turns), `patterns` (prompts with patterns of their own), `categories` (prompts
    by category) and `labelled`: `responses` that people labelled and the rule's `precision`, `recall` and `kappa` on
    them, null where undefined.

    Raises:
        UserError: the name is not a valid path.
    """
    reading = examine_probe(probe_path(file, "FILE"))
    check: dict[str, Any] = {"file": file, "problems": reading.problems, "warnings": reading.warnings}
    if (probe := reading.probe) is None:
        return check
    agreement = {name: None if math.isnan(value) else value for name, value in rule_agreement(probe)._asdict().items()}
    return check | {
        "probe": probe.name,
        "rule": probe.header.rule,
        "prompts": len(probe.prompts),
        "turns": sum(len(prompt.conversation) > 1 for prompt in probe.prompts),
        "patterns": sum(bool(prompt.violates or prompt.clears) for prompt in probe.prompts),
        "categories": dict(Counter(prompt.category for prompt in probe.prompts)),
        "labelled": agreement,
    }


def check_text(check: dict[str, Any]) -> str:
    """Return the result of `probe_check` for people."""
    if check["problems"]:
        return "\n".join(line(problem) for problem in check["problems"])
    categories = ", ".join(f"{name} {count}" for name, count in check["categories"].items())
    texts = [
        *check["warnings"],
        f"{line(check['file'])}: {counted(check['prompts'], 'prompt')}, {check['turns']} of several turns, "
        f"{check['patterns']} with patterns of their own",
        f"  rule {check['rule']}: {RULES[check['rule']]}",
        f"  categories: {categories}",
    ]
    if (labelled := check["labelled"])["responses"]:
        measures = {name: value for name, value in labelled.items() if name != "responses" and value is not None}
        shares = ", ".join(f"{name} {number(value)}" for name, value in measures.items())
        texts.append(f"  the rule on {counted(labelled['responses'], 'labelled response')}: {shares}")
    return "\n".join(texts)
