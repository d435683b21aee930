"""PPO of SmolLM2-135M on two ranks against one process. Needs `tether fetch smollm2`, 9 GB of memory, 4 GB of disk."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from components.base.jsonl import read_rows, write_json
from components.models.folders import load_reward_model, save_model
from components.reward.scoring import ScoreScale
from tests.components.conftest import RUNTIME, Stages
from tests.components.distributed.conftest import Launched
from tests.components.distributed.test_stages import compare_samples, difference, on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.real_data, pytest.mark.slow, pytest.mark.timeout(3600)]

OPTIONS = {
    "updates": 2, "minibatch_size": 8, "learning_rate": 1e-5, "critic": {"kind": "shared"},
    "score": {"missing_eos": "keep"}, "evaluate": 4, "watch": {"prompts": 4}, "monitors": {"responses": 8},
}  # fmt: skip
ROUNDED_KL = 1e-4
"""Absolute: a KL in nats, which may be near 0, sums ten log-probabilities, and each rounds by about 1e-5. The largest
difference measured was 1.3e-5, of an interval's end over four responses."""
RATIOS, ROUNDED_RATIO = ("ppo/ratio_max", "ppo/grad_norm"), 1e-4
"""Relative: a ratio is the exponential of log-probabilities and multiplies the gradient. 2e-5 and 1.4e-5 measured."""


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Path]:
    """A folder for gigabytes, which pytest would keep."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def reward_of(smollm2: Path, artifact: Path) -> Path:
    """A reward artifact whose head is random: training one would take longer than PPO."""
    save_model(*load_reward_model(smollm2, RUNTIME, seed=1), artifact / "model")
    scores = torch.linspace(-3, 3, 16)
    write_json(artifact / "sft_scores.json", [scores.tolist()])
    write_json(artifact / "reward.json", ScoreScale.measure(scores, 1.0).model_dump(exclude_defaults=True))
    return artifact


def computed(stages: Stages, out: Path, ranks: int, sharding: str) -> Launched:
    """PPO in processes of their own, which leave no memory behind, and without their checkpoints of 1.6 GB."""
    found = on_ranks(stages, "ppo", out, ranks, sharding, **OPTIONS)
    shutil.rmtree(out / "checkpoint")
    return found


def compare(alone: Mapping[str, float], both: Mapping[str, float]) -> None:
    """See that two ranks measured what one process did, to rounding."""
    assert alone.keys() == both.keys()
    for name in alone:
        rel = ROUNDED_RATIO if name in RATIOS else 1e-5
        assert both[name] == pytest.approx(alone[name], rel=rel, abs=ROUNDED_KL), name


def test_ppo_of_a_pretrained_policy_on_two_ranks_gives_one_process_weights_texts_and_metrics(
    desk_data: Path, smollm2: Path, room: Path
) -> None:
    stages = Stages({"data": desk_data, "sft": smollm2, "reward": reward_of(smollm2, room / "reward")})
    one, two = room / "one", room / "two"
    alone, both = computed(stages, one, 1, "none"), computed(stages, two, 2, "zero2")
    compare_samples(one, two)
    moved, apart = difference(smollm2.parent, one), difference(one, two)
    print(f"relative L2 distance of the weights: {moved:.1e} from the start, {apart:.1e} from one process's")
    assert apart < 1e-6 < 5e-5 < moved  # 9.7e-9 and 1.3e-4 measured
    assert apart < 1e-3 * moved, "AdamW hides the scale of a gradient, not its direction"  # 7.5e-5 measured
    for rows in zip(*(read_rows(each / "artifact" / "history.jsonl") for each in (one, two)), strict=True):
        compare(*rows)
    compare(alone.metrics, both.metrics)
