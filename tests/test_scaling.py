"""The tables of docs/scaling.md are what `tether plan` computes now."""

import re
from pathlib import Path

from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.planning.shape import KNOWN
from flows.reports.memory_report import MemoryPlan

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
SETTING = [line.strip().removeprefix("--set ").removesuffix(" \\") for line in PAGE.splitlines() if "    --set" in line]
"""Options of the command above the table, on top of the profile `gpu`."""
LORA = ["reward.lora.rank=16", "ppo.lora.rank=16"]
METHODS = {"full": [], "LoRA": LORA, "QLoRA": [*LORA, "reward.lora.quantize=4bit", "ppo.lora.quantize=4bit"]}


def row(model: str, method: str) -> str:
    """Return a row: GB of each stage's worst phase on one GPU and on eight, bold above 80, and PPO's worst phase."""
    cells = []
    for gpus, options in ((1, list[str]()), (8, ["runtime.sharding=zero3"])):
        config = load_config("gpu", [parse_override(option) for option in [*SETTING, *METHODS[method], *options]])
        plan = MemoryPlan.of("gpu", config, KNOWN[model], gpus, 80 * 10**9)
        for phase in map(plan.worst, plan.stages):
            size = f"{phase.bytes / 1e9:.0f}"
            cells.append(size if plan.holds(phase) else f"**{size}**")
        cells.append(plan.worst("ppo").name)
    return f"| {model} | {method} | {' | '.join(cells)} |"


def test_advice_on_memory_names_the_methods_options() -> None:
    of = {m: load_config("tiny", [parse_override(f"policy.method={m}")]) for m in ("ppo", "online_dpo", "best_of_n")}
    texts = {m: MemoryPlan.of("tiny", config, KNOWN["smollm2-135m"], 1, 10**9).text() for m, config in of.items()}
    assert [m for m, text in texts.items() if "policy update" in text and "ppo.critic.kind" in text] == [*of][:2]
    options = texts["best_of_n"].partition("Options that reduce memory (STAGE: sft, reward or policy):")[2]
    assert "policy.lora.rank=16" in options and "ppo." not in options
    (larger,) = re.findall(r"ppo: --set (policy\.micro_batch_size=\d+)", MemoryPlan.of(
        "tiny", of["best_of_n"], KNOWN["smollm2-135m"], 1, 10**11
    ).text())  # fmt: skip
    size = load_config("tiny", [parse_override("policy.method=best_of_n"), parse_override(larger)]).policy
    assert size.micro_batch_size > of["best_of_n"].policy.micro_batch_size


def test_the_pages_table_is_the_plans() -> None:
    rows = [row(model, method) for model in KNOWN for method in METHODS]
    assert len(SETTING) == 12 and [line for line in PAGE.splitlines() if line.startswith(("| smol", "| llama"))] == rows


def test_the_page_says_when_a_direct_method_frees_frozen_models() -> None:
    def frozen(*changes: str) -> int:
        config = load_config("tiny", [parse_override(change) for change in changes])
        phases = MemoryPlan.of("tiny", config, KNOWN["smollm2-135m"], 1, None).stages["ppo"]
        return next(phase.parts.get("frozen", 0) for phase in phases if phase.name == "training")

    freed, kto, kept = (frozen(f"policy.method={method}", f"policy.evaluate_every={every}")
                        for method, every in (("dpo", "null"), ("kto", "null"), ("dpo", "8")))  # fmt: skip
    assert freed == 0 < kto < kept
    words = " ".join(PAGE.split())
    assert "its training frees the frozen models that no step uses unless `policy.evaluate_every` is set" in words
