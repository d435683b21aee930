"""Tether's PPO update against that of TRL 1.12.0's PPOTrainer: samples/s, seconds of each phase, peak memory.

    pip install --no-deps --target /tmp/trl trl==1.12.0
    python -m tests.bench.trl.throughput --trl /tmp/trl                     # on the CPU, against TRL
    python -m tests.bench.trl.throughput --rollout                          # our sampler against `generate`
    python -m tests.bench.trl.throughput --device cuda --dtype bfloat16     # on a GPU, ours alone, against its limits

The work is fixed (`workload.py`): equal models, prompts and response lengths; batches of 32 responses (8 at 135m),
which are one minibatch and one micro-batch; 4 epochs, so 4 optimiser steps an update; no gradient checkpointing, no
dropout, AdamW. `ragged`: prompts of 16 to 64 tokens, responses of 8 to 64 with EOS; `full`: all of 64, without. TRL
has a separate value model always; it is compared with both of our critics. bfloat16 is each side's own autocast.

Every measurement is a process of its own (`throughput_side.py`): an update that isn't measured, then `--updates`; with
0 the first is what is measured, for sizes at which one takes a minute. Sides alternate, in reversed order every second
pair; ratios are medians over `--pairs` of TRL / ours for time, ours / TRL for memory. Memory is the peak while updating
less what the imports took, on a GPU the peak that torch allocated there. What each phase holds stands in
`throughput_side.py`; `cpu` is processor time, all threads.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.tools import argument_parser, bar, markdown, measured, require_trl

SIZES, VARIANTS, DTYPES = ("1m", "7m", "30m", "135m", "1b"), ("ragged", "full"), ("float32", "bfloat16")
CRITICS = ("separate", "shared")
TITLES = ["", "TRL", *(title for critic in CRITICS for title in (critic, "ratio"))]
PHASES = ("rollout", "scoring", "training", "other", "update")
CLOCKS = tuple(phase + clock for clock in ("", " cpu") for phase in PHASES)
"""What `throughput_side.py` calls its seconds: of the clock, then of the processor."""
SPEED_BARS = {
    ("separate", "7m"): {"ragged": 1.5, "full": 1.2},
    ("separate", "135m"): {"ragged": 1.3, "full": 1.05},
    ("shared", "7m"): {"ragged": 2.8, "full": 2.3},
    ("shared", "135m"): {"ragged": 2.0, "full": 1.6},
}
"""Least ratio of samples/s, against TRL in the same format."""
MEMORY_BARS = {"separate": 0.7, "shared": 0.6}
"""Largest ratio of peak memory, at the sizes of `SPEED_BARS`."""
ACROSS_BAR, ROLLOUT_BAR = 3.0, 2.0
"""Least ratio of our shared bfloat16 at 135m to TRL's float32; of our sampler's tokens/s to `generate`'s."""

Counted = dict[str, dict[str, float]]
"""Operations by phase (`update operations` and so on), by side."""
Measured = dict[tuple[str, str], list[dict[str, Any]]]
"""What `throughput_side.py` printed, by (side, dtype), a pair an item."""


def measure(options: argparse.Namespace, side: str, pair: int = 0, **what: Any) -> Any:
    """Run `throughput_side.py`, or take what `--out` says it printed for the same before."""
    given = {name: getattr(options, name) for name in ("device", "threads", "updates", "pairs", "products")} | {
        "count": False, "side": side, "smollm2": str(options.smollm2), "variant": "ragged", "dtype": "float32",
        "peaks": {"bandwidth": options.bandwidth, "flops": options.peak_flops}, **what,
    }  # fmt: skip
    asked = given | {"pair": pair}
    if side != "rollout":
        del asked["pairs"]
    if options.out and options.out.exists():
        for line in map(json.loads, options.out.read_text("utf-8").splitlines()):
            if line["asked"] == asked:
                return line["found"]
    found = measured("tests.bench.trl.throughput_side", given, options.threads, options.trl if side == "trl" else None)
    if options.out:
        with options.out.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps({"asked": asked, "found": found}) + "\n")
    return found


def alternate(options: argparse.Namespace, size: str, variant: str) -> Measured:
    """All sides in all formats, in turns, `--pairs` times."""
    sides = [(side, dtype) for dtype in options.dtype for side in ("trl", *CRITICS)]
    measured: Measured = {side: [] for side in sides}
    for pair in range(options.pairs):
        for side, dtype in sides if pair % 2 == 0 else reversed(sides):
            measured[side, dtype].append(measure(options, side, pair, size=size, variant=variant, dtype=dtype))
            print(f"{size} {variant} {dtype} {side}, pair {pair + 1}", file=sys.stderr)
    return measured


def ratio(over: Iterable[float], under: Iterable[float]) -> float:
    """Median of the ratios of each pair."""
    return median(a / b for a, b in zip(over, under, strict=True))


def count(options: argparse.Namespace, size: str, variant: str) -> Counted:
    """Operations of each side's first update, by phase, counted once: they depend on shapes alone."""
    asked = {"size": size, "variant": variant, "updates": 0, "count": True}
    return {side: measure(options, side, **asked)["seconds"] for side in ("trl", *CRITICS)}


