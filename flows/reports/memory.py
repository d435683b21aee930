"""Compute the memory that a run needs on a machine: each phase, whether it fits, and options that reduce it."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from components.base.errors import UserError
from components.base.paths import user_path
from components.models.weights import count_parameters
from components.planning.memory import FLOAT, Machine, Phase, PlannedRun, Sharding, phases
from components.planning.shape import ModelShape
from components.rewards.config import ModelReward
from flows.config.profiles import Override, parse_override
from flows.config.run_config import RunConfig, load_config

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
    judged = config.data.has_judge
    return PlannedRun(shape, dtype, config.generation, config.sft, config.reward, config.ppo, judges, uncounted, judged)


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
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)B?", text.strip(), re.IGNORECASE)
    size = float(found[1]) * UNITS[found[2].capitalize()] if found else 0.0
    if not 1 <= size < math.inf:
        raise UserError(f"--memory {text}: give a size with its unit, such as 80GB (10^9 bytes each) or 24GiB (2^30).")
    return int(size)


class MemoryAdvice(NamedTuple):
    """Options to change together, and the memory of the stage's worst phase afterwards."""

    options: tuple[str, ...]
    """The options, each in the form for `--set`."""
    bytes: int
    fits: bool


@dataclass(frozen=True)
class StagePlan:
    """One stage on a machine."""

    stage: str
    phases: list[Phase]
    fits: bool | None
    """Whether the stage fits; None if the machine's memory is not known."""
    advice: list[MemoryAdvice]
    """Empty if the stage fits. First single changes, the largest saving first; then, if none is enough, several."""

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a run's training stages on a machine."""

    profile: str
    run: PlannedRun
    machine: Machine
    stages: list[StagePlan]

    @classmethod
    def of(
        cls, profile: str, overrides: Sequence[Override], shape: ModelShape, gpus: int, memory: int | None
    ) -> "MemoryPlan":
        """Return the plan of a profile on a machine, for a model of this shape.

        Args:
            gpus: 0 for a CPU.
            memory: bytes of each GPU, or of the process; None if it is not known.

        Raises:
            UserError: the config is not valid, or stages would refuse so many GPUs.
        """

        def planned(*options: str) -> tuple[PlannedRun, Machine]:
            config = load_config(profile, [*overrides, *map(parse_override, options)])
            on_ranks = config.runtime.model_copy(update={"ranks": max(1, gpus)})
            config.model_copy(update={"runtime": on_ranks}).check_ranks()
            mode = config.runtime.sharding
            sharding: Sharding = "zero2" if mode == "auto" or mode == "none" else mode
            return planned_run(config, shape, gpus > 0), Machine(gpus, memory, sharding)

        def worst(stage: str, options: Sequence[str]) -> float:
            try:
                return max(phase.bytes for phase in phases(*planned(*options)) if phase.stage == stage)
            except UserError:  # this config can't have these options
                return math.inf

        run, machine = planned()
        stages = []
        for stage in ("sft", "reward", "ppo"):
            own = [phase for phase in phases(run, machine) if phase.stage == stage]
            fits = None if memory is None else max(phase.bytes for phase in own) <= memory
            found = list(_advice(list(_changes(run, machine, stage)), partial(worst, stage), memory or 0))
            stages.append(StagePlan(stage, own, fits, found if fits is False else []))
        return cls(profile, run, machine, stages)

    @property
    def fits(self) -> bool | None:
        """Return whether every stage fits; None if the machine's memory is not given."""
        return None if self.machine.memory is None else all(stage.fits for stage in self.stages)

    def as_json(self) -> str:
        """Return the plan as one JSON object; docs/scaling.md describes its fields."""
        memory, machine = self.machine.memory, self.machine
        stages = [
            {
                "stage": stage.stage,
                "bytes": stage.worst.bytes,
                "fits": stage.fits,
                "phases": [
                    {"phase": phase.name, "bytes": phase.bytes, "host_bytes": phase.host,
                     "fits": None if memory is None else phase.bytes <= memory, "parts": phase.parts}
                    for phase in stage.phases
                ],
                "advice": [
                    {"set": list(each.options), "bytes": each.bytes, "fits": each.fits} for each in stage.advice
                ],
            }
            for stage in self.stages
        ]  # fmt: skip
        told = {
            "profile": self.profile, "parameters": self.run.shape.parameters, "dtype": self.run.dtype,
            "gpus": machine.gpus, "sharding": machine.sharding if machine.gpus > 1 else "none", "memory": memory,
            "fits": self.fits, "stages": stages, "uncounted": list(self.run.uncounted),
        }  # fmt: skip
        return json.dumps(told)

    def text(self) -> str:
        """Return the plan as text for a terminal."""
        memory = self.machine.memory
        lines = [self._machine(), "", f"{'stage':8}{'phase':15}{'GB':>8}  {'fits' if memory else '':5}  most of it"]
        for stage in self.stages:
            for phase in stage.phases:
                most = sorted(phase.parts.items(), key=lambda part: -part[1])[:LARGEST]
                told = ", ".join(f"{part} {held / 1e9:.2f}" for part, held in most)
                fits = "" if memory is None else "yes" if phase.bytes <= memory else "NO"
                host = f"; and {phase.host / 1e9:.2f} GB of host memory" if phase.host else ""
                lines.append(f"{stage.stage:8}{phase.name:15}{phase.bytes / 1e9:8.2f}  {fits:5}  {told}{host}")
        if self.run.uncounted:
            named = ", ".join(self.run.uncounted)
            lines += ["", f"Not counted: reward models of ppo.rewards that are not in a folder here: {named}."]
        for stage in self.stages:
            if stage.advice:
                needs = f"{stage.stage} needs {stage.worst.bytes / 1e9:.2f} GB ({stage.worst.name})."
                lines += ["", f"{needs} With these options it needs less:"]
                lines += [
                    f"  {' '.join(f'--set {option}' for option in each.options)}: {each.bytes / 1e9:.2f} GB, "
                    f"{'fits' if each.fits else 'does not fit'}"
                    for each in stage.advice
                ]
            elif stage.fits is False:
                lines += ["", f"{stage.stage} needs {stage.worst.bytes / 1e9:.2f} GB, and no option reduces that."]
        return "\n".join(lines)

    def _machine(self) -> str:
        machine, run = self.machine, self.run
        of = f" of {machine.memory / 1e9:g} GB" if machine.memory else ""
        where = f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}{of}" if machine.gpus else f"a CPU{of}"
        shared = f", {machine.sharding}" if machine.gpus > 1 else ""
        return f"{self.profile}: {run.shape.parameters:,} parameters, {run.dtype}, on {where}{shared}; GB per device"


