"""The training stages in bfloat16, on two ranks and in one process.

Autocast rounds each weight's gradient to bfloat16 once per micro-batch; micro-batches and ranks are summed in float32.
So the result depends on which rows share a micro-batch, and not on which process computes it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import components.ppo.models
from components.distributed import ranks
from components.training import loop
from tests.components.conftest import Stages
from tests.components.distributed.conftest import runtime_of
from tests.components.distributed.test_stages import compare_samples, difference, on_ranks

RANKS = 2
UNCLIPPED = {"max_grad_norm": 1e9}
"""Ranks sum the squares of the gradient's norm in another order, so clipping would change the last bits of a step."""
SFT, REWARD, PPO = 5e-3, 1e-3, 0.1
"""Largest distance from one process with its own micro-batches. Measured: 1.4e-3, 1.3e-4 and 2.3e-2.

Other splits of the same rows in one process measured 3e-5 to 2.3e-3, 1.6e-4 to 2.1e-4 and 3.5e-3 to 2.5e-2, so these
bounds are twice to five times what splits do. (SFT's is mostly two weights whose gradient is near 0 and changes sign:
AdamW's first steps are as large for them as for others. In PPO some tokens are sampled differently.)"""


class InBfloat16(Stages):
    """The stages on one thread in bfloat16, with this machine's kernels, as a rank computes them."""

    def job(self, stage: str, **options: Any) -> Any:
        return super().job(stage, **options).model_copy(update={"runtime": runtime_of(1, "none", "bfloat16")})


@contextmanager
def micro_batches_of_ranks() -> Iterator[None]:
    """Let this process compute the micro-batches of all ranks, those of rank 0 first."""

    def of_all(split: Callable[..., Any]) -> Callable[..., list[Any]]:
        def found(*arguments: Any) -> list[Any]:
            runs = []
            for number in range(RANKS):
                with pytest.MonkeyPatch.context() as as_rank:
                    as_rank.setattr(ranks, "size", lambda: RANKS)
                    as_rank.setattr(ranks, "rank", lambda number=number: number)
                    runs += split(*arguments)
            return runs

        return found

    with pytest.MonkeyPatch.context() as patched:
        for module, name in ((loop, "micro_batches"), (components.ppo.models, "shared_runs")):
            patched.setattr(module, name, of_all(getattr(module, name)))
        yield


def different(one: Path, other: Path) -> list[str]:
    """The tensors of artifact and checkpoints (critic and moments too) whose bits differ."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert {path.parts[0] for path in files} == {"artifact", "checkpoint"}
    found = []
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        assert a.keys() == b.keys()
        found += [f"{file}: {name}" for name in a if not torch.equal(a[name], b[name])]
    return found


@pytest.mark.parametrize(
    "stage, sharding, options, bound",
    [
        pytest.param("sft", "zero2", {}, SFT, marks=pytest.mark.whole, id="sft"),
        pytest.param("sft", "zero3", {}, SFT, marks=pytest.mark.ranks, id="sft-zero3"),
        pytest.param("sft", "zero3", {"gradient_checkpointing": True}, SFT, marks=pytest.mark.ranks, id="sft-again"),
        pytest.param("reward", "zero2", {}, REWARD, marks=pytest.mark.ranks, id="reward"),
        pytest.param("ppo", "zero2", {}, PPO, marks=pytest.mark.ranks, id="ppo-separate"),
        pytest.param("ppo", "zero3", {}, PPO, marks=pytest.mark.ranks, id="ppo-zero3"),
        pytest.param("ppo", "zero2", {"critic": {"kind": "shared"}}, PPO, marks=pytest.mark.ranks, id="ppo-shared"),
    ],
)
def test_two_ranks_in_bfloat16_are_to_the_bit_one_process_with_their_micro_batches_and_near_any_other(
    stage: str, sharding: str, options: dict[str, Any], bound: float, stages: Stages, tmp_path: Path
) -> None:
    plain, one, two = tmp_path / "plain", tmp_path / "one", tmp_path / "two"
    in_bfloat16, options = InBfloat16(stages.inputs), UNCLIPPED | options
    on_ranks(in_bfloat16, stage, two, RANKS, sharding, dtype="bfloat16", **options)
    with micro_batches_of_ranks():
        in_bfloat16.run(stage, one, **options)
    assert different(one, two) == []
    if stage != "reward":
        compare_samples(one, two)
    in_bfloat16.run(stage, plain, **options)
    assert 0 < difference(plain, two) < bound
