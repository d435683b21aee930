"""Peak memory of a stage against what `tether plan` says of it.

    python tests/bench/memory.py [--only NAME ...] [--held-out]     # a quarter of an hour on two cores

Each configuration runs in a process of its own, as the stage does: the same loop, with the allocator set as in a run.
Texts are long enough to fill every limit on lengths, which is what the plan supposes. Measured is the peak of what the
process holds (`held`) less what it holds after its imports. Planned is the phase that holds most, less the plan's own
part for the process. Resident memory would not compare: the kernel maps more pages of the libraries on one machine than
on another, and drops them when memory is short.
Models and artifacts are made beforehand, in another process.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BAR = 0.25
"""Largest share by which plan and measurement may differ."""
SMALL = {"hidden_size": 256, "layers": 6, "heads": 4, "vocabulary": 8192}
MEDIUM = {"hidden_size": 512, "layers": 8, "heads": 8, "vocabulary": 4096}
"""Llamas with 6.8 M and 27.3 M parameters."""
SMOLLM2 = "smollm2"


class Configuration(NamedTuple):
    """A stage and the options that decide its memory."""

    stage: str
    model: dict[str, int] | str
    """Options of `sft.scratch`, or `smollm2`."""
    options: dict[str, Any]
    prompt: int = 64
    response: int = 64
    dtype: str = "float32"

    def values(self) -> dict[str, Any]:
        """The config that `tether plan` reads: the profile tiny with this over it."""
        scratch = self.model if isinstance(self.model, dict) else None
        sizes = {"max_prompt_tokens": self.prompt, "max_new_tokens": self.response}
        lora = {"lora": self.options["lora"]} if self.options.get("lora") else {}
        given: dict[str, Any] = {
            "runtime": {"device": "cpu", "dtype": self.dtype, "threads": 2},
            "generation": sizes,
            "sft": {"scratch": scratch} if scratch else {"base": SMOLLM2},
            "reward": lora,
        }
        given[self.stage] = given.get(self.stage, {}) | self.options
        return given


STEPS = {"batch_size": 16, "micro_batch_size": 8}
UPDATES = {
    "updates": 2, "batch_size": 16, "minibatch_size": 16, "micro_batch_size": 8, "epochs": 1,
    "kl": {"control": "fixed"}, "stop_epochs_above": None, "watch": {"kl_high": None},
}  # fmt: skip
CONFIGURATIONS = {
    "small": Configuration("ppo", SMALL, UPDATES),
    "sft": Configuration("sft", MEDIUM, STEPS | {"overlong": "cut", "evaluate": 8}),
    "reward": Configuration("reward", MEDIUM, STEPS | {"scale_responses": 16}),
    "separate": Configuration("ppo", MEDIUM, UPDATES),
    "shared": Configuration("ppo", SMOLLM2, UPDATES | {"critic": {"kind": "shared"}}),
    "lora": Configuration("ppo", SMOLLM2, UPDATES | {"lora": {"rank": 8}}),
    "checkpointing": Configuration(
        "ppo", MEDIUM, UPDATES | {"gradient_checkpointing": True, "batch_size": 32, "minibatch_size": 32,
                                  "micro_batch_size": 32}, prompt=192,
    ),
    "bfloat16": Configuration("ppo", MEDIUM, UPDATES, dtype="bfloat16"),
    "reward-lora": Configuration("reward", MEDIUM, STEPS | {"scale_responses": 16, "lora": {"rank": 8}}),
    "adapters": Configuration(
        "reward", {"hidden_size": 384, "layers": 10, "heads": 6, "vocabulary": 6000},
        STEPS | {"scale_responses": 16, "lora": {"rank": 16}}, prompt=96, response=48,
    ),
}  # fmt: skip
"""`small` is the quick one, which a test runs too."""
HELD_OUT = {
    "held-rloo": Configuration("ppo", MEDIUM, UPDATES | {"advantage": "rloo", "group_size": 4}),
    "held-shared": Configuration(
        "ppo", MEDIUM, UPDATES | {"critic": {"kind": "shared"}, "micro_batch_size": 16}, prompt=96, response=48
    ),
    "held-deep": Configuration("ppo", {"hidden_size": 384, "layers": 14, "heads": 6, "vocabulary": 6000}, UPDATES),
    "held-sft": Configuration(
        "sft", SMOLLM2, {"batch_size": 8, "micro_batch_size": 4, "overlong": "cut", "evaluate": 8}
    ),
    "held-deep-lora": Configuration(
        "reward", {"hidden_size": 320, "layers": 16, "heads": 5, "vocabulary": 5000},
        STEPS | {"scale_responses": 16, "lora": {"rank": 16}}, prompt=48, response=80,
    ),
    "held-ppo-lora": Configuration("ppo", MEDIUM, UPDATES | {"lora": {"rank": 16}}, prompt=160, response=40),
    "held-members": Configuration(
        "reward", {"hidden_size": 448, "layers": 9, "heads": 7, "vocabulary": 5000},
        STEPS | {"scale_responses": 16, "members": 2, "micro_batch_size": 4}, prompt=80, response=40,
    ),
    "held-packing": Configuration(
        "sft", {"hidden_size": 384, "layers": 14, "heads": 6, "vocabulary": 6000},
        STEPS | {"overlong": "cut", "evaluate": 8, "packing": 1024}, prompt=96, response=64,
    ),
    "held-checkpointing": Configuration(
        "ppo", {"hidden_size": 384, "layers": 14, "heads": 6, "vocabulary": 6000},
        UPDATES | {"gradient_checkpointing": True, "micro_batch_size": 16}, prompt=128,
    ),
    "held-sft-checkpointing": Configuration(
        "sft", MEDIUM, {"batch_size": 32, "micro_batch_size": 16, "overlong": "cut", "evaluate": 8,
                        "gradient_checkpointing": True}, prompt=128, response=128,
    ),
}  # fmt: skip
"""They had no part in choosing a constant."""
CONFIGURATIONS |= HELD_OUT


def held() -> int:
    """Bytes of this process that are in no file, in memory or swapped out, and those of weights that it maps."""
    status = Path("/proc/self/status").read_text()
    found = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)
    assert len(found) == 2
    total, weights = sum(map(int, found)), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:  # 7f00-7f10 r--p 00000000 08:01 42 /path
            weights = line.endswith(".safetensors")
        elif weights and name in ("Size:", "Anonymous:", "Swap:"):  # a page that was written to is in no file
            total += int(values[0]) if name == "Size:" else -int(values[0])
    return total * 1024


def config_of(configuration: Configuration) -> Any:
    """The run's config, as a profile over tiny would give it."""
    from flows.config.profiles import lay, read_profile
    from flows.config.run_config import check_config

    return check_config(lay(read_profile("tiny"), configuration.values()), "the configuration")


