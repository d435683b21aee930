"""Train the reward models, each on its share of the pairs, and average their weights if the config says so."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from components.base.errors import UserError
from components.base.hashing import hash8
from components.base.observe import Observe
from components.distributed.sharding import gathered, spread
from components.models.adapters import Backbone
from components.models.batching import length_buckets, onto
from components.models.folders import draw_head, frozen, load_reward_model, on_host
from components.models.runtime import release_memory
from components.reward.config import RewardConfig, RewardJob
from components.reward.losses import pair_losses, weighted_mean
from components.reward.pair_scores import check_packed, packed_scores, separate_scores
from components.reward.refresh.previous import start_from
from components.reward.scoring import adapter_name
from components.reward.training_pairs import Pair, Pairs, PreferencePair, member_rows
from components.training.heldout import HeldOut, LossEvaluations
from components.training.loop import TrainingExamples, fit, torch_seed
from components.training.training_checks import check_encoding

SHOWN = 4
"""Number of held-out pairs whose scores are shown at each evaluation during training."""
CHECKED = 4
"""Number of pairs whose packed scores are checked before training. They are the pairs with the longest texts, since a
layer with a sliding window treats shorter ones correctly."""


@dataclass
class HeldPairs:
    """Pairs of the calibration split that are evaluated during training, with the results."""

    pairs: Pairs
    prompts: list[bytes]
    """(n,) the hashed prompt of each pair."""
    examples: list[PreferencePair]
    """The first few pairs as texts, whose scores people can read while the model trains."""
    keep_last: Callable[[Any, int], None]
    """Stores a model as its last step left it, and its number, if an earlier step's weights are published."""
    evaluations: list[LossEvaluations] = field(default_factory=list)
    """The results for each model that was trained."""

    @classmethod
    def choose(
        cls, config: RewardConfig, rows: Sequence[PreferencePair], pairs: Pairs,
        keep_last: Callable[[Any, int], None],
    ) -> "HeldPairs | None":  # fmt: skip
        """Take the first calibration pairs, given as rows and as token ids; None if nothing is evaluated.

        Raises:
            UserError: there are fewer than two pairs.
        """
        if config.evaluate_every is None:
            return None
        if len(rows) < 2:
            raise UserError(
                f"reward.evaluate_every needs two pairs of the calibration split, and there are {len(rows)}. Raise "
                "data.split.calibration, or set reward.evaluate_every=null."
            )
        count = min(config.watch.examples, len(rows))
        prompts = [hash8(str(row["prompt"])) for row in rows[:count]]
        return cls(pairs, prompts, list(rows[: min(count, SHOWN)]), keep_last)

    def metrics(self) -> dict[str, float]:
        """Return the final metrics: means over the models that were trained."""
        published = [run.published for run in self.evaluations if run.published]
        names = published[0] if published else ()
        return {name: math.fsum(values[name] for values in published) / len(published) for name in names}

    def document(self) -> dict[str, Any]:
        """Return which checkpoint is published and why, for `metadata.json`."""
        documents = [run.document() for run in self.evaluations]
        if len(documents) == 1:
            return documents[0]
        reasons = (f"Model {i}: {model['reason']}" for i, model in enumerate(documents, 1))
        return {"reason": " ".join(reasons), "models": documents}


