"""The sub-stages `evaluation.sft_tasks` and `evaluation.policy_tasks`: one model's results on tasks."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.evaluation import harness
from components.evaluation.config import ITEMS, RESULTS, TasksJob
from components.training.chunks import in_chunks


def run(job: TasksJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Evaluate the model of `inputs["model"]` on the tasks of `inputs["tasks/..."]`.

    `artifact/` has `tasks.json` (`harness.TaskScore` of each task, and the harness' version) and `items.jsonl`
    (`harness.TaskItem`). A finished task is in `out/checkpoint/` and is not computed again.

    Raises:
        UserError: the harness is missing or of another version, or can't evaluate a task.
    """
    harness.check_harness()
    tasks = harness.load_tasks(inputs)

    @functools.cache
    def model() -> Any:
        return harness.model_of(inputs["model"] / "model", job.runtime, job.evaluation.batch_size)

    def compute(names: Sequence[str], start: int) -> list[dict[str, Any]]:
        score, items = harness.evaluate(model(), names[0], tasks[names[0]], job.evaluation)
        return [{"score": score, "items": items}]

    def done(count: int) -> None:
        observe(count, {"evaluation/tasks": float(count)}, total=len(tasks))

    results = in_chunks(sorted(tasks), 1, out / "checkpoint" / "tasks", compute, done)
    scores = [result["score"] for result in results]
    write_json(out / "artifact" / RESULTS, {"harness": harness.HARNESS, "tasks": scores})
    write_rows(out / "artifact" / ITEMS, (item for result in results for item in result["items"]))
    return {"evaluation/task_items": float(sum(score["items"] for score in scores))}
