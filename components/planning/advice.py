"""Whether a run's phases fit a device, and which options to change if they do not. Importable without torch."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from components.models.config import AdapterConfig
from components.planning.memory import Phase, PlannedRun, phases
from components.planning.models import Ranks, Sharding

RANK = 16
"""Rank of the adapters that are suggested."""


class Machine(NamedTuple):
    """The machine of a stage: a number of equal GPUs, or a CPU's memory."""

    gpus: int
    """0 for a CPU."""
    memory: int | None
    """Bytes of each GPU, or of the process; None if it is not known."""
    sharding: Sharding = "zero2"

    def phases(self, run: PlannedRun) -> list[Phase]:
        """Return the phases of `run` on this machine."""
        return phases(run, Ranks(max(1, self.gpus), self.sharding), "cuda" if self.gpus else "cpu")


@dataclass(frozen=True)
class MemoryAdvice:
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
    """Empty if the stage fits. First each single change, the one that saves most first. If no single change is enough,
    then several together, none of which is superfluous (all changes, if even these are not enough)."""

    @property
    def worst(self) -> Phase:
        """Return the phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.bytes)


class _Situation(NamedTuple):
    run: PlannedRun
    machine: Machine

    def worst(self, stage: str) -> int:
        return max(phase.bytes for phase in self.machine.phases(self.run) if phase.stage == stage)

    def fits(self, stage: str) -> bool:
        return self.machine.memory is not None and self.worst(stage) <= self.machine.memory

    def set(self, stage: str, **options: Any) -> Self:
        config = getattr(self.run, stage).model_copy(update=options)
        return self._replace(run=self.run._replace(**{stage: config}))


Change = Callable[[_Situation, str], tuple[_Situation, tuple[str, ...]] | None]
"""Returns the situation with an option of a stage changed, and the change in the form for `--set`; None if not
possible."""


def plan_stages(run: PlannedRun, machine: Machine) -> list[StagePlan]:
    """Return the plan of each training stage of `run` on `machine`."""
    found, now = machine.phases(run), _Situation(run, machine)
    plans = []
    for stage in dict.fromkeys(phase.stage for phase in found):
        fits = None if machine.memory is None else now.fits(stage)
        advice = list(_advice(now, stage)) if fits is False else []
        plans.append(StagePlan(stage, [phase for phase in found if phase.stage == stage], fits, advice))
    return plans


def _advice(now: _Situation, stage: str) -> Iterator[MemoryAdvice]:
    """Yield single changes that save memory, the largest saving first; then those that together make the stage fit."""
    before, alone = now.worst(stage), []
    for change in _CHANGES:
        then, options = _changed(now, stage, [change])
        if then.worst(stage) < before:
            alone.append(MemoryAdvice(options, then.worst(stage), then.fits(stage)))
    yield from sorted(alone, key=lambda each: each.bytes)
    if any(each.fits for each in alone):
        return
    helping: list[Change] = []
    for change in _CHANGES:
        more = [*helping, change]
        helping = more if _held(now, stage, more) < _held(now, stage, helping) else helping
    if _held(now, stage, helping) <= (now.machine.memory or 0):
        for change in _LEFT_OUT:
            rest = [each for each in helping if each is not change]
            helping = rest if _held(now, stage, rest) <= (now.machine.memory or 0) else helping
    if len(helping) > 1:
        then, options = _changed(now, stage, helping)
        yield MemoryAdvice(options, then.worst(stage), then.fits(stage))


def _changed(now: _Situation, stage: str, changes: Sequence[Change]) -> tuple[_Situation, tuple[str, ...]]:
    """Apply those of `changes` that are possible, one after the other."""
    options: tuple[str, ...] = ()
    for change in changes:
        if (changed := change(now, stage)) is not None:
            now, options = changed[0], options + changed[1]
    return now, options


def _held(now: _Situation, stage: str, changes: Sequence[Change]) -> int:
    return _changed(now, stage, changes)[0].worst(stage)


def _checkpointing(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    if getattr(now.run, stage).gradient_checkpointing:
        return None
    return now.set(stage, gradient_checkpointing=True), (f"{stage}.gradient_checkpointing=true",)


def _micro_batch(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    """Choose the largest micro-batch that fits, else the smallest; a limit on tokens is that many longest sequences."""
    config, by_tokens = getattr(now.run, stage), ("micro_batch_tokens", "packing")
    option = next((name for name in by_tokens if getattr(config, name, None) is not None), "micro_batch_size")
    size, length = getattr(config, option), now.run.length
    if option in by_tokens:
        smaller = list(range(length, size, length))
    else:
        divided = getattr(config, "minibatch_size", 0)  # in PPO the size must divide this
        smaller = [each for each in range(1, size) if divided % each == 0]
    if not smaller or now.fits(stage):
        return None
    fitting = bisect_right(
        smaller, now.machine.memory or 0, key=lambda each: now.set(stage, **{option: each}).worst(stage)
    )
    chosen = smaller[max(0, fitting - 1)]
    return now.set(stage, **{option: chosen}), (f"{stage}.{option}={chosen}",)


def _eight_bits(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    config, machine = getattr(now.run, stage), now.machine
    sharded = machine.gpus > 1 and machine.sharding != "replicas" and getattr(config, "lora", None) is None
    if config.optimizer != "adamw" or sharded:
        return None
    return now.set(stage, optimizer="adamw_8bit"), (f"{stage}.optimizer=adamw_8bit",)


def _zero3(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    if now.machine.gpus < 2 or now.machine.sharding == "zero3":
        return None
    return now._replace(machine=now.machine._replace(sharding="zero3")), ("runtime.sharding=zero3",)


def _bfloat16(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    if now.run.dtype == "bfloat16":
        return None
    return now._replace(run=now.run._replace(dtype="bfloat16")), ("runtime.dtype=bfloat16",)


def _shared_critic(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    config = now.run.ppo
    if stage != "ppo" or not config.has_critic or config.critic.kind == "shared":
        return None
    critic = config.critic.model_copy(update={"kind": "shared"})
    return now.set("ppo", critic=critic), ("ppo.critic.kind=shared",)


def _lora(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    """Use adapters for the reward model, and with them for PPO's four models."""
    if stage == "sft" or getattr(now.run, stage).lora is not None:
        return None
    changed, options = now, tuple[str, ...]()
    for each in ("reward",) if stage == "reward" else ("reward", "ppo"):
        if getattr(now.run, each).lora is None:
            changed, options = changed.set(each, lora=AdapterConfig(rank=RANK)), (*options, f"{each}.lora.rank={RANK}")
    return changed, options


def _four_bits(now: _Situation, stage: str) -> tuple[_Situation, tuple[str, ...]] | None:
    lora = getattr(getattr(now.run, stage), "lora", None)
    if lora is None or lora.quantize is not None:
        return None
    changed = now.set(stage, lora=lora.model_copy(update={"quantize": "4bit"}))
    return changed, (f"{stage}.lora.quantize=4bit",)


_CHANGES: tuple[Change, ...] = (
    _checkpointing, _zero3, _bfloat16, _eight_bits, _shared_critic, _lora, _four_bits, _micro_batch,
)  # fmt: skip
"""Changes in the order in which they are combined. Those that do not change results come first; the micro-batch size is
last, since it is chosen to fit with the others."""
_LEFT_OUT: tuple[Change, ...] = (
    _four_bits, _lora, _shared_critic, _eight_bits, _bfloat16, _zero3, _micro_batch, _checkpointing,
)  # fmt: skip
"""Changes in the order in which they are left out if the rest is enough: first those that change results most."""
