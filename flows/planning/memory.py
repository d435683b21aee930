"""Peak memory of each phase of the training stages on one device, part by part. Importable without torch.

A simple model, within a quarter of what was measured (docs/scaling.md). D is the model's width, I that of its MLP.
Sequences are assumed to have the largest length that the config allows.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from components.direct.config import PolicyConfig
from components.gates.methods import ON_PAIRS
from components.models.config import CAPTURED_TOKENS, LOGITS_AT_ONCE, PREFILL_PARTS, AdapterConfig, GenerationConfig
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig
from components.training.optim import OptimizerConfig
from flows.planning.shape import ModelShape

Format = Literal["float32", "bfloat16"]
"""Format of matrix products; weights that train are float32 in both."""
Sharding = Literal["replicas", "zero2", "zero3"]
"""As `Runtime.sharding`: what ranks hold of what trains."""

FLOAT = 4
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0}
"""Bytes a parameter of AdamW's two moments."""
FOUR_BITS = 0.52
"""Bytes a weight of 4 bits (NF4), scales included (Dettmers et al. 2023, "QLoRA", section 3)."""
SAMPLED_AT_ONCE = 64
"""Responses that the sampler makes at a time outside of PPO."""
CUDA = 0.8e9
"""Assumed: driver, kernels and cuBLAS workspaces of a process on a GPU."""
ALLOCATOR = {"cuda": 0.05, "cpu": 1.0}
"""What an allocator holds beyond tensors: PyTorch's on a GPU, as a share of all of them; on a CPU the C library's heap,
as a share of what a step allocates and frees."""
PROCESS = 0.55e9
"""Measured: a CPU process with all its libraries."""
MARGIN = 1.25
"""Factor by which memory should exceed the plan (docs/scaling.md)."""
PASSING = ("gradients", "activations", "logits", "working")
"""Parts that a step allocates and frees."""

Parts = dict[str, float]


