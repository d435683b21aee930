"""A run's complete config: the stages' config classes side by side. `load_config` builds it from a profile and
`--set`."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, JsonValue, create_model, model_validator
from pydantic.fields import FieldInfo

from components.base.errors import UserError, refuse_credentials
from components.base.redaction import has_credentials
from components.base.settings import Settings
from components.data.config import DataConfig
from components.direct.config import PolicyConfig
from components.evaluation.config import EvaluationConfig
from components.gates.judging import ExtraGate, GatesConfig, with_kl_gates
from components.gates.methods import DIRECT_METHODS, ON_PAIRS, is_used
from components.gates.table import GATES
from components.human_eval.config import HumanEvalConfig
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.rollouts.client import resolve_rollout
from components.sft.config import SftConfig
from flows.config.config_errors import unknown, validated
from flows.config.profiles import Override, apply_overrides, profile_name, profile_names, read_profile
from flows.config.removed import without_removed
from tasks.runs.config import profile_values
from tasks.stages import DIRECT, KNOWN, OPTIONAL, PIPELINE, STAGES, Stage, StageName

Job = TypeVar("Job", bound=Settings)


LOCAL = "local"
CPU_POOL = "cpu"
"""The pool that runs pipelines, and each stage whose runner is local."""
GPU_POOL = "gpu"
"""The pool that computes PPO, one run at a time."""


class Runner(Settings):
    """Where a stage is computed. A pool's name alone is enough: `runners.ppo=gpu`."""

    pool: str = Field(LOCAL, min_length=1)
    """`local` for the run's own process; otherwise a Prefect work pool whose worker computes the stage (see `tether
    deploy`)."""
    runtime: Runtime | None = None
    """The pool's machine, if it differs from the run's: the line `a run here` of `tether doctor` on that machine."""
    timeout: float | None = Field(None, gt=0)
    """Seconds that one attempt may take; a stage that takes longer is stopped and not retried. Null: no limit."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: Any) -> Any:
        return {"pool": value} if isinstance(value, str) else value


class PriceConfig(Settings):
    """Prices of computing, with which Tether shows a run's cost next to its time. They are not part of a key."""

    currency: str = Field("USD", pattern=r"^[A-Za-z€$£¥]{1,8}$")
    """Currency of the prices."""
    hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Price per hour by work pool, or by device (`cpu`, `cuda`) for stages whose pool has no price. Stages with neither
    price show no cost."""


class MlflowConfig(Settings):
    """What MLflow stores in addition to metrics, tables and lineage. It is not part of a key."""

    weights: Literal["champion", "all", "none"] = "champion"
    """The models whose weights are copied into MLflow, once each, for `mlflow.transformers.load_model`: champions and
    the reward models that they were trained against (`champion`), every registered version (`all`), or none."""


_CONTROL = r"\x00-\x1f\x7f-\x9f"
_PRINTABLE = rf"^[^\s{_CONTROL}]([^{_CONTROL}]*[^\s{_CONTROL}])?$"
"""No control characters, and no blanks at the ends. Prefect's form accepts only patterns that Python's `re` accepts."""


class Options(Settings):
    """All options of a run. The defaults of each group are in its stage's class; thresholds are in the profiles."""

    project: str = Field("tether", max_length=500, pattern=_PRINTABLE)
    """Name of the MLflow experiment that records the run, and the prefix of its registered models' names."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of all random draws. The same seed on the same kind of machine gives the same bytes."""
    policy_seed: int | None = Field(None, ge=0, lt=2**32)
    """Seed of the policy's training alone (stage `ppo`); null takes `seed`. Runs that differ only here share data, SFT
    model and reward model."""
    runtime: Runtime = Runtime()
    """Device, number format and threads; resolved for this machine before the first key is built."""
    runners: dict[StageName, Runner] = Field(default_factory=dict)
    """Where each stage is computed; `local` by default. It is not part of a key."""
    retries: int = Field(2, ge=0, le=100)
    """How often each stage, and a deployed run, restarts from its checkpoint after its process died, its lease was lost
    or a connection failed. User errors, failed gates and failed checks are never retried. It is not part of a key."""
    retry_seconds: float = Field(30, ge=0, le=3600)
    """Wait before the first retry. Each further wait is twice as long, up to an hour. It is not part of a key."""
    prices: PriceConfig = PriceConfig()
    """Price per hour of a pool or a device."""
    mlflow: MlflowConfig = MlflowConfig()
    """What MLflow stores."""
    promote: bool = True
    """Whether the run's models may get the aliases `candidate` and `champion` in MLflow. False in profiles for trying
    things. It is not part of a key."""
    generation: GenerationConfig = GenerationConfig()
    """How responses are sampled in every stage."""
    data: DataConfig = DataConfig()
    """Where the data come from, and how they are split and checked."""
    sft: SftConfig = SftConfig()
    """Supervised fine-tuning."""
    reward: RewardConfig = RewardConfig()
    """The reward model."""
    policy: PolicyConfig = PolicyConfig()
    """The method that trains the policy, and the options of the direct methods."""
    ppo: PpoConfig = PpoConfig()
    """Training of the policy by PPO, with its KL penalty towards SFT; and how a policy of any method is evaluated."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The evaluation of SFT model and policy by tasks and probes, before people are asked."""
    human_eval: HumanEvalConfig = HumanEvalConfig()
    """The blind comparison with SFT."""
    gates: GatesConfig = GatesConfig()
    """Thresholds by group and gate; null, or no threshold, turns a gate off. `extra` adds gates on any metric."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_options(cls, values: object) -> object:
        """Read options that were removed or renamed, as deployments of an earlier release store them."""
        return without_removed(values, "config") if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _extra_gates_are_of_stages(self) -> Self:
        for stage in self.gates.extra:
            if stage not in PIPELINE:
                raise ValueError(f"gates.extra.{stage}: no such stage; there are {', '.join(PIPELINE)}")
        return self

    @model_validator(mode="after")
    def _reward_model_fits_ppo(self) -> Self:
        if self.ppo.score.ensemble != "mean" and self.reward.members < 2:
            raise ValueError(
                f"ppo.score.ensemble: {self.ppo.score.ensemble} needs several reward models: set reward.members to 2 "
                "or more"
            )
        group = "policy" if self.policy.method in DIRECT_METHODS else "ppo"
        if getattr(self, group).lora is not None and self.reward.lora is None:
            raise ValueError(
                f"{group}.lora: the reward model shares the policy's backbone only if it is an adapter too: set "
                "reward.lora, as in --set reward.lora.rank=8"
            )
        return self

    @model_validator(mode="after")
    def _patience_counts_evaluations(self) -> Self:
        is_direct, patience = self.policy.method in DIRECT_METHODS, self.ppo.watch.patience
        if is_direct and patience is not None and self.policy.evaluate_every is None:
            raise ValueError("ppo.watch.patience counts evaluations, and there are none: set policy.evaluate_every")
        return self

    @model_validator(mode="after")
    def _judges_have_names_of_their_own(self) -> Self:
        if self.data.has_judge and any(reward.judge and reward.name == "trained" for reward in self.ppo.rewards or ()):
            raise ValueError(
                "ppo.rewards: a judge is called trained, which is the name of the judge that is trained on "
                "data.judge_preferences (or data.generator.judge_pairs), and their metrics would clash: rename it"
            )
        return self

    @model_validator(mode="after")
    def _limits_of_kl_are_above_its_target(self) -> Self:
        kl, has_target = self.ppo.kl, self.policy.method not in DIRECT_METHODS and self.ppo.kl.control == "adaptive"
        for name, limit in (("band", kl.band), ("ceiling", kl.ceiling)):
            if has_target and limit is not None and limit <= kl.target:
                raise ValueError(
                    f"ppo.kl: {name} ({limit:g}) must be greater than target ({kl.target:g}), which KL swings around: "
                    f"set ppo.kl.{name} to about twice the target"
                )
        return self

    @model_validator(mode="after")
    def _an_alarm_that_stops_has_a_limit(self) -> Self:
        if self.policy.stop_on_alarm and self.policy.method in ON_PAIRS and self.chosen_limit is None:
            raise ValueError(
                "policy.stop_on_alarm stops where chosen responses fall below the number of "
                "gates.policy.chosen_log_ratio, which is null: set it, or leave policy.stop_on_alarm out"
            )
        return self

    @model_validator(mode="after")
    def _online_dpo_has_pairs(self) -> Self:
        if (self.policy.method == "online_dpo") is (self.ppo.pair_labels is None):
            raise ValueError(
                "policy.method=online_dpo and ppo.pair_labels go together: set ppo.pair_labels to soft or hard, with "
                "ppo.advantage=rloo and ppo.group_size=2, or leave both out"
            )
        return self

    @property
    def effective_gates(self) -> GatesConfig:
        """Return the gates that judge a run: the gate on KL takes the band if it is not named, and PPO's own are off
        with another method."""
        gates = GatesConfig(**with_kl_gates(self.gates.model_dump(), self.ppo.kl.model_dump()))
        method = self.policy.method
        unused = [name for name in GATES if not is_used(method, f"gates.{name}")]
        reason = "clips no ratios" if method == "online_dpo" else "has no PPO updates"
        return gates.without(unused, f"policy.method={method} {reason}")

    @property
    def chosen_limit(self) -> float | None:
        """Return the threshold of the gate `policy.chosen_log_ratio`, which is also the alarm's; None if it is off."""
        return getattr(self.gates, "policy", {}).get("chosen_log_ratio")

    def job(self, kind: type[Job]) -> Job:
        """Return the part of this config that enters a stage's key: the groups that the stage's job class `kind`
        names."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})

    def has(self, stage: str) -> bool:
        """Return whether a run with these options has a stage or sub-stage of the pipeline."""
        return stage not in OPTIONAL or any(attrgetter(option)(self) for option in OPTIONAL[stage])

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Return the stages of a run with these options, in order."""
        return tuple(filter(self.has, PIPELINE))

    def stage(self, name: str) -> Stage:
        """Return the stage of a name; of `ppo`, the one that trains by `policy.method`."""
        return DIRECT if self.policy.method in DIRECT_METHODS and name == DIRECT.name else KNOWN[name]

    def stage_job(self, stage: Stage) -> Settings:
        """Return the job of a stage, for the machine that computes it."""
        stage = self.stage(stage.name)
        runtime = self.runners.get(stage.group, Runner()).runtime or self.runtime
        if not stage.spreads:  # one process computes this stage, however many ranks train
            runtime = runtime.model_copy(update={"ranks": 1, "sharding": "none"})
        seed = self.policy_seed if stage.name == "ppo" and self.policy_seed is not None else self.seed
        return self.model_copy(update={"runtime": runtime, "seed": seed}).job(stage.load_job())

    def with_label_noise(self, metrics: Mapping[str, float]) -> Self:
        """Return these options with `policy.label_smoothing: auto` replaced by the estimate among the `metrics` of
        validate.

        Raises:
            UserError: there is no estimate.
        """
        if self.policy.label_smoothing != "auto" or not is_used(self.policy.method, "policy.label_smoothing"):
            return self
        if (noise := metrics.get("data/label_noise")) is None:
            raise UserError(
                "policy.label_smoothing is auto, and validate has no estimate of the label noise (data/label_noise): "
                "the pairs are too few, or their texts say too little about the labels. Set policy.label_smoothing to "
                "a number."
            )
        return self.model_copy(update={"policy": self.policy.model_copy(update={"label_smoothing": noise})})

    @property
    def pools(self) -> dict[str, str]:
        """Return the work pool of each stage that this process does not compute."""
        return {stage: runner.pool for stage, runner in self.runners.items() if runner.pool != LOCAL}

    @property
    def timeouts(self) -> dict[str, float]:
        """Return the seconds that one attempt may take, for each stage that has a limit."""
        return {stage: runner.timeout for stage, runner in self.runners.items() if runner.timeout is not None}

    @property
    def hourly_prices(self) -> dict[str, float]:
        """Return the price per hour of each stage whose pool or device has one."""
        prices = {}
        for stage in self.pipeline:
            runner = self.runners.get(stage, Runner())
            device = (runner.runtime or self.runtime).device
            price = self.prices.hour.get(runner.pool, self.prices.hour.get(device))
            if price is not None:
                prices[stage] = price
        return prices

    def resolved(self, with_ppo: bool = True) -> Self:
        """Return these options with each `auto` replaced by what this machine, or the rollout server, has.

        Values that a pool's runtime leaves out are taken from this machine. Without PPO no server is asked.

        Raises:
            UserError: the rollout server doesn't answer, or a stage cannot be computed in its number of ranks.
        """
        runners = {
            stage: runner if runner.runtime is None else runner.model_copy(update={"runtime": runner.runtime.resolve()})
            for stage, runner in self.runners.items()
        }
        ppo = self.ppo
        if with_ppo and self.policy.method not in DIRECT_METHODS:
            ppo = ppo.model_copy(update={"rollout": resolve_rollout(ppo.rollout)})
        config = self.model_copy(update={"runtime": self.runtime.resolve(), "runners": runners, "ppo": ppo})
        config.check_ranks()
        return config

    def check_ranks(self) -> None:
        """Check what sft, reward and ppo would refuse only when they begin: options that several ranks lack.

        Raises:
            UserError: a stage would refuse its options.
        """
        policy = ("policy", self.policy) if self.policy.method in DIRECT_METHODS else ("ppo", self.ppo)
        for name, options in (("sft", self.sft), ("reward", self.reward), policy):
            runtime = self.runners.get("ppo" if name == "policy" else name, Runner()).runtime or self.runtime
            if runtime.ranks == 1:
                continue
            rollout, responses = self.ppo.rollout, self.ppo.batch_size
            if name == "ppo" and (longest := rollout.longest_wait(responses)) >= runtime.rank_timeout:
                raise UserError(
                    f"ppo.rollout: {responses} responses, {rollout.concurrency} at a time, may take {longest:g} s with "
                    f"ppo.rollout.timeout={rollout.timeout:g}, and ranks wait {runtime.rank_timeout:g} s for rank 0, "
                    "which asks the server. Raise runtime.rank_timeout or ppo.rollout.concurrency, or lower "
                    "ppo.rollout.timeout."
                )
            whole = getattr(options, "lora", None) is None and getattr(options, "train", True)
            if options.optimizer == "adamw_8bit" and whole and runtime.sharding != "replicas":
                raise UserError(
                    f"{name}.optimizer: adamw_8bit cannot step parameters that are sharded over {runtime.ranks} ranks. "
                    f"Set runtime.sharding=replicas, or use {name}.optimizer=adamw."
                )


