"""Compute the memory that a run needs on a machine: each phase, and whether it fits."""

import json
import math
import re
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from components.base.errors import UserError
from components.base.paths import user_path
from components.direct.config import DirectJob
from components.gates.methods import DIRECT_METHODS
from components.models.weights import count_parameters
from components.rewards.config import ModelReward
from flows.config.run_config import RunConfig
from flows.planning.memory import FLOAT, Machine, Phase, PlannedRun, Sharding, larger_micro_batch, phases
from flows.planning.shape import ModelShape

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
LARGEST = 3
"""Number of a phase's parts that the table names."""


def planned_run(config: RunConfig, shape: ModelShape, gpu: bool = False) -> PlannedRun:
    """Return the part of `config` that determines memory, for a model of this shape.

    Args:
        gpu: whether `runtime.dtype: auto` means a GPU's format; otherwise it means this machine's.
    """
    dtype = config.runtime.dtype
    if dtype == "auto":
        dtype = "bfloat16" if gpu else config.runtime.resolve().dtype
    assert dtype != "auto"
    judges, uncounted = judges_of(config)
    graphs = gpu and config.runtime.cuda_graphs
    policy = config.policy if config.policy.method in DIRECT_METHODS else None
    stages = config.generation, config.sft, config.reward, config.job(DirectJob).ppo if policy else config.ppo
    return PlannedRun(shape, dtype, *stages, judges, uncounted, config.data.has_judge, graphs, policy)


def judges_of(config: RunConfig) -> tuple[int, tuple[str, ...]]:
    """Return the bytes of the reward models that `ppo.rewards` names, as PPO holds them (float32), and the names of
    models that are not in a folder here, which are not counted.

    Raises:
        UserError: a folder has a damaged safetensors file.
    """
    parameters, uncounted = 0, []
    for source in (item for item in config.ppo.rewards or () if isinstance(item, ModelReward)):
        name = source.source.removeprefix("model:")
        folder = user_path(name, "ppo.rewards: source")
        if not folder.is_dir():
            uncounted.append(name)
            continue
        for member in (folder, *sorted(folder.glob("members/*"))):
            weights = member / "model" if (member / "model").is_dir() else member
            parameters += count_parameters(weights, f"ppo.rewards: source = {source.source}")
    return FLOAT * parameters, tuple(uncounted)


