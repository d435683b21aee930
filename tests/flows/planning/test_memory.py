"""The plan's bytes: near what was measured, what a count by hand says, and what each option saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from components.base.jsonl import read_rows
from components.direct.config import PolicyConfig
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime, autocast
from components.ppo.config import PpoConfig
from components.reward.config import RewardConfig
from components.sft.config import SftConfig
from flows.config.profiles import lay, parse_override, read_profile
from flows.config.run_config import check_config, load_config
from flows.planning import memory
from flows.planning.memory import PROCESS, Machine, Phase, PlannedRun, phases
from flows.planning.shape import KNOWN, ModelShape
from flows.reports.memory_report import planned_run

LORA = AdapterConfig(rank=16)
FOUR = AdapterConfig(rank=16, quantize="4bit")
P, SCALAR, MATRICES = 1_235_814_400, 1_235_816_448, 973_078_528
"""Parameters of Llama 3.2 1B as a language model and with a scalar head of 2,048, and of its blocks' matrices."""
MEASURED = list(read_rows(Path(__file__).with_name("measured.jsonl")))
"""A stage's peak in MB without the process, and the config over tiny (docs/benchmarks/throughput.md); `adapters` is the
mean of four runs."""


@pytest.mark.parametrize("measured", MEASURED, ids=[row["name"] for row in MEASURED])
def test_a_plan_is_within_a_quarter_of_what_a_cpu_held(measured: dict[str, Any]) -> None:
    values = measured["values"]
    sft = {name: value for name, value in values["sft"].items() if name != "base"}
    config = check_config(lay(read_profile("tiny"), values | {"sft": sft}), measured["name"])
    shape = KNOWN["smollm2-135m"] if "base" in values["sft"] else ModelShape.of_scratch(config.sft.scratch)
    of_stage = [phase for phase in phases(planned_run(config, shape), Machine(0)) if phase.stage == measured["stage"]]
    worst = max(of_stage, key=lambda phase: phase.bytes)
    assert (worst.bytes - worst.parts["process"]) / 1e6 == pytest.approx(measured["megabytes"], rel=0.25)


@pytest.mark.parametrize(("critic", "measured"), [("separate", 5.68), ("shared", 4.03)])
def test_a_plan_is_near_the_peak_that_a_gpu_measured(critic: str, measured: float) -> None:
    """GB of PyTorch's allocator on an H200, PPO of SmolLM2-135M in bfloat16 (docs/benchmarks/gpu.md)."""
    options = [
        f"ppo.critic.kind={critic}", "generation.max_prompt_tokens=64", "generation.max_new_tokens=64",
        "ppo.batch_size=8", "ppo.minibatch_size=8", "ppo.micro_batch_size=8",
    ]  # fmt: skip
    config = load_config("hh-smollm2", map(parse_override, options))
    planned = phases(planned_run(config, KNOWN["smollm2-135m"], gpu=True), Machine(1))
    worst = max(phase.bytes for phase in planned if phase.stage == "ppo")
    assert (worst - memory.CUDA) / 1e9 == pytest.approx(measured, rel=0.05)


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


def planned(run: PlannedRun, machine: Machine = Machine(1)) -> dict[tuple[str, str], Phase]:  # noqa: B008
    return {(phase.stage, phase.name): phase for phase in phases(run, machine)}


def test_weights_gradients_and_moments_are_a_count_by_hand() -> None:
    """4 bytes a parameter of weights and of gradients, 8 of moments; a frozen model's matrices in bfloat16."""
    parts = planned(run())["sft", "training"].parts
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (4 * P, 8 * P, 4 * P)
    ppo = planned(run())["ppo", "frozen pass"].parts
    assert ppo["frozen"] == 2 * MATRICES + 4 * (P - MATRICES) + 2 * MATRICES + 4 * (SCALAR - MATRICES)
    assert ppo["weights"] == 4 * (P + SCALAR)


def test_models_beside_ppos_own_are_held_through_all_of_ppo() -> None:
    """A reward model of `ppo.rewards`, and an independent judge."""
    plain = planned(run())
    judge = 2 * MATRICES + 4 * (SCALAR - MATRICES)
    for more, size in (({"judges": 10**9}, 10**9), ({"judge": True}, judge)):
        for (stage, name), phase in planned(run()._replace(**more)).items():
            expected = round(1.05 * size) if stage == "ppo" else 0
            assert phase.bytes - plain[stage, name].bytes == pytest.approx(expected, abs=2), name