class Machine(NamedTuple):
    """The machine of a stage: a number of equal GPUs, or a CPU's memory."""

    gpus: int
    """0 for a CPU."""
    memory: int | None = None
    """Bytes of each GPU, or of the process; None if it is not known."""
    sharding: Sharding = "zero2"

    @property
    def ranks(self) -> int:
        """Return the number of processes, a device each."""
        return max(1, self.gpus)

    @property
    def zero3(self) -> bool:
        """Return whether ranks gather parameters for each pass, reduce gradients after it, and share frozen models."""
        return self.sharded and self.sharding == "zero3"

    @property
    def sharded(self) -> bool:
        """Return whether the ranks share out a model that trains whole."""
        return self.ranks > 1 and self.sharding != "replicas"

    def rows(self, rows: int) -> int:
        """Return the sequences of a batch that a rank gets."""
        return -(-rows // self.ranks)


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
    judge: bool = False
    """Whether an independent judge is in memory with PPO's models."""
    graphs: bool = False
    """Whether a GPU decodes by CUDA graphs."""
    policy: PolicyConfig | None = None
    """The options of a direct method, whose `ppo` is as in `DirectJob`; None for PPO's updates."""

    def group(self, stage: str) -> str:
        """Return the name of the options by which a stage trains."""
        return stage if stage != "ppo" or self.policy is None else "policy"


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


class Trained(NamedTuple):
    """Bytes on a rank of what trains of a model."""

    weights: float
    moments: float
    gradients: float
    """The most in a backward pass that reduces: its rank's share, and those that are reduced at a time, with a copy."""
    unreduced: float
    """Those between the micro-batches of a step: `zero2` reduces them after the last, `zero3` after each."""
    working: float
    """What a pass gathers from other ranks, and copies in bfloat16."""


def phases(run: PlannedRun, machine: Machine) -> list[Phase]:
    """Return the phases of sft, reward and ppo in order, for one rank."""
    planner = _Planner(run, machine)
    return [*planner.sft(), *planner.reward(), *planner.ppo()]


def larger_micro_batch(run: PlannedRun, machine: Machine, stage: str) -> int | None:
    """Return the largest power of two to which a stage's `micro_batch_size` can be raised on GPUs so that the phases
    that it changes fit with `MARGIN`; None if there is none."""
    group = run.group(stage)
    config, before = getattr(run, group), getattr(_Planner(run, machine), stage)()
    step, of_phases = run.ppo.minibatch_size if group == "ppo" else config.batch_size, [phase.bytes for phase in before]
    for size in reversed([2**power for power in range(machine.rows(step).bit_length())]):
        larger = run._replace(**{group: config.model_copy(update={"micro_batch_size": size})})
        after = [phase.bytes for phase in getattr(_Planner(larger, machine), stage)()]
        worst = max((new for new, old in zip(after, of_phases, strict=True) if new != old), default=math.inf)
        if size > config.micro_batch_size and step % size == 0 and MARGIN * worst <= (machine.memory or 0):
            return size if machine.gpus else None
    return None


class _Planner:
    def __init__(self, run: PlannedRun, machine: Machine) -> None:
        ppo = run.ppo if run.policy is None else run.policy.measured(run.ppo)
        self.run, self.machine, self.shape = run._replace(ppo=ppo), machine, run.shape
        self.device = "cuda" if machine.gpus else "cpu"
        self.width = 2 if run.dtype == "bfloat16" else FLOAT
        self.length = run.generation.max_prompt_tokens + run.generation.max_new_tokens

    def sft(self) -> Iterator[Phase]:
        """Yield training, a checkpoint, and samples of the trained model."""
        config, trained = self.run.sft, self._trained(self.run.sft)
        rows = config.micro_batch_size if config.packing is None else max(1, config.packing // self.length)
        rows = min(rows, self.machine.rows(config.batch_size))
        masked = 0 if config.packing is None else rows * self.length
        several = self.machine.rows(config.batch_size) > rows
        logits = self._logits(rows * self.run.generation.max_new_tokens, 3)
        converted = FLOAT * self.shape.parameters  # on one rank of a host at a time; a base in float32 is only mapped
        yield self._loading("sft", {}, trained.weights, converted)
        yield self._training("sft", "training", {}, trained, config, rows * self.length, masked, logits, several)
        best = FLOAT * self.shape.parameters if config.evaluate_every is not None else 0
        yield self._saving("sft", {}, trained, config.checkpoint_whole, best)
        rows = self.machine.rows(min(SAMPLED_AT_ONCE, config.evaluate))
        yield self._sampling("sft", "sampling", {"weights": trained.weights}, rows, gathered=True)

    def reward(self) -> Iterator[Phase]:
        """Yield training of the last member, a checkpoint, and the SFT policy's samples that all members score."""
        config, generation, lora = self.run.reward, self.run.generation, self.run.reward.lora
        trained = self._trained(config, lora, scalar=True)
        resident: Parts = {} if lora is None else {"backbone": self._frozen(lora=lora)}
        others = config.members - 1
        resident |= {"frozen": others * FLOAT * self._count(lora, scalar=True)}
        rows = min(config.micro_batch_size, self.machine.rows(config.batch_size))
        row = generation.max_prompt_tokens + 2 * generation.max_new_tokens if config.shared_prompts else 2 * self.length
        masked, several = row if config.shared_prompts else 0, self.machine.rows(config.batch_size) > rows
        yield self._loading("reward", resident, trained.weights)
        yield self._training("reward", "training", resident, trained, config, rows * row, masked, 0, several, lora)
        best = FLOAT * self._count(lora, scalar=True) if config.evaluate_every is not None else 0
        yield self._saving("reward", resident, trained, config.checkpoint_whole, best)
        members = {"frozen": config.members * FLOAT * self._count(lora, scalar=True)}
        policy = self._frozen() - (2 * self.shape.matrices if self.run.dtype == "bfloat16" else 0)  # the copy has them
        scoring = resident | members | {"policy": policy}
        rows = self.machine.rows(min(SAMPLED_AT_ONCE, config.scale_responses))
        yield self._sampling("reward", "sampling", scoring, rows)

    def ppo(self) -> Iterator[Phase]:
        """Yield an update's phases, the evaluation between updates, the last one, a checkpoint, and on rank 0 the
        merging of adapters. A direct method's update is a step on pairs, which are not sampled, or on responses."""
        config, direct, machine, lora = self.run.ppo, self.run.policy, self.machine, self.run.ppo.lora
        policy, frozen = self._trained(direct or config, lora), self._held_by_ppo()
        separate = config.has_critic and config.critic.kind == "separate"
        critic = self._trained(config, lora, scalar=True) if separate else Trained(0, 0, 0, 0, 0)
        every = config.evaluate_every
        best = FLOAT * self._count(lora) if every is not None else 0  # in the memory of rank 0's process
        best_here = {"best weights": best if self.device == "cpu" else 0}
        early = every is not None and (direct or config.updates > (every if config.kl.band is None else 1))
        average = {} if config.ema is None else {"average": policy.weights}
        resident = frozen | average | (best_here if early else {})
        still = resident | {
            "weights": policy.weights + critic.weights, "optimizer": policy.moments + critic.moments
        }  # fmt: skip
        yield self._loading("ppo", frozen, policy.weights + critic.weights)
        if not config.rollout.by_server:
            if direct is None or direct.method not in ON_PAIRS:
                yield self._sampling("ppo", "sampling", still, machine.rows(config.batch_size), lora, gathered=True)
            graphs = self._graphs(machine.rows(config.batch_size), lora)
            frozen, resident, still = frozen | graphs, resident | graphs, still | graphs
        (size, tokens), cap = config.micro_batch, self.run.generation.max_new_tokens
        rows = min(size if tokens is None else max(1, tokens // self.length), machine.rows(config.minibatch_size))
        several, copies = machine.rows(config.minibatch_size) > rows, 7 if config.entropy_coefficient > 0 else 4
        if direct is not None:
            rows = min(direct.micro_batch_size, machine.rows(direct.batch_size))
            several, copies = machine.rows(direct.batch_size) > rows, 3
            rows *= 2 if direct.method in ON_PAIRS else 1
        scored_rows, work = rows if direct is None else max(rows, machine.rows(size)), rows * self.length
        scored = {"activations": self._forward(scored_rows * self.length), "logits": self._logits(scored_rows * cap, 5)}
        if machine.sharded and lora is None:
            of_frozen = self._gathered(self.shape.parameters) if machine.zero3 else 0
            scored["working"] = policy.working + critic.working + of_frozen
        before_training = direct is not None and direct.method != "kto"
        yield self._phase("ppo", "frozen pass", still | scored | ({"optimizer": 0} if before_training else {}))
        if direct is not None and lora is None:
            resident |= self._held_by_ppo(direct.unused)
        name, logits = "training" if direct else "policy update", self._logits(rows * cap, copies)
        others = resident | {"critic": critic.weights + critic.moments}
        yield self._training(
            "ppo", name, others, policy, direct or config, work, 0, logits, several or config.ptx.coefficient > 0, lora
        )
        if separate:
            others = resident | {"policy": policy.weights + policy.moments}
            yield self._training("ppo", "critic update", others, critic, config, work, 0, 0, several, lora)
        if every is not None:  # with an average, the policy's own weights are kept as well
            watching = still | best_here | ({} if config.ema is None else {"set aside": policy.weights})
            rows = machine.rows(min(config.watch.prompts, config.batch_size))
            yield self._sampling("ppo", "watching", watching, rows, lora, gathered=True)
        published = frozen | average | best_here | {"weights": policy.weights}
        rows = max(config.evaluate, min(config.evaluate, config.repeats.prompts) * (config.repeats.samples - 1))
        rows = machine.rows(min(rows, config.batch_size))
        yield self._sampling("ppo", "evaluation", published, rows, lora, gathered=True)
        trained = Trained(*(sum(pair) for pair in zip(policy, critic, strict=True)))
        copied = resident.get("average", 0) + (self._refreshed() if config.kl.refresh_every else 0)
        yield self._saving("ppo", resident | best_here, trained, (direct or config).checkpoint_whole, copied + best)
        if lora is not None:
            yield self._phase("ppo", "merging", published | {"merged": FLOAT * self.shape.parameters})

    def _held_by_ppo(self, unused: Collection[str] = ()) -> Parts:
        """Return what is frozen in PPO: reference and reward models, or the backbone and the reward model's adapters on
        it; an independent judge, which is one more; further reward models. Those that are `unused`
        (`PolicyConfig.unused`) are left out."""
        config, members = self.run.ppo, self.run.reward.members * (2 if self.run.judge else 1)
        refreshed = self._refreshed() if config.kl.refresh_every else 0
        if config.lora is None:
            members = 0 if "reward_model" in unused else members
            frozen = ("sft" not in unused) * self._frozen() + members * self._frozen(scalar=True) + refreshed
            frozen /= self.machine.ranks if self.machine.zero3 else 1
            return {"frozen": frozen, "judges": self.run.judges}
        adapters = members * FLOAT * self._count(self.run.reward.lora or config.lora)
        backbone = self._frozen(lora=config.lora)
        return {"backbone": backbone, "frozen": adapters + refreshed, "judges": self.run.judges}

    def _refreshed(self) -> float:
        """Return the bytes of a reference that is refreshed, and so checkpointed."""
        return self._frozen() if self.run.ppo.lora is None else FLOAT * self._count(self.run.ppo.lora)

    def _count(self, lora: AdapterConfig | None, scalar: bool = False) -> int:
        if lora is not None:
            return self.shape.adapter_parameters(lora) + scalar * self.shape.hidden_size
        return self.shape.scalar_parameters if scalar else self.shape.parameters

    def _frozen(self, scalar: bool = False, lora: AdapterConfig | None = None) -> float:
        """Return the bytes of a model that only computes, whole on each rank: the blocks' matrices in the format of
        products or in 4 bits, the rest in float32."""
        quantized = lora is not None and lora.quantize is not None
        rest = self._count(None, scalar) - self.shape.matrices
        return FLOAT * rest + (FOUR_BITS if quantized else self.width) * self.shape.matrices

    def _trained(self, config: OptimizerConfig, lora: AdapterConfig | None = None, scalar: bool = False) -> Trained:
        """Return what trains: 4 bytes a parameter of weights, 4 of gradients and AdamW's moments, shared out by ZeRO.
        Ranks each hold all of an adapter."""
        shape, sharded = self.shape, self.machine.sharded and lora is None
        count, share = self._count(lora, scalar), 1 / self.machine.ranks if sharded else 1.0
        block, working = shape.matrices / shape.layers, self._gathered(count) if sharded else 0.0
        if lora is None and self.run.dtype == "bfloat16":  # with checkpointing cast anew, block by block
            working += 2 * shape.embedding
            working += 0 if sharded else 2 * (block if config.gradient_checkpointing else shape.matrices)
        gradients, unreduced, ends = FLOAT * count * share, float(FLOAT * count), count - shape.matrices
        if sharded:
            unreduced = gradients if self.machine.zero3 else unreduced
            gradients += 2 * FLOAT * max(ends, block)
        return Trained(
            FLOAT * count * share, MOMENTS[config.optimizer] * count * share, gradients, unreduced, working
        )

    def _gathered(self, count: int) -> float:
        """Return the bytes that a pass gathers of a sharded model with `count` parameters: both ends and, in the format
        of products, the matrices of all blocks, with `zero3` of two."""
        shape, blocks = self.shape, 2 if self.machine.zero3 else self.shape.layers
        return FLOAT * (count - shape.matrices) + self.width * blocks * shape.matrices / shape.layers

    def _loading(self, stage: str, resident: Parts, weights: float, converted: float = 0) -> Phase:
        """Return what loading holds at the end, with a part that moves whole to the device before ranks share it out.

        Args:
            converted: bytes of host memory for weights in another format than float32; others are mapped from files.
        """
        shape = self.shape
        moved = FLOAT * max(shape.parameters - shape.matrices, shape.matrices / shape.layers)
        parts = resident | {"weights": weights, "moved": moved if self.machine.sharded else 0}
        return self._phase(stage, "loading", parts, converted if self.device == "cuda" else 0)

    def _block(self, tokens: int, masked: int) -> float:
        """Return the bytes that autograd keeps of one block: 26 D a token (what enters norms and linear layers), and in
        the format of products queries, attention's output, keys, values and 4 I of the MLP.

        Args:
            masked: the length of a sequence if attention gets a mask, which each layer keeps in float32; 0 if not.
        """
        shape = self.shape
        products = 2 * shape.head_size * (shape.heads + shape.kv_heads) + 4 * shape.intermediate_size
        return tokens * (26 * shape.hidden_size + self.width * products + FLOAT * masked)

    def _forward(self, tokens: int) -> float:
        """Return the bytes that a forward pass without gradients holds at most: the MLP's three, and 3 D."""
        return tokens * 3 * (FLOAT * self.shape.hidden_size + self.width * self.shape.intermediate_size)

    def _logits(self, predicted: int, copies: float) -> float:
        """Return the bytes of `copies` of the float32 logits of `predicted` tokens, or of as many as are held at a
        time."""
        return FLOAT * copies * min(predicted * self.shape.vocabulary, max(LOGITS_AT_ONCE, self.shape.vocabulary))

    def _training(
        self, stage: str, name: str, resident: Parts, trained: Trained, config: OptimizerConfig, tokens: int,
        masked: int, logits: float, several: bool, lora: AdapterConfig | None = None,
    ) -> Phase:  # fmt: skip
        """Return the worse of two moments of a step: the end of the forward pass, and of the backward pass.

        Args:
            tokens: of a forward pass, padding included.
            masked: as of `_block`.
            logits: bytes of the head's logits; 0 for a scalar head.
            several: micro-batches a step, so that the gradients of the first are held through the next.
        """
        again, block = config.gradient_checkpointing, self._block(tokens, masked)
        entering = FLOAT * tokens * self.shape.hidden_size * (self.shape.layers + 2)
        graph = entering + block if again else self.shape.layers * block
        gradients = max(trained.gradients, trained.unreduced if several else 0)
        base = resident | {"weights": trained.weights, "optimizer": trained.moments}
        forward = {"gradients": trained.unreduced if several else 0, "activations": graph, "logits": logits}
        moments: list[Parts] = [forward, {"gradients": gradients, "activations": block}]
        steps = [self._phase(stage, name, base | moment | {"working": trained.working}) for moment in moments]
        return max(steps, key=lambda phase: phase.bytes)

    def _sampling(
        self, stage: str, name: str, resident: Parts, rows: int, lora: AdapterConfig | None = None,
        gathered: bool = False,
    ) -> Phase:  # fmt: skip
        """Return what sampling `rows` responses holds: a copy of the policy, keys and values, and a step's logits.

        Args:
            gathered: whether the policy may be in shares, which are gathered before they are copied.
        """
        shape, quantized, graphs = self.shape, lora is not None and lora.quantize is not None, self._graphs(rows, lora)
        whole = gathered and self.machine.sharded and lora is None and self.run.dtype == "float32"
        copy = FLOAT * shape.parameters if whole else 0.0
        if not quantized and not (graphs and lora is None):  # of adapters, the merged model is copied to the kept one
            copy += 2 * shape.parameters if self.run.dtype == "bfloat16" else 0
            copy += self.width * (shape.matrices + shape.embedding) if self.device == "cpu" else 0
        prompts = self._forward(-(-rows // PREFILL_PARTS[self.device]) * self.run.generation.max_prompt_tokens)
        heads = 2 * self.width * rows * self.length * shape.head_size  # bytes of keys and values a head
        expanded = heads * shape.heads if shape.kv_heads < shape.heads else 0
        parts = {
            "sampling copy": copy, "key-value cache": shape.layers * heads * shape.kv_heads,
            "activations": max(prompts, expanded), "logits": FLOAT * 4 * rows * shape.vocabulary,
        }  # fmt: skip
        if graphs:  # those of more rows, which are resident, stay
            del parts["key-value cache"], parts["logits"]
            resident = graphs | resident
        return self._phase(stage, name, resident | parts)

    def _graphs(self, rows: int, lora: AdapterConfig | None) -> Parts:
        """Return what CUDA graphs for `rows` responses keep after sampling: the policy's copy in bfloat16, keys and
        values, and a step's logits. A backbone of 4 bits is sampled from without graphs."""
        if not self.run.graphs or (lora is not None and lora.quantize is not None):
            return {}
        shape, slots = self.shape, -(-self.length // CAPTURED_TOKENS) * CAPTURED_TOKENS
        states = 2 * self.width * rows * slots * shape.head_size * shape.kv_heads * shape.layers
        copy = 2 * shape.parameters if self.run.dtype == "bfloat16" else 0
        return {"CUDA graphs": copy + states + FLOAT * 4 * rows * shape.vocabulary}

    def _saving(self, stage: str, resident: Parts, trained: Trained, whole_up_to: float, copied: float = 0) -> Phase:
        """Return what is held while a checkpoint is written; on a GPU the host gets a copy of it, and at the end one of
        the whole model, which is published.

        Args:
            whole_up_to: GB that are gathered; of more, each rank copies and writes a gigabyte at a time.
            copied: bytes of what else is written.
        """
        ranks = self.machine.ranks if trained.gradients != trained.unreduced else 1
        written = (trained.weights + trained.moments) * ranks
        if ranks > 1 and written > whole_up_to * 1e9:
            written = min(written, ranks * 2e9)
        base = resident | {"weights": trained.weights, "optimizer": trained.moments}
        host = max(written + copied, FLOAT * self.shape.parameters)
        return self._phase(stage, "saving", base, host if self.device == "cuda" else 0)

    def _phase(self, stage: str, name: str, parts: Parts, host: float = 0) -> Phase:
        tensors = {part: round(size) for part, size in parts.items() if round(size)}
        if self.device == "cuda":
            tensors["CUDA"] = round(CUDA + ALLOCATOR["cuda"] * sum(tensors.values()))
        else:
            tensors["heap"] = round(ALLOCATOR["cpu"] * sum(tensors.get(part, 0) for part in PASSING))
            tensors["process"] = round(PROCESS)
        return Phase(stage, name, tensors, round(host))
