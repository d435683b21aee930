"""The plan as a whole: what each option saves, what ranks share, and advice that does what it says."""

from typing import Any

import pytest

from components.models.config import AdapterConfig, GenerationConfig
from components.planning.advice import Machine, plan_stages
from components.planning.memory import PROCESS, Phase, PlannedRun, phases
from components.planning.models import Ranks
from components.planning.shape import KNOWN, ModelShape
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig

GB = 10**9
LORA = AdapterConfig(rank=16)
FOUR = AdapterConfig(rank=16, quantize="4bit")


def run(shape: str | ModelShape = "llama-3.2-1b", dtype: str = "bfloat16", **stages: dict[str, Any]) -> PlannedRun:
    """A run with a batch of 8 in micro-batches of 4, and options by stage over it."""
    batch = {"batch_size": 8, "micro_batch_size": 4}
    return PlannedRun(
        KNOWN[shape] if isinstance(shape, str) else shape,
        dtype,  # type: ignore[arg-type]
        GenerationConfig(max_prompt_tokens=96, max_new_tokens=32),
        SftConfig(**batch | stages.get("sft", {})),
        RewardConfig(**batch | stages.get("reward", {})),
        PpoConfig(**batch | {"minibatch_size": 8} | stages.get("ppo", {})),
    )


def found(planned: PlannedRun, device: str = "cuda", ranks: Ranks = Ranks()) -> dict[tuple[str, str], Phase]:  # noqa: B008
    return {(phase.stage, phase.name): phase for phase in phases(planned, ranks, device)}


def test_weights_gradients_and_moments_take_what_a_count_by_hand_says() -> None:
    """1,235,814,400 parameters: 4 bytes of weights and of gradients, 8 of moments; a frozen one of the blocks'
    973,078,528 in bfloat16 and the rest in float32."""
    count, matrices = 1_235_814_400, 973_078_528
    parts = found(run())["sft", "training"].parts
    assert parts["weights"] == 4 * count and parts["optimizer"] == 8 * count
    assert parts["gradients"] == pytest.approx(4 * count, rel=0.25)  # and the largest, made beside its sum
    ppo = found(run())["ppo", "frozen pass"].parts
    scalar = count + 2048  # a head of its own: the output layer is the embedding
    assert ppo["frozen"] == 2 * matrices + 4 * (count - matrices) + 2 * matrices + 4 * (scalar - matrices)
    assert ppo["weights"] == 4 * (count + scalar)


def test_micro_batches_by_tokens_and_an_average_are_planned_as_they_are_computed() -> None:
    plain = found(run())
    by_tokens = found(run(ppo={"micro_batch_tokens": 4 * 128 + 127, "micro_batch_size": 8}))
    assert by_tokens["ppo", "policy update"].parts == plain["ppo", "policy update"].parts, "four whole sequences fit"
    averaged = found(run(ppo={"ema": 0.9}))
    for phase in ("policy update", "critic update", "frozen pass"):
        parts, without = (dict(each["ppo", phase].parts) for each in (averaged, plain))
        assert parts.pop("average") == 4 * 1_235_814_400
        assert parts.pop("CUDA") > without.pop("CUDA") and parts == without
    assert averaged["ppo", "evaluation"].parts == plain["ppo", "evaluation"].parts


def test_a_small_model_on_a_cpu_takes_the_process_and_next_to_nothing() -> None:
    tiny = ModelShape(vocabulary=600, hidden_size=32, intermediate_size=85, layers=2, heads=2, kv_heads=2, head_size=16)
    for phase in found(run(tiny, "float32"), "cpu").values():
        assert PROCESS <= phase.bytes < 1.1 * PROCESS and phase.host == 0


@pytest.mark.parametrize(
    ("stage", "phase", "options"),
    [
        ("sft", "training", {"sft": {"gradient_checkpointing": True}}),
        ("sft", "training", {"sft": {"optimizer": "adamw_8bit"}}),
        ("sft", "training", {"sft": {"micro_batch_size": 1}}),
        ("reward", "training", {"reward": {"lora": LORA}}),
        ("reward", "training", {"reward": {"shared_prompts": False, "micro_batch_size": 1}}),
        ("ppo", "policy update", {"ppo": {"critic": {"kind": "shared"}}}),
        ("ppo", "policy update", {"ppo": {"advantage": "rloo", "group_size": 2}}),
        ("ppo", "policy update", {"reward": {"lora": LORA}, "ppo": {"lora": LORA}}),
        ("ppo", "sampling", {"ppo": {"batch_size": 8, "lora": LORA}, "reward": {"lora": LORA}}),
    ],
)  # fmt: skip
def test_an_option_that_saves_memory_saves_it(stage: str, phase: str, options: dict[str, Any]) -> None:
    assert found(run(**options))[stage, phase].bytes < found(run())[stage, phase].bytes