def direct(method: str, **options: Any) -> PlannedRun:
    policy = PolicyConfig(method=method, batch_size=8, micro_batch_size=4, **options)  # type: ignore[arg-type]
    return run(reward={"lora": policy.lora})._replace(policy=policy)


def test_a_step_on_pairs_holds_two_sequences_a_pair_and_no_critic() -> None:
    dpo, best = planned(direct("dpo")), planned(direct("best_of_n"))
    parts = dpo["ppo", "training"].parts
    assert parts["activations"] == 2 * best["ppo", "training"].parts["activations"]
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (4 * P, 8 * P, 4 * P)
    assert ("ppo", "sampling") in best and not {("ppo", "sampling"), ("ppo", "watching")} & dpo.keys()


def test_the_frozen_pass_is_over_both_responses_of_a_pair_or_as_many() -> None:
    """Best of n scores as PPO's code measures: 2 `micro_batch_size` responses at once."""
    dpo, best = planned(direct("dpo"))["ppo", "frozen pass"], planned(direct("best_of_n"))["ppo", "frozen pass"]
    for part in ("activations", "logits"):
        assert best.parts[part] == dpo.parts[part], part


def test_a_direct_training_without_evaluations_holds_no_frozen_model_that_it_does_not_use() -> None:
    sft, reward = 2 * MATRICES + 4 * (P - MATRICES), 2 * MATRICES + 4 * (SCALAR - MATRICES)
    watched = planned(direct("dpo", evaluate_every=2)._replace(judge=True))
    dpo, kto = planned(direct("dpo")), planned(direct("kto"))
    assert watched["ppo", "training"].parts["frozen"] == sft + 2 * reward
    assert "frozen" not in dpo["ppo", "training"].parts and kto["ppo", "training"].parts["frozen"] == sft
    assert dpo["ppo", "evaluation"].parts["frozen"] == dpo["ppo", "frozen pass"].parts["frozen"] == sft + reward
    assert watched["ppo", "watching"].bytes > dpo["ppo", "evaluation"].bytes


def test_what_saves_memory_saves_it_with_a_direct_method() -> None:
    plain = planned(direct("dpo"))["ppo", "training"]
    saving = {"micro_batch_size": 1, "optimizer": "adamw_8bit", "lora": LORA, "gradient_checkpointing": True}
    for options in ({name: value} for name, value in saving.items()):
        policy = PolicyConfig(**{"method": "dpo", "batch_size": 8, "micro_batch_size": 4} | options)
        less = run(reward={"lora": policy.lora})._replace(policy=policy)
        assert planned(less)["ppo", "training"].bytes < plain.bytes, options
    machines = Machine(1), Machine(4, None, "zero3")
    kto, shared = (planned(direct("kto"), machine)["ppo", "training"].parts for machine in machines)
    assert all(4 * shared[name] == kto[name] for name in ("weights", "optimizer", "frozen"))
    one, four = (planned(direct("dpo"), machine)["ppo", "frozen pass"].parts for machine in (Machine(1), Machine(4)))
    assert 2 * four["activations"] == one["activations"], "8 pairs on 4 ranks are 2 each"


def test_cuda_graphs_keep_copy_states_and_logits_through_all_of_ppo() -> None:
    plain, graphs = planned(run()), planned(run()._replace(graphs=True))
    shape = KNOWN["llama-3.2-1b"]
    kept = 2 * shape.parameters + 2 * 2 * 8 * 128 * 64 * 8 * 16 + 4 * 4 * 8 * shape.vocabulary
    sampled = {key for key in graphs if key[0] == "ppo" and key[1] != "loading"}
    assert {graphs[key].parts["CUDA graphs"] for key in sampled} == {kept}
    assert all(graphs[key].bytes == pytest.approx(plain[key].bytes) for key in plain if key[1] == "sampling")
    four, its_plain = planned(run()._replace(graphs=True), Machine(4)), planned(run(), Machine(4))
    assert four["ppo", "evaluation"].bytes == pytest.approx(its_plain["ppo", "evaluation"].bytes)
    update = "ppo", "policy update"
    assert graphs[update].bytes == pytest.approx(plain[update].bytes + kept * (1 + memory.ALLOCATOR["cuda"]))


