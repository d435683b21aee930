"""The stages: names, where their code and config classes are, and the libraries whose version changes their results.

Everything is named by string: knowing the stages must not import torch.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from components.base.observe import Observe
from components.base.settings import Settings

TORCH = ("torch", "transformers")
CONTRACT = ("pandas", "great-expectations", "transformers", "tokenizers", "rensa", "py3langid", "datasets", "pyarrow")


Run = Callable[[Settings, Mapping[str, Path], Path, Observe], dict[str, float]]
"""A stage's function: its config, inputs on disk, the folder to write to, and what to call after a step."""


class Stage(NamedTuple):
    """One computed, keyed and published step."""

    name: str
    """Part of the key."""
    module: str
    """Holds `run(job, inputs, out, observe) -> metrics`."""
    job: str
    """`module:Class` of its config."""
    libraries: tuple[str, ...]
    """Distributions whose version is part of the key."""
    shown: str
    """The pipeline's stage under which status and MLflow show it."""
    final: bool = True
    """Whether it ends the shown stage; only then are gates judged."""
    spreads: bool = False
    """Whether `runtime.ranks` processes compute it; else it takes one."""

    def load_run(self) -> Run:
        """Return the stage's function (imports its module, and so maybe torch)."""
        return importlib.import_module(self.module).run

    def load_job(self) -> type[Settings]:
        """Return the class of its config."""
        module, _, name = self.job.partition(":")
        return getattr(importlib.import_module(module), name)


def _stage(
    name: str, module: str, job: str, libraries: tuple[str, ...], shown: str = "", final: bool = True,
    spreads: bool = False,
) -> Stage:  # fmt: skip
    return Stage(name, module, job, libraries, shown or name, final, spreads)


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        _stage(
            "validate.judge",
            "data_contracts.judge",
            "data_contracts.config:ValidateJudgeJob",
            CONTRACT,
            shown="validate",
            final=False,
        ),
        _stage("validate", "data_contracts.validate", "data_contracts.config:ValidateJob", CONTRACT),
        _stage("sft", "components.sft.stage", "components.sft.config:SftJob", TORCH, spreads=True),
        _stage(
            "reward.judge",
            "components.reward.substages.judge",
            "components.reward.config:JudgeJob",
            (*TORCH, "peft"),
            shown="reward",
            final=False,
            spreads=True,
        ),
        _stage(
            "reward", "components.reward.stage", "components.reward.config:RewardJob", (*TORCH, "peft"), spreads=True
        ),
        _stage("ppo", "components.ppo.stage", "components.ppo.config:PpoJob", (*TORCH, "peft"), spreads=True),
        _stage(
            "human_eval.sample",
            "components.human_eval.sample",
            "components.human_eval.config:SampleJob",
            TORCH,
            shown="human_eval",
            final=False,
        ),
        _stage(
            "human_eval.reward",
            "components.reward.substages.judged",
            "components.reward.config:JudgedJob",
            (*TORCH, "peft"),
            shown="human_eval",
            final=False,
        ),
        _stage("human_eval", "components.human_eval.score", "components.human_eval.config:ScoreJob", ("pandas",)),
    )
}
"""Every stage by name, in the order in which `flows/rlhf.py` runs them; those of `OPTIONAL` where asked."""

OPTIONAL = ("validate.judge", "reward.judge")
"""The sub-stages of an independent judge (`data.judge_preferences`)."""

COMPARISON: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        _stage(
            "human_eval.compare",
            "components.human_eval.comparison.sample",
            "components.human_eval.config:SampleJob",
            TORCH,
            shown="human_eval",
            final=False,
        ),
        _stage(
            "human_eval.compared",
            "components.human_eval.comparison.score",
            "components.human_eval.config:ScoreJob",
            ("pandas",),
            shown="human_eval",
        ),
    )
}
"""The stages of a run that compares models which are there already, by name; they stand for all of `STAGES`."""

KNOWN = STAGES | COMPARISON
"""Every stage that a record may be of, by name."""

PIPELINE = tuple(dict.fromkeys(stage.shown for stage in STAGES.values()))
"""What status and MLflow show, in order."""

if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[PIPELINE]