def parse_size(text: str) -> int:
    """Return a size such as `80GB`, `24GiB` or `512MB` in bytes.

    Raises:
        UserError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].capitalize()] if match else 0.0
    if not 1 <= size < math.inf:
        raise UserError(f"--memory {text}: give a size with its unit, such as 80GB (10^9 bytes each) or 24GiB (2^30).")
    return int(size)


OPTIONS = (
    "STAGE.gradient_checkpointing=true", "STAGE.micro_batch_size=1", "STAGE.optimizer=adamw_8bit",
    "runtime.dtype=bfloat16", "runtime.sharding=zero3 (several GPUs)", "ppo.critic.kind=shared",
    "reward.lora.rank=16 and ppo.lora.rank=16", "reward.lora.quantize=4bit and ppo.lora.quantize=4bit",
)  # fmt: skip
"""Options that reduce memory, first those that change results least."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a run's training stages on a machine."""

    profile: str
    run: PlannedRun
    machine: Machine
    stages: dict[str, list[Phase]]
    """The phases of sft, reward and ppo, by stage."""
    larger: dict[str, int | None]
    """The `larger_micro_batch` of each stage."""

    @classmethod
    def of(cls, profile: str, config: RunConfig, shape: ModelShape, gpus: int, memory: int | None) -> "MemoryPlan":
        """Return the plan of a profile's config on a machine, for a model of this shape.

        Args:
            gpus: 0 for a CPU.
            memory: bytes of each GPU, or of the process; None if it is not known.

        Raises:
            UserError: stages would refuse so many GPUs.
        """
        on_ranks = config.runtime.model_copy(update={"ranks": max(1, gpus)})
        config.model_copy(update={"runtime": on_ranks}).check_ranks()
        mode = config.runtime.sharding
        sharding: Sharding = "zero2" if mode == "auto" or mode == "none" else mode
        run, machine = planned_run(config, shape, gpus > 0), Machine(gpus, memory, sharding)
        by_stage = groupby(phases(run, machine), key=attrgetter("stage"))
        stages = {stage: list(stage_phases) for stage, stage_phases in by_stage}
        larger = {stage: larger_micro_batch(run, machine, stage) for stage in stages}
        return cls(profile, run, machine, stages, larger)

    def worst(self, stage: str) -> Phase:
        """Return the phase of a stage that needs most memory on a device."""
        return max(self.stages[stage], key=attrgetter("bytes"))

    def holds(self, phase: Phase) -> bool | None:
        """Return whether a phase fits on the machine; None if the machine's memory is not given."""
        return None if self.machine.memory is None else phase.bytes <= self.machine.memory

    @property
    def fits(self) -> bool | None:
        """Return whether every stage fits; None if the machine's memory is not given."""
        return self.holds(max(map(self.worst, self.stages), key=attrgetter("bytes")))

    def as_json(self) -> str:
        """Return the plan as one JSON object; docs/scaling.md describes its fields."""
        machine = self.machine
        stages = [
            {
                "stage": stage,
                "bytes": self.worst(stage).bytes,
                "fits": self.holds(self.worst(stage)),
                "phases": [
                    {"phase": phase.name, "bytes": phase.bytes, "host_bytes": phase.host,
                     "fits": self.holds(phase), "parts": phase.parts}
                    for phase in stage_phases
                ],
                "larger_micro_batch_size": self.larger[stage],
            }
            for stage, stage_phases in self.stages.items()
        ]  # fmt: skip
        document = {
            "profile": self.profile, "parameters": self.run.shape.parameters, "dtype": self.run.dtype,
            "gpus": machine.gpus, "sharding": machine.sharding if machine.gpus > 1 else "none",
            "memory": machine.memory, "fits": self.fits, "stages": stages, "uncounted": list(self.run.uncounted),
        }  # fmt: skip
        return json.dumps(document)

    def text(self) -> str:
        """Return the plan as text for a terminal."""
        memory, marks = self.machine.memory, {None: "", True: "yes", False: "NO"}
        lines = [self._machine(), "", f"{'stage':8}{'phase':15}{'GB':>8}  {'fits' if memory else '':5}  most of it"]
        for phase in (phase for stage_phases in self.stages.values() for phase in stage_phases):
            most = sorted(phase.parts.items(), key=lambda part: -part[1])[:LARGEST]
            largest = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in most)
            host = f"; and {phase.host / 1e9:.2f} GB of host memory" if phase.host else ""
            fits = marks[self.holds(phase)]
            lines.append(f"{phase.stage:8}{phase.name:15}{phase.bytes / 1e9:8.2f}  {fits:5}  {largest}{host}")
        if self.run.uncounted:
            named = ", ".join(self.run.uncounted)
            lines += ["", f"Not counted: reward models of ppo.rewards that are not in a folder here: {named}."]
        if any(self.larger.values()):
            lines += ["", "Larger micro-batches fit (each takes 55 to 120 ms of launches on an H200, however small):"]
        for stage, size in self.larger.items():
            group = self.run.group(stage)
            micro = getattr(self.run, group).micro_batch_size
            lines += [f"  {stage}: --set {group}.micro_batch_size={size} in place of {micro}"] if size else []
        if self.fits is False:
            group = self.run.group("ppo")
            lines += ["", f"Options that reduce memory (STAGE: sft, reward or {group}):"]
            used = [option for option in OPTIONS if group == "ppo" or "critic" not in option]
            lines += [f"  {option.replace('ppo.', f'{group}.')}" for option in used]
        return "\n".join(lines)

    def _machine(self) -> str:
        machine, run = self.machine, self.run
        of = f" of {machine.memory / 1e9:g} GB" if machine.memory else ""
        where = f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}{of}" if machine.gpus else f"a CPU{of}"
        shared = f", {machine.sharding}" if machine.gpus > 1 else ""
        return f"{self.profile}: {run.shape.parameters:,} parameters, {run.dtype}, on {where}{shared}; GB per device"