def test_an_average_of_weights_is_held_and_the_policy_set_aside() -> None:
    options = {"watch": {"prompts": 4}, "evaluate_every": 2}
    plain, averaged = (planned(run(ppo=options | more)) for more in ({}, {"ema": 0.9}))
    for name in ("policy update", "critic update", "frozen pass"):
        assert averaged["ppo", name].parts["average"] == 4 * P and "average" not in plain["ppo", name].parts
    watching = averaged["ppo", "watching"].parts
    assert watching["average"] == watching["set aside"] == 4 * P
    assert ("ppo", "watching") not in planned(run(ppo={"evaluate_every": None}))


def test_a_checkpoint_on_a_gpu_is_copied_on_the_host() -> None:
    """12 bytes a parameter, the average, and the best weights once; each rank's part above a limit."""
    stepped = 12 * (P + SCALAR)
    for machine in (Machine(1), Machine(4, None, "zero3")):

        def host(machine: Machine = machine, **options: Any) -> int:
            return planned(run(ppo={"checkpoint_whole": 50.0} | options), machine)["ppo", "saving"].host

        assert host(evaluate_every=None) == pytest.approx(stepped, abs=16)
        assert host() == pytest.approx(stepped + 4 * P, abs=16)
        assert host(ema=0.9) > host()
        parts = stepped if machine.ranks == 1 else 4 * 2 * 10**9
        assert host(evaluate_every=None, checkpoint_whole=29.0) == pytest.approx(parts, abs=16)
    adapters = {"reward": {"lora": LORA}, "ppo": {"lora": LORA, "evaluate_every": None}}
    one, eight = (planned(run(**adapters), Machine(n))["ppo", "saving"] for n in (1, 8))
    assert one.host == eight.host == 4 * P, "of adapters the merged policy is larger than a checkpoint"


def test_the_last_evaluation_holds_a_ranks_part_of_the_policy_and_its_share_of_the_responses() -> None:
    """The setting of docs/scaling.md: 8 B on 8 GPUs, with the average of `ppo.ema`, and without a critic."""
    options = {"batch_size": 128, "minibatch_size": 64, "ema": 0.9, "evaluate": 512}
    phases = planned(run("llama-3.1-8b", ppo=options), Machine(8, None, "zero3"))
    count = KNOWN["llama-3.1-8b"].parameters
    evaluation, watching = phases["ppo", "evaluation"], phases["ppo", "watching"]
    assert evaluation.parts["weights"] == evaluation.parts["average"] == count // 2
    assert evaluation.parts["key-value cache"] == 16 * 128 * 2**17
    assert evaluation.bytes < watching.bytes
    assert max(phase.host for phase in phases.values()) < 64e9
    for stage in ("sft", "reward"):
        assert phases[stage, "sampling"].parts["key-value cache"] == 8 * 128 * 2**17


def test_a_small_model_on_a_cpu_is_little_more_than_the_process() -> None:
    tiny = ModelShape(vocabulary=600, hidden_size=32, intermediate_size=85, layers=2, heads=2, kv_heads=2, head_size=16)
    for phase in planned(run(tiny, "float32"), Machine(0)).values():
        assert PROCESS <= phase.bytes < 1.1 * PROCESS and phase.host == 0


def proposed(memory_gb: float, gpus: int = 1, **stages: dict[str, Any]) -> dict[str, int | None]:
    options = {"sft": {"batch_size": 64}, "reward": {"batch_size": 64}, "ppo": {"batch_size": 64, "minibatch_size": 64}}
    options = {stage: of_stage | stages.get(stage, {}) for stage, of_stage in options.items()}
    machine = Machine(gpus, round(memory_gb * 1e9), "zero3")
    return {stage: memory.larger_micro_batch(run(**options), machine, stage) for stage in options}


def test_a_larger_micro_batch_is_the_largest_that_fits_with_a_quarter() -> None:
    """Llama 3.2 1B on one GPU, in micro-batches of 4."""

    def worst(size: int) -> int:
        return planned(run(sft={"batch_size": 64, "micro_batch_size": size}))["sft", "training"].bytes

    assert worst(8) < worst(16) < worst(32)
    assert proposed(1.25 * worst(16) / 1e9 + 0.01)["sft"] == 16
    assert proposed(1.25 * worst(16) / 1e9 - 0.01)["sft"] == 8
    assert proposed(1.1 * worst(8) / 1e9)["sft"] is None, "it fits, and leaves no quarter"
    assert proposed(1000) == {"sft": 64, "reward": 64, "ppo": 64}


