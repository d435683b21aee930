"""The policy's self-checks at its boundaries: its models are those of the artifacts; what is judged is published."""

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from components.base.jsonl import read_rows
from components.data.support_desk.task import task_scores
from components.data.tables.published import has_split, read_split
from components.distributed.sharding import is_spread
from components.gates.self_checks import SelfChecks
from components.models.adapters import AdapterView
from components.models.batching import encode_prompt
from components.models.weights import load_from
from components.ppo.config import PpoJob
from components.ppo.experience import sampled_batches
from components.ppo.models import Models
from components.ppo.monitors.by_the_book import Surprises, check_sampled, is_exact, plain_logprobs, tokens_of
from components.reward.evaluation.model_checks import EXACT, ROUNDED, check_sft_scores
from components.reward.scoring import score_sequences
from components.sft.tokenized_demonstrations import choose_demonstrations, loss_a_token, response_losses
from components.training.trained_weights import WeightAverage

MEASURED, DEMONSTRATIONS = 512, 96
"""Held-out demonstrations whose loss the stage of sft measures by default, and most of them that are measured again."""
AGAIN = 64
"""Number of prompts of the evaluation that are answered again."""
FEW = 16
"""With fewer demonstrations or responses nothing is judged."""
WHOLE, TENSORS = 50_000_000, 24
"""Models with more parameters than the first number are compared with their files in as many tensors as the second."""


def check_inputs(checks: SelfChecks, models: Models, job: PpoJob, inputs: Mapping[str, Path]) -> None:
    """Judge the models as they were loaded from `inputs`, before anything trains. All ranks call it.

    Raises:
        CheckFailed: one of them is not what its artifact says.
    """
    _check_reference(checks, models, inputs["sft"])
    _check_tokenizers(checks, models.tokenizer, inputs)
    _check_sft_loss(checks, models, job, inputs)
    names, reward = ("ppo.scale", "ppo.reward_scores"), inputs["reward"]
    check_sft_scores(checks, names, models.reward_model, models.tokenizer, job, inputs["data"], reward, models.scale,
                     job.ppo.score, EXACT if is_exact(job) else ROUNDED)  # fmt: skip


def _check_reference(checks: SelfChecks, models: Models, sft: Path) -> None:
    if models.policy in (models.sft, models.reference):
        checks.judge(
            "ppo.reference", False, "the reference and the policy are one object, so it trains with the policy"
        )
    wrong, compared = list[str](), 0
    for name, model in {"SFT policy": models.sft, "reference": models.reference, "policy": models.policy}.items():
        if isinstance(model, AdapterView) and model is models.policy:
            continue  # its adapter adds nothing before the first update, which `check_start` judges
        others, count = other_weights(model, sft)
        compared += count
        if others:
            wrong.append(f"{len(others)} of {count} tensors of the {name} are not those of {sft}, as {others[0]}")
    if not compared:
        checks.skip("ppo.reference", "the weights are stored in another form")
        return
    checks.judge("ppo.reference", not wrong, "; ".join(wrong) or f"{compared} tensors are those of the SFT artifact")


