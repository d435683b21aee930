"""What Tether's PPO learns against what TRL 1.12.0's PPOTrainer learns, on the built-in task: gold score at equal KL.

    pip install --no-deps --target /tmp/trl trl==1.12.0
    python -m tests.bench.trl.learning --trl /tmp/trl --jobs 2 --figure docs/images/learning.png

Both run the config whose speed `throughput.py` compares (`recipe.py`, which also says what can't be the same), with
demo-long's SFT policy, reward model, prompts, lengths and β, at the learning rate given here; a seed has the same
prompts in the same order on both sides. Before the first update and after every `--judge-every` of them the same code
judges both policies on the same held-out prompts: mean KL to SFT, mean gold score. That makes a curve a run.

Of each seed the gap is our gold score less TRL's, the gain is TRL's less SFT's, both averaged over the KL that both
curves reach. The bar: the one-sided 95 % lower bound of the mean gap (paired t over seeds) is at least -10 % of the
mean gain. The learning rate is lower than demo-long's, so that points follow KL as it rises: at 1e-3 the 4 epochs of an
update overshoot β's equilibrium, and KL then says little of how far a policy has come. What is made goes to `--out`, a
file a run; what is there is not made again.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.optimize import isotonic_regression

from tests.bench.tools import argument_parser, markdown, measured, require_trl
from tests.bench.trl.recipe import ppo_config

CRITICS = ("separate", "shared")
BAR, CONFIDENCE = -0.10, 0.95
LEAST_OVERLAP = 0.5
"""Nats a response: curves that share less of KL say nothing about equal KL."""
GRID = 101

Curve = list[tuple[float, float]]
"""KL to SFT (nats a response) and gold score after so many updates; the first is SFT's own, at KL 0."""


class Compared(NamedTuple):
    """A seed's two curves at equal KL."""

    gap: float
    """Our gold score less TRL's."""
    gain: float
    """TRL's gold score less SFT's."""
    reach: float
    """The KL up to which both curves go, nats a response."""


class Verdict(NamedTuple):
    """All seeds."""

    gap: float
    lower: float
    """One-sided 95 % bound of the mean gap."""
    gain: float
    passed: bool

    @property
    def share(self) -> float:
        """The bound as a share of TRL's gain."""
        return self.lower / self.gain


def rising(curve: Curve) -> np.ndarray:
    """The curve (P, 2) as gold score by rising KL: points over which KL falls again become one, their mean.

    That is isotonic regression of KL over updates. At its equilibrium KL goes up and down by chance while gold still
    rises: in order of KL, a late policy would stand in for an early one.
    """
    points = np.array(curve)
    blocks = isotonic_regression(points[:, 0]).blocks
    return np.array([points[first:end].mean(0) for first, end in pairwise(blocks)])


def at_equal_kl(ours: Curve, theirs: Curve) -> Compared:
    """Means over the KL that both curves reach, points joined by straight lines as `rising` has them.

    Raises:
        ValueError: the curves don't start at the same SFT policy, or share less than `LEAST_OVERLAP` nats.
    """
    if not math.isclose(ours[0][1], theirs[0][1], rel_tol=1e-6):
        raise ValueError(f"gold scores before the first update differ: {ours[0][1]} and {theirs[0][1]}")
    curves = [rising(curve) for curve in (ours, theirs)]
    low, reach = max(c[0, 0] for c in curves), min(c[-1, 0] for c in curves)
    if reach - low < LEAST_OVERLAP:
        raise ValueError(f"the curves share KL from {low:.2f} to {reach:.2f} nats only: train longer, or harder")
    here, there = (np.interp(np.linspace(low, reach, GRID), c[:, 0], c[:, 1]).mean() for c in curves)
    return Compared(float(here - there), float(there - theirs[0][1]), float(reach))


def judge(compared: Sequence[Compared]) -> Verdict:
    """The verdict on two seeds or more.

    Raises:
        ValueError: TRL gained nothing, so a share of its gain means nothing.
    """
    gaps, gain = [c.gap for c in compared], mean(c.gain for c in compared)
    if gain <= 0:
        raise ValueError(f"TRL's gain is {gain:.3f}: it learnt nothing to compare with")
    error = float(stats.sem(gaps)) * float(stats.t.ppf(CONFIDENCE, len(gaps) - 1))
    lower = mean(gaps) - error
    return Verdict(mean(gaps), lower, gain, lower >= BAR * gain)


def inputs(home: Path, wanted: Sequence[str] = ("validate", "sft", "reward")) -> dict[str, str]:
    """Data, SFT policy and reward model of demo-long at seed 0, made with every core where they aren't there.

    Args:
        wanted: the stages whose artifacts are needed, in their order.
    """
    from components.models.runtime import activate
    from flows.config.run_config import load_config
    from tasks.stages import STAGES

    made: dict[str, Path] = {}
    config = load_config("demo-long").resolved()
    for stage in wanted:
        name = "data" if stage == "validate" else stage
        done, making = home / name, home / f"{name}.part"
        if not done.exists():
            print(f"making {done}", file=sys.stderr)
            activate(config.runtime)
            making.mkdir(parents=True, exist_ok=True)
            STAGES[stage].load_run()(config.stage_job(STAGES[stage]), made, making, lambda *_, **__: None)
            making.rename(done)
        made[name] = done / "artifact"
    return {name: str(path) for name, path in made.items()}