def test_four_bits_take_a_quarter_of_a_backbone_and_the_sampler_no_copy() -> None:
    whole, four = (
        found(run("llama-3.1-8b", reward={"lora": lora}, ppo={"lora": lora}))["ppo", "sampling"].parts
        for lora in (LORA, FOUR)
    )
    matrices = KNOWN["llama-3.1-8b"].matrices
    assert whole["backbone"] - four["backbone"] == pytest.approx(matrices * (2 - 0.516), rel=1e-3)
    assert whole["sampling copy"] == 2 * KNOWN["llama-3.1-8b"].parameters and "sampling copy" not in four


def test_ranks_share_moments_and_zero3_weights_too_but_every_rank_holds_frozen_models() -> None:
    one, replicas, zero2, zero3 = (
        found(run(), ranks=ranks)["ppo", "policy update"].parts
        for ranks in (Ranks(), Ranks(4, "replicas"), Ranks(4, "zero2"), Ranks(4, "zero3"))
    )
    assert one["optimizer"] == replicas["optimizer"] == 4 * zero2["optimizer"] == 4 * zero3["optimizer"]
    assert one["frozen"] == replicas["frozen"] == zero2["frozen"] == zero3["frozen"]
    assert zero3["working"] < zero2["working"]
    alone, shared = (found(run(), ranks=ranks)["ppo", "frozen pass"].parts for ranks in (Ranks(), Ranks(4)))
    assert shared["activations"] * 2 == alone["activations"]  # 8 rows on 4 ranks are 2 each, not micro-batches of 4


def test_the_host_gets_a_copy_of_what_a_gpu_writes() -> None:
    saving = found(run())["sft", "saving"]
    assert saving.host == saving.parts["weights"] + saving.parts["optimizer"]
    shared = found(run(), ranks=Ranks(4, "zero2"))["sft", "saving"]
    assert shared.host == pytest.approx(saving.host, rel=1e-6)  # gathered


@pytest.mark.parametrize(("shape", "gpus", "memory"), [("llama-3.2-1b", 1, 24), ("llama-3.1-8b", 8, 80)])
def test_advice_does_what_it_says(shape: str, gpus: int, memory: int) -> None:
    planned, machine = run(shape), Machine(gpus, memory * GB)
    plans = {plan.stage: plan for plan in plan_stages(planned, machine)}
    assert any(plan.fits is False and plan.advice for plan in plans.values())
    for plan in plans.values():
        assert plan.fits == (plan.worst.bytes <= memory * GB) and bool(plan.advice) <= (plan.fits is False)
        for advice in plan.advice:
            assert advice.bytes < plan.worst.bytes and advice.fits == (advice.bytes <= memory * GB)
            changed, where = planned, machine
            for option in advice.options:
                changed, where = with_option(changed, where, option)
            again = max(p.bytes for p in where.phases(changed) if p.stage == plan.stage)
            assert again == advice.bytes, advice.options


def with_option(planned: PlannedRun, machine: Machine, option: str) -> tuple[PlannedRun, Machine]:
    """What `--set` makes of a plan."""
    (group, *path), value = option.partition("=")[0].split("."), option.partition("=")[2]
    if group == "runtime":
        return (planned, machine._replace(sharding=value)) if path == ["sharding"] else (  # type: ignore[arg-type]
            planned._replace(dtype=value), machine  # type: ignore[arg-type]
        )  # fmt: skip
    config = getattr(planned, group)
    values: dict[str, Any] = config.model_dump()
    inner = values
    for name in path[:-1]:
        inner[name] = inner.get(name) or {}
        inner = inner[name]
    inner[path[-1]] = value
    return planned._replace(**{group: type(config).model_validate(values)}), machine


def test_where_nothing_alone_is_enough_no_change_of_those_together_can_be_left_out() -> None:
    planned, machine = run("llama-3.1-8b", ppo={"micro_batch_size": 8}), Machine(1, 48 * GB)
    ppo = next(plan for plan in plan_stages(planned, machine) if plan.stage == "ppo")
    together = ppo.advice[-1]
    assert together.fits and len(together.options) > 1
    assert not any(each.fits for each in ppo.advice[:-1])
    for left_out in together.options:
        if left_out.startswith("reward.") or "lora.rank" in left_out:  # PPO's adapters need the reward model's
            continue
        changed, where = planned, machine
        for option in together.options:
            if option != left_out:
                changed, where = with_option(changed, where, option)
        assert max(p.bytes for p in where.phases(changed) if p.stage == "ppo") > 48 * GB, left_out