def train_models(
    job: RewardJob, sft: Path, rows: Sequence[PreferencePair], pairs: Pairs, pad_id: int, out: Path,
    observe: Observe, previous: Path | None = None, held_out: HeldPairs | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Train and yield the frozen reward models of the artifact: the members one after the other, or their average.

    Args:
        rows, pairs: the training pairs, as rows and as token ids.
        observe: gets the members' steps, numbered consecutively over all members.
        previous: the reward artifact from which training continues; None starts from the SFT model.
        held_out: the pairs evaluated during training; takes the results.
    """
    config = job.reward
    shares = [member_rows(rows, config.member_share, job.seed, m) for m in range(config.members)]
    steps = [config.epochs * math.ceil(len(share) / config.batch_size) for share in shares]

    begin = partial(start_model, job, sft) if previous is None else partial(start_from, job, sft, previous)

    first = None
    for member, share in enumerate(shares):
        before = sum(steps[:member])

        def counted_through(
            step: int, metrics: Mapping[str, float], total: int | None = None, *,
            tokens: float | None = None, resumed: bool = False,
            samples: Sequence[Mapping[str, object]] | None = None, doing: str | None = None, before: int = before,
        ) -> None:  # fmt: skip
            if doing is not None:
                observe(step, {}, total=total, doing=doing)
                return
            # `fit` counts the longer of a pair's two sequences; without packing two of them are computed.
            tokens = tokens if tokens is None or config.shared_prompts else 2 * tokens
            observe(before + step, metrics, total=sum(steps), tokens=tokens, resumed=resumed, samples=samples)

        model = begin(member, first)
        first = model if first is None and config.lora is not None else first
        whole = fit_model(job, model, pairs.choose(share), pad_id, out, counted_through, member, held_out)
        yield frozen(whole)


def start_model(job: RewardJob, sft: Path, member: int, first: Any = None) -> Any:
    """Return the untrained reward model `member` (from 0): heads on the SFT model, or on an adapter of it.

    With adapters, later members share the backbone of the `first` member, so that the SFT model is loaded once.
    """
    config = job.reward
    number = (member,) if member else ()
    head_seed, adapter_seed = (torch_seed(job.seed, "reward", part, *number) for part in ("head", "adapter"))
    if config.lora is not None and first is not None:
        head = draw_head(copy.deepcopy(first.backbone.model.score), head_seed)
        if config.head_start == "zeros":
            nn.init.zeros_(head.weight)
        return first.backbone.add(adapter_name(member), config.lora, adapter_seed, head)
    model, _ = load_reward_model(sft, on_host(job.runtime), head_seed, config.heads)
    if config.head_start == "zeros":
        nn.init.zeros_(model.score.weight)
    if config.lora is None:
        return model
    backbone = Backbone(model, job.runtime.dtype, config.lora.quantize, job.runtime.device)
    return backbone.add("reward", config.lora, adapter_seed, model.score)


def fit_model(
    job: RewardJob, model: Any, pairs: Pairs, pad_id: int, out: Path, observe: Observe, member: int = 0,
    held_out: HeldPairs | None = None,
) -> Any:  # fmt: skip
    """Train `model` on `pairs`, in an order that depends on `member`; return it. Resumes from `out/checkpoint`."""
    config = job.reward
    check_encoding("reward.encoding", pairs.tokenizer, pairs.rows, pairs, pairs.generation, out)
    model = spread(model.requires_grad_(True), job.runtime.sharding, job.runtime.device, job.runtime.dtype)
    combination = torch.tensor([config.objectives[name] for name in config.heads] or [1.0], device=job.runtime.device)

    if config.shared_prompts:
        check_packed(model, pairs.longest(CHECKED), pad_id, job.runtime)

    def score(rows: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        return (packed_scores if config.shared_prompts else separate_scores)(model, rows, pad_id, job.runtime)

    def batch_loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        rows = pairs.at(batch)
        chosen, rejected = score(rows)
        labels = onto(job.runtime.device, torch.tensor([[p.weight, p.source_weight, *p.shares] for p in rows]))
        weights, shares = labels[:, 0], labels[:, 2:]
        losses = labels[:, 1] * pair_losses(chosen, rejected, shares)
        # Sources' weights are no part of the divisor: in batches sorted by length, a batch may have one source only.
        loss = weighted_mean(losses, weights)
        with torch.no_grad():
            right = ((chosen - rejected) @ combination > 0).float()
        return loss, {"reward/train_loss": loss, "reward/train_accuracy": weighted_mean(right, weights)}

    evaluations = None
    if held_out is not None:
        unit = "nats a pair" if len(config.heads) < 2 else "nats a pair, all objectives together"
        evaluations = LossEvaluations(config, "reward", HeldOut(
            lambda: _pair_losses(score, held_out.pairs, combination, config.batch_size), held_out.pairs.weights[:],
            held_out.prompts, unit, lambda: _example_scores(score, held_out, combination),
        ))  # fmt: skip
    data = TrainingExamples(batch_loss, pairs.lengths, pairs.weights)
    observers = {} if evaluations is None else {"evaluations": evaluations}
    fit(model.train(), data, config, seed=job.seed, group="reward", out=out, observe=observe, part=member or None,
        observers=observers)  # fmt: skip
    release_memory(job.runtime.device)
    model = gathered(model)
    if held_out is not None and evaluations is not None:
        evaluations.publish(model, lambda: held_out.keep_last(model, member))
        held_out.evaluations.append(evaluations)
    return model


_Score = Callable[[Sequence[Pair]], tuple[Tensor, Tensor]]
"""Returns raw scores (N, K) of the chosen and of the rejected responses of pairs."""


def _pair_losses(
    score: _Score, pairs: Pairs, combination: Tensor, batch_size: int
) -> tuple[list[float], dict[str, float]]:
    """Return the log loss of each pair, and the accuracy."""
    losses, right = [0.0] * len(pairs), 0.0
    for batch in length_buckets(pairs.lengths[:], batch_size):
        rows = pairs.at(batch)
        chosen, rejected = (side.double().cpu() for side in score(rows))
        labels = torch.tensor([[p.weight, *p.shares] for p in rows], dtype=torch.float64)
        weights = labels[:, 0]
        right += float((((chosen - rejected) @ combination.double().cpu() > 0) * weights).sum())
        of_batch = pair_losses(chosen, rejected, labels[:, 1:]) * weights
        for i, loss in zip(batch, of_batch.tolist(), strict=True):
            losses[i] = loss
    return losses, {"accuracy": right / math.fsum(pairs.weights[:])}


def _example_scores(score: _Score, held_out: HeldPairs, combination: Tensor) -> list[dict[str, object]]:
    """Return the raw scores of both sides of the first few held-out pairs."""
    sides = ((side @ combination).tolist() for side in score(held_out.pairs[: len(held_out.examples)]))
    return [
        {"prompt": pair["prompt"], "response": pair[side], "preferred": preferred, "score": value}
        for pair, *values in zip(held_out.examples, *sides, strict=True)
        for side, preferred, value in zip(("chosen", "rejected"), (1, 0), values, strict=True)
    ]
