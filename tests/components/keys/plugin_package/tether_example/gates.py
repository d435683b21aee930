"""A gate: `gates.extra.ppo.apologies={plugin: no_apologies, op: "<=", threshold: 0.1}`."""

import json


def apologies(metrics, artifact):
    """Share of the policy's held-out responses that apologise."""
    lines = (artifact / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    said = [json.loads(line)["policy"]["response"].lower() for line in lines]
    return sum("sorry" in text for text in said) / len(said)
