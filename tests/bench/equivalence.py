"""Whether our reward training ends where TRL 1.12.0's RewardTrainer ends: held-out accuracy and loss, over seeds.

    pip install --no-deps --target /tmp/trl trl==1.12.0
    python tests/bench/equivalence.py --trl /tmp/trl --jobs 2

The data are demo-long's (simulated), and so are the SFT model that every reward model starts from and the config
(AdamW, warm-up, linear decay, gradients clipped at norm 1, one epoch). A seed is a sample of `--pairs` training pairs
and a head, the same on both sides, and an order of the pairs, each side's own: ours is bucketed by length, TRL's isn't,
and that is what could make them differ. The same code judges both on the same `--judged` held-out pairs.

Equivalence is tested as two one-sided tests at 5 % (Schuirmann 1987): the 90 % t interval of the paired differences
lies within the margin, 1 point of accuracy, 1 % of TRL's loss. A wide interval is thus no equivalence. With
`--our-order` TRL gets the pairs in our batches: what then differs is rounding, or a fault. What is made goes to
`--out`, a file a run; what is there is not made again.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

SIDES = ("trl", "tether")
ACCURACY_MARGIN, LOSS_MARGIN = 0.01, 0.01
"""Of accuracy, absolute; of loss, as a share of TRL's."""
ERROR = 0.05
"""Of each one-sided test."""


class Verdict(NamedTuple):
    """Paired differences, ours less TRL's, over seeds."""

    mean: float
    low: float
    high: float
    """Ends of the 90 % interval."""
    p: float
    """The greater p value of the two one-sided tests."""
    equivalent: bool


def equivalence(differences: Sequence[float], margin: float) -> Verdict:
    """Two one-sided t tests of paired differences (S,) against -margin and +margin, and the interval to go with them.

    Raises:
        ValueError: fewer than two differences.
    """
    if len(differences) < 2:
        raise ValueError("an interval over seeds needs two seeds or more")
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(1 - 2 * ERROR)
    p = max(
        float(stats.ttest_1samp(differences, end, alternative=side).pvalue)
        for end, side in ((-margin, "greater"), (margin, "less"))
    )
    return Verdict(sum(differences) / len(differences), float(low), float(high), p, p < ERROR)


def report(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A Markdown table, a seed a line, and the verdicts on accuracy and loss.

    Raises:
        ValueError: the two sides of a seed didn't start from the same weights.
    """
    lines = ["| seed | accuracy, TRL | Tether | loss, TRL | Tether | seconds, TRL | Tether |", "|" + "---|" * 7]
    accuracy, loss = [], []
    for seed, (theirs, ours) in enumerate(zip(*(runs[side] for side in SIDES), strict=True)):
        if not math.isclose(theirs["first_loss"], ours["first_loss"], rel_tol=1e-6):
            raise ValueError(f"seed {seed}: losses of the first weights: {theirs['first_loss']}, {ours['first_loss']}")
        accuracy.append(ours["accuracy"] - theirs["accuracy"])
        loss.append(ours["loss"] / theirs["loss"] - 1)
        cells = [f"{side[name]:.4f}" for name in ("accuracy", "loss") for side in (theirs, ours)]
        cells += [f"{side['seconds']:.0f}" for side in (theirs, ours)]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    for name, differences, margin in (("accuracy", accuracy, ACCURACY_MARGIN), ("loss", loss, LOSS_MARGIN)):
        found, unit = equivalence(differences, margin), "points" if name == "accuracy" else "%"
        mean, low, high = (100 * x for x in found[:3])
        lines += [
            "",
            f"{name}, ours less TRL's: {mean:+.2f} {unit}, 90 % interval [{low:+.2f}, {high:+.2f}] over "
            f"{len(differences)} seeds; within ±{100 * margin:g} {unit}: p = {found.p:.2g}, "
            f"{'equivalent' if found.equivalent else 'NOT SHOWN'}",
        ]
    return "\n".join(lines)


def run(options: argparse.Namespace, side: str, seed: int, made: dict[str, str]) -> Any:
    """What `equivalence_side.py` prints for a side and seed, kept in a file of `options.out`."""
    from process import measured  # beside this script; the unit tests import it by another name

    given = {
        "side": side, "seed": seed, "pairs": options.pairs, "judged": options.judged, "threads": 1,
        "our_order": options.our_order, **made,
    }  # fmt: skip
    kept = options.out / f"{side}-{seed}.json"
    if not kept.exists() or json.loads(kept.read_text())["given"] != given:
        found = measured("equivalence_side.py", given, threads=1, trl=options.trl if side == "trl" else None)
        kept.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        print(f"{side}, seed {seed}: {found['seconds']:.0f} s", file=sys.stderr)
    return json.loads(kept.read_text())


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--seeds", type=int, default=8, help="seeds 0 .. N-1")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, of one thread each")
    parser.add_argument("--pairs", type=int, default=4000, help="training pairs of a seed")
    parser.add_argument("--judged", type=int, default=2000, help="held-out pairs")
    parser.add_argument("--our-order", action="store_true", help="of the pairs, on TRL's side too")
    parser.add_argument("--inputs", type=Path, default=home / "learning" / "inputs", help="shared with learning.py")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl"), help="the folder TRL was installed into")
    parser.add_argument("--out", type=Path, default=home / "equivalence", help="a JSON file a run")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, print rows and verdicts."""
    from learning import inputs
    from process import require_trl

    options = arguments()
    require_trl(options.trl)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    made = inputs(options.inputs.resolve(), wanted=("validate", "sft"))
    wanted = [(side, seed) for seed in range(options.seeds) for side in SIDES]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip(wanted, pool.map(lambda one: run(options, *one, made), wanted), strict=True))
    print(report({side: [found[side, seed] for seed in range(options.seeds)] for side in SIDES}))


if __name__ == "__main__":
    main()
