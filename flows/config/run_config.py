"""A run's whole config: the stages' config classes side by side, and how a profile and `--set` become one."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from components.base.errors import UserError, refuse_credentials
from components.base.redaction import has_credentials
from components.base.settings import Settings
from components.data.config import DataConfig
from components.gates.judging import ExtraGate, GatesConfig
from components.gates.table import GATES
from components.human_eval.config import HumanEvalConfig
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.rollouts.client import resolve_rollout
from components.sft.config import SftConfig
from flows.config.errors import explain, unknown
from flows.config.profiles import Override, apply_overrides, profile_names, read_profile
from tasks.stages import PIPELINE, STAGES, Stage, StageName

Job = TypeVar("Job", bound=Settings)


LOCAL = "local"
CPU_POOL = "cpu"
"""Runs the pipelines, and each stage whose runner is local."""
GPU_POOL = "gpu"
"""Computes PPO, one at a time."""


class Runner(Settings):
    """Who computes a stage. A pool's name alone will do: `runners.ppo=gpu`."""

    pool: str = Field(LOCAL, min_length=1)
    """`local` for the process of the run; else a Prefect work pool, whose worker computes it (see `tether deploy`)."""
    runtime: Runtime | None = None
    """The pool's machine, where it isn't like the run's own: what `tether doctor` says there of `a run here`."""
    timeout: float | None = Field(None, gt=0)
    """Seconds that one attempt may take; a stage that takes longer is stopped and not tried again. Null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: Any) -> Any:
        return {"pool": given} if isinstance(given, str) else given


class PriceConfig(Settings):
    """What computing costs, so that Tether shows a run's cost beside its seconds. It is not part of a key."""

    currency: str = Field("USD", pattern=r"^[A-Za-z€$£¥]{1,8}$")
    """What the prices are in."""
    hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Price of an hour by work pool, or by device (`cpu`, `cuda`) where a stage's pool has none. What it says nothing
    of has no cost."""


class MlflowConfig(Settings):
    """What MLflow is given beside numbers, tables and lineage. It is not part of a key."""

    weights: Literal["champion", "all", "none"] = "champion"
    """Whose weights are copied into MLflow, once each, for `mlflow.transformers.load_model`: those of a champion and of
    the reward model that it was trained against, those of every registered version, or none."""


_CONTROL = r"\x00-\x1f\x7f-\x9f"
_PRINTABLE = rf"^[^\s{_CONTROL}]([^{_CONTROL}]*[^\s{_CONTROL}])?$"
"""No control characters, no blanks at the ends. Prefect's form takes only patterns that Python's `re` takes."""


class Options(Settings):
    """Everything a run is asked to do. Each group's defaults stand in its stage's class, thresholds in the profiles."""

    project: str = Field("tether", max_length=500, pattern=_PRINTABLE)
    """Name of the MLflow experiment that the run is recorded in, and what its registered models are called after."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random; the same seed on the same kind of machine gives the same bytes."""
    runtime: Runtime = Runtime()
    """Device, number format and threads, resolved for this machine before the first key."""
    runners: dict[StageName, Runner] = Field(default_factory=dict)
    """Who computes which stage; `local` where nothing is said. It is not part of a key."""
    retries: int = Field(2, ge=0, le=100)
    """How often each stage, and a deployed run, goes on by itself from the checkpoint after its process died, its lease
    was lost or a connection failed; never after a mistake, a failed gate or a failed check. It is not part of a key."""
    retry_seconds: float = Field(30, ge=0, le=3600)
    """Wait before the first retry; twice as long before each further one, an hour at most. It is not part of a key."""
    prices: PriceConfig = PriceConfig()
    """What an hour of a pool or a device costs."""
    mlflow: MlflowConfig = MlflowConfig()
    """What MLflow is given."""
    generation: GenerationConfig = GenerationConfig()
    """How responses are sampled, in every stage."""
    data: DataConfig = DataConfig()
    """Where the data come from, how they are split."""
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning."""
    reward: RewardConfig = RewardConfig()
    """The reward model."""
    ppo: PpoConfig = PpoConfig()
    """The policy and its tether."""
    human_eval: HumanEvalConfig = HumanEvalConfig()
    """The blind comparison with SFT."""
    gates: GatesConfig = GatesConfig()
    """Thresholds by stage and gate; null, or no threshold, leaves a gate off. `extra` adds gates on any metric."""

    @model_validator(mode="after")
    def _extra_gates_are_of_stages(self) -> Self:
        for stage in self.gates.extra:
            if stage not in PIPELINE:
                raise ValueError(f"gates.extra.{stage}: no such stage; there are {', '.join(PIPELINE)}")
        return self

    @model_validator(mode="after")
    def _reward_model_fits_ppo(self) -> Self:
        if self.ppo.score.ensemble != "mean" and self.reward.published < 2:
            raise ValueError(
                f"ppo.score.ensemble: {self.ppo.score.ensemble} needs several reward models: set reward.members to 2 "
                "or more, and leave reward.combine at ensemble"
            )
        if self.ppo.lora is not None and self.reward.lora is None:
            raise ValueError(
                "ppo.lora: the reward model shares the policy's backbone only if it is an adapter too: set "
                "reward.lora, as in --set reward.lora.rank=8"
            )
        return self

    @model_validator(mode="after")
    def _judges_have_names_of_their_own(self) -> Self:
        if self.data.has_judge and any(each.judge and each.name == "trained" for each in self.ppo.rewards or ()):
            raise ValueError(
                "ppo.rewards: a judge is called trained, and so are the metrics of the judge that is trained on "
                "data.judge_preferences (or data.generator.judge_pairs): give it another name"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        buffer, cap = self.ppo.score.length_buffer, self.generation.max_new_tokens
        if buffer is not None and buffer >= cap:
            raise ValueError(
                f"ppo.score.length_buffer ({buffer}) must be below generation.max_new_tokens ({cap}): the penalty "
                "begins that many tokens before the cap"
            )
        return self

    def job(self, kind: type[Job]) -> Job:
        """Return the part of this config that a stage's job class names: all that enters the stage's key."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})

    def stage_job(self, stage: Stage) -> Settings:
        """Return the job of a stage, for the machine of whoever runs it."""
        runner = self.runners.get(stage.shown)
        there = runner.runtime if runner is not None else None
        runtime = self.runtime if there is None else there
        if not stage.spreads:  # one process computes it, however many ranks train
            runtime = runtime.model_copy(update={"ranks": 1, "sharding": "none"})
        return self.model_copy(update={"runtime": runtime}).job(stage.load_job())

    @property
    def pools(self) -> dict[str, str]:
        """Stage to work pool, for the stages that this process does not compute."""
        return {stage: runner.pool for stage, runner in self.runners.items() if runner.pool != LOCAL}

    @property
    def timeouts(self) -> dict[str, float]:
        """Stage to the seconds that one attempt may take, for the stages that have a limit."""
        return {stage: runner.timeout for stage, runner in self.runners.items() if runner.timeout is not None}

    @property
    def hourly_prices(self) -> dict[str, float]:
        """Stage to the price of an hour of what computes it, for the stages whose pool or device has one."""
        found = {}
        for stage in PIPELINE:
            runner = self.runners.get(stage, Runner())
            device = (runner.runtime or self.runtime).device
            price = self.prices.hour.get(runner.pool, self.prices.hour.get(device))
            if price is not None:
                found[stage] = price
        return found

    def resolved(self) -> Self:
        """Return these options with each `auto` replaced by what this machine has, and by what the rollout server says.

        A pool's runtime takes from this machine what it doesn't say.

        Raises:
            UserError: the rollout server doesn't answer.
        """
        runners = {
            stage: runner if runner.runtime is None else runner.model_copy(update={"runtime": runner.runtime.resolve()})
            for stage, runner in self.runners.items()
        }
        ppo = self.ppo.model_copy(update={"rollout": resolve_rollout(self.ppo.rollout)})
        return self.model_copy(update={"runtime": self.runtime.resolve(), "runners": runners, "ppo": ppo})