def other_weights(model: Any, artifact: Path, merged: bool = False) -> tuple[list[str], int]:
    """Return the names of the tensors of `model` that differ from the file in `artifact`, and how many were compared.

    Tensors of another shape or layout (in shares, in four bits) are left out. The files are read tensor by tensor.

    Args:
        merged: whether the file's layers are the backbone's plus the product of the adapter's matrices.
    """
    named = model.weights() if isinstance(model, AdapterView) else model.named_parameters()
    adapted = model.backbone.layers.items() if merged and isinstance(model, AdapterView) else ()
    weights: dict[str, Tensor] = {name.replace(".base_layer", ""): weight.detach() for name, weight in named}
    others, compared = list[str](), 0
    few = sum(weight.numel() for weight in weights.values()) > WHOLE
    for file in sorted((artifact / "model").glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            names = [name for name in stored.keys() if name in weights]  # noqa: SIM118  (it is not a mapping)
            for name in names[:: max(1, len(names) // TENSORS)] if few else names:
                weight = weights[name]
                if is_spread(weight) or not weight.is_floating_point():
                    continue
                value = stored.get_tensor(name)
                if value.shape == weight.shape:
                    compared += 1
                    layer = next((layer for path, layer in adapted if name.endswith(f".{path}.weight")), None)
                    if layer is None or model.name not in layer.lora_A:
                        same = torch.equal(value.to(weight.dtype), weight.cpu())
                    else:
                        delta = layer.get_delta_weight(model.name).detach().float()
                        allowed = 0.1 * delta.norm() + torch.finfo(value.dtype).eps * weight.norm()
                        same = bool((value.float() - (weight + delta).cpu()).norm() <= allowed)
                    others += [] if same else [name]
    return others, compared


def _check_tokenizers(checks: SelfChecks, tokenizer: Any, inputs: Mapping[str, Path]) -> None:
    """Compare what the tokenizers of the artifacts make of the same prompts and texts, with PPO's own."""
    rows = [*islice(read_split(inputs["data"] / "pairs.test"), 4)] if has_split(inputs["data"] / "pairs.test") else []

    def seen(tokenizer: Any) -> dict[str, Any]:
        prompts = [encode_prompt(tokenizer, row["prompt"], 1 << 20) for row in rows]
        texts = [tokenizer(row["chosen"], add_special_tokens=False)["input_ids"] for row in rows]
        tokens = {"EOS": tokenizer.eos_token_id, "the pad token": tokenizer.pad_token_id}
        sides = {"the side of padding": tokenizer.padding_side, "the number of tokens": len(tokenizer)}
        return {"prompts in the chat template": prompts, "texts": texts} | tokens | sides

    expected, names = seen(tokenizer), [name for name in ("sft", "reward", "judge") if name in inputs]
    wrong = [
        f"{what} of {name}"
        for name in names
        for what, value in seen(load_from(AutoTokenizer, inputs[name] / "model")).items()
        if value != expected[what]
    ]
    numbers = f"{', '.join(wrong)} differ from the policy's" if wrong else f"those of {', '.join(names)} agree"
    checks.judge("ppo.tokenizers", not wrong, numbers)


def _check_sft_loss(checks: SelfChecks, models: Models, job: PpoJob, inputs: Mapping[str, Path]) -> None:
    """Compare SFT's loss on held-out demonstrations, as PPO encodes them, with the one that the SFT stage recorded.

    The stage measured the first of the same demonstrations, and may have dropped or cut overlong ones, so both are
    tried. Five standard errors and 0.02 nats are allowed. Beyond that it warns, since SFT may come from a run with
    other data; if the difference is half of the loss and more, it stops the stage.
    """
    name, file, data = "ppo.sft_loss", inputs["sft"] / "metrics.json", inputs["data"] / "demonstrations.heldout"
    recorded = json.loads(file.read_text()).get("sft/loss") if file.is_file() else None
    if recorded is None or not has_split(data):
        checks.skip(name, "the artifact of sft has no loss, or the data have no held-out demonstrations")
        return
    first = read_split(data)[:MEASURED]
    rows, results = first[:: max(1, len(first) // DEMONSTRATIONS)], list[tuple[float, float]]()
    for overlong in ("drop", "cut"):
        chosen = choose_demonstrations(models.tokenizer, rows, job.generation, overlong, DEMONSTRATIONS)
        if len(chosen.examples) < FEW or (overlong == "cut" and results and not chosen.overlong):
            continue
        losses = response_losses(models.sft, models.tokenizer.pad_token_id, chosen.examples, job.runtime)
        loss = loss_a_token(losses, chosen.examples)
        if math.isfinite(loss.high - loss.low):
            results.append((loss.value, 5 * (loss.high - loss.low) / (2 * 1.96) + 0.02))
    if not results:
        checks.skip(name, f"fewer than {FEW} held-out demonstrations fit, or all are to one prompt")
        return
    value, allowed = min(results, key=lambda result: abs(result[0] - recorded) / result[1])
    numbers = f"{value:.3f} nats a token here, {recorded:.3f} in the record of sft ({allowed:.2f} apart is allowed)"
    off = abs(value - recorded)
    checks.judge(name, off <= allowed, numbers, fails=off > allowed + 0.5 * recorded)


def check_average(checks: SelfChecks, average: WeightAverage, policy: Any) -> None:
    """Judge that the policy has the weights of `ppo.ema` after its training. Raises CheckFailed if it has others."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    pairs = zip(average.weights, trained, strict=True)
    others = sum(not (is_spread(weight) or torch.equal(mean, weight)) for mean, weight in pairs)
    checks.judge("ppo.published", not others, f"{others} tensors are not those of the moving average (ppo.ema)")


def check_end(
    checks: SelfChecks, models: Models, job: PpoJob, inputs: Mapping[str, Path], out: Path, metrics: Mapping[str, float]
) -> None:
    """Judge the written evaluation and the published policy. Only the first rank calls it, after the evaluation.

    Raises:
        CheckFailed: what was judged is not what was published, or a number of it is not what its definition gives.
    """
    rows = read_rows(out / "artifact" / "evaluation.jsonl")
    prompts, heldout = [row["prompt"] for row in rows], read_split(inputs["data"] / "prompts.test")
    others = sum(row["prompt"] != expected["prompt"] for row, expected in zip(rows, heldout, strict=False))
    numbers = f"{others} of the {len(rows)} prompts of the evaluation are not those of prompts.test"
    checks.judge("ppo.evaluation_prompts", not others and len(rows) <= len(heldout), numbers)
    wrong = sum(
        row[side].get(name) != value
        for row in rows
        for side in ("policy", "sft")
        for name, value in task_scores(inputs["data"], row["prompt"], row[side]["response"]).items()
    )
    numbers = f"{wrong} true scores (gold and others) in evaluation.jsonl are not those of their prompt and text"
    checks.judge("ppo.evaluation", not wrong, numbers)
    _check_published(checks, models, out)
    _check_gain(checks, metrics)
    _check_sft_evaluation(checks, [row["sft"] for row in rows], job, inputs["sft"])
    if any(is_spread(parameter) for parameter in models.policy.parameters()):
        checks.skip("ppo.evaluation", "the policy is sharded over ranks")
        return
    _check_evaluation(checks, models, job, prompts[:AGAIN], [row["policy"] for row in rows[:AGAIN]])


def _check_published(checks: SelfChecks, models: Models, out: Path) -> None:
    others, count = other_weights(models.policy, out / "artifact", merged=True)
    if not count:
        checks.skip("ppo.published", "the weights are stored in another form")
        return
    numbers = f"{len(others)} of {count} tensors of the published model are not those of the policy that was judged"
    checks.judge("ppo.published", not others, numbers)


def _check_gain(checks: SelfChecks, metrics: Mapping[str, float]) -> None:
    """A mean moves by at most sqrt(2 KL) deviations if the scores are sub-Gaussian; twice that and 0.3 are allowed."""
    gain, kl = metrics["policy/reward_gain"], metrics["policy/kl"]
    bound = 2 * math.sqrt(2 * max(kl, 0.0)) + 0.3
    numbers = f"a gain of {gain:.2f} deviations at a KL of {kl:.2f} nats a response ({bound:.2f} is allowed)"
    checks.judge("ppo.gain", gain <= bound, numbers, fails=False)


def _check_sft_evaluation(checks: SelfChecks, rows: Sequence[Any], job: PpoJob, sft: Path) -> None:
    """SFT has no KL to itself, and its responses are as long as in its own stage: within 5 standard errors."""
    largest = max(abs(row["kl"]) for row in rows)
    of_kl = f"SFT's own responses have a KL to SFT of up to {largest:.2g} nats"
    checks.judge("ppo.sft_evaluation", largest <= 1e-3, of_kl)
    at, file = job.ppo.evaluate_temperature, sft / "samples.jsonl"
    if at not in (None, job.generation.temperature) or not file.is_file():
        return
    here, there = ([float(len(row["response"])) for row in some] for some in (rows, read_rows(file)))
    if min(len(here), len(there)) < FEW:
        return
    allowed = 5 * math.sqrt(variance(here) / len(here) + variance(there) / len(there)) + 1
    numbers = f"{of_kl}; they have {fmean(here):.0f} characters on average, and {fmean(there):.0f} in the stage of sft"
    checks.judge("ppo.sft_evaluation", abs(fmean(here) - fmean(there)) <= allowed, numbers, fails=False)


def _check_evaluation(
    checks: SelfChecks, models: Models, job: PpoJob, prompts: Sequence[Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Answer a few prompts again with the same random numbers, and compute score and KL response by response.

    Rows whose texts differ are left out, since other batches round otherwise; in float32 at most half of them may.
    """
    name, exact, at = "ppo.evaluation", is_exact(job), job.ppo.evaluate_temperature
    generation = job.generation if at is None else job.generation.model_copy(update={"temperature": at})
    texts, kl, scores, seen = list[str](), list[float](), list[float](), list[Surprises]()
    for _, samples, _ in sampled_batches(models, models.policy, prompts, job, "evaluation", generation):
        texts += samples.texts(models.tokenizer)
        seen.append(Surprises.of(models.policy, samples, job, at))
        for row in range(len(samples.ended)):
            prompt, response = tokens_of(samples, row)
            with torch.no_grad():
                mine, its = (plain_logprobs(model, prompt, response, job) for model in (models.policy, models.sft))
            kl.append(float((mine - its).sum()))
            raw = score_sequences(
                models.reward_model, models.tokenizer.pad_token_id, [prompt + samples.reward_ids(row)], job.runtime
            )
            scores.append(float(models.scale(raw)[0]))
    if at != 0:
        check_sampled(checks, "the policy's evaluation", seen, exact)
        of_sft = sampled_batches(models, models.sft, prompts[: AGAIN // 2], job, "evaluation", generation)
        seen = [Surprises.of(models.sft, samples, job, at) for _, samples, _ in of_sft]
        check_sampled(checks, "SFT's evaluation", seen, exact)
    same = [i for i, text in enumerate(texts) if text == rows[i]["response"]]
    if exact and job.runtime.device == "cpu" and len(same) < len(rows) / 2:
        numbers = f"{len(same)} of {len(rows)} responses in evaluation.jsonl are those of the policy"
        checks.judge(name, False, numbers)
    if not same:
        checks.skip(name, "no response is the same in another batch")
        return
    tokens = fmean(rows[i]["tokens"] for i in same)
    rounding = 1e-3 * math.sqrt(tokens) if exact else 0.3 * math.sqrt(tokens / len(same))
    off = abs(fmean(kl[i] - rows[i]["kl"] for i in same))
    off_score = 0.0 if models.rewards is not None else abs(fmean(scores[i] - rows[i]["score"] for i in same))
    numbers = (
        f"of {len(same)} responses, KL is {fmean(rows[i]['kl'] for i in same):.3f} nats and here "
        f"{fmean(kl[i] for i in same):.3f}, and the scores differ by {off_score:.2g} deviations"
    )
    checks.judge(name, off <= rounding and off_score <= (0.01 if exact else 0.5), numbers)
