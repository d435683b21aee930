"""Peak memory of each phase of the training stages on one device, part by part. Importable without torch.

A phase's bytes are its peak. Sequences are assumed to have the largest length that the config allows. Memory that does
not depend on the model (libraries, the CUDA context) is a separate part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from components.models.config import AdapterConfig, GenerationConfig
from components.planning.models import Ranks, Trained, adapter, backbone, frozen, packed, whole
from components.planning.shape import ModelShape
from components.planning.tensors import (
    FLOAT,
    SAMPLED_AT_ONCE,
    Format,
    Pass,
    activations,
    block_activations,
    cached_keys,
    logits,
    passing,
    width,
)
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig
from components.training.optim import OptimizerConfig

PREFILL_PARTS = 8
"""As in `components.models.cache`, which imports torch: number of parts in which prompts are processed."""
WRITTEN_AT_ONCE = 10**9
"""As in `components.training.shares`, which imports torch: bytes of a file of a rank's part of a checkpoint."""
CUDA_CONTEXT = 0.8e9
"""Assumed, not measured: driver, kernels and cuBLAS workspaces of a process on a GPU."""
CUDA_SPARE = 0.05
"""Assumed, not measured: memory of PyTorch's allocator beyond its tensors, as a share of them."""
PROCESS = 0.55e9
"""Measured: resident memory of a CPU process with all its libraries. A third of it are file pages, which the kernel
frees when memory is short."""
HEAP = 0.75
"""Measured: memory of the C library's heap beyond the tensors of a pass, as a share of them. An aligned block does not
fit into the gap that one of its size left where a small object has taken the few bytes that align it."""
ADAPTERS_HEAP = 1.45
"""Measured: the same for adapters, each of whose layers makes more tensors that it does not keep."""
CHECKPOINTING_HEAP = 1.6
"""Measured: the same with gradient checkpointing, which makes a block's tensors again among those that are kept."""
PASSING = ("gradients", "activations", "logits", "working")
"""Parts that are allocated and freed in every step."""


