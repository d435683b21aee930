"""Operations by formula are those that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from components.models.config import GenerationConfig
from components.planning.cost import forward, ppo_update, step_traffic, training
from components.planning.memory import PlannedRun
from components.planning.models import Ranks
from components.planning.shape import KNOWN, ModelShape
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig

SHAPE = ModelShape(vocabulary=300, hidden_size=64, intermediate_size=96, layers=3, heads=4, kv_heads=2, head_size=16)
ROWS, TOKENS = 3, 20


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_a_forward_and_a_backward_pass_take_the_operations_that_torch_counts(llama: LlamaForCausalLM) -> None:
    """Eager attention multiplies all pairs of tokens: twice what causal attention needs."""
    ids = torch.randint(1, 300, (ROWS, TOKENS))
    with FlopCounterMode(display=False) as counter:
        logits = llama(input_ids=ids, use_cache=False).logits
    every_pair = 2 * 3 * 64 * ROWS * TOKENS**2
    predicted = ROWS * TOKENS
    assert counter.get_total_flops() == forward(SHAPE, ROWS, TOKENS, predicted) + every_pair
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    backward = training(SHAPE, ROWS, TOKENS, predicted, False, False) - forward(SHAPE, ROWS, TOKENS, predicted)
    assert counter.get_total_flops() == backward + 2 * every_pair


def planned(**options: object) -> PlannedRun:
    generation = GenerationConfig(max_prompt_tokens=512, max_new_tokens=512)
    return PlannedRun(KNOWN["llama-3.2-1b"], "bfloat16", generation, SftConfig(), RewardConfig(), PpoConfig(**options))  # type: ignore[arg-type]


def test_an_updates_operations_grow_in_proportion_to_responses_and_epochs() -> None:
    one = ppo_update(planned(batch_size=64, epochs=1))
    twice = ppo_update(planned(batch_size=128, epochs=1))
    assert {phase: twice[phase] / one[phase] for phase in one} == dict.fromkeys(one, 2.0)
    again = ppo_update(planned(batch_size=64, epochs=2))
    assert again["updates"] == 2 * one["updates"] and again["sampling"] == one["sampling"]


def test_adapters_and_a_shared_trunk_leave_out_the_products_that_they_do_not_need() -> None:
    whole = ppo_update(planned(batch_size=64))
    shared = ppo_update(planned(batch_size=64, critic={"kind": "shared"}))
    adapted = ppo_update(planned(batch_size=64, lora={"rank": 8}))
    assert adapted["updates"] * 3 == whole["updates"] * 2
    assert 0.4 < shared["updates"] / whole["updates"] < 0.6


def test_zero3_sends_more_than_zero2_with_every_micro_batch() -> None:
    shape = KNOWN["llama-3.1-8b"]
    assert step_traffic(shape, Ranks(8, "zero2"), 4) == step_traffic(shape, Ranks(8, "replicas"), 1)
    assert step_traffic(shape, Ranks(8, "zero2"), 1) == 2 * 4 * shape.parameters * 7 / 8
    assert step_traffic(shape, Ranks(8, "zero3"), 4) > 3 * step_traffic(shape, Ranks(8, "zero2"), 4)