def test_a_larger_micro_batch_is_at_most_a_ranks_share_of_a_step() -> None:
    assert proposed(1000, gpus=8) == {"sft": 8, "reward": 8, "ppo": 8}
    assert proposed(1000, gpus=16) == {"sft": None, "reward": None, "ppo": None}, "the share is 4 already"
    assert proposed(1000, gpus=0) == {"sft": None, "reward": None, "ppo": None}, "a CPU has no launches"
    assert proposed(1000, ppo={"batch_size": 48, "minibatch_size": 24})["ppo"] == 8, "it must divide a minibatch"
    by_tokens = {"sft": {"packing": 512}, "ppo": {"micro_batch_tokens": 512}}
    assert proposed(1000, **by_tokens) == {"sft": None, "reward": 64, "ppo": None}


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
        ("ppo", "policy update", {"ppo": {"micro_batch_tokens": 2 * 128 + 127, "micro_batch_size": 8}}),
        ("ppo", "sampling", {"ppo": {"batch_size": 8, "lora": LORA}, "reward": {"lora": LORA}}),
    ],
)  # fmt: skip
def test_an_option_that_saves_memory_saves_it(stage: str, phase: str, options: dict[str, Any]) -> None:
    assert planned(run(**options))[stage, phase].bytes < planned(run())[stage, phase].bytes


def test_four_bits_are_a_quarter_of_a_backbone_and_need_no_copy() -> None:
    whole, four = (
        planned(run("llama-3.1-8b", reward={"lora": lora}, ppo={"lora": lora}))["ppo", "sampling"].parts
        for lora in (LORA, FOUR)
    )
    matrices = KNOWN["llama-3.1-8b"].matrices
    assert whole["backbone"] - four["backbone"] == pytest.approx(matrices * (2 - 0.52), rel=1e-3)
    assert whole["sampling copy"] == 2 * KNOWN["llama-3.1-8b"].parameters and "sampling copy" not in four


def test_ranks_share_what_trains_and_with_zero3_what_is_frozen() -> None:
    one, replicas, zero2, zero3 = (
        planned(run(), machine)["ppo", "policy update"].parts
        for machine in (Machine(1), Machine(4, None, "replicas"), Machine(4), Machine(4, None, "zero3"))
    )
    assert one["optimizer"] == replicas["optimizer"] == 4 * zero2["optimizer"] == 4 * zero3["optimizer"]
    assert one["frozen"] == replicas["frozen"] == zero2["frozen"] == 4 * zero3["frozen"]
    assert zero3["working"] < zero2["working"]
    loading = planned(run(), Machine(4, None, "zero3"))["ppo", "loading"].parts
    whole = {"frozen": one["frozen"], "weights": 4 * (P + SCALAR)}
    assert {name: 4 * loading[name] for name in whole} == whole and loading["moved"] == 4 * (P - MATRICES)
    alone, shared = (planned(run(), machine)["ppo", "frozen pass"].parts for machine in (Machine(1), Machine(4)))
    assert shared["activations"] * 2 == alone["activations"]  # 8 rows on 4 ranks are 2 each, not micro-batches of 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autograd_keeps_of_a_block_what_is_counted(dtype: str) -> None:
    """Bytes of the tensors that torch saves in a forward pass of two blocks less those of one, without parameters."""
    sizes = {"vocabulary": 300, "hidden_size": 64, "intermediate_size": 176, "heads": 4, "kv_heads": 2}
    shape = ModelShape(layers=2, head_size=16, **sizes)

    def saved(layers: int) -> int:
        config = LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=176, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        model, storages = LlamaModel(config), dict[int, int]()
        shapes = {tuple(size) for p in model.parameters() for size in (p.shape, p.shape[::-1])}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tuple(tensor.shape) not in shapes:  # neither a parameter nor its copy in bfloat16
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        runtime = Runtime(device="cpu", dtype=dtype, threads=1)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(runtime):
            output = model(input_ids=torch.ones(3, 40, dtype=torch.long), use_cache=False).last_hidden_state
        return sum(storages.values()) + 0 * len(output)

    planner = memory._Planner(run(shape, dtype), Machine(0))
    assert saved(2) - saved(1) == pytest.approx(planner._block(3 * 40, 0), rel=0.1)