def bounds(counted: Counted, measured: Measured, dtype: str) -> str:
    """A Markdown table: operations of each phase, what their ratio allows at most, and the share of it that is reached.

    The bound is the ratio of samples/s if every operation took both sides the same time and nothing else took any.
    """
    rows = []
    for phase in PHASES:
        of = {side: found[f"{phase} operations"] / 1e9 for side, found in counted.items()}
        cells = [f"{phase}, GFLOP", f"{of['trl']:.1f}"]
        for critic in CRITICS:
            cells += [f"{of[critic]:.1f}", f"{of['trl'] / of[critic]:.2f}" if of[critic] else ""]
        rows.append(cells)
    for title, field in (("share of the bound", "samples_per_second"), ("by processor time", "update cpu")):
        cells = [title, ""]
        for critic in CRITICS:
            bound = counted["trl"]["update operations"] / counted[critic]["update operations"]
            here, there = measured[critic, dtype], measured["trl", dtype]
            if field == "samples_per_second":
                reached = ratio([r[field] for r in here], [r[field] for r in there])
            else:
                reached = ratio([r["seconds"][field] for r in there], [r["seconds"][field] for r in here])
            cells += ["", f"{reached / bound:.0%}"]
        rows.append(cells)
    return markdown(TITLES, rows)


def table(measured: Measured, size: str, variant: str, dtype: str) -> str:
    """A Markdown table of a size, variant and format: a phase a line, then samples/s and memory."""
    runs = {side: measured[side, dtype] for side in ("trl", *CRITICS)}
    rows = []
    seconds = {side: {p: [r["seconds"][p] for r in found] for p in CLOCKS} for side, found in runs.items()}
    for phase in CLOCKS:
        cells = [f"{phase}, s", f"{median(seconds['trl'][phase]):.2f}"]
        for critic in CRITICS:
            here, there = seconds[critic][phase], seconds["trl"][phase]
            cells += [f"{median(here):.2f}", f"{ratio(there, here):.2f}" if all(here) else ""]
        rows.append(cells)
    for name, title, unit, largest in (
        ("samples_per_second", "samples/s", 1, False),
        ("peak", "memory, GB", 1e9, True),
    ):
        values = {side: [r[name] / unit for r in found] for side, found in runs.items()}
        cells = [title, f"{median(values['trl']):.2f}"]
        for critic in CRITICS:
            bars = SPEED_BARS.get((critic, size))
            limit = bars and (MEMORY_BARS[critic] if largest else bars[variant])
            cells += [f"{median(values[critic]):.2f}", bar(ratio(values[critic], values["trl"]), limit, largest)]
        rows.append(cells)
    return markdown(TITLES, rows)


def across(measured: Measured) -> str:
    """Our shared trunk in bfloat16 against TRL in float32."""
    speeds = [[r["samples_per_second"] for r in measured[k]] for k in (("shared", "bfloat16"), ("trl", "float32"))]
    return f"shared trunk in bfloat16 / TRL in float32: {bar(ratio(*speeds), ACROSS_BAR)} samples/s"


def on_cpu(options: argparse.Namespace, size: str) -> None:
    """Measure and print both variants of a size."""
    for variant in options.variants:
        counted, measured = count(options, size, variant), alternate(options, size, variant)
        for dtype in options.dtype:
            print(f"\n{size}, {variant}, {dtype}, {options.pairs} pairs\n\n{table(measured, size, variant, dtype)}\n")
            print(bounds(counted, measured, dtype), flush=True)
        if size == "135m" and len(options.dtype) == 2:
            print(across(measured))


def rollouts(options: argparse.Namespace, size: str) -> None:
    """Measure and print our sampler against `generate`."""
    found = measure(options, "rollout", size=size)
    print(
        f"{size}, rollout of 64 ragged: {found['tether']:.0f} tokens/s, `generate` {found['generate']:.0f}; "
        f"{bar(found['ratio'], ROLLOUT_BAR)}, by processor time {found['cpu_ratio']:.2f}"
    )


def against_limits(options: argparse.Namespace, size: str) -> None:
    """Measure and print ours alone, against the device's limits."""
    for variant in options.variants:
        for dtype in options.dtype:
            for critic in CRITICS:
                found = measure(options, critic, size=size, variant=variant, dtype=dtype)
                print(
                    f"{size}, {variant}, {dtype}, {critic}: {found['samples_per_second']:.1f} samples/s; "
                    f"decoding {found['decoded_tokens_per_second']:.0f} tokens/s, {found['bandwidth_share']:.1%} of "
                    f"the bandwidth limit; training {found['flop_utilisation']:.1%} model FLOP utilisation; "
                    f"peak {found['peak'] / 1e9:.1f} GB"
                )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argument_parser(__doc__)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES[:4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="each against TRL's own")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each side")
    parser.add_argument("--updates", type=int, default=2, help="measured updates of each measurement; 0: the first")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rollout", action="store_true", help="only our sampler against `generate`")
    parser.add_argument(
        "--products", choices=("onednn", "torch"), default="onednn", help="torch: our float32 products as TRL's, by MKL"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ours alone (never run yet)")
    parser.add_argument("--alone", action="store_true", help="ours alone, against the limits given, on any device")
    # NVIDIA's data sheet of the H200 SXM: 4.8 TB/s; dense bfloat16 989 TFLOP/s (half of the figure with sparsity).
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="the device's memory bandwidth, bytes/s")
    parser.add_argument("--peak-flops", type=float, default=989e12, help="the device's peak in the format, FLOP/s")
    parser.add_argument("--smollm2", type=Path, default=home / "models" / "smollm2", help="from `tether fetch smollm2`")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl"), help="the folder TRL was installed into")
    parser.add_argument("--out", type=Path, default=None, help="a journal: what is in it isn't measured again")
    return parser.parse_args()


def main() -> None:
    """Measure size after size and print as they come."""
    options = arguments()
    by_limits = options.alone or options.device == "cuda"
    alone = options.rollout or by_limits
    if not alone:
        require_trl(options.trl)
    one = rollouts if options.rollout else against_limits if by_limits else on_cpu
    for size in options.sizes:
        if size == "135m" and not options.smollm2.is_dir():
            print(f"135m left out: no model in {options.smollm2}; `tether fetch smollm2` makes it")
            continue
        one(options, size)


if __name__ == "__main__":
    main()
