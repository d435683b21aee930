"""The stages: their names, the places of their code and config classes, and libraries whose versions change results.

Everything is given by name, because knowing the stages must not import torch.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from components.base.observe import Observe
    from components.base.settings import Settings

TORCH = ("torch", "transformers")
PEFT = (*TORCH, "peft")
HARNESS = (*TORCH, "datasets", "lm-eval")
CONTRACT = ("pandas", "great-expectations", "transformers", "tokenizers", "rensa", "py3langid", "datasets", "pyarrow")


Run: TypeAlias = "Callable[[Settings, Mapping[str, Path], Path, Observe], dict[str, float]]"
"""A stage's function. Its arguments: config, paths of inputs, output folder, and a function to call after each step."""


class Stage(NamedTuple):
    """One computed, keyed and published step."""

    name: str
    """The name; it is part of the key."""
    module: str
    """The module with `run(job, inputs, out, observe) -> metrics`."""
    job: str
    """The config class, as `module:Class`."""
    libraries: tuple[str, ...]
    """Distributions whose versions are part of the key."""
    spreads: bool = False
    """Whether `runtime.ranks` processes compute it; otherwise one process does."""

    @property
    def group(self) -> str:
        """Return the pipeline's stage under which status, reports and MLflow show it."""
        return group_of(self.name)

    def load_run(self) -> Run:
        """Return the stage's function. This imports its module, which may import torch."""
        return importlib.import_module(self.module).run

    def load_job(self) -> "type[Settings]":
        module, _, name = self.job.partition(":")
        return getattr(importlib.import_module(module), name)


_STAGES = (
    Stage("validate.judge", "data_contracts.judge_pairs", "data_contracts.config:ValidateJudgeJob", CONTRACT),
    Stage("validate", "data_contracts.validate", "data_contracts.config:ValidateJob", CONTRACT),
    Stage("sft", "components.sft.stage", "components.sft.config:SftJob", TORCH, spreads=True),
    Stage("reward.judge", "components.reward.substages.judge", "components.reward.config:JudgeJob", PEFT, spreads=True),
    Stage("reward", "components.reward.stage", "components.reward.config:RewardJob", PEFT, spreads=True),
    Stage("ppo", "components.ppo.stage", "components.ppo.config:PpoJob", PEFT, spreads=True),
    *(Stage(f"evaluation.{model}_tasks", "components.evaluation.task_results", "components.evaluation.config:TasksJob",
            HARNESS) for model in ("sft", "policy")),
    *(Stage(f"evaluation.{model}_probes", "components.evaluation.probe_results",
            "components.evaluation.config:ProbesJob", TORCH) for model in ("sft", "policy")),
    Stage("evaluation", "components.evaluation.stage", "components.evaluation.config:EvaluationJob", ()),
    Stage("human_eval.sample", "components.human_eval.blinded_sample", "components.human_eval.config:SampleJob", TORCH),
    Stage("human_eval.reward", "components.reward.substages.sheet_scores", "components.reward.config:SheetScoresJob",
          PEFT),
    Stage("human_eval", "components.human_eval.unblinded_score", "components.human_eval.config:ScoreJob", ("pandas",)),
)
_COMPARISON = (
    Stage("human_eval.compare", "components.human_eval.comparison.comparison_sample",
          "components.human_eval.config:SampleJob", TORCH),
    Stage("human_eval.compared", "components.human_eval.comparison.comparison_score",
          "components.human_eval.config:ScoreJob", ("pandas",)),
)  # fmt: skip

STAGES = {stage.name: stage for stage in _STAGES}
"""Every stage by name, in the order in which `flows/rlhf.py` runs them. Those in `OPTIONAL` run only if configured."""

_JUDGE = ("data.judge_preferences", "data.generator.judge_pairs")
OPTIONAL = {
    **dict.fromkeys(("validate.judge", "reward.judge"), _JUDGE),
    **dict.fromkeys(("evaluation.sft_tasks", "evaluation.policy_tasks"), ("evaluation.tasks",)),
    **dict.fromkeys(("evaluation.sft_probes", "evaluation.policy_probes"), ("evaluation.probes",)),
    "evaluation": ("evaluation.tasks", "evaluation.probes"),
}
"""Maps each (sub-)stage that a run may leave out to the options of which any one adds it."""

COMPARISON = {stage.name: stage for stage in _COMPARISON}
"""The stages of a run that compares existing models, by name. Such a run has none of `STAGES`."""

KNOWN = STAGES | COMPARISON
"""Every stage that a record may name."""

DIRECT = Stage("ppo", "components.direct.stage", "components.direct.config:DirectJob", PEFT, spreads=True)
"""The policy's stage with a direct method (`policy.method`). It keeps its name, `ppo`, whatever the method."""


def stage_of(name: str, options: Mapping[str, object]) -> Stage:
    """Return the stage that computed, or will compute, from a job's keyed values. Only a direct method's has `policy`.

    Raises:
        KeyError: there is no such stage.
    """
    return DIRECT if name == DIRECT.name and "policy" in options else KNOWN[name]


def group_of(stage: str) -> str:
    """Return the group of a stage, which views show as one: `reward` has `reward.judge` and `reward`."""
    return stage.partition(".")[0]


def ends_group(stage: str) -> bool:
    """Return whether a stage is the last of its group. Only then are the group's gates judged."""
    return "." not in stage or stage == _COMPARISON[-1].name


PIPELINE = tuple(dict.fromkeys(map(group_of, STAGES)))
"""The stages that status and MLflow show, in order."""


ALWAYS = tuple(stage for stage in PIPELINE if stage not in OPTIONAL)
"""Those of the pipeline's stages that every run has."""


def reaches(stage: str, until: str | None) -> bool:
    """Return whether a run that ends with the stage `until` (empty or None: the last) has the stage `stage`."""
    return PIPELINE.index(stage) <= PIPELINE.index(until or PIPELINE[-1])


if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[PIPELINE]