def _groups_of_further_stages() -> dict[str, tuple[object, FieldInfo]]:
    """Return class and field, by name, of each group that a stage's job needs and `Options` does not define."""
    fields = [item for stage in STAGES.values() for item in stage.load_job().model_fields.items()]
    return {name: (field.annotation, field) for name, field in fields if name not in Options.model_fields}


if TYPE_CHECKING:
    RunConfig = Options
else:
    RunConfig = create_model(
        "RunConfig", __base__=Options, __doc__=Options.__doc__, __module__=__name__, **_groups_of_further_stages()
    )


def load_config(profile: str | Path, overrides: Iterable[Override] = ()) -> RunConfig:
    """Return the checked config of a built-in profile or a YAML file, with `--set` overrides applied.

    Raises:
        UserError: there is no such profile, or a key or value is invalid; the message names key, value and nearest key.
    """
    config = check_config(apply_overrides(read_profile(profile), overrides), source=str(profile))
    check_kl_limits(config, source=str(profile))
    return config


def check_kl_limits(config: RunConfig, source: str, before: RunConfig | None = None) -> None:
    """Refuse a config whose gate on KL is off or above the band, or whose band is above the ceiling.

    It is the gate in `ppo.kl.unit`. With nats per response it is allowed to turn off both gates on KL.

    Args:
        before: the stored config that `config` was made from; its limits may contradict each other.

    Raises:
        UserError: two limits contradict each other; the message says which option to change.
    """
    kl, gates = config.ppo.kl, {gate.name: threshold for gate, threshold in config.effective_gates.rules("ppo")}
    gate, both = f"policy.{kl.measure}", ("policy.kl", "policy.kl_per_token")
    if gates[gate] is None and (kl.unit == "token" or any(gates[name] is not None for name in both)):
        option = "ppo.kl.band" if gate in config.gates.unnamed else f"gates.{gate}"
        raise UserError(
            f"{source}: gates.{gate}: ppo.kl.unit is {kl.unit}, and the gate on nats per {kl.unit} has no threshold, "
            f"so no gate would judge KL against its target: set {option}, as in --set {option}={2 * kl.target:g} for "
            f"twice ppo.kl.target. Check that the target ({kl.target:g}) is in nats per {kl.unit} too."
        )
    limits = _kl_limits(config)
    if before is not None and limits == _kl_limits(before):
        return
    numbers = [(option, limit) for option, limit in limits.items() if isinstance(limit, float)]
    for place, ((lower, low), (upper, high)) in enumerate(pairwise(numbers), 1):
        if low > high:
            settings = " ".join(f"--set {option}={low:g}" for option, limit in numbers[place:] if limit < low)
            raise UserError(
                f"{source}: {lower} ({low:g}) is above {upper} ({high:g}), so the run fails before KL gets there: "
                f"raise {upper}, as in {settings}, or lower {lower}."
            )


