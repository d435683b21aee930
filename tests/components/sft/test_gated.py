"""Every number that an SFT gate judges, computed again from the published model, its samples and the demonstrations."""

import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import t as student
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.gates.table import GATES
from components.models.config import GenerationConfig
from components.models.sampling import generate_responses
from components.sft import stage

PROMPT, CAP, HELD_OUT = 40, 24, 14
OPTIONS = {"epochs": 5, "evaluate": HELD_OUT, "max_demonstrations": 150, "learning_rate": 2e-2}


class Read:
    """A published model's own view of demonstrations, by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    def response(self, row: dict[str, Any]) -> list[int]:
        return (self.tokenizer(row["response"], add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id])[
            :CAP
        ]

    @torch.no_grad()
    def nats(self, rows: list[dict[str, Any]]) -> list[float]:
        """Nats of each response; the pad token can't be sampled."""
        found = []
        for row in rows:
            text = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            prompt, response = self.tokenizer(text, add_special_tokens=False)["input_ids"][-PROMPT:], self.response(row)
            logits = self.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
            logits[:, self.tokenizer.pad_token_id] = -math.inf
            found.append(-float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum()))
        return found


def high(values: list[float], weights: list[int], rows: list[dict[str, Any]]) -> float:
    """The upper end of sum(values) / sum(weights), where rows of one prompt depend on each other."""
    ratio, moved = sum(values) / sum(weights), defaultdict[str, float](float)
    for value, weight, row in zip(values, weights, rows, strict=True):
        moved[row["prompt"][-1]["content"]] += value - ratio * weight
    clusters = len(moved)
    error = math.sqrt(clusters / (clusters - 1) * sum(each**2 for each in moved.values())) / sum(weights)
    return ratio + float(student.ppf(0.975, clusters - 1)) * error


def wilson_low(share: float, draws: int) -> float:
    """The lower end of a share of independent draws, whose variance is estimated with draws - 1."""
    quantile, worth = float(student.ppf(0.975, draws - 1)), draws - 1
    return float(brentq(lambda p: share - p - quantile * math.sqrt(p * (1 - p) / worth), 1e-12, share))


@pytest.mark.parametrize("base", [False, True])
def test_the_gated_numbers_are_those_of_the_published_model(
    stages: Any, tmp_path: Path, base: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[Any] = []
    monkeypatch.setattr(stage, "generate_responses", lambda *a: sampled.extend(generate_responses(*a)) or sampled)
    start = stages.inputs["sft"] / "model"
    inputs = {"data": stages.inputs["data"]} | ({"base": start} if base else {})
    job = stages.job("sft", generation=GenerationConfig(max_prompt_tokens=PROMPT, max_new_tokens=CAP), **OPTIONS)
    metrics = stage.run(job, inputs, tmp_path, lambda *a, **k: None)

    data, ours = stages.inputs["data"], Read(tmp_path / "artifact" / "model")
    heldout = read_split(data / "demonstrations.heldout")[:HELD_OUT]
    nats, lengths = ours.nats(heldout), [len(ours.response(row)) for row in heldout]
    if base:
        before = Read(start).nats(heldout)
    else:
        train = read_split(data / "demonstrations.train")[:150]
        seen = Counter(token for row in train for token in ours.response(row))
        share = {
            token: (seen[token] + 1) / (seen.total() + len(ours.tokenizer)) for token in range(len(ours.tokenizer))
        }
        before = [-sum(math.log(share[token]) for token in ours.response(row)) for row in heldout]
    samples = read_rows(tmp_path / "artifact" / "samples.jsonl")
    assert [s["prompt"] for s in samples] == [r["prompt"] for r in read_split(data / "prompts.test")[:HELD_OUT]]
    decoded = [ours.tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in sampled]
    assert [re.sub(r"⟨\|\w+\|⟩", "", s["response"]) for s in samples] == decoded
    ended = [r.token_ids[-1] == ours.tokenizer.eos_token_id for r in sampled]
    assert [s["ended"] for s in samples] == ended
    assert all(end or len(r.token_ids) == CAP for r, end in zip(sampled, ended, strict=True))
    share, prompts = sum(ended) / HELD_OUT, len({s["prompt"][-1]["content"] for s in samples})
    assert prompts == HELD_OUT, "one response a prompt: Wilson's interval of independent draws"
    expected = {
        "sft/loss_high": high(nats, lengths, heldout),
        "sft/perplexity_ratio_high": math.exp(
            high([mine - its for mine, its in zip(nats, before, strict=True)], lengths, heldout)
        ),
        "sft/ended_low": wilson_low(share, HELD_OUT),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["sft/ended"] == share and 0 < share < 1
    assert abs(math.log(expected["sft/perplexity_ratio_high"])) > 0.05
    assert expected.keys() == {gate.metric for gate in GATES.values() if gate.stage == "sft"}