def run(options: argparse.Namespace, side: str, seed: int, made: dict[str, str]) -> Any:
    """What `learning_side.py` prints for a side and seed, kept in a file of `options.out`."""
    critic = "separate" if side == "trl" else side
    config = ppo_config(options.batch, options.updates, options.learning_rate, critic)
    given = {
        "side": side, "seed": seed, "judge_every": options.judge_every, "judged": options.judged, **made,
        "config": config.model_dump(mode="json"),
    }  # fmt: skip
    kept = options.out / f"{side}-{seed}.json"
    if not kept.exists() or json.loads(kept.read_text())["given"] != given:
        found = measured("tests.bench.trl.learning_side", given, threads=1, trl=options.trl if side == "trl" else None)
        kept.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        print(f"{side}, seed {seed}: {found['seconds']['all']:.0f} s", file=sys.stderr)
    return json.loads(kept.read_text())


def curve(found: Any) -> Curve:
    """KL and gold score of a run."""
    return [(point["kl"], point["gold"]) for point in found["points"]]


def summary(critic: str, compared: Sequence[Compared]) -> dict[str, Any]:
    """What is printed and kept of one of our critics against TRL."""
    out: dict[str, Any] = {"critic": critic, "seeds": [c._asdict() for c in compared]}
    if len(compared) > 1:
        verdict = judge(compared)
        out |= {**verdict._asdict(), "share": verdict.share}
    return out


def report(critic: str, compared: Sequence[Compared]) -> str:
    """A Markdown table, a seed a line, and the verdict."""
    rows = [(i, f"{c.gap:+.3f}", f"{c.gain:.3f}", f"{c.reach:.2f}") for i, c in enumerate(compared)]
    lines = [markdown(["seed", "gap", "TRL's gain", "equal KL up to"], rows)]
    if len(compared) > 1:
        found = judge(compared)
        lines += [
            "",
            f"{critic} critic, {len(compared)} seeds: gold score at equal KL {found.gap:+.3f} to TRL's, one-sided "
            f"{CONFIDENCE:.0%} bound {found.lower:+.3f}; TRL's gain {found.gain:.3f}; the bound is {found.share:+.1%} "
            f"of it (≥ {BAR:.0%} {'met' if found.passed else 'MISSED'})",
        ]
    return "\n".join(lines)


def median_curve(curves: Sequence[Curve]) -> Curve:
    """Medians over seeds of KL and of gold score after each number of updates."""
    return [tuple(np.median(points, axis=0)) for points in zip(*curves, strict=True)]


def figure(curves: dict[str, list[Curve]], path: Path) -> None:
    """Gold score against KL: every seed thin, as `rising` has it; medians over seeds thick."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for colour, (side, found) in zip(("C7", "C0", "C2"), curves.items(), strict=False):
        for one in found:
            axes.plot(*rising(one).T, color=colour, linewidth=0.6, alpha=0.35)
        label = "TRL 1.12.0" if side == "trl" else f"Tether, {side} critic"
        axes.plot(*zip(*median_curve(found), strict=True), "o-", color=colour, linewidth=2, markersize=4, label=label)
    axes.set(xlabel="KL to the SFT policy, nats per response", ylabel="gold score (simulated)")
    axes.set_title(f"The built-in task, {len(curves['trl'])} seeds: what is learnt for the KL spent (thick: medians)")
    axes.legend(loc="lower right")
    drawn.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argument_parser(__doc__)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--seeds", type=int, default=16, help="seeds 0 .. N-1 of PPO")
    parser.add_argument("--critics", nargs="+", choices=CRITICS, default=["separate"], help="ours; TRL's is separate")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, of one thread each")
    parser.add_argument("--batch", type=int, default=32, help="responses an update")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of policy and critic, constant")
    parser.add_argument("--judge-every", type=int, default=3, help="updates between points of a curve")
    parser.add_argument("--judged", type=int, default=256, help="held-out prompts a point")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl"), help="the folder TRL was installed into")
    parser.add_argument("--out", type=Path, default=home / "learning", help="a JSON file a run, and summary.json")
    parser.add_argument("--figure", type=Path, default=None, help="write the curves here")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, print the tables and verdicts, draw the figure."""
    options = arguments()
    require_trl(options.trl)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    made = inputs(options.out / "inputs")
    wanted = [(side, seed) for seed in range(options.seeds) for side in ("trl", *options.critics)]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(wanted, pool.map(lambda one: run(options, *one, made), wanted), strict=True))
    curves = {s: [curve(found[s, seed]) for seed in range(options.seeds)] for s in ("trl", *options.critics)}
    kept = []
    for critic in options.critics:
        compared = [at_equal_kl(*pair) for pair in zip(curves[critic], curves["trl"], strict=True)]
        print(f"\n{report(critic, compared)}")
        kept.append(summary(critic, compared))
    (options.out / "summary.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    if options.figure:
        figure(curves, options.figure)


if __name__ == "__main__":
    main()