def _kl_limits(config: RunConfig) -> dict[str, object]:
    """Return the limits on KL by option, the lowest first."""
    kl, gate = config.ppo.kl, f"policy.{config.ppo.kl.measure}"
    thresholds = {rule.name: threshold for rule, threshold in config.effective_gates.rules("ppo")}
    return {f"gates.{gate}": thresholds[gate], "ppo.kl.band": kl.band, "ppo.kl.ceiling": kl.ceiling}


def check_config(values: dict[str, JsonValue], source: str) -> RunConfig:
    """Return `values` as a checked config. Errors name `source`, the place that the values come from.

    Raises:
        UserError: as `load_config`.
    """
    values = without_removed(values, source)
    gates = [f"gates.{name}" for name in GATES]
    gates += [
        f"gates.extra.{stage}.{short}.{field}"
        for stage, extra in _groups(dict(_groups(values.get("gates"))).get("extra"))
        for short, _ in _groups(extra)
        for field in ExtraGate.model_fields
    ]
    for group, thresholds in _groups(values.get("gates")):
        for short, threshold in _groups(thresholds):
            if group != "extra" and (key := f"gates.{group}.{short}") not in gates:
                raise UserError(f"{source}: {unknown(key, threshold, gates)}")
    if has_credentials("\n".join(text for _, text in _texts(values))):
        for key, text in _texts(values):
            refuse_credentials(f"{source}: {key}", text)
    return validated(RunConfig, values, source, gates)


