"""`tether plan`: what it prints, as a table and as JSON, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file


def plan(tether_here: Any, tmp_path: Path, *arguments: str) -> Any:
    return tether_here("plan", *arguments, home=tmp_path / "home")


def test_json_has_the_fields_that_the_guide_lists(tether_here: Any, tmp_path: Path) -> None:
    done = plan(tether_here, tmp_path, "tiny", "--gpus", "0", "--memory", "2gb", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert list(told) == ["profile", "parameters", "dtype", "gpus", "sharding", "memory", "fits", "stages", "uncounted"]
    assert (told["memory"], told["gpus"], told["sharding"], told["fits"]) == (2 * 10**9, 0, "none", True)
    assert [stage["stage"] for stage in told["stages"]] == ["sft", "reward", "ppo"]
    for stage in told["stages"]:
        assert list(stage) == ["stage", "bytes", "fits", "phases", "larger_micro_batch_size"]
        assert stage["bytes"] == max(phase["bytes"] for phase in stage["phases"])
        for phase in stage["phases"]:
            assert list(phase) == ["phase", "bytes", "host_bytes", "fits", "parts"]
            assert phase["bytes"] == sum(phase["parts"].values())
    assert [phase["phase"] for phase in told["stages"][2]["phases"]] == [
        "loading", "sampling", "frozen pass", "policy update", "critic update", "watching", "evaluation", "saving",
    ]  # fmt: skip


def test_what_does_not_fit_ends_with_3_and_lists_options(tether_here: Any, tmp_path: Path) -> None:
    large = ["gpu", "--gpus", "8", "--memory", "80GB", "--shape", "llama-3.1-8b"]
    done = plan(tether_here, tmp_path, *large)
    assert done.returncode == 3
    assert "8,030,261,248 parameters, bfloat16, on 8 GPUs of 80 GB, zero2" in done.stdout
    assert "\n  STAGE.gradient_checkpointing=true\n" in done.stdout
    told = json.loads(plan(tether_here, tmp_path, *large, "--json").stdout)
    assert told["fits"] is False
    again = plan(tether_here, tmp_path, *large, "--json", "--set", "runtime.sharding=zero3")
    before, after = told["stages"][2], json.loads(again.stdout)["stages"][2]
    assert after["bytes"] < before["bytes"] and (before["fits"], after["fits"]) == (False, True)


def test_a_larger_micro_batch_that_fits_is_proposed_with_its_command(tether_here: Any, tmp_path: Path) -> None:
    small = ["gpu", "--shape", "llama-3.2-1b", "--set", "sft.micro_batch_size=4", "--set", "ppo.micro_batch_size=1"]
    done = plan(tether_here, tmp_path, *small, "--memory", "80GB")
    assert done.returncode == 0, done.stderr
    told = json.loads(plan(tether_here, tmp_path, *small, "--memory", "80GB", "--json").stdout)
    sizes = {stage["stage"]: stage["larger_micro_batch_size"] for stage in told["stages"]}
    proposed = [f"  {s}: --set {s}.micro_batch_size={size} in place of" for s, size in sizes.items() if size]
    assert len(proposed) >= 2 and all(line in done.stdout for line in proposed)
    assert "each takes 55 to 120 ms of launches on an H200" in done.stdout
    again = plan(tether_here, tmp_path, *small, "--memory", "80GB", "--set", f"ppo.micro_batch_size={sizes['ppo']}")
    assert again.returncode == 0 and "ppo: --set" not in again.stdout
    assert "micro_batch_size" not in plan(tether_here, tmp_path, *small).stdout, "no memory is given"


def test_without_a_memory_nothing_is_judged(tether_here: Any, tmp_path: Path) -> None:
    done = plan(tether_here, tmp_path, "gpu", "--json", "--shape", "llama-3.1-8b")
    assert done.returncode == 0 and json.loads(done.stdout)["fits"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--memory", "lots"], "--memory lots: give a size with its unit, such as 80GB"),
        (["tiny", "--memory", "80"], "--memory 80: give a size with its unit"),
        (["tiny", "--memory", "0GB"], "--memory 0GB: give a size"),
        (["tiny", "--memory", f"{'9' * 400}TB"], "9TB: give a size"),
        (["tiny", "--memory", "0.0001KB"], "--memory 0.0001KB: give a size"),
        (["tiny", "--gpus", "8", "--set", "ppo.optimizer=adamw_8bit"], "cannot step parameters that are sharded"),
        (["tiny", "--shape", "gpt-9"], "--shape gpt-9: no such model"),
        (["tiny", "--set", "sft.base=nowhere"], "sft.base = nowhere: there is no such folder"),
        (["tinny"], "tinny: no such profile"),
    ],
)
def test_a_mistake_ends_with_2_and_one_paragraph(
    tether_here: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = plan(tether_here, tmp_path, *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_reward_models_of_ppo_rewards_are_counted_from_their_files_and_those_of_the_hub_are_named(
    tether_here: Any, tmp_path: Path
) -> None:
    """60 numbers of a classifier in bfloat16, and 2 · 30 of an ensemble: PPO holds each in float32."""
    one, two = tmp_path / "classifier", tmp_path / "ensemble"
    for folder in (one, two / "model", two / "members" / "2" / "model"):
        folder.mkdir(parents=True)
    save_file({"a": torch.zeros(5, 10).bfloat16(), "b": torch.zeros(10).bfloat16()}, one / "model.safetensors")
    for folder in (two / "model", two / "members" / "2" / "model"):
        save_file({"a": torch.zeros(30)}, folder / "model.safetensors")
    sources = [f"model:{one}", f"model:{two}", "model:org/judge@main"]
    given = json.dumps([{"source": source, "name": f"judge{i}"} for i, source in enumerate(sources)])
    options = ["tiny", "--gpus", "0", "--set", f"ppo.rewards={given}"]
    told = json.loads(plan(tether_here, tmp_path, *options, "--json").stdout)
    sft, reward, ppo = ([phase["parts"].get("judges") for phase in stage["phases"]] for stage in told["stages"])
    assert {*sft, *reward} == {None} and set(ppo) == {4 * (60 + 2 * 30)}
    assert told["uncounted"] == ["org/judge@main"]
    said = plan(tether_here, tmp_path, *options).stdout
    assert "Not counted: reward models of ppo.rewards that are not in a folder here: org/judge@main." in said
    (one / "model.safetensors").write_bytes(b"no tensors")
    done = plan(tether_here, tmp_path, *options)
    assert done.returncode == 2
    assert f"source = model:{one}: {one / 'model.safetensors'} is not a weights file" in " ".join(done.stderr.split())