def _changes(run: PlannedRun, machine: Machine, stage: str) -> Iterator[tuple[str, ...]]:
    """Yield options that may reduce a stage's memory, first those that do not change results; those that a
    config can't have are left to its checks."""
    config = getattr(run, stage)
    lora = getattr(config, "lora", None)
    yield (f"{stage}.gradient_checkpointing=true",)
    if machine.gpus > 1:
        yield ("runtime.sharding=zero3",)
    by_tokens = next((n for n in ("packing", "micro_batch_tokens") if getattr(config, n, None) is not None), None)
    length = run.generation.max_prompt_tokens + run.generation.max_new_tokens
    yield (f"{stage}.{by_tokens}={length}" if by_tokens else f"{stage}.micro_batch_size=1",)
    yield ("runtime.dtype=bfloat16",)
    yield (f"{stage}.optimizer=adamw_8bit",)
    if stage == "ppo" and run.ppo.has_critic:
        yield ("ppo.critic.kind=shared",)
    if stage != "sft" and lora is None:
        models = ["reward"] if stage == "reward" else ["reward", "ppo"]
        yield tuple(f"{name}.lora.rank=16" for name in models if getattr(run, name).lora is None)
    if stage != "sft":
        yield (f"{stage}.lora.quantize=4bit",)


def _advice(
    changes: Sequence[tuple[str, ...]], worst: Callable[[Sequence[str]], float], memory: int
) -> Iterator[MemoryAdvice]:
    """Yield the changes that save memory, the largest saving first; if none is enough, several together, added in turn
    until the stage fits."""
    before, together = worst(()), tuple[str, ...]()
    alone = sorted((worst(options), options) for options in changes)
    yield from (MemoryAdvice(options, int(size), size <= memory) for size, options in alone if size < before)
    if alone[0][0] > memory:
        least = before
        for options in changes:
            if least > memory and (size := worst((*together, *options))) < least:
                together, least = (*together, *options), size
        yield MemoryAdvice(together, int(least), least <= memory)
