"""PPO's models (policy, reference, reward model, critic) and the forward passes through them."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from components.base.errors import UserError
from components.data.tables.published import read_split
from components.distributed import ranks
from components.distributed.sharding import is_spread, only_own_part, spread, through, whole
from components.models.adapters import AdapterView, Backbone, load_adapter, tensors_digest
from components.models.batching import even_runs, onto
from components.models.folders import frozen, load_causal_lm, load_reward_model, on_host
from components.models.logprobs import TokenStats, last_hidden, positions, predicting, token_stats
from components.models.runtime import Runtime, autocast, release_memory
from components.models.sampling import ANSWERS_STREAM, Samples, SftAnswers, generate_responses
from components.ppo.config import PpoJob
from components.reward.config import EnsembleConfig
from components.reward.scoring import (
    ScoreScale,
    adapter_name,
    as_one,
    member_folder,
    read_sft_scores,
    score_sequences,
    score_tokens,
    with_one_head,
)
from components.rewards.rules import Rules
from components.rewards.weighted import Rewards
from components.training.loop import torch_seed


class SeparateCritic(nn.Module):
    """A critic that is its own model: a scalar head whose output `scale` converts to the unit of scaled scores."""

    def __init__(self, model: Any, scale: ScoreScale) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def values(self, batch: "Packed", hidden: Tensor | None, runtime: Runtime) -> Tensor:
        """Return values (K,) of the states in which the response tokens were chosen. `hidden` is not used."""
        return self.scale(through(self.model, _head_values, batch, runtime).squeeze(-1))


def _head_values(model: Any, batch: "Packed", runtime: Runtime) -> Tensor:
    with autocast(runtime):
        hidden = predicting(last_hidden(model, batch.ids, batch.mask, side="right"), batch.at)
    return model.score(hidden.float())


class SharedCritic(nn.Linear):
    """A linear value head on the policy's last hidden states. It starts at 0, SFT responses' mean scaled score."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def values(self, batch: "Packed", hidden: Tensor | None, runtime: Runtime) -> Tensor:
        """Return values (K,) from the policy's hidden states (K, D) in which the response tokens were chosen."""
        return self(hidden).squeeze(-1)


