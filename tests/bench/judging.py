"""Whether an independent judge tells a tethered policy from one whose tether is cut, over seeds: a line a run.

    python -m tests.bench.judging --seeds 0-4 --threads 1

A seed's runs are `tether run demo` with `data.generator.judge_pairs` (1,000 carefully labelled pairs), with the tether
and with β = 0, no ceiling and no early stop. They share the data, the SFT policy, the reward model and the judge, which
are hits the second time. Judged is the last policy of each: the judge's gain over SFT, in standard deviations of its
SFT scores, with its interval, beside the reward model's score and gold. Held: the upper end is below 0 where the tether
is cut, the lower end above 0 where it is not. Every gate is off; finished runs are not run again. A run takes about
five minutes of processor time.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.bench.runs import stage_of_run
from tests.bench.thresholds import seed_range

KINDS: dict[str, tuple[str, ...]] = {
    "tethered": (),
    "cut": ("ppo.kl.control=fixed", "ppo.kl.coefficient=0", "ppo.kl.stop_above=null", "ppo.stop_early=false"),
}
"""Options by kind of run."""


class Judged(NamedTuple):
    """What a run's last policy has."""

    kind: str
    gain: float
    low: float
    high: float
    """The judge's gain over SFT and the ends of its interval, in standard deviations of its SFT scores."""
    proxy: float
    gold: float
    sft_gold: float
    kl: float

    @classmethod
    def of(cls, kind: str, metrics: Mapping[str, float]) -> "Judged":
        """Of a run's metrics: the last policy's, where an earlier one is published."""

        def last(name: str, of_published: str = "") -> float:
            return metrics.get(f"ppo/last_{name}", metrics[f"ppo/{of_published or name}"])

        ends = (last(f"judge_gain{end}", f"judge_trained_gain{end}") for end in ("", "_low", "_high"))
        return cls(kind, *ends, last("proxy_reward"), last("gold"), metrics["ppo/sft_gold"], last("kl"))

    @property
    def holds(self) -> bool:
        """Whether the judge says for certain what the truth is: a gain with the tether, a loss without."""
        return self.high < 0 if self.kind == "cut" else self.low > 0


def table(runs: Mapping[tuple[int, str], Judged]) -> str:
    """A line a run, and how many held."""
    lines = [
        "| seed | tether | judge's gain | proxy reward | gold (SFT) | KL | held |",
        "|---|---|---|---|---|---|---|",
    ]
    for (seed, kind), run in sorted(runs.items()):
        gain = f"{run.gain:.2f} [{run.low:.2f}, {run.high:.2f}]"
        gold = f"{run.gold:.2f} ({run.sft_gold:.2f})"
        held = "yes" if run.holds else "no"
        lines.append(f"| {seed} | {kind} | {gain} | {run.proxy:.2f} | {gold} | {run.kl:.1f} | {held} |")
    for kind in KINDS:
        own = [run for run in runs.values() if run.kind == kind]
        lines.append(f"{kind}: {sum(run.holds for run in own)} of {len(own)} held")
    return "\n".join(lines)


def judged_run(home: Path, seed: int, kind: str, given: Sequence[str]) -> Judged:
    """A run of demo-long, or what is kept of it."""
    options = [f"seed={seed}", *given, *KINDS[kind]]
    found: dict[str, Any] = stage_of_run(home, f"{kind}-{seed}", "demo-long", "ppo", options)
    return Judged.of(kind, found["metrics"])


def main() -> None:
    """Run what is asked for and print the table after each run."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=seed_range, default="0-4", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--pairs", type=int, default=1000, help="carefully labelled pairs, those held out included")
    options.add_argument("--epochs", type=int, help="passes of the judge over its pairs (default: judge.epochs)")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--home", type=Path, default=Path(".tether/bench/judging"))
    asked = options.parse_args()
    given = [f"runtime.threads={asked.threads}", f"data.generator.judge_pairs={asked.pairs}"]
    given += [] if asked.epochs is None else [f"judge.epochs={asked.epochs}"]
    runs: dict[tuple[int, str], Judged] = {}
    for seed in asked.seeds:
        for kind in KINDS:
            runs[seed, kind] = judged_run(asked.home.resolve(), seed, kind, given)
            print(table(runs), flush=True)


if __name__ == "__main__":
    main()