def _groups_of_further_stages() -> dict[str, tuple[object, FieldInfo]]:
    """Name to class and field of each group that a stage's job names and `Options` does not spell out."""
    fields = [item for stage in STAGES.values() for item in stage.load_job().model_fields.items()]
    return {name: (field.annotation, field) for name, field in fields if name not in Options.model_fields}


if TYPE_CHECKING:
    RunConfig = Options
else:
    RunConfig = create_model(
        "RunConfig", __base__=Options, __doc__=Options.__doc__, __module__=__name__, **_groups_of_further_stages()
    )


def load_config(profile: str | Path, overrides: Iterable[Override] = ()) -> RunConfig:
    """Return a built-in profile or a YAML file with `--set` overrides on top, checked.

    Raises:
        UserError: no such profile, or a key or value that is none; the message names key, value and nearest key.
    """
    config = check_config(apply_overrides(read_profile(profile), overrides), source=str(profile))
    check_kl_is_judged(config, source=str(profile))
    return config


def check_kl_is_judged(config: RunConfig, source: str) -> None:
    """Refuse a config with a KL target in a unit whose gate has no threshold. Stored configs are not refused.

    With nats a response, no gate on KL at all is a choice that anybody may make.

    Raises:
        UserError: naming the gate and a threshold for it.
    """
    unit, thresholds = config.ppo.kl.unit, {gate.name: threshold for gate, threshold in config.gates.rules("ppo")}
    own, other = ("ppo.kl_per_token", "ppo.kl") if unit == "token" else ("ppo.kl", "ppo.kl_per_token")
    if thresholds[own] is None and (unit == "token" or thresholds[other] is not None):
        raise UserError(
            f"{source}: gates.{own}: ppo.kl.unit is {unit}, and the gate on nats per {unit} has no threshold, so "
            f"no gate would judge KL against its target: set gates.{own}, as in --set gates.{own}="
            f"{2 * config.ppo.kl.target:g} for twice ppo.kl.target."
        )


