"""Our SFT and reward training against TRL 1.12.0's SFTTrainer and RewardTrainer: tokens/s and pairs/s.

    pip install --no-deps --target /tmp/trl trl==1.12.0
    python tests/bench/supervised.py --trl /tmp/trl

Both sides get the same model (`workload.py`), the same examples, tokenised, and the same config (`recipe.py` says what
TRL is given and what is its own): prompts of 16 to 64 tokens, responses of 8 to 64 with EOS, all uniform; `--batches`
optimiser steps of 32 examples (8 at 135m), `--micro` a forward; AdamW at a constant rate, gradients clipped at norm 1;
one epoch. SFT's loss is on the response alone. TRL's `--padding-free` flattens a batch into one row, which transformers
masks block by block with its default attention too: it works here without flash-attention, in the square of the
batch's tokens; so padding, TRL's default, is what is compared unless this asks for it.

Every measurement is a process of its own (`supervised_side.py`): two steps that aren't measured, then the epoch. Sides
alternate, in reversed order every second pair; ratios are medians over `--pairs` of TRL's seconds / ours. That both
sides train on the same tokens (and on the same response tokens), take the same steps and have the same mean loss is
checked. Slots are what is computed: padding too, and of ours a prompt once that two responses share. `cpu` is
processor time, all threads.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

SIZES, DTYPES = ("1m", "7m", "30m", "135m"), ("float32", "bfloat16")
STAGES, SIDES = ("sft", "reward"), ("trl", "tether")
BAR = 1.3
"""Least ratio of tokens/s (SFT) or pairs/s (reward training)."""
PHASES = ("all", "all cpu", "data", "forward and the rest", "backward", "optimizer")
SAME = ("tokens", "loss tokens", "steps")
"""Counts that must be equal on both sides."""

Runs = dict[str, list[dict[str, Any]]]
"""What `supervised_side.py` printed, by side, a pair an item."""


def batch_size(size: str) -> int:
    """Examples an optimiser step."""
    return 8 if size == "135m" else 32


def alternate(options: argparse.Namespace, stage: str, size: str, dtype: str) -> Runs:
    """Both sides in turns, `--pairs` times."""
    from process import measured  # beside this script; the unit tests import it by another name

    batch, runs = batch_size(size), {side: [] for side in SIDES}
    given = {
        "stage": stage, "size": size, "dtype": dtype, "threads": options.threads, "smollm2": str(options.smollm2),
        "batch": batch, "batches": options.batches, "micro": min(options.micro or batch, batch),
        "padding_free": options.padding_free,
    }  # fmt: skip
    for pair in range(options.pairs):
        for side in SIDES if pair % 2 == 0 else reversed(SIDES):
            trl = options.trl if side == "trl" else None
            runs[side].append(measured("supervised_side.py", given | {"side": side}, options.threads, trl))
            print(f"{stage} {size} {dtype} {side}, pair {pair + 1}", file=sys.stderr)
    check_equal_work(runs)
    return runs


def check_equal_work(runs: Runs) -> None:
    """See that all measurements were of the same work.

    Raises:
        ValueError: they weren't: other tokens, steps, or a mean loss that differs by over 1 %.
    """
    first, *others = [run for side in SIDES for run in runs[side]]
    for run in others:
        counts = [{name: r["counts"].get(name, 0) for name in SAME} for r in (first, run)]
        if counts[0] != counts[1]:
            raise ValueError(f"the sides did different work: {counts[0]} and {counts[1]}")
        if not math.isclose(first["loss"], run["loss"], rel_tol=0.01):
            raise ValueError(f"the sides' mean losses differ: {first['loss']} and {run['loss']}")


def table(runs: Runs, stage: str, examples: int) -> str:
    """A Markdown table, a phase a line, and the ratio of speeds beside its bar."""
    lines = ["| | TRL | Tether | ratio |", "|---|---|---|---|"]
    seconds = {side: {p: [run["seconds"].get(p, 0.0) for run in runs[side]] for p in PHASES} for side in SIDES}

    def ratio(phase: str) -> float:
        pairs = zip(*(seconds[side][phase] for side in SIDES), strict=True)
        return median(theirs / ours if ours else math.inf for theirs, ours in pairs)

    for phase in PHASES:
        theirs, ours = (median(seconds[side][phase]) for side in SIDES)
        lines.append(f"| {phase}, s | {theirs:.2f} | {ours:.2f} | {ratio(phase):.2f} |")
    counts = {side: runs[side][0]["counts"] for side in SIDES}
    slots = [counts[side]["slots"] / counts[side]["tokens"] for side in SIDES]
    lines.append(f"| slots computed a token | {slots[0]:.2f} | {slots[1]:.2f} | {slots[0] / slots[1]:.2f} |")
    unit, work = ("tokens/s", counts["trl"]["tokens"]) if stage == "sft" else ("pairs/s", examples)
    speeds = [median(work / s for s in seconds[side]["all"]) for side in SIDES]
    verdict = f"≥ {BAR:g} {'met' if ratio('all') >= BAR else 'MISSED'}"
    lines.append(f"| {unit} | {speeds[0]:.1f} | {speeds[1]:.1f} | {ratio('all'):.2f} ({verdict}) |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["7m"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="both sides' own autocast")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--batches", type=int, default=32, help="optimiser steps of each measurement")
    parser.add_argument("--micro", type=int, default=None, help="examples a forward (default: the whole batch)")
    parser.add_argument("--padding-free", action="store_true", help="on TRL's side of SFT")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smollm2", type=Path, default=home / "models" / "smollm2", help="from `tether fetch smollm2`")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl"), help="the folder TRL was installed into")
    parser.add_argument("--out", type=Path, default=None, help="write every measurement here, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measure stage after stage and size after size, and print as they come."""
    from process import require_trl

    options, kept = arguments(), []
    require_trl(options.trl)
    for size in options.sizes:
        if size == "135m" and not options.smollm2.is_dir():
            print(f"135m left out: no model in {options.smollm2}; `tether fetch smollm2` makes it")
            continue
        for dtype in options.dtype:
            for stage in options.stages:
                runs = alternate(options, stage, size, dtype)
                found = table(runs, stage, options.batches * batch_size(size))
                print(f"\n{stage}, {size}, {dtype}, {options.pairs} pairs\n\n{found}\n", flush=True)
                kept.append({"stage": stage, "size": size, "dtype": dtype, "runs": runs})
                if options.out:
                    options.out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
