"""The section of a model card that shows how to load the folder that `tether export` writes."""

import json
import math
from collections.abc import Iterator, Mapping

from pydantic import JsonValue

from components.base.nested import group
from components.base.text import markdown as words
from flows.models.facts import SHOWN, ModelFacts
from tasks.tracking.links import JUDGE


def loading(facts: ModelFacts) -> Iterator[str]:
    """Yield the lines of the section."""
    scores = facts.kind in ("reward", JUDGE)
    template = _SCORE if scores else _GENERATE
    yield from (
        "## How to load it",
        "",
        "In the folder that `tether export` writes (where this file is README.md):",
        "",
    )
    # to find stop strings, transformers needs the tokenizer
    tokenizer = ", tokenizer=tokenizer" if group(facts.record.job, "generation").get("stop") else ""
    yield from ("```python", template.format(**_scale(facts), tokenizer=tokenizer), "```", "")
    yield from _about_template(facts)
    if scores:
        yield from _about_scores(facts)
    if group(facts.record.job, SHOWN.get(facts.record.stage, facts.record.stage)).get("lora"):
        yield (
            "The folder holds the whole model with its LoRA adapter merged. `adapter/` holds only the adapter, for "
            f"peft: load it on top of the SFT model, artifact `{facts.record.inputs['sft'][:16]}`, which `tether "
            "export` writes."
        )
        heads = len(_weights(facts))
        classifier = ("AutoModelForSequenceClassification", f", num_labels={heads}")
        adapted = classifier if scores else ("AutoModelForCausalLM", "")
        yield from ("", "```python", _ADAPTER.format(*adapted), "```", "")


def _weights(facts: ModelFacts) -> Mapping[str, JsonValue]:
    """Return each head's weight by objective, in the order of the heads; one head without a name if there are no
    objectives."""
    return dict(sorted(group(facts.record.job, "reward", "objectives").items())) or {"": 1.0}


def _scale(facts: ModelFacts) -> dict[str, float | list[JsonValue]]:
    """Return the numbers that turn a reward model's logits into its score; for other models they are not used."""
    metrics = facts.record.metrics
    prefix = "reward/judge_" if facts.kind == JUDGE else "reward/"
    found = {name: metrics.get(f"{prefix}{name}", math.nan) for name in ("shift", "scale", "temperature")}
    return {**found, "weights": list(_weights(facts).values())}


def _about_template(facts: ModelFacts) -> Iterator[str]:
    options = next((group(record.job, "sft") for record in facts.made if record.stage == "sft"), {})
    variables = group(options, "template_variables").items()
    told = [f"`{name}` is {words(json.dumps(value))} unless you pass another value" for name, value in variables]
    if options.get("system_in_question"):
        told.append("a system message is put before the first question")
    if told:
        yield from (f"In its chat template, {', and '.join(told)}.", "")


def _about_scores(facts: ModelFacts) -> Iterator[str]:
    options, weights = group(facts.record.job, "reward"), _weights(facts)
    yield (
        "The score is read at the end token, after the prompt in its chat template and the response. "
        "`scaled` has mean 0 and standard deviation 1 over the SFT model's responses; score differences over the "
        "temperature are log-odds. `config.json` states shift, scale and temperature as `score_scale`."
    )
    if options.get("objectives"):
        told = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        yield f"Its heads are {', '.join(weights)}: the score is the sum of their logits, weighted by {told}."
    if options.get("members", 1) != 1 and options.get("combine", "ensemble") == "ensemble":
        yield f"It is one of {options['members']} members (`members/`); shift, scale and temperature are of their mean."
    yield ""


_GENERATE = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
prompt = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs{tokenizer})  # sampled as in training: see generation_config.json
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

_SCORE = """import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForSequenceClassification.from_pretrained(".")
shift, scale, temperature = {shift!r}, {scale!r}, {temperature!r}
messages = [{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
texts = [prompt + response + tokenizer.eos_token for response in ("one response", "another")]
with torch.no_grad():
    logits = model(**tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")).logits
raw = logits @ torch.tensor({weights})
scaled = (raw - shift) / scale
probability = torch.sigmoid((raw[0] - raw[1]) / temperature)  # that people prefer the first"""

_ADAPTER = """from peft import PeftModel
from transformers import {0}

model = PeftModel.from_pretrained({0}.from_pretrained("SFT_FOLDER"{1}), "adapter")"""
