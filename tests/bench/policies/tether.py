"""Whether the demo's tether holds KL at its target, over seeds and targets: a table with a line a run.

    python -m tests.bench.policies.tether --seeds 10-19 --targets 1 3 6 --jobs 2 --threads 1

A seed has a TETHER_HOME of its own (that of `tests.bench.policies.seeds --report`, whose stages are hits here), and its
targets share the data, the SFT policy and the reward model. Every gate is off: what is judged is the training's own
curve. Finished runs are not run again.

A run holds if, over the last third of its updates, mean KL is within 15 % of the target, no batch's KL is beyond 1.5
targets, and the 95 % t interval of log β's mean step holds 0; if no earlier batch is beyond twice the target; and if
proxy reward and gold score end above SFT's. That interval takes the steps for independent. They resemble each other, so
the true one is wider: what holds 0 in this one holds it in that one. Seeds are independent, and below the table stands
the mean step over them.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scipy import stats

from components.stats.intervals import Interval
from tests.bench.policies.thresholds import rate
from tests.bench.tools import argument_parser, markdown, policy_of_run, seed_range

START = {1.0: 0.65, 6.0: 0.045}
"""β at the start for targets other than the profile's: KL's balance goes about as β^-0.35 (docs/decisions.md)."""


class Held(NamedTuple):
    """What the last third of a training says of its tether; KL is divided by the target."""

    updates: int
    """Updates of the last third."""
    mean: float
    """Their mean KL."""
    largest: float
    """Their largest."""
    earlier: float
    """The largest KL of a batch before."""
    rise: float
    """The change of log β over them."""
    step: Interval
    """Log β's mean step there, with the interval that takes steps for independent."""

    @property
    def faults(self) -> list[str]:
        """What does not hold; empty where all does."""
        found = {
            "mean KL": abs(self.mean - 1) > 0.15, "a late batch": self.largest > 1.5,
            "an earlier batch": self.earlier > 2, "β": not self.step.low <= 0 <= self.step.high,
        }  # fmt: skip
        return [name for name, wrong in found.items() if wrong]


def held(history: Sequence[Mapping[str, float]], target: float) -> Held:
    """Judge the rows of `history.jsonl`, one an update, against a target in nats a response."""
    late = len(history) // 3
    kl = [row["ppo/kl"] / target for row in history]
    steps = [math.log(b / a) for a, b in pairwise(row["ppo/beta"] for row in history[-late - 1 :])]
    return Held(late, fmean(kl[-late:]), max(kl[-late:]), max(kl[:-late]), math.fsum(steps), mean_of(steps))


def mean_of(values: Sequence[float]) -> Interval:
    """The mean of independent values with its 95 % t interval."""
    ends = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    return Interval(fmean(values), float(ends.low), float(ends.high))


def run(folder: Path, profile: str, seed: int, target: float, threads: int) -> dict[str, Any]:
    """One seed's policy, trained to one target."""
    given = [f"seed={seed}", f"runtime.threads={threads}"]
    if target in START:
        given += [
            f"ppo.kl.target={target:g}",
            f"ppo.kl.coefficient={START[target]}",
            f"ppo.kl.ceiling={3 * target:g}",
            f"ppo.kl.band={2 * target:g}",
        ]
    home = (folder / f"gates-{seed}").resolve()
    return {"seed": seed, "target": target} | policy_of_run(home, f"target-{target:g}", profile, given)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, a run a line, how many hold, and the mean of log β's steps over the seeds."""
    titles = ["seed", "mean KL", "largest", "largest before", "β at the end", "its change", "mean step of log β",
              "proxy gain", "gold", "SFT gold", "does not hold"]  # fmt: skip
    rows, good, steps = [], 0, []
    for each in runs:
        history, found = each["history"], each["metrics"]
        it = held(history, each["target"])
        gains = {"proxy": found["policy/reward_gain"], "gold": found["policy/gold"] - found["policy/sft_gold"]}
        faults = it.faults + [f"{name} is not above SFT's" for name, gain in gains.items() if gain <= 0]
        good += not faults
        steps.append(it.rise / it.updates)
        rows.append([
            each["seed"], f"{it.mean:.2f}", f"{it.largest:.2f}", f"{it.earlier:.2f}",
            f"{history[-1]['ppo/beta']:.3f}", f"{math.exp(it.rise):.2f}",
            f"[{it.step.low:+.3f}, {it.step.high:+.3f}]", f"{gains['proxy']:.2f}",
            f"{found['policy/gold']:.2f}", f"{found['policy/sft_gold']:.2f}", ", ".join(faults),
        ])  # fmt: skip
    lines = [markdown(titles, rows), "", f"The tether holds in {rate(good, len(runs))} seeds."]
    if len(steps) > 1:
        mean = mean_of(steps)
        lines.append(f"Mean step of log β over the seeds: {mean.value:+.4f} [{mean.low:+.4f}, {mean.high:+.4f}].")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    options = argument_parser(__doc__)
    options.add_argument("--profile", default="demo", help="demo or demo-long; a home holds runs of one of them")
    options.add_argument("--seeds", type=seed_range, default="10-19", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--targets", type=float, nargs="+", default=[1.0, 3.0, 6.0], choices=[1.0, 3.0, 6.0])
    options.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options.add_argument("--threads", type=int, default=0, help="runtime.threads of each run; 0 is every core")
    options.add_argument("--home", type=Path, default=Path(".tether/bench"))
    given = options.parse_args()

    def runs_of(seed: int) -> list[dict[str, Any]]:
        return [run(given.home, given.profile, seed, target, given.threads) for target in given.targets]

    with ThreadPoolExecutor(given.jobs) as pool:  # a seed's runs one after the other, in its own home
        of_seed = pool.map(runs_of, given.seeds)
        runs = [each for several in of_seed for each in several]
    print("KL is divided by the target; all but `largest before` are of the last third of the updates.")
    for target in given.targets:
        print(f"\nTarget {target:g} nats a response\n\n{table([e for e in runs if e['target'] == target])}")


if __name__ == "__main__":
    main()
