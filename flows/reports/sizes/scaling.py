"""Write the tables of docs/scaling.md with the arithmetic of `tether plan`.

python -m flows.reports.sizes.scaling          # updates the page; --check exits 1 if it is stale
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from components.planning.advice import Machine, StagePlan, plan_stages
from components.planning.cost import forward, ppo_update, step_traffic
from components.planning.memory import PlannedRun
from components.planning.models import Ranks
from components.planning.shape import KNOWN
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.reports.sizes.memory import planned_run

PAGE = Path(__file__).resolve().parents[3] / "docs" / "scaling.md"
MODELS = ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b")
CARD = 80 * 10**9
SETTING = (
    "generation.max_prompt_tokens=512", "generation.max_new_tokens=512",
    "sft.batch_size=64", "sft.micro_batch_size=4", "sft.gradient_checkpointing=true",
    "reward.batch_size=64", "reward.micro_batch_size=4", "reward.gradient_checkpointing=true",
    "ppo.batch_size=128", "ppo.minibatch_size=64", "ppo.micro_batch_size=4", "ppo.gradient_checkpointing=true",
)  # fmt: skip
"""Options on top of the profile `gpu`, for every table."""
METHODS = {
    "full": (),
    "LoRA": ("reward.lora.rank=16", "ppo.lora.rank=16"),
    "QLoRA": ("reward.lora.rank=16", "reward.lora.quantize=4bit", "ppo.lora.rank=16", "ppo.lora.quantize=4bit"),
}


def planned(model: str, *options: str) -> PlannedRun:
    """Return a run of the profile `gpu` with the page's setting and `options`, for the model `model`."""
    config = load_config("gpu", [parse_override(each) for each in (*SETTING, *options)])
    return planned_run(config, None, KNOWN[model], gpu=True)


def setting() -> str:
    """Return the command that prints the numbers of the tables."""
    lines = ["tether plan gpu --memory 80GB --shape MODEL --gpus N \\"]
    lines += [f"    --set {option} \\" for option in SETTING]
    return "\n".join(["```sh", *lines, "    ...", "```"])


def _cell(stage: StagePlan) -> str:
    told = f"{stage.worst.bytes / 1e9:.0f}"
    return told if stage.fits else f"**{told}**"


def memory() -> str:
    """Return the table of memory: a row per model and method, the worst phase of each stage in GB per GPU, above 80
    bold."""
    lines = [
        "| model | method | 1 GPU: sft | reward | ppo | worst of ppo | 8 GPUs: sft | reward | ppo | worst of ppo |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---|",
    ]
    for model in MODELS:
        for method, options in METHODS.items():
            run = planned(model, *options)
            cells: list[str] = []
            for machine in (Machine(1, CARD), Machine(8, CARD, "zero3")):
                stages = plan_stages(run, machine)
                cells += [*map(_cell, stages), stages[-1].worst.name]
            lines.append(f"| {model} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts() -> str:
    """Return the table of what PPO holds in its worst phase, by part, for the three methods at 8 B on one GPU."""
    found = {}
    for method, options in METHODS.items():
        found[method] = plan_stages(planned("llama-3.1-8b", *options), Machine(1, CARD))[-1].worst
    names = list(dict.fromkeys(part for phase in found.values() for part in phase.parts))
    lines = [f"| part, GB | {' | '.join(f'{m}: {p.name}' for m, p in found.items())} |", "|---|---:|---:|---:|"]
    for name in names:
        cells = [f"{phase.parts[name] / 1e9:.1f}" if name in phase.parts else "" for phase in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(f'{phase.bytes / 1e9:.1f}' for phase in found.values())} |")
    return "\n".join(lines)


def operations() -> str:
    """Return the table of operations per PPO update by phase, for full training of each model."""
    lines = [
        "| model | sampling | frozen pass | updates | all, PFLOP | forward pass of a token, GFLOP |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model in MODELS:
        run = planned(model)
        found = ppo_update(run)
        cells = [f"{each / 1e15:.2f}" for each in (*found.values(), sum(found.values()))]
        token = forward(run.shape, 1, run.length, run.length) / run.length
        lines.append(f"| {model} | {' | '.join(cells)} | {token / 1e9:.2f} |")
    return "\n".join(lines)


def growth() -> str:
    """Return the table of how operations and memory grow if one size doubles, at 1 B."""
    base = planned("llama-3.2-1b")
    doubled = {
        "prompts an update (`ppo.batch_size`)": planned("llama-3.2-1b", "ppo.batch_size=256", "ppo.minibatch_size=128"),
        "epochs (`ppo.epochs`)": planned("llama-3.2-1b", f"ppo.epochs={2 * base.ppo.epochs}"),
        "response (`generation.max_new_tokens`)": planned("llama-3.2-1b", "generation.max_new_tokens=1024"),
        "prompt (`generation.max_prompt_tokens`)": planned("llama-3.2-1b", "generation.max_prompt_tokens=1024"),
        "both lengths": planned("llama-3.2-1b", "generation.max_new_tokens=1024", "generation.max_prompt_tokens=1024"),
        "blocks (parameters of the matrices)": base._replace(shape=base.shape.model_copy(update={"layers": 32})),
    }
    lines = ["| twice the | operations an update | peak of ppo, GB |", "|---|---:|---:|"]
    lines.append(f"| (none) | × 1 | {_peak(base):.1f} |")
    once = sum(ppo_update(base).values())
    for what, run in doubled.items():
        lines.append(f"| {what} | × {sum(ppo_update(run).values()) / once:.2f} | {_peak(run):.1f} |")
    return "\n".join(lines)


def _peak(run: PlannedRun) -> float:
    return plan_stages(run, Machine(1, CARD))[-1].worst.bytes / 1e9


def rank_table() -> str:
    """Return the table of PPO at 8 B with full training on 1 to 32 ranks: memory, operations and bytes sent per
    rank."""
    run = planned("llama-3.1-8b")
    micros = -(-run.ppo.minibatch_size // run.ppo.micro_batch_size)
    operations = sum(ppo_update(run).values())
    lines = [
        "| GPUs | ZeRO-2: ppo, GB | sent a step, GB | ZeRO-3: ppo, GB | sent a step, GB | PFLOP a GPU and update |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for gpus in (1, 2, 4, 8, 16, 32):
        cells = []
        for sharding in ("zero2", "zero3"):
            stage = plan_stages(run, Machine(gpus, CARD, sharding))[-1]
            sent = step_traffic(run.shape, Ranks(gpus, sharding), max(1, micros // gpus))
            cells += [_cell(stage), f"{sent / 1e9:.0f}"]
        lines.append(f"| {gpus} | {' | '.join(cells)} | {operations / gpus / 1e15:.1f} |")
    return "\n".join(lines)


TABLES = {
    "setting": setting, "memory": memory, "parts": parts, "operations": operations, "growth": growth,
    "ranks": rank_table,
}  # fmt: skip


def refreshed(page: str) -> str:
    """Return `page` with each table computed again, between the comments `<!-- table: NAME -->` and `<!-- end -->`."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def stale(page: str) -> Iterator[str]:
    """Return the names of the tables that `page` lacks, and `tables` if one of them is stale."""
    yield from (name for name in TABLES if f"<!-- table: {name} -->" not in page)
    if refreshed(page) != page:
        yield "tables"


def main() -> None:
    """Update the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        if found := list(stale(page)):
            sys.exit(f"{PAGE} is stale ({', '.join(found)}): python -m flows.reports.sizes.scaling")
        return
    PAGE.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