@dataclass
class Models:
    """The models that PPO trains (`policy`, `critic`) and those that stay frozen (all others)."""

    policy: Any
    reference: Any
    """The reference of the KL penalty: `sft`, or a later policy if the reference is refreshed."""
    reward_model: Any
    critic: SeparateCritic | SharedCritic | None
    tokenizer: Any
    scale: ScoreScale
    sft: Any = None
    """The SFT policy. KL to it is logged, gated and compared with the ceiling. Defaults to `reference`."""
    rewards: Rewards | None = None
    """The sources of `ppo.rewards`; `scale` is then that of their sum. None if the reward model is the only source."""
    judge: Any = None
    """An independent judge, used only in evaluations; None without one."""
    judge_scale: ScoreScale | None = None
    """Converts the judge's raw scores to SFT standard deviations."""
    rules: Rules | None = None
    """Counts violations of `ppo.rules`; None without rules, and on all ranks but the first."""

    answers: SftAnswers = field(default_factory=SftAnswers)
    """SFT's responses to the first prompts of the calibration split."""

    def __post_init__(self) -> None:
        self.sft = self.reference if self.sft is None else self.sft

    @classmethod
    def load(cls, job: PpoJob, inputs: Mapping[str, Path]) -> "Models":
        """Load policy and reference from the SFT artifact, reward model and a separate critic from the reward artifact.

        What trains is sharded over the ranks, with `zero3` also what is frozen.

        Raises:
            UserError: `ppo.lora` is set, and the reward artifact holds no adapter of this SFT model.
        """
        models = (cls._separate if job.ppo.lora is None else cls._on_one_backbone)(job, inputs)
        models.answers = SftAnswers.read(inputs["reward"]) or models._sampled_answers(job, inputs["data"])
        return models

    def _sampled_answers(self, job: PpoJob, data: Path) -> SftAnswers:
        """Sample what the reward stage of release 0.1.0 sampled but did not store, with this run's seed."""
        prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")[: self.scale.responses]]
        seed = torch_seed(job.seed, *ANSWERS_STREAM)
        responses = generate_responses(self.sft, self.tokenizer, prompts, job.generation, seed, job.runtime)
        return SftAnswers.of(responses, seed)

    @classmethod
    def _separate(cls, job: PpoJob, inputs: Mapping[str, Path]) -> "Models":
        policy, tokenizer = load_causal_lm(inputs["sft"], on_host(job.runtime))
        policy = spread(policy.requires_grad_(True), job.runtime.sharding, job.runtime.device, job.runtime.dtype)
        return cls._with_policy(policy, tokenizer, job, inputs, None)

    @classmethod
    def _with_policy(cls, policy: Any, tokenizer: Any, job: PpoJob, inputs: Mapping[str, Path], sft: Any) -> Self:
        """Load the other models; SFT only if `sft` is None."""
        host, move = on_host(job.runtime), (job.runtime.sharding, job.runtime.device, job.runtime.dtype)
        sft = reference = frozen(load_causal_lm(inputs["sft"], host)[0], job.runtime) if sft is None else sft
        if job.ppo.kl.refresh_every:
            reference = frozen(load_causal_lm(inputs["sft"], host)[0], job.runtime)
        reward_model, scale, critic = load_judges(
            job, inputs["reward"], policy.config,
            load=lambda folder, name: load_reward_model(folder, host)[0],
            from_sft=lambda: load_reward_model(inputs["sft"], host, seed=0)[0],
        )  # fmt: skip
        if isinstance(critic, SeparateCritic):
            spread(critic.model.requires_grad_(True), *move)
        judge = load_judge(inputs, lambda folder, name: load_reward_model(folder, host)[0], job.runtime)
        return cls(policy, reference, reward_model, critic, tokenizer, scale, sft, None, *judge)

    @classmethod
    def _on_one_backbone(cls, job: PpoJob, inputs: Mapping[str, Path]) -> "Models":
        """Load all models as adapters of one SFT model. The SFT policy is that model without an adapter."""
        config = job.ppo.lora
        assert config is not None
        model, tokenizer = load_causal_lm(inputs["sft"], on_host(job.runtime))
        backbone = Backbone(model, job.runtime.dtype, config.quantize, job.runtime.device)
        seed = functools.partial(torch_seed, job.seed, "ppo")
        head = functools.partial(nn.Linear, model.config.hidden_size, 1, bias=False, device=job.runtime.device)
        reward_model, scale, critic = load_judges(
            job, inputs["reward"], model.config,
            load=lambda folder, name: load_adapter(backbone, name, folder / "adapter"),
            from_sft=lambda: backbone.add("critic", config, seed("critic"), head()),
        )  # fmt: skip
        policy = backbone.add("policy", config, seed("adapter"))
        sft = reference = AdapterView(backbone)
        if job.ppo.kl.refresh_every:
            reference = frozen(backbone.add("reference", config, seed("adapter")))
        judge = load_judge(
            inputs, lambda folder, name: load_adapter(backbone, f"judge-{name}", folder / "adapter"), job.runtime
        )
        return cls(policy, reference, reward_model, critic, tokenizer, scale, sft, None, *judge)

    @contextmanager
    def without(self, names: Sequence[str], job: PpoJob, inputs: Mapping[str, Path]) -> Iterator[None]:
        """Free the frozen models with these names in the block, and load them again after it. Adapters stay."""
        if not names or isinstance(self.policy, AdapterView):
            yield
            return
        for name in names:
            setattr(self, name, None)
        release_memory(job.runtime.device)
        yield
        release_memory(job.runtime.device)
        loaded = self._with_policy(self.policy, self.tokenizer, job, inputs, self.sft)
        for name in names:
            setattr(self, name, getattr(loaded, name))

    def value_head(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function from the policy's last hidden states (n, D) to values (n,), if the critic is shared."""
        critic = self.critic
        return (lambda hidden: critic(hidden).squeeze(-1)) if isinstance(critic, SharedCritic) else None

    def trained(self) -> dict[str, nn.Module]:
        """Return the models that are trained: the policy, and the critic if there is one."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    def refresh_reference(self) -> None:
        """Copy the policy's current weights into the reference."""
        only_own_part(self.policy)
        with torch.no_grad():
            for frozen_weight, trained in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                frozen_weight.copy_(trained if is_spread(frozen_weight) else whole(trained))


def load_judge(
    inputs: Mapping[str, Path], load: Callable[[Path, str], Any], runtime: Runtime
) -> tuple[Any, ScoreScale | None]:
    """Load the frozen judge of `inputs["judge"]` (several members: their mean score) and its scale; None without one.

    Args:
        load: takes a member's folder and a name, and returns the reward model there.
    """
    if (artifact := inputs.get("judge")) is None:
        return None, None
    sft_scores, scale = read_sft_scores(artifact), ScoreScale.read(artifact)
    folders = [(member_folder(artifact, m), adapter_name(m)) for m in range(len(sft_scores))]
    members = [frozen(with_one_head(load(*folder), scale.objectives), runtime) for folder in folders]
    return as_one(members, sft_scores, EnsembleConfig())[0], scale


Critic = SeparateCritic | SharedCritic | None


def load_judges(
    job: PpoJob, artifact: Path, config: Any, load: Callable[[Path, str], Any], from_sft: Callable[[], Any]
) -> tuple[Any, ScoreScale, Critic]:
    """Load the frozen reward model of `artifact`, its scale, and the value function.

    Args:
        config: the policy's model config.
        load: takes a member's folder and a name, and loads a new copy of the reward model there.
        from_sft: returns a scalar-head model on the SFT policy's trunk.
    """
    sft_scores, written = read_sft_scores(artifact), ScoreScale.read(artifact)
    temperature = written.temperature

    def loaded(folder: Path, name: str) -> Any:
        return with_one_head(load(folder, name), written.objectives)

    if len(sft_scores) == 1 and job.ppo.score.ensemble != "mean":
        raise UserError(
            f"ppo.score.ensemble is {job.ppo.score.ensemble}, and {artifact} holds one reward model. "
            "Set reward.members to 2 or more."
        )
    members = [frozen(loaded(member_folder(artifact, m), adapter_name(m)), job.runtime) for m in range(len(sft_scores))]
    model, combined = as_one(members, sft_scores, job.ppo.score)
    scale = ScoreScale.measure(combined, temperature)
    if not job.ppo.has_critic:
        return model, scale, None
    if job.ppo.critic.kind == "shared":
        return model, scale, SharedCritic(config.hidden_size).to(job.runtime.device)
    if job.ppo.critic.start == "reward":
        return model, scale, SeparateCritic(loaded(artifact, "critic"), ScoreScale.measure(sft_scores[0], temperature))
    trunk = from_sft()
    nn.init.zeros_(trunk.score.weight)
    return model, scale, SeparateCritic(trunk, scale.model_copy(update={"shift": 0.0, "scale": 1.0}))


@dataclass(frozen=True)
class Packed:
    """Sequences without left padding, cut to the longest one; the training path computes on these.

    Response tokens keep their row-major order, so flat values (K,) match `response_mask` of the same rows.
    """

    ids: Tensor
    mask: Tensor
    counts: Tensor
    at: Tensor
    """(K,) `positions` of the response tokens in (N, L)."""
    responses: Tensor
    """(K,) `positions` of the same tokens in the response mask (N, T)."""

    @classmethod
    def of(cls, samples: Samples, rows: Sequence[int]) -> "Packed":
        """Return the rows `rows` of `samples`. Lengths are known on the host, so this does not wait for a GPU."""
        device, index = samples.ids.device, on_device(samples, rows)
        prompts = torch.tensor([samples.prompt_lengths[row] for row in rows]).unsqueeze(1)
        ends = prompts + torch.tensor([samples.response_lengths[row] for row in rows]).unsqueeze(1)
        columns = torch.arange(int(ends.max()))
        mask = columns < ends
        counts = mask & (columns >= prompts)
        responses = torch.arange(samples.response_ids.shape[1]) < ends - prompts
        tensors = (onto(device, tensor) for tensor in (mask, counts, positions(counts), positions(responses)))
        order = (~samples.mask[index]).to(torch.uint8).argsort(dim=1, stable=True)[:, : len(columns)]
        return cls(samples.ids[index].gather(1, order), *tensors)

    def stats(self, model: Any, job: PpoJob, with_entropy: bool) -> TokenStats:
        """Compute token statistics of `model` on the training path, at the sampling temperature."""
        temperature = job.generation.temperature
        return token_stats(
            model, self.ids, self.mask, self.counts, job.runtime, temperature, with_entropy, side="right", at=self.at
        )


def on_device(samples: Samples, rows: Sequence[int]) -> Tensor:
    """Return `rows` as an index tensor (n,) on the device of `samples`."""
    return onto(samples.ids.device, torch.tensor(rows, dtype=torch.long))


def micro_batches(
    samples: Samples, rows: Sequence[int], size: int, tokens: int | None = None, together: int = 1
) -> Iterator[tuple[list[int], bool]]:
    """Yield this rank's `shared_runs` of the `rows` of `samples`. Each `together` consecutive rows stay in one run."""
    of_row = [samples.prompt_lengths[row] + samples.response_lengths[row] for row in rows]
    firsts = range(0, len(rows), together)
    lengths = {rows[first]: together * max(of_row[first : first + together]) for first in firsts}
    for run, counts in shared_runs(lengths, max(1, size // together), tokens):
        yield [row + i for row in run for i in range(together)], counts


def shared_runs(lengths: Mapping[int, int], size: int, tokens: int | None) -> Iterator[tuple[list[int], bool]]:
    """Yield this rank's share of the rows, in runs (`even_runs`), and whether each run counts.

    Every rank makes the same number of passes: a rank with fewer repeats a row, in a run that does not count.

    Args:
        lengths: row number to length in tokens; shares have about equal total lengths.
        size: largest number of rows in a run, if `tokens` is None.
        tokens: largest number of tokens in a run, including padding.
    """
    ordered = sorted(lengths, key=lengths.__getitem__)
    most_rows = size if tokens is None else len(ordered)

    def runs(rank: int) -> list[list[int]]:
        rows_of_rank = ranks.share(ordered, of=rank)
        parts = even_runs([lengths[row] for row in rows_of_rank], most_rows, tokens) if rows_of_rank else ()
        return [[rows_of_rank[i] for i in run] for run in parts]

    runs_here, most = runs(ranks.rank()), max(len(runs(rank)) for rank in range(ranks.size()))
    yield from ((run, True) for run in runs_here)
    yield from ((ordered[:1], False) for _ in range(most - len(runs_here)))


class FrozenPass(NamedTuple):
    """What stays fixed during the update of a batch. B responses, T tokens; 0 where the mask is False."""

    policy: Tensor
    """(B, T) log π_old."""
    policy_at_1: Tensor
    """(B, T) the same at temperature 1."""
    reference: Tensor
    """(B, T) log π_ref."""
    sft: Tensor
    """(B, T) log π_SFT."""
    sft_at_1: Tensor
    """(B, T) the same at temperature 1."""
    entropy: Tensor
    """(B, T) entropy of the policy, nats."""
    raw_scores: Tensor
    """(B,) of the reward model."""
    values: Tensor | None = None
    """(B, T) the critic's values; None without a critic."""
    judge_scores: Tensor | None = None
    """(B,) raw scores of the independent judge; None if it was not asked."""


@torch.no_grad()
def frozen_pass(models: Models, samples: Samples, job: PpoJob, by_judge: bool = False) -> FrozenPass:
    """Compute everything that stays fixed during the update of a batch.

    The policy's log-probabilities are the sampler's if those were kept; all else comes from the training path.

    Args:
        by_judge: also ask the independent judge, which only evaluations may do.
    """
    mask, critic, seen = samples.response_mask, models.critic, samples.stats
    zeros, scores = torch.zeros_like(samples.logprobs), torch.zeros(len(mask), device=mask.device)
    passed = {id(m): m for m in (models.policy, models.reference, models.sft)}  # a model with two roles passes once
    columns = {key: {n: zeros.clone() for n in ("logprobs", "logprobs_at_1", "entropy")} for key in passed}
    scorers = {"raw_scores": models.reward_model}
    if by_judge and models.judge is not None:
        scorers["judge_scores"] = models.judge
    raw, values, values_seen = {name: scores.clone() for name in scorers}, zeros.clone(), False
    if seen is not None and not (isinstance(critic, SharedCritic) and seen.values is None):
        del passed[id(models.policy)]
        columns[id(models.policy)] = {
            "logprobs": samples.logprobs, "logprobs_at_1": seen.logprobs_at_1, "entropy": seen.entropy
        }  # fmt: skip
        values, values_seen = (values, False) if seen.values is None else (seen.values, True)
    for numbers, counts in micro_batches(samples, range(len(mask)), *job.ppo.micro_batch):
        batch, rows, hidden = Packed.of(samples, numbers), on_device(samples, numbers), None
        for key, model in passed.items():
            stats = batch.stats(model, job, with_entropy=model is models.policy)
            hidden = stats.hidden if model is models.policy else hidden
            for name, column in columns[key].items():
                if counts and (flat := getattr(stats, name)) is not None:
                    column[rows] = scatter(flat, mask[rows], batch.responses)
        for name, model in scorers.items():
            scores_of_rows = score_tokens(model, batch.ids, batch.mask, job.runtime, side="right")
            if counts:
                raw[name][rows] = scores_of_rows
        if isinstance(critic, SeparateCritic) or (critic is not None and hidden is not None):
            values_of_rows = scatter(critic.values(batch, hidden, job.runtime), mask[rows], batch.responses)
            if counts:
                values[rows] = values_of_rows
    for trained in models.trained().values():
        only_own_part(trained)  # what one gathered needs no memory while the other trains
    for tensor in [*raw.values(), *([] if values_seen else [values])]:
        ranks.joined(tensor)
    for key in passed:
        for tensor in columns[key].values():
            ranks.joined(tensor)
    if samples.other_endings:
        rows = on_device(samples, list(samples.other_endings))
        for name, model in scorers.items():
            raw[name][rows] = _scores_with_eos(model, models.tokenizer, samples, job).to(scores)
    policy, reference, sft = (columns[id(m)] for m in (models.policy, models.reference, models.sft))
    return FrozenPass(
        policy["logprobs"], policy["logprobs_at_1"], reference["logprobs"], sft["logprobs"], sft["logprobs_at_1"],
        policy["entropy"], values=None if critic is None else values, **raw,
    )  # fmt: skip


def _scores_with_eos(model: Any, tokenizer: Any, samples: Samples, job: PpoJob) -> Tensor:
    """Score the responses of `samples.other_endings` (n,) as the reward model reads them, that is with EOS.

    Each rank computes all of them.
    """
    prompts = [samples.prompt_ids[row][samples.prompt_mask[row]].tolist() for row in samples.other_endings]
    sequences = [prompt + samples.reward_ids(row) for prompt, row in zip(prompts, samples.other_endings, strict=True)]
    return score_sequences(model, tokenizer.pad_token_id, sequences, job.runtime)


def scatter(flat: Tensor, mask: Tensor, at: Tensor | None = None) -> Tensor:
    """Scatter flat values (K,) to (B, T), 0 where the mask is False.

    `at` are the mask's `positions`. If None they are computed, for which the host waits for the GPU.
    """
    at = positions(mask) if at is None else at
    return flat.new_zeros(mask.numel()).scatter(0, at, flat).view(mask.shape)


def weights_digest(model: Any) -> str:
    """Return the sha256 of all weights, including a shared backbone's. A frozen model's must not change.

    Those of a sharded model are gathered one by one, so all ranks must call it.
    """
    named = model.weights() if isinstance(model, AdapterView) else model.named_parameters()
    return tensors_digest((name, whole(tensor)) for name, tensor in named)
