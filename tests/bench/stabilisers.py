"""What PPO's stabilisers do to demo-long, each against none on the same seeds: a table with a line each.

    python -m tests.bench.stabilisers --seeds 20-22 --variants ptx warmup --jobs 1 --threads 1

A seed has a TETHER_HOME of its own, and its variants share the data, the SFT policy and the reward model. Every gate is
off. Finished runs are not run again. Beside each difference of paired seeds stands its 95 % t interval, from two seeds
on. `--set` changes options of every run, as in `--set ppo.updates=30 ppo.batch_size=64`; give such runs a `--home` of
their own.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.bench.runs import stage_of_run
from tests.bench.tether import mean_of
from tests.bench.thresholds import seed_range

PLAIN = "plain"
VARIANTS: dict[str, list[str]] = {
    PLAIN: [],
    "ptx": ["ppo.ptx.coefficient=0.2", "ppo.ptx.batch_size=128"],
    "warmup": ["ppo.critic.warmup=5"],
    "clip-higher": ["ppo.clip_range_high=0.28"],
    "dual-clip": ["ppo.dual_clip=3"],
    "truncated": ["ppo.mask_truncated=true"],
    "sequence": ["ppo.aggregation=sequence"],
    "cap": ["ppo.aggregation=cap"],
    "length-buffer": ["ppo.score.length_buffer=16"],
    "ema": ["ppo.ema=0.8"],
}
SHOWN = (
    "ppo/demonstration_perplexity_ratio", "ppo/gold", "ppo/kl", "ppo/reward_gain", "ppo/entropy_ratio", "ppo/ratio_max",
    "ppo/ended",
)  # fmt: skip

Runs = Mapping[tuple[int, str], Mapping[str, float]]
"""The final metrics of each seed and variant."""


def run(folder: Path, seed: int, variant: str, threads: int, changed: Sequence[str] = ()) -> Mapping[str, float]:
    """The final metrics of one seed's policy, with the options `changed` of demo-long."""
    given = [f"seed={seed}", f"runtime.threads={threads}", *changed, *VARIANTS[variant]]
    found: dict[str, Any] = stage_of_run((folder / f"stabilisers-{seed}").resolve(), variant, "demo-long", "ppo", given)
    return dict(found["metrics"])


def table(runs: Runs) -> str:
    """A Markdown table of means over seeds; of a variant with its paired difference to plain demo-long."""
    seeds = sorted({seed for seed, _ in runs})
    variants = [variant for variant in VARIANTS if all((seed, variant) in runs for seed in seeds)]
    lines = ["| variant | seeds | " + " | ".join(name.removeprefix("ppo/") for name in SHOWN) + " |"]
    lines += ["|---|---:|" + "---:|" * len(SHOWN)]
    for variant in variants:
        cells = [_cell(runs, seeds, variant, name) for name in SHOWN]
        lines.append(f"| {variant} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(runs: Runs, seeds: Sequence[int], variant: str, name: str) -> str:
    mean = fmean(runs[seed, variant][name] for seed in seeds)
    if variant == PLAIN:
        return f"{mean:.3f}"
    differences = [runs[seed, variant][name] - runs[seed, PLAIN][name] for seed in seeds]
    if len(differences) < 2:
        return f"{mean:.3f} ({differences[0]:+.3f})"
    found = mean_of(differences)
    return f"{mean:.3f} ({found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}])"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=seed_range, required=True)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS)[1:], required=True)
    parser.add_argument("--home", type=Path, default=Path(".tether-bench"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], help="options of every run")
    options = parser.parse_args()

    def of_seed(seed: int) -> dict[tuple[int, str], Mapping[str, float]]:
        return {(seed, v): run(options.home, seed, v, options.threads, options.set) for v in (PLAIN, *options.variants)}

    with ThreadPoolExecutor(options.jobs) as pool:
        found = {key: metrics for each in pool.map(of_seed, options.seeds) for key, metrics in each.items()}
    print(table(found))


if __name__ == "__main__":
    main()
