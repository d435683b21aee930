"""The sub-stage `reward.judge`: a reward model that only judges, trained on labels of its own."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.base.observe import Observe
from components.data.splits import SPLITS
from components.data.tables.published import read_split
from components.reward.config import JudgeJob
from components.reward.refresh.compare import loose, old_pairs, pair_key
from components.reward.stage import train_on
from components.reward.training_pairs import PreferencePair, check_votes
from components.training.loop import torch_seed

LEFT_OUT = "left_out.jsonl"
"""A line for each pair that does not train the judge: `source`, `row` and `reason`."""
SHARED = "the reward model trains on this pair"
HELD_OUT = "its prompt is held out in the run's data"
logger = logging.getLogger(__name__)


def run(job: JudgeJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train and calibrate a judge on `inputs["judge_data"]` from `inputs["sft"]`, as the reward stage does.

    Its scale is measured on prompts of `inputs["data"]`, the run's own data. Two kinds of pairs are left out of its
    training: pairs with a prompt and two responses on which the reward model trains, whatever their label, and pairs
    whose prompt is held out in the run's data, since PPO is judged on such prompts.

    Returns:
        The metrics of the reward stage, called `reward/judge_...`, and how many pairs were left out.

    Raises:
        UserError: no pair is left to train on, or the pairs lack the votes that the config trains on.
    """
    pairs = {split: read_split(inputs["judge_data"] / f"pairs.{split}") for split in SPLITS}
    training, left_out = own_pairs(pairs["train"], inputs)
    if not training:
        first = left_out[0]
        raise UserError(
            f"data.judge_preferences: none of the {len(left_out)} pairs of its training split is left to train a judge "
            f"on. The first, {first['source']} row {first['row']}: {first['reason']}. Give pairs that "
            "data.preferences does not hold."
        )
    if left_out:
        logger.warning("%d of %d pairs do not train the judge: %s names them.", len(left_out), len(pairs["train"]),
                       LEFT_OUT)  # fmt: skip
    reward = job.as_reward(torch_seed(job.seed, "judge") % 2**32)  # else both would start from the same random head
    check_votes(training, reward.reward, "the judge's pairs.train")

    def observe_judge(step: int, metrics: Mapping[str, float], total: int | None = None, **more: Any) -> None:
        observe(step, judge_metrics(metrics), total, **more)

    train_inputs = {name: inputs[name] for name in ("data", "sft", "judge_data")}
    values = train_on(pairs | {"train": training}, reward, train_inputs, out, observe_judge)
    write_rows(out / "artifact" / LEFT_OUT, left_out)
    return judge_metrics(values) | {
        "reward/judge_pairs": float(len(training)),
        "reward/judge_left_out": float(len(left_out)),
    }


def own_pairs(
    pairs: Sequence[PreferencePair], inputs: Mapping[str, Path]
) -> tuple[list[PreferencePair], list[dict[str, object]]]:
    """Return the pairs that may train a judge, and the rows of `left_out.jsonl` for the others.

    Args:
        inputs: `data`; for a refreshed reward model also `previous_data` and `previous_reward`, since it trains on old
            pairs too.
    """
    data = inputs["data"]
    old: Iterable[PreferencePair] = old_pairs(inputs, {})["train"] if "previous_data" in inputs else ()
    trains = {pair_key(row) for row in chain(read_split(data / "pairs.train"), old)}
    held_out = {
        loose(row)
        for kind in ("pairs", "prompts") for split in SPLITS[1:] for row in read_split(data / f"{kind}.{split}")
    }  # fmt: skip
    training, left_out = list[PreferencePair](), list[dict[str, object]]()
    for row in pairs:
        reason = SHARED if pair_key(row) in trains else HELD_OUT if loose(row) in held_out else ""
        if reason:
            left_out.append({"source": row["source"], "row": row["row"], "reason": reason})
        else:
            training.append(row)
    return training, left_out


def judge_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename a reward model's metrics to the judge's: `reward/accuracy` becomes `reward/judge_accuracy`."""
    return {name.replace("/", "/judge_", 1): value for name, value in metrics.items()}
