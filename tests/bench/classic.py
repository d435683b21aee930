"""The classic exercise: reward that climbs while KL stays flat, on a real pretrained model and real pairs.

    python -m tests.bench.classic --figure docs/images/classic.png \
        --set 'data.preferences=[helpful-base-test.jsonl.gz, harmless-base-test.jsonl.gz]'

The profile hh-smollm2 up to PPO, 100 updates: with its adaptive tether, without it, and with ten times the coefficient
that it ended on. Every gate is off. The three share data, SFT and reward model, and those of a home where the profile
has run. An interrupted run goes on from its checkpoint; finished ones are not run again.

What is asked of the tethered run: over the last 50 updates the interval of KL's slope holds 0 and the raw score's lies
above 0 (lines of least squares, intervals that allow for autocorrelation, `components.stats.series`). A batch of higher
KL also has a higher score, so the rise at equal √KL is less noisy; it stands beside.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from components.stats.series import series_mean, series_rise
from flows.config.run_config import load_config
from tests.bench.curves import draw
from tests.bench.runs import REAL, stage_of_run, with_models

PROFILE, LATE = "hh-smollm2", 50
TETHERED, CUT, TIGHT = "tethered", "cut (β = 0)", "tight (10 β)"


def run(home: Path, name: str, given: list[str]) -> list[dict[str, Any]]:
    """The rows of one run's history."""
    return list(stage_of_run(home, f"classic-{name.split()[0]}", PROFILE, "ppo", given)["history"])


def line(name: str, history: list[dict[str, Any]]) -> str:
    """A row of the table: the last updates' KL and raw score, and how far their lines rise."""
    late = history[-LATE:]
    cells = [name, f"{len(history)}"]
    for metric in ("ppo/kl", "ppo/proxy_reward"):
        values = [row[metric] for row in late]
        mean, rise = series_mean(values), series_rise(values)
        cells += [f"{mean.value:.2f}", f"{rise.value:+.2f} [{rise.low:+.2f}, {rise.high:+.2f}]"]
    score, kl = ([row[f"ppo/{metric}"] for row in late] for metric in ("proxy_reward", "kl"))
    rise = series_rise(score, given=[math.copysign(math.sqrt(abs(value)), value) for value in kl])
    cells += [f"{rise.value:+.2f} [{rise.low:+.2f}, {rise.high:+.2f}]"]
    cells += [f"{late[-1]['ppo/beta']:.3f}", f"{late[-1]['ppo/response_tokens']:.0f}", f"{late[-1]['ppo/ended']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run what is missing, print the table, draw the figure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--set", action="append", default=[], dest="given", help="as of tether run, for all three")
    options.add_argument("--home", type=Path, default=REAL)
    options.add_argument("--figure", type=Path, default=None, help="write the figure here")
    asked = options.parse_args()
    home = with_models(asked.home)
    histories = {TETHERED: run(home, TETHERED, asked.given)}
    fixed = ["ppo.kl.control=fixed", "ppo.kl.stop_above=null"]
    histories[CUT] = run(home, CUT, [*asked.given, *fixed, "ppo.kl.coefficient=0"])
    beta = histories[TETHERED][-1]["ppo/beta"]
    histories[TIGHT] = run(home, TIGHT, [*asked.given, *fixed, f"ppo.kl.coefficient={10 * beta:.3g}"])
    print(f"Over the last {LATE} updates: mean, and rise along the line of least squares with its 95 % interval.\n")
    print(
        "| run | updates | KL | its rise | raw score | its rise | at equal √KL | β at the end | tokens | ended |\n|"
        + "---|" * 10
    )
    for name, history in histories.items():
        print(line(name, history))
    kl, score = ([row[f"ppo/{m}"] for row in histories[TETHERED][-LATE:]] for m in ("kl", "proxy_reward"))
    flat = series_rise(kl)
    climbs = series_rise(score).low > 0
    print(f"\nTethered: KL is {'flat' if flat.low <= 0 <= flat.high else 'not flat'}, the raw score "
          f"{'climbs' if climbs else 'does not climb for certain'}.")  # fmt: skip
    if asked.figure is not None:
        title = "SmolLM2-135M on HH-RLHF: the tether held, cut, and ten times as tight"
        draw(histories, title, asked.figure, load_config(PROFILE).ppo.kl.target)


if __name__ == "__main__":
    main()