def worst_phase(run: Any, stage: str) -> Any:
    """The phase of a stage that holds most on a CPU, as `tether plan --gpus 0` has it."""
    from components.planning.memory import Machine, phases

    return max((p for p in phases(run, Machine(0)) if p.stage == stage), key=lambda phase: phase.bytes)


def planned(configuration: Configuration, home: Path) -> tuple[str, int, dict[str, int]]:
    """The stage's worst phase: name, bytes, parts."""
    from flows.data.pretrained import find_base
    from flows.reports.memory import planned_run, shape_of

    config = config_of(configuration)
    base = find_base(SMOLLM2, home) if config.sft.base else None
    worst = worst_phase(planned_run(config, shape_of(config, base)), configuration.stage)
    return worst.name, worst.bytes, worst.parts


def prepare(folder: Path, configuration: Configuration, home: Path) -> None:
    """What the stage reads: data, and models as the stages before would leave them, untrained."""
    import torch

    from components.base.jsonl import write_json
    from components.models.adapters import Backbone, save_adapter
    from components.models.config import AdapterConfig, ScratchModel
    from components.models.folders import build_causal_lm, load_base, load_reward_model, save_model
    from components.models.runtime import Runtime
    from components.models.tokenizers import texts_of, train_tokenizer
    from components.reward.scoring import ScoreScale
    from flows.data.pretrained import find_base
    from tests.splits import write_split

    vocabulary = configuration.model["vocabulary"] if isinstance(configuration.model, dict) else 4000
    many, position = vocabulary - 60, 0

    def text(words: int) -> str:
        nonlocal position
        chosen = [f"w{(position + i) * 7919 % many}" for i in range(words)]
        position += words
        return " ".join(chosen)

    demonstrations = [
        {"prompt": [{"role": "user", "content": text(configuration.prompt + 8)}],
         "response": text(configuration.response + 8)}
        for _ in range(max(64, 2 * many // (configuration.prompt + configuration.response)))
    ]  # fmt: skip
    data = folder / "data"
    write_json(data / "task.json", {"name": "none"})
    write_split(data / "demonstrations.train", demonstrations)
    write_split(data / "demonstrations.heldout", demonstrations[:8])
    for split, count in (("train", 48), ("calibration", 32), ("test", 32)):
        rows = [
            {"prompt": each["prompt"], "chosen": text(configuration.response + 8), "margin": None, "votes": None,
             "rejected": text(configuration.response + 8), "category": "one"}
            for each in demonstrations[:count]
        ]  # fmt: skip
        write_split(data / f"pairs.{split}", rows)
        write_split(data / f"prompts.{split}", ({"prompt": r["prompt"], "category": "one"} for r in rows))
    if configuration.stage == "sft":
        return
    if isinstance(configuration.model, dict):
        tokenizer = train_tokenizer(texts_of(demonstrations), vocabulary)
        scratch = ScratchModel(**configuration.model)
        model: Any = build_causal_lm(scratch, tokenizer, max(configuration.prompt + configuration.response, 512), 0)
    else:
        model, tokenizer = load_base(find_base(configuration.model, home))
    save_model(model, tokenizer, folder / "sft" / "model")
    if configuration.stage == "reward":
        return
    lora = configuration.options.get("lora")
    runtime = Runtime(device="cpu", dtype="float32", threads=2)
    if lora:
        head = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
        view = Backbone(model).add("reward", AdapterConfig(**lora), seed=1, score=head)
        save_adapter(view, folder / "reward" / "adapter")
    else:
        scalar, tokenizer = load_reward_model(folder / "sft", runtime, seed=0)
        save_model(scalar, tokenizer, folder / "reward" / "model")
    scale = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=16)
    write_json(folder / "reward" / "reward.json", scale.model_dump())
    write_json(folder / "reward" / "sft_scores.json", [[-1.0, 0.0, 1.0]])


def measure(folder: Path, configuration: Configuration, home: Path) -> None:
    """Run the stage and print the peak of what it holds less the imports, and what these hold, bytes."""
    from components.models.runtime import activate, release_memory
    from flows.data.pretrained import find_base
    from tasks.stages import STAGES

    peak = 0

    def watch(*_: Any, **__: Any) -> None:
        nonlocal peak
        peak = max(peak, held())

    def released(device: str) -> None:
        """Release memory, and look before: at no other time the heap gives anything back."""
        watch()
        release_memory(device)

    job = config_of(configuration).resolved().stage_job(STAGES[configuration.stage])
    if configuration.options.get("lora"):
        import peft.tuners.lora  # noqa: F401
    import components.ppo.stage
    import components.reward.stage
    import components.reward.train
    import components.sft.stage
    from components.data.tables.published import read_split
    from components.models.folders import save_model
    from components.ppo.models import Models

    for module in (components.sft.stage, components.reward.train, components.ppo.stage):
        vars(module)["release_memory"] = released
    data, out = folder / "data", folder / "out"
    _ = read_split(data / "pairs.train")[0]  # imports what reads a split
    activate(job.runtime)
    imports = held()
    if configuration.stage == "sft":
        base = {"base": find_base(SMOLLM2, home)} if configuration.model == SMOLLM2 else {}
        components.sft.stage.run(job, {"data": data} | base, out, watch)
    elif configuration.stage == "reward":
        components.reward.stage.run(job, {"data": data, "sft": folder / "sft"}, out, watch)
    else:  # without the final evaluation, of 256 prompts at least, which holds no moments
        models = Models.load(job, {"sft": folder / "sft", "reward": folder / "reward"})
        prompts = [row["prompt"] for row in read_split(data / "prompts.train")]
        components.ppo.stage.train(models, job, prompts, data, out, watch)
        released(job.runtime.device)
        save_model(models.policy, models.tokenizer, out / "artifact" / "model")
    watch()
    print(json.dumps({"peak": peak - imports, "imports": imports}))


def compared(name: str, home: Path) -> dict[str, Any]:
    """Measure a configuration and compare; `error` is (planned - measured) / measured."""
    configuration = CONFIGURATIONS[name]
    with TemporaryDirectory() as folder:
        prepare(Path(folder), configuration, home)
        command = [sys.executable, __file__, "--child", folder, "--only", name, "--home", str(home)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    phase, whole, parts = planned(configuration, home)
    bytes_ = whole - parts["process"]
    return {"name": name, "measured": found["peak"], "imports": found["imports"], "planned": bytes_, "phase": phase,
            "error": bytes_ / found["peak"] - 1, "parts": parts}  # fmt: skip


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, help="these alone, else all but `small`")
    parser.add_argument("--held-out", action="store_true", help="only those that had no part in choosing a constant")
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("TETHER_HOME", ROOT / ".tether")))
    parser.add_argument("--verbose", action="store_true", help="the plan's parts too")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, CONFIGURATIONS[options.only[0]], options.home)
        return
    print("| configuration | worst phase | planned, MB | measured, MB | difference |\n|---|---|---:|---:|---:|")
    missed, fitted = False, [name for name in CONFIGURATIONS if name not in {*HELD_OUT, "small"}]
    for name in options.only or (HELD_OUT if options.held_out else [*fitted, *HELD_OUT]):
        found = compared(name, options.home)
        missed |= abs(found["error"]) > BAR
        print(f"| {name} | {found['phase']} | {found['planned'] / 1e6:.0f} | {found['measured'] / 1e6:.0f} "
              f"| {found['error']:+.1%} |", flush=True)  # fmt: skip
        if options.verbose:
            print({part: round(size / 1e6) for part, size in found["parts"].items()}, "imports",
                  round(found["imports"] / 1e6), file=sys.stderr)  # fmt: skip
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
