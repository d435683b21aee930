"""`tether plan`: what it prints, as a table and as JSON, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest


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
        assert list(stage) == ["stage", "bytes", "fits", "phases", "advice"]
        assert stage["bytes"] == max(phase["bytes"] for phase in stage["phases"]) and stage["advice"] == []
        for phase in stage["phases"]:
            assert list(phase) == ["phase", "bytes", "host_bytes", "fits", "parts"]
            assert phase["bytes"] == sum(phase["parts"].values())
    assert [phase["phase"] for phase in told["stages"][2]["phases"]] == [
        "sampling", "frozen pass", "policy update", "critic update", "watching", "evaluation", "saving",
    ]  # fmt: skip


def test_what_does_not_fit_ends_with_3_and_says_what_to_set(tether_here: Any, tmp_path: Path) -> None:
    large = ["gpu", "--gpus", "8", "--memory", "80GB", "--shape", "llama-3.1-8b"]
    done = plan(tether_here, tmp_path, *large)
    assert done.returncode == 3
    assert "8,030,261,248 parameters, bfloat16, on 8 GPUs of 80 GB, zero2" in done.stdout
    assert "  --set sft.gradient_checkpointing=true: " in done.stdout and " GB, fits" in done.stdout
    told = json.loads(plan(tether_here, tmp_path, *large, "--json").stdout)
    assert told["fits"] is False and told["stages"][0]["advice"][0]["fits"] is True
    options = told["stages"][0]["advice"][0]["set"]
    again = plan(tether_here, tmp_path, *large, "--json", *(part for each in options for part in ("--set", each)))
    assert json.loads(again.stdout)["stages"][0]["bytes"] == told["stages"][0]["advice"][0]["bytes"]


def test_without_a_memory_nothing_is_judged(tether_here: Any, tmp_path: Path) -> None:
    done = plan(tether_here, tmp_path, "gpu", "--json", "--shape", "llama-3.1-8b")
    assert done.returncode == 0 and json.loads(done.stdout)["fits"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--memory", "lots"], "--memory lots: give a size with its unit, as 80GB"),
        (["tiny", "--memory", "80"], "--memory 80: give a size with its unit"),
        (["tiny", "--memory", "0GB"], "--memory 0GB: give a size"),
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
