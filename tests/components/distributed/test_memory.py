"""What each rank holds of sharded models and needs while it loads and trains them, measured against the plan."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from components.models.config import GenerationConfig
from components.models.folders import save_model
from components.models.tokenizers import train_tokenizer
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig
from components.training.optim import FitConfig
from flows.planning.memory import Machine, Phase, PlannedRun, phases
from flows.planning.shape import ModelShape
from tests.components.distributed.conftest import runtime_of, start
from tests.components.distributed.memory import MemoryJob

FIT = FitConfig(learning_rate=1e-3, gradient_checkpointing=True)
SLACK = 6e6
"""Bytes: allocations below 64 kB, and threads' stacks. Up to 3.4e6 measured."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 126 MB in float32, of which 14 MB are a block and 8 MB each end."""
    tokenizer = train_tokenizer(["a b c d e f"] * 10, 300)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("large")
    save_model(LlamaForCausalLM(config), tokenizer, folder)
    return folder


def planned(shape: ModelShape, ranks: int, dtype: str) -> dict[str, Phase]:
    """The phases of SFT as planned for so many GPUs."""
    sft = SftConfig(**{**FIT.model_dump(), "micro_batch_size": 1})
    generation = GenerationConfig(max_prompt_tokens=2, max_new_tokens=2)
    run = PlannedRun(shape, dtype, generation, sft, RewardConfig(), PpoConfig())
    return {phase.name: phase for phase in phases(run, Machine(ranks, sharding="zero3")) if phase.stage == "sft"}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks, dtype", [(2, "bfloat16"), (2, "float32"), (3, "bfloat16"), (3, "float32")])
def test_a_rank_of_zero3_holds_and_needs_its_planned_share(ranks: int, dtype: str, large: Path, tmp_path: Path) -> None:
    shape = ModelShape.of_path(large, "")
    job = MemoryJob(runtime=runtime_of(ranks, "zero3", dtype), fit=FIT)
    measured = start("tests.components.distributed.memory", job, {"model": large}, tmp_path).metrics
    whole, width = 4 * shape.parameters, 2 if dtype == "bfloat16" else 4
    block, ends = width * shape.matrices / shape.layers, 4 * (shape.parameters - shape.matrices)

    frozen, share = (width * shape.matrices + ends) / ranks, whole / ranks
    assert measured["held_frozen"] == pytest.approx(frozen, rel=0.01)  # rows that do not divide by the ranks
    assert measured["held_trained"] == pytest.approx(share, rel=0.01)
    assert measured["peak_frozen"] < 1.01 * frozen + block + SLACK, "it was whole while it was loaded"
    assert measured["peak_trained"] < 1.01 * share + SLACK, "it was whole while it was loaded"

    assert measured["held_copy"] == width * shape.parameters
    packed = width * (shape.matrices + shape.embedding)  # the sampler's on a CPU
    assert measured["peak_copy"] < measured["held_copy"] + packed + SLACK, "it was whole in float32"

    assert (measured["other_digest"], measured["changed_digest"]) == (0, 1)
    assert measured["at_once"] == 1

    training = planned(shape, ranks, dtype)["training"].parts
    assert measured["held_gradients"] == measured["held_reduced"] == pytest.approx(share, rel=0.01)
    ratio = measured["peak_first"] / (training["gradients"] + training["working"])
    print(f"{ranks} ranks, {dtype}: {ratio:.2f} of the planned, {measured}")
    assert 0.75 < ratio < 1.1
    assert measured["peak_last"] < measured["peak_first"], "its gradients are there already"