class PlannedRun(NamedTuple):
    """The parts of a run's config that determine its memory, and the shape of its model."""

    shape: ModelShape
    dtype: Format
    generation: GenerationConfig
    sft: SftConfig
    reward: RewardConfig
    ppo: PpoConfig
    judges: int = 0
    """Bytes in memory of the reward models that `ppo.rewards` names in addition to the pipeline's own."""
    uncounted: tuple[str, ...] = ()
    """Those of these models whose size is not known here."""
    judged: bool = False
    """Whether an independent judge is in memory with PPO's models."""

    @property
    def asks_policy(self) -> bool:
        """Return whether the policy computes the log-probabilities of its samples again: those of its own sampler in
        float32 are the training path's."""
        return self.dtype == "bfloat16" or self.ppo.rollout.by_server

    @property
    def prompt(self) -> int:
        """Return the tokens of the longest prompt."""
        return self.generation.max_prompt_tokens

    @property
    def response(self) -> int:
        """Return the tokens of the longest response."""
        return self.generation.max_new_tokens

    @property
    def length(self) -> int:
        """Return the tokens of both together."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Phase:
    """The peak memory of one phase of a stage, bytes on one device."""

    stage: str
    name: str
    parts: dict[str, int]
    host: int = 0
    """Bytes of host memory that a phase on a GPU needs in addition, since data to write is copied there."""

    @property
    def bytes(self) -> int:
        """Return the sum of all parts."""
        return sum(self.parts.values())


def phases(run: PlannedRun, ranks: Ranks, device: str) -> list[Phase]:
    """Return the phases of sft, reward and ppo in order, for one rank."""
    planner = _Planner(run, ranks, device)
    return [*planner.sft(), *planner.reward(), *planner.ppo()]


Parts = dict[str, float]


class _Planner:
    """The arithmetic of one run on one kind of machine."""

    def __init__(self, run: PlannedRun, ranks: Ranks, device: str) -> None:
        self.run, self.ranks, self.device = run, ranks, device
        self.shape, self.dtype = run.shape, run.dtype

    def sft(self) -> Iterator[Phase]:
        """Yield the loop, then sampling with the model that it leaves; checkpoints come between its steps."""
        config, run = self.run.sft, self.run
        trained = self._whole(config, scalar=False)
        micro = config.micro_batch_size if config.packing is None else max(1, config.packing // run.length)
        micro = self._micro(micro, config.batch_size)
        work = Pass(micro, run.length) if config.packing is None else Pass(1, micro * run.length, masked=True)
        several = self.ranks.rows(config.batch_size) > micro
        yield self._training("sft", "training", {}, trained, config, work, micro * run.response, several)
        yield self._saving("sft", {"weights": trained.weights, "optimizer": trained.moments}, config.checkpoint_whole)
        rows = min(SAMPLED_AT_ONCE, config.evaluate)
        yield self._sampling("sft", {"weights": FLOAT * self.shape.parameters}, rows)  # rank 0, alone

    def reward(self) -> Iterator[Phase]:
        """Training member by member, then the SFT policy's samples, which make the scale, beside all members."""
        config, run = self.run.reward, self.run
        lora, ensemble = config.lora, config.members
        held: Parts = {}
        if lora is not None:
            held["backbone"] = backbone(self.shape, self.dtype, lora.quantize)
            trained = adapter(self.shape, lora, True, config.optimizer)
            before = (ensemble - 1) * FLOAT * self.shape.adapter_parameters(lora)
        else:
            trained = self._whole(config, scalar=True)
            before = (config.members - 1) * FLOAT * self.shape.scalar_parameters
        held |= {"frozen": before} if before else {}
        micro = self._micro(config.micro_batch_size, config.batch_size)
        several = self.ranks.rows(config.batch_size) > micro
        if config.shared_prompts:
            work = Pass(micro, run.prompt + 2 * run.response, masked=True)
        else:
            work = Pass(2 * micro, run.length)
        yield self._training("reward", "training", held, trained, config, work, 0, several, lora)
        yield self._saving(
            "reward", held | {"weights": trained.weights, "optimizer": trained.moments}, config.checkpoint_whole
        )
        scored: Parts = {"policy": frozen(self.shape, False, self.dtype)}
        if lora is not None:
            scored |= held | {"weights": trained.weights}
        else:
            scored |= {"frozen": ensemble * FLOAT * self.shape.scalar_parameters}
        yield self._sampling("reward", scored, min(SAMPLED_AT_ONCE, config.scale_responses))

    def ppo(self) -> Iterator[Phase]:
        """Sampling, the frozen models' pass, the policy's update, the critic's, an evaluation between updates; the
        final evaluation, what is written, adapters merged."""
        config, run, ranks = self.run.ppo, self.run, self.ranks
        held = self._held_by_ppo()
        policy = self._trained_by_ppo(scalar=False)
        held |= {} if config.ema is None else {"average": policy.weights}
        best = self._best_weights()
        held |= best if self._looks_before_the_last_update() else {}
        critic = self._trained_by_ppo(scalar=True) if config.has_critic and config.critic.kind == "separate" else None
        still: Parts = dict(held)
        still["weights"] = policy.weights + (critic.weights if critic else 0)
        still["optimizer"] = policy.moments + (critic.moments if critic else 0)
        batch = ranks.rows(config.batch_size)
        gathered = ranks.sharded and config.lora is None
        if config.rollout.by_server:
            yield self._sending(still, gathered)
        else:
            yield self._sampling("ppo", still, batch, config.lora, gathered=gathered)
        sized, tokens = config.micro_batch
        micro = self._micro(sized if tokens is None else max(1, tokens // run.length), config.minibatch_size)
        work, predicted = Pass(micro, run.length), micro * run.response
        divided = run.generation.temperature != 1
        judged: Parts = {  # an evaluation asks the policy in any format
            "activations": passing(self.shape, work, self.dtype),
            "logits": logits(self.shape, predicted, 2 + divided + 3),
        }
        scoring = judged | {"logits": logits(self.shape, predicted, 2 + divided + 3 * run.asks_policy)}
        yield self._phase("ppo", "frozen pass", still | scoring)
        several = ranks.rows(config.minibatch_size) > micro or config.ptx.coefficient > 0
        beside = held | ({"critic": critic.weights + critic.moments} if critic else {})
        copies = 7 if config.entropy_coefficient > 0 else 3 + divided
        yield self._training(
            "ppo", "policy update", beside, policy, config, work, predicted, several, config.lora, copies
        )
        if critic is not None:
            beside = held | {"policy": policy.weights + policy.moments}
            more = ranks.rows(config.minibatch_size) > micro
            yield self._training("ppo", "critic update", beside, critic, config, work, 0, more, config.lora)
        if config.evaluate_every is not None:  # with an average, the policy's own weights are kept as well
            looking = still | best | ({} if config.ema is None else {"set aside": policy.weights})
            rows = ranks.rows(min(config.watch.prompts, config.batch_size))
            yield self._sampling("ppo", looking, rows, config.lora, "watching", gathered, judged)
        whole_again = self._held_by_ppo() | best
        if config.lora is None:
            models = self.shape.parameters + (self.shape.scalar_parameters if critic else 0)
            whole_again["weights"] = FLOAT * models
        else:
            whole_again["weights"] = still["weights"]
        again = min(config.evaluate, config.repeats.prompts) * (config.repeats.samples - 1)
        rows = min(max(config.evaluate, again), config.batch_size)
        yield self._sampling("ppo", whole_again, rows, config.lora, "evaluation", judged=judged)  # rank 0, alone
        refreshed = self._reference() if config.kl.refresh_every else 0
        yield self._saving(
            "ppo", still | best, config.checkpoint_whole, still.get("average", 0), refreshed, self._best_on_host()
        )
        if config.lora is not None:
            yield self._phase("ppo", "merging", whole_again | {"merged": FLOAT * self.shape.parameters})

    def _reference(self) -> float:
        """Bytes of a reference that is refreshed, and so checkpointed."""
        lora = self.run.ppo.lora
        return frozen(self.shape, False, self.dtype) if lora is None else FLOAT * self.shape.adapter_parameters(lora)

    def _best_on_host(self) -> float:
        """Bytes of the best weights that evaluations found: float32, whole, in the memory of each rank's process."""
        config = self.run.ppo
        count = self.shape.parameters if config.lora is None else self.shape.adapter_parameters(config.lora)
        return FLOAT * count if config.evaluate_every is not None else 0

    def _best_weights(self) -> Parts:
        """These as a part of what a device holds: of a CPU alone."""
        return {"best weights": self._best_on_host()} if self.device == "cpu" else {}

    def _looks_before_the_last_update(self) -> bool:
        """Return whether an evaluation may come before the last update: by its number, or since KL has risen."""
        config = self.run.ppo
        every = config.evaluate_every
        return every is not None and config.updates > (1 if config.watch.kl_high is not None else every)

    def _held_by_ppo(self) -> Parts:
        """Frozen models, or the backbone and the reward model's adapter on it; an independent judge, which is one more;
        further reward models."""
        config, members = self.run.ppo, self.run.reward.members * (2 if self.run.judged else 1)
        judges: Parts = {"judges": self.run.judges}
        if config.lora is not None:
            reward = self.run.reward.lora or config.lora
            adapters = FLOAT * members * self.shape.adapter_parameters(reward)
            return {
                "backbone": backbone(self.shape, self.dtype, config.lora.quantize),
                "frozen": adapters + (self._reference() if config.kl.refresh_every else 0),
            } | judges
        policies = frozen(self.shape, False, self.dtype) + (self._reference() if config.kl.refresh_every else 0)
        return {"frozen": policies + members * frozen(self.shape, True, self.dtype)} | judges

    def _trained_by_ppo(self, scalar: bool) -> Trained:
        config, reward = self.run.ppo, self.run.reward
        if config.lora is None:
            return self._whole(config, scalar)
        shape = (reward.lora or config.lora) if scalar and config.critic.start == "reward" else config.lora
        return adapter(self.shape, shape, scalar, config.optimizer)

    def _whole(self, config: OptimizerConfig, scalar: bool) -> Trained:
        again = config.gradient_checkpointing
        return whole(self.shape, scalar, self.dtype, config.optimizer, self.ranks, again)

    def _micro(self, micro: int, batch: int) -> int:
        return min(micro, self.ranks.rows(batch))

    def _training(
        self, stage: str, name: str, held: Parts, trained: Trained, config: OptimizerConfig, work: Pass,
        predicted: int, several: bool, lora: AdapterConfig | None = None, copies: int = 3,
    ) -> Phase:  # fmt: skip
        """Return the worst of four moments: the graph with the head's logits, after them, the end of the backward pass,
        the step.

        Args:
            predicted: tokens whose logits are computed; 0 for a scalar head.
            several: micro-batches a step, so that the gradients of the first are held through the next.
            copies: of the float32 logits, at the worst moment of their forward and backward pass.
        """
        shape, dtype, again = self.shape, self.dtype, config.gradient_checkpointing
        graph = activations(shape, work, dtype, again, lora)
        head = logits(shape, predicted, copies + (0.5 if dtype == "bfloat16" else 0))
        block = block_activations(shape, work, dtype, lora) if again else 0
        block += work.all * width(dtype) * (3 * shape.intermediate_size + 2 * shape.hidden_size)
        output = trained.largest if predicted else 0
        before = trained.unreduced if several else 0
        moments: list[Parts] = [
            {"gradients": before, "activations": graph, "logits": head, "working": trained.working},
            {"gradients": before + output, "activations": graph + block, "working": trained.working},
            {"gradients": (before or trained.gradients) + (trained.largest if predicted or several else 0),
             "activations": block, "working": trained.working},
            {"gradients": trained.gradients},
        ]  # fmt: skip
        base = held | {"weights": trained.weights, "optimizer": trained.moments}
        heap = max(HEAP, CHECKPOINTING_HEAP if again else 0, ADAPTERS_HEAP if lora is not None else 0)
        found = (self._phase(stage, name, base | moment, heap=heap) for moment in moments)
        return max(found, key=lambda phase: phase.bytes)

    def _sampling(
        self, stage: str, held: Parts, rows: int, trained: AdapterConfig | None = None, name: str = "sampling",
        gathered: bool = False, judged: Parts | None = None,
    ) -> Phase:  # fmt: skip
        """Return the prompts' pass or the last token, whichever holds more, beside the copy that is sampled from.

        Args:
            gathered: whether it is made of shares, which are gathered before.
            judged: what a pass of frozen models makes while the copy is held, and the cache no longer.
        """
        shape, run, dtype = self.shape, self.run, self.dtype
        part = Pass(-(-rows // PREFILL_PARTS), run.prompt)
        quantized = trained is not None and trained.quantize is not None
        whole = FLOAT * shape.parameters if gathered else 0  # in bfloat16 it goes once the copy is made
        copied = whole if dtype == "float32" or quantized else 2.0 * shape.parameters
        copied += 0 if quantized else packed(shape, dtype, self.device)
        expanded = 2 * width(dtype) * rows * run.length * shape.queries if shape.kv_heads < shape.heads else 0
        last = FLOAT * 4 * rows * shape.vocabulary
        cache = cached_keys(shape, rows, run.length, dtype)
        moments: list[Parts] = [
            {"activations": passing(shape, part, dtype)},
            {"activations": expanded, "logits": last},
        ]
        base = held | {"sampling copy": copied, "key-value cache": cache}
        found = [self._phase(stage, name, base | moment) for moment in moments]
        if judged is not None:
            found.append(self._phase(stage, name, held | {"sampling copy": copied} | judged))
        if whole > 0 and dtype == "bfloat16":
            found.append(self._phase(stage, name, held | {"sampling copy": whole + copied}))
        return max(found, key=lambda phase: phase.bytes)

    def _sending(self, held: Parts, gathered: bool) -> Phase:
        """Return what is held while weights go to the server that samples; as files they are copied on the host before,
        where a folder in memory has those of two updates for a moment."""
        config, count = self.run.ppo, self.shape.parameters
        held = held | ({"merged": FLOAT * count} if config.lora is not None or gathered else {})
        copied = 0.0
        if config.rollout.transfer == "folder":
            in_memory = (config.rollout.folder or "").startswith("/dev/shm")
            copied = (3 if in_memory else 1) * width("float32" if config.rollout.dtype == "float32" else "bfloat16")
        if self.device == "cpu":
            return self._phase("ppo", "sending", held | {"sent": copied * count})
        return self._phase("ppo", "sending", held, copied * count)

    def _saving(
        self, stage: str, held: Parts, whole_up_to: float, average: float = 0, reference: float = 0, best: float = 0
    ) -> Phase:
        """Return what is held while it is written; on a GPU the host gets a copy of it, gathered or part by part.

        Args:
            whole_up_to: GB that are gathered.
            average: bytes of `held` that a rank holds of an average of weights, written too.
            reference: bytes of `held` that are a reference, whole and written too.
            best: bytes of each rank on the host, written from there.
        """
        if self.device != "cuda":
            return self._phase(stage, "saving", held)
        own, number = held.get("weights", 0) + held.get("optimizer", 0) + average, self.ranks.number
        sharded = self.ranks.sharded and "backbone" not in held  # every rank has all of an adapter
        written = own * number if sharded else own
        if sharded and written > whole_up_to * 1e9:  # each rank's part, file by file
            written = number * 2 * min(own, max(WRITTEN_AT_ONCE, FLOAT * self.shape.embedding / number))
        host = written + reference + best * number
        return self._phase(stage, "saving", held, host)

    def _phase(self, stage: str, name: str, parts: Parts, host: float = 0, heap: float = HEAP) -> Phase:
        tensors = {part: round(held) for part, held in parts.items() if round(held)}
        if self.device == "cuda":
            tensors["CUDA"] = round(CUDA_CONTEXT + CUDA_SPARE * sum(tensors.values()))
        else:
            tensors["heap"] = round(heap * sum(tensors.get(part, 0) for part in PASSING))
            tensors["process"] = round(PROCESS)
        return Phase(stage, name, tensors, round(host))
