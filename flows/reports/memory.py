"""Compute the memory that a run needs on a machine: each phase, whether it fits, and options that reduce it."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from components.base.errors import UserError
from components.base.paths import user_path
from components.planning.advice import Machine, StagePlan, plan_stages
from components.planning.memory import PlannedRun
from components.planning.models import Sharding
from components.planning.shape import ModelShape
from components.planning.tensors import FLOAT
from components.rewards.config import ModelReward
from flows.config.run_config import RunConfig

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
NAMED = 3
"""Number of a phase's parts that the table names."""


def planned_run(config: RunConfig, base: Path | None, shape: ModelShape | None = None, gpu: bool = False) -> PlannedRun:
    """Return the part of `config` that determines memory.

    Args:
        base: the folder of the pretrained model that `sft.base` names; None if it names none.
        shape: a model's shape to plan for instead of the configured model.
        gpu: whether `runtime.dtype: auto` means a GPU's format; otherwise it means this machine's.

    Raises:
        UserError: memory can't be computed for this kind of pretrained model.
    """
    if shape is None:
        shape = ModelShape.of_scratch(config.sft.scratch) if base is None else ModelShape.of_folder(base, "sft.base")
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
    held, uncounted = 0, []
    for source in (each for each in config.ppo.rewards or () if isinstance(each, ModelReward)):
        asked = source.source.removeprefix("model:")
        folder = user_path(asked, "ppo.rewards: source")
        if not folder.is_dir():
            uncounted.append(asked)
            continue
        for member in (folder, *sorted(folder.glob("members/*"))):
            weights = member / "model" if (member / "model").is_dir() else member
            held += sum(FLOAT * _elements(file, source.source) for file in weights.glob("*.safetensors"))
    return held, tuple(uncounted)


def _elements(file: Path, source: str) -> int:
    """Return the number of elements in a safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as opened:
            return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"ppo.rewards: source = {source}: {file} is damaged ({error}). Copy it again.") from None


def sharding_of(config: RunConfig) -> Sharding:
    """Return `runtime.sharding`, or zero2 if it is `auto` or `none`, because the plan is for several ranks."""
    found = config.runtime.sharding
    return next((each for each in get_args(Sharding) if each == found), "zero2")


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


@dataclass(frozen=True)
class MemoryPlan:
    """The memory plan of a run's training stages on a machine."""

    profile: str
    run: PlannedRun
    machine: Machine
    stages: list[StagePlan]

    @classmethod
    def of(cls, profile: str, run: PlannedRun, machine: Machine) -> "MemoryPlan":
        """Return the plan of `run` on `machine`."""
        return cls(profile, run, machine, plan_stages(run, machine))

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
                most = sorted(phase.parts.items(), key=lambda part: -part[1])[:NAMED]
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
