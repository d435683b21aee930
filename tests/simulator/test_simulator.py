"""The stages on a pretended GPU: no mixed devices, no kernel that isn't deterministic, and how often the host waits.

A wait for each token of a rollout, or twenty for each optimiser step, is what makes a GPU idle. `LIMITS` bounds them by
the project's function that waits, and may not rise.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiles a device guard for torch with g++ (apt-get install g++)"
)

A_TOKEN = {"components/models/sampling.py _still_going": 0.2, "components/models/sampling.py _responses": 0.1}
"""Waits a sampled token, by function: a look at who has ended, every eight tokens, and the end of each batch."""
A_STEP = {
    "components/training/loop.py read": 2.6,
    "components/models/logprobs.py last_hidden": 5.0,
    "components/models/adapters.py base_model": 5.0,
    "components/ppo/experience.py gather_experience": 1.0,
    "components/ppo/experience.py returns_deviation": 0.2,
    "components/ppo/experience.py lower_ends": 1.0,
    "components/ppo/learner.py update": 0.5,
    "components/ppo/maths.py gae": 0.5,
    "components/ppo/maths.py explained_variance": 1.0,
    "components/ppo/maths.py estimate_advantages": 0.5,
    "components/models/sampling.py prompt_lengths": 0.5,
    "components/models/sampling.py response_lengths": 0.5,
    "components/models/sampling.py text_ids": 0.5,
}
"""Waits an optimiser step, by function, with what precedes an update in it: numbers are read once for each model that
is stepped, and transformers asks once a pass whether positions are packed (`find_packed_sequence_indices`)."""
MOST_A_TOKEN, MOST_A_STEP = 0.26, 9.0

BFLOAT16 = {"dtype": "bfloat16"}
LORA = {"lora": {"rank": 2}}
STAGES = [{"name": stage, "stage": stage} for stage in ("sft", "reward", "ppo")]
FAULTS = {
    "mixed devices": "on the CPU, at tests/",
    "a wait a token": "",
    "a cumulative sum of floats": "aten.cumsum.default",
    "a misaligned mask": "a misaligned mask of attention",
    "a wait in a captured step": "a wait in a captured step",
}
SHORT = {"epochs": 1, "evaluate": 8}

VARIANTS: dict[str, dict[str, Any]] = {
    "shared critic": {"critic": {"kind": "shared"}, "entropy_coefficient": 0.01},
    "value clipping": {"critic": {"clip_range": 0.2, "start": "sft"}},
    "sequence": {"advantage": "sequence"},
    "rloo": {"advantage": "rloo", "group_size": 2, "kl": {"control": "fixed", "form": "k2"}},
    "grpo": {"advantage": "grpo", "group_size": 2, "kl": {"control": "fixed", "form": "k3", "refresh_every": 1}},
    "adaptive": {"kl": {"control": "adaptive", "unit": "token", "horizon": 0.25, "target": 0.1}, "updates": 5},
    "score": {"score": {"missing_eos": "subtract", "length_penalty": 0.01}, "stop_epochs_above": None},
    "best of": {"best_of": 2},
    "stabilisers": {
        "critic": {"warmup": 1}, "ema": 0.5, "ptx": {"coefficient": 0.5, "batch_size": 2}, "clip_range_high": 0.3,
        "dual_clip": 3.0, "aggregation": "cap", "micro_batch_tokens": 400, "updates": 4,
    },
    "watched": {
        "evaluate_every": 2, "kl": {"control": "fixed", "band": 50.0}, "watch": {"prompts": 8, "patience": 9},
        "evaluate_temperature": 0.5, "monitors": {"responses": 16, "stop_on": ["length"]}, "evaluate": 8,
        "checkpoint_every": 1,
    },
    "rules": {
        "rules": {"patterns": {"digit": "[0-9]"}}, "stop_epochs_above": None, "discount": 0.99, "optimizer": "adamw",
        "weight_decay": 0.01, "kl": {"control": "fixed", "ceiling": 50.0},
    },
    "checkpointing": {"gradient_checkpointing": True, "decay": "none"},
}  # fmt: skip
"""Options of PPO, beside the three stages as they are."""


def whole_walk() -> list[dict[str, Any]]:
    """Three stages in float32, bfloat16 and LoRA; ensembles; every option of PPO."""
    cases: list[dict[str, Any]] = [*STAGES, {"name": "sft packed", "stage": "sft", "options": {"packing": 400}}]
    for name, of_reward, of_ppo in (("bfloat16", {}, {}), ("lora", LORA, LORA)):
        common = BFLOAT16 if name == "bfloat16" else {}
        sft = f"sft {name}" if common else "sft"
        cases += [{"name": sft, "stage": "sft", **common}] if common else []
        cases.append({"name": f"reward {name}", "stage": "reward", "sft": sft, "options": of_reward, **common})
        cases.append(
            {"name": f"ppo {name}", "stage": "ppo", "sft": sft, "reward": f"reward {name}", "options": of_ppo, **common}
        )
    lora = {"stage": "ppo", "reward": "reward lora", "options": LORA | {"gradient_checkpointing": True}, **BFLOAT16}
    cases.append({"name": "ppo lora bfloat16", **lora})
    weights = {"importance": {"level": "sequence"}, "aggregation": "sequence", "evaluate": 8}
    cases.append({"name": "ppo weights", "stage": "ppo", "options": weights, **BFLOAT16})
    cases.append({"name": "reward two", "stage": "reward", "options": {"members": 2, "shared_prompts": False}})
    minimum = {"score": {"ensemble": "minimum"}}
    cases.append({"name": "ppo minimum", "stage": "ppo", "reward": "reward two", "options": minimum})
    cases += [{"name": f"ppo {name}", "stage": "ppo", "options": options} for name, options in VARIANTS.items()]
    for stage in ("sft", "reward"):
        watched = {"evaluate_every": 2, "watch": {"examples": 8, "patience": 9}}
        cases.append({"name": f"{stage} watched", "stage": stage, "options": watched})
    cases.append({"name": "ppo lora bfloat16 with graphs", **lora, "graphs": True})
    cases += [{"name": method, "stage": "direct", "options": {"method": method}} for method in ("dpo", "ipo", "kto")]
    labels = {"label_smoothing": 0.1, "form": "robust", "gradient_checkpointing": True}
    cases.append({"name": "dpo lora bfloat16", **lora, "stage": "direct", "options": LORA | labels})
    cooler = {"stage": "ppo", "generation": {"temperature": 0.7, "max_new_tokens": 16}}
    return [*cases, {"name": "ppo cooler", **cooler}, {"name": "ppo cooler with graphs", **cooler, "graphs": True}]


def walk(folder: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulator.walk", str(folder / "walk"), json.dumps(cases)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["name"] for each in found] == [case["name"] for case in cases]
    return found


def over_limits(found: dict[str, Any]) -> list[str]:
    """The functions that wait oftener than they may, with the lines."""
    out = []
    for part, count, limits, most in (
        ("sampling", found["tokens"], A_TOKEN, MOST_A_TOKEN), ("training", found["steps"], A_STEP, MOST_A_STEP),
    ):  # fmt: skip
        waits: dict[str, int] = found["waits"][part]
        out += [f"{name}: {n} of {count}" for name, n in waits.items() if n > limits.get(name, 0) * count]
        out += [f"{part}: {sum(waits.values())} of {count}"] if sum(waits.values()) > most * count else []
    return [f"{found['name']}: {each}" for each in out] + (found["most"] if out else [])


def sound(found: list[dict[str, Any]]) -> None:
    assert [(each["name"], each["error"]) for each in found if each["error"]] == []
    assert [(each["name"], each["alerts"]) for each in found if each["alerts"]] == []
    assert [line for each in found for line in over_limits(each)] == []
    assert all(each["tokens"] and each["steps"] for each in found)


@pytest.mark.whole
def test_the_stages_mix_no_devices_and_wait_rarely_and_planted_faults_are_found(tmp_path: Path) -> None:
    faults = [
        {"name": fault, "stage": "sft", "fault": fault, "options": SHORT, "graphs": "captured" in fault}
        for fault in FAULTS
    ]
    found = walk(tmp_path, [*STAGES, *faults])
    sound(found[:3])
    mixed, waiting, floats, masks, captured = found[3:]
    assert "has tensors on cuda:0 and, of shape" in mixed["error"] and "on the CPU" in mixed["error"]
    assert any("tests/simulator" in line or "sampling.py" in line for line in over_limits(waiting))
    for each in (floats, masks, captured):
        assert each["alerts"] and all(FAULTS[each["name"]] in alert for alert in each["alerts"])
    assert waiting["error"] is None and not waiting["alerts"]


@pytest.mark.whole
@pytest.mark.long
@pytest.mark.simulator
def test_every_option_of_the_stages_on_the_pretended_gpu(tmp_path: Path) -> None:
    sound(walk(tmp_path, whole_walk()))
