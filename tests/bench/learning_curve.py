"""A reward model's accuracy by the number of its training pairs, and how many would put it above the length rule.

    python -m tests.bench.learning_curve hh-smollm2 --sizes 750 1500 3000 \
        --set 'data.preferences=[helpful-base-test.jsonl.gz, harmless-base-test.jsonl.gz]'

Each size is `tether run PROFILE --set reward.max_pairs=N`, ended after the reward stage with every gate off; data and
SFT are computed once. A smaller size trains on the first pairs of a larger one, which are a fair sample of all. All are
judged on the same test pairs. Finished sizes are not run again.

Accuracy is fitted as logit(accuracy) = a + b log2(pairs), weighted by each point's error, and read off where it is as
far above the length rule's as the gate asks, half the interval's width included. The interval of that number of pairs
is the fit's own, drawn 10,000 times; the points share their test pairs, so their differences are surer than it says.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import logit
from scipy.stats import norm

from components.training.loop import seeded
from flows.config.run_config import load_config
from tests.bench.runs import REAL, stage_of_run, with_models

DRAWS = 10_000
SHOWN = {
    "accuracy": "accuracy", "accuracy_low": "low", "accuracy_high": "high", "length_accuracy": "length rule",
    "length_gain_low": "gain on it, low", "balanced_length_accuracy_low": "balanced, low", "ece": "ECE",
    "ece_null_95": "its bound", "calibration_slope": "slope", "brier": "Brier", "temperature": "temperature",
}  # fmt: skip


class Needed(NamedTuple):
    """How many pairs it takes; infinite where the fit never gets there."""

    pairs: float
    low: float
    high: float
    """Ends of the 95 % interval."""


def needed(sizes: list[int], points: list[dict[str, float]], margin: float, seed: int = 0) -> Needed:
    """Pairs at which the fitted accuracy is the length rule's plus `margin`.

    Args:
        sizes: pairs of each point, two or more different ones.
        points: `reward/accuracy` with `_low` and `_high` (95 %), and `reward/length_accuracy`.
    """
    x = np.log2(np.asarray(sizes, dtype=np.float64))
    low, value, high = (logit([p[f"reward/accuracy{end}"] for p in points]) for end in ("_low", "", "_high"))
    error = (high - low) / (2 * norm.ppf(0.975))
    wanted = logit(min(max(p["reward/length_accuracy"] for p in points) + margin, 1 - 1e-9))
    draws = np.random.default_rng(seeded(seed, "learning curve").getrandbits(64))
    curves = value + error * draws.standard_normal((DRAWS, len(sizes)))
    slopes, intercepts = np.polyfit(x, np.vstack([value, curves]).T, 1, w=1 / error)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        at = np.where(slopes > 0, np.exp2((wanted - intercepts) / slopes), math.inf)
    ends = np.quantile(at[1:], [0.025, 0.975], method="nearest")
    return Needed(float(at[0]), float(ends[0]), float(ends[1]))


def table(sizes: list[int], points: list[dict[str, float]]) -> str:
    """A Markdown table, a size a line."""
    lines = ["| pairs | " + " | ".join(SHOWN.values()) + " |", "|" + "---|" * (len(SHOWN) + 1)]
    for size, point in zip(sizes, points, strict=True):
        lines.append(f"| {size} | " + " | ".join(f"{point[f'reward/{name}']:.3f}" for name in SHOWN) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table and how many pairs it takes."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("profile")
    options.add_argument("--sizes", type=int, nargs="+", required=True, help="training pairs, three sizes or more")
    options.add_argument("--set", action="append", default=[], dest="given", help="as of tether run")
    options.add_argument("--home", type=Path, default=REAL)
    asked = options.parse_args()
    sizes = sorted(set(asked.sizes))
    if len(sizes) < 3:
        options.error("a curve needs three sizes or more")
    home = with_models(asked.home)
    points: list[dict[str, Any]] = [
        stage_of_run(home, f"pairs-{size}", asked.profile, "reward", [*asked.given, f"reward.max_pairs={size}"])[
            "metrics"
        ]
        for size in sizes
    ]
    print(table(sizes, points))
    threshold = next(t for gate, t in load_config(asked.profile).gates.rules() if gate.name == "reward.length_gain_low")
    half = points[-1]["reward/accuracy"] - points[-1]["reward/length_accuracy"] - points[-1]["reward/length_gain_low"]
    margin = (threshold if isinstance(threshold, (int, float)) else 0.0) + half
    it = needed(sizes, points, margin)
    print(
        f"\nThe gate asks for {margin:.3f} above the length rule ({half:.3f} of it is half the interval of "
        f"{points[-1]['reward/test_pairs']:.0f} test pairs). The fit is there at {it.pairs:,.0f} pairs "
        f"[{it.low:,.0f}, {it.high:,.0f}]."
    )


if __name__ == "__main__":
    main()
