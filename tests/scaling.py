"""Write the tables of docs/scaling.md with the arithmetic of `tether plan`.

python -m tests.scaling          # updates the page; --check exits 1 if it is stale
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from components.planning.advice import Machine, StagePlan, plan_stages
from components.planning.memory import PlannedRun
from components.planning.shape import KNOWN
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.reports.memory import planned_run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
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


def rank_table() -> str:
    """Return the table of the memory of PPO at 8 B with full training on 1 to 32 ranks."""
    run = planned("llama-3.1-8b")
    lines = ["| GPUs | ZeRO-2: ppo, GB | ZeRO-3: ppo, GB |", "|---:|---:|---:|"]
    for gpus in (1, 2, 4, 8, 16, 32):
        cells = [_cell(plan_stages(run, Machine(gpus, CARD, sharding))[-1]) for sharding in ("zero2", "zero3")]
        lines.append(f"| {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"setting": setting, "memory": memory, "parts": parts, "ranks": rank_table}


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
            sys.exit(f"{PAGE} is stale ({', '.join(found)}): python -m tests.scaling")
        return
    PAGE.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