def check_config(values: dict[str, JsonValue], source: str) -> RunConfig:
    """`values` as a config; `source` is where they come from, for the error.

    Raises:
        UserError: as `load_config`.
    """
    gates = [f"gates.{name}" for name in GATES]
    gates += [
        f"gates.extra.{stage}.{short}.{field}"
        for stage, extra in _groups(dict(_groups(values.get("gates"))).get("extra"))
        for short, _ in _groups(extra)
        for field in ExtraGate.model_fields
    ]
    for stage, thresholds in _groups(values.get("gates")):
        for short, threshold in _groups(thresholds):
            if stage != "extra" and (key := f"gates.{stage}.{short}") not in gates:
                raise UserError(f"{source}: {unknown(key, threshold, gates)}")
    if has_credentials("\n".join(text for _, text in _texts(values))):
        for key, text in _texts(values):
            refuse_credentials(f"{source}: {key}", text)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(explain(error, values, RunConfig, source, extra_keys=gates)) from error


def default_values(profile: str) -> tuple[str, dict[str, JsonValue]]:
    """Return the values that a run of `profile` has where nothing is changed, and what they are called.

    A profile that is none of ours was a file that may have changed since: then the classes' defaults, and thresholds of
    the demo, which the classes have none of.
    """
    if profile in profile_names():
        return f"the profile {profile}", to_values(load_config(profile))
    plain = RunConfig(gates=load_config("demo").gates)
    return "the classes' defaults and the demo's thresholds", to_values(plain)


def _texts(values: JsonValue, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a config, keys included, with the dotted key that it stands at."""
    if isinstance(values, str):
        yield key, values
    for name, value in (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    ):
        yield key, str(name)
        yield from _texts(value, f"{key}.{name}" if key else str(name))


def _groups(values: Any) -> list[tuple[str, Any]]:
    """Key and value of a group; nothing of what isn't one."""
    return list(values.items()) if isinstance(values, dict) else []


def to_values(config: RunConfig) -> dict[str, JsonValue]:
    """`config` as plain values that `check_config` reads back to the same config."""
    return config.model_dump(mode="json")
