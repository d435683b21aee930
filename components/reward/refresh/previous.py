"""Start from an earlier run's reward model, after a check that it fits this run."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.models.adapters import Backbone, load_adapter
from components.models.folders import load_reward_model, on_host
from components.models.weights import load_from
from components.reward.config import RewardConfig, RewardJob
from components.reward.scoring import ScoreScale, adapter_name, member_folder, read_sft_scores


def check_previous(config: RewardConfig, sft: Path, previous: Path) -> None:
    """Refuse an earlier reward artifact `previous` from which this run's model, on the artifact `sft`, cannot start.

    Raises:
        UserError: they differ in tokenizer, architecture, heads, number of members or adapter. The message says what to
            do.
    """
    same_sft = (
        "Give this run the same sft.base, or, where the model is built from scratch, the same data.demonstrations, "
        "sft.max_demonstrations and sft.scratch."
    )
    here, there = _shapes(sft), _shapes(previous)
    facts: list[tuple[str, Any, Any]] = [
        ("tokenizer", _tokenizer(previous)[:12], _tokenizer(sft)[:12]),
        *((name, there.get(name), here.get(name)) for name in {**here, **there}),
        ("reward.objectives", sorted(ScoreScale.read(previous).objectives), list(config.heads)),
        ("reward.members", len(read_sft_scores(previous)), config.members),
    ]
    if config.lora is not None:
        file = previous / "adapter" / "adapter_config.json"
        adapter = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        targets = sorted(adapter.get("target_modules", ()))
        facts += [
            ("reward.lora", "an adapter" if adapter else None, "an adapter"),
            ("reward.lora.rank", adapter.get("r"), config.lora.rank),
            ("reward.lora.alpha", adapter.get("lora_alpha"), config.lora.alpha),
            ("reward.lora.targets", targets, targets if config.lora.targets is None else sorted(config.lora.targets)),
        ]
    for name, earlier, now in facts:
        if earlier != now:
            advice = f"Set {name} as it was there, or train a new model without reward.refresh."
            raise UserError(
                f"reward.refresh: {name} of the earlier reward model is {earlier or 'null'}, and {now or 'null'} in "
                f"this run. {advice if name.startswith('reward.') else same_sft}"
            )


def start_from(job: RewardJob, sft: Path, previous: Path, member: int, first: Any = None) -> Any:
    """Load the earlier run's reward model `member` (from 0), or its only one if that is an average.

    With adapters, later members share the backbone of the `first` member.

    Raises:
        UserError: its adapter was trained on a different SFT model.
    """
    folder = member_folder(previous, member)
    lora = job.reward.lora
    if lora is None:
        return load_reward_model(folder, on_host(job.runtime))[0]
    if first is not None:
        backbone = first.backbone
    else:
        model, _ = load_reward_model(sft, on_host(job.runtime), seed=0, heads=job.reward.heads)
        backbone = Backbone(model, job.runtime.dtype, lora.quantize, job.runtime.device)
    if json.loads((folder / "adapter" / "backbone.json").read_text())["sha256"] != backbone.digest:
        raise UserError(
            "reward.refresh: the earlier reward model is an adapter of another SFT model than this run's, and fits no "
            "other. Give this run the same data.demonstrations, sft options and seed, or train with reward.lora=null."
        )
    return load_adapter(backbone, adapter_name(member), folder / "adapter")


def _tokenizer(artifact: Path) -> str:
    tokenizer = load_from(AutoTokenizer, artifact / "model")
    return digest_json([tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.eos_token, tokenizer.pad_token])


def _shapes(artifact: Path) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each weight except the head's, without loading the weights."""
    with torch.device("meta"):
        body = AutoModel.from_config(load_from(AutoConfig, artifact / "model"))
    return {name: tuple(weight.shape) for name, weight in body.named_parameters()}
