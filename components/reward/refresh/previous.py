"""Start from an earlier run's reward model, after a check that it fits this run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.text import counted
from components.models.adapters import Backbone, load_adapter
from components.models.folders import load_reward_model
from components.models.weights import load_from
from components.reward.config import RewardConfig, RewardJob
from components.reward.scoring import ScoreScale, adapter_name, member_folder, read_sft_scores


def check_previous(config: RewardConfig, sft: Path, previous: Path) -> None:
    """Refuse an earlier reward artifact `previous` from which this run's model, on the artifact `sft`, cannot start.

    Raises:
        UserError: they differ in tokenizer, architecture, heads, number of members or adapter. The message says what to
            do.
    """
    said = "reward.refresh: the earlier reward model"
    if _tokenizer(sft) != _tokenizer(previous):
        raise UserError(
            f"{said} has another tokenizer than this run's SFT model. Give this run the same sft.base, or, where the "
            "model is built from scratch, the same data.demonstrations, sft.max_demonstrations and sft.scratch."
        )
    if (here := _shapes(sft)) != (there := _shapes(previous)):
        name = next(n for n in (*here, *there) if here.get(n) != there.get(n))
        raise UserError(
            f"{said} is of another architecture than this run's SFT model: {name} is {there.get(name, 'not there')}, "
            f"here {here.get(name, 'not there')}. Give this run the same sft.base or sft.scratch."
        )
    heads = tuple(sorted(ScoreScale.read(previous).objectives))
    if heads != config.heads:
        raise UserError(
            f"{said} has {_named(heads)}, and reward.objectives asks for {_named(config.heads)}. Name the same ones "
            "(their weights may differ), or train a new model without reward.refresh."
        )
    if (members := len(read_sft_scores(previous))) != config.members:
        raise UserError(
            f"{said} has {counted(members, 'member')}, this run's would have {config.members}, and each starts from "
            f"its own earlier one. Set reward.members={members}, or train new ones without reward.refresh."
        )
    if config.lora is not None:
        _check_adapter(config, previous, said)


def _check_adapter(config: RewardConfig, previous: Path, said: str) -> None:
    file = previous / "adapter" / "adapter_config.json"
    if config.lora is None or not file.is_file():
        raise UserError(f"{said} was trained whole, without an adapter. Set reward.lora=null, as it was there.")
    adapter = json.loads(file.read_text(encoding="utf-8"))
    if config.lora.targets is not None and set(config.lora.targets) != set(adapter["target_modules"]):
        raise UserError(
            f"{said}'s adapter is of {', '.join(adapter['target_modules'])}, and reward.lora.targets asks for "
            f"{', '.join(config.lora.targets)}. Leave reward.lora.targets at null: training continues with the "
            "earlier ones."
        )
    if (adapter["r"], adapter["lora_alpha"]) != (config.lora.rank, config.lora.alpha):
        raise UserError(
            f"{said}'s adapter has rank {adapter['r']} and alpha {adapter['lora_alpha']}, and reward.lora asks for "
            f"{config.lora.rank} and {config.lora.alpha}. Set reward.lora.rank={adapter['r']} and "
            f"reward.lora.alpha={adapter['lora_alpha']}."
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
        return load_reward_model(folder, job.runtime)[0]
    if first is not None:
        backbone = first.backbone
    else:
        on_host = job.runtime.model_copy(update={"device": "cpu"})
        model, _ = load_reward_model(sft, on_host, seed=0, heads=job.reward.heads)
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


def _named(heads: Sequence[str]) -> str:
    return f"the heads {', '.join(heads)}" if heads else "one head"