def file_values(profile: str) -> dict[str, JsonValue] | None:
    """Return the values of a profile that is a file, laid over those it extends; None for another, or if it is valid
    only with further options."""
    try:
        return to_values(load_config(profile)) if profile_name(profile) != profile else None
    except UserError:
        return None


def default_values(home: Path, run: str, profile: str) -> tuple[str, dict[str, JsonValue]]:
    """Return the values that an unchanged run of the profile of `run` has, and a name for them.

    Of a file they were stored when the run began. A run of an earlier version did not store them: the values are then
    the classes' defaults with the demo's thresholds, because the classes define no thresholds.

    Raises:
        UserError: what the run stored is damaged.
    """
    if (stored := profile_values(home, run)) is not None:
        return f"the profile {profile}", stored
    if profile in profile_names():
        config = load_config(profile)
        # Runs of an earlier version name the gate on KL, which now takes the band.
        return f"the profile {profile}", to_values(config.model_copy(update={"gates": config.effective_gates}))
    plain = RunConfig(gates=load_config("demo").effective_gates)
    return "the classes' defaults and the demo's thresholds", to_values(plain)


def _texts(values: JsonValue, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(values, str):
        yield key, values
    for name, value in (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    ):
        yield key, str(name)
        yield from _texts(value, f"{key}.{name}" if key else str(name))


def _groups(values: Any) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, dict) else []


def to_values(config: RunConfig) -> dict[str, JsonValue]:
    """Return `config` as plain values, from which `check_config` builds an equal config."""
    return config.model_dump(mode="json")
