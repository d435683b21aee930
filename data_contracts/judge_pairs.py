"""The sub-stage `validate.judge`: validate the pairs that train an independent judge, with the contract for pairs.

A prompt's split depends on the prompt alone, as for all data, so the judge is never trained on a prompt on which PPO is
evaluated.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.observe import Observe
from components.data.inputs import JUDGE, kind_of
from components.data.support_desk.desk import generate_careful
from data_contracts import validate
from data_contracts.config import ValidateJob, ValidateJudgeJob, of_judge
from data_contracts.examine import generated, source_files
from data_contracts.rows.gather import RowSource


def _sources(job: ValidateJob, inputs: Mapping[str, Path], alone: bool) -> dict[str, list[RowSource]]:
    """Return the judge's pairs: from files, or from the built-in task's careful annotators."""
    files = source_files(job, inputs, "preferences")
    pairs = files or [generated("preferences", generate_careful(job.seed, job.data.generator))]
    return {"preferences": [pairs[0]._replace(label=JUDGE)] if len(pairs) == 1 else pairs}


def run(job: ValidateJudgeJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Validate the judge's pairs as `validate` validates preferences.

    Args:
        inputs: `judge_preferences` (each of several `judge_preferences/LABEL`), and the inputs of `validate` other than
            data. Without files, the built-in task generates pairs that careful annotators label.
        out: gets `artifact/`, with the layout of a `validate` artifact, and `attachments/judge/`.

    Returns:
        The metrics of `validate`, renamed to `data/judge_...`.

    Raises:
        UserError: as for `validate`; the message says that it concerns the judge's data.
    """
    shutil.rmtree(out / "attachments", ignore_errors=True)  # left by an attempt that was killed
    named = {
        f"preferences{name.removeprefix(JUDGE)}" if kind_of(name) == JUDGE else name: path
        for name, path in inputs.items()
    }

    def observe_judge(step: int, metrics: Mapping[str, float], total: int | None = None, **progress: Any) -> None:
        observe(step, judge_metrics(metrics), total, **progress)

    try:
        metrics = validate.run(job, named, out, observe_judge, _sources)
    except UserError as error:
        raise UserError(of_judge(error)) from error
    attachments = out / "attachments"
    attachments.rename(out / "judge")
    attachments.mkdir()
    shutil.move(out / "judge", attachments)
    return judge_metrics(metrics)


def judge_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` with the judge's names, for example `data/judge_pairs` for `data/pairs`."""
    return {name.replace("/", "/judge_", 1): value for name, value in metrics.items()}
