"""The classic exercise: reward that climbs while KL stays flat, on a real pretrained model and real pairs.

    python -m tests.bench.policies.classic --figure docs/images/classic.png \
        --set 'data.preferences=[helpful-base-test.jsonl.gz, harmless-base-test.jsonl.gz]'

The profile hh-smollm2 up to PPO, 100 updates, with shorter texts and fewer pairs (`SIZES`): with its adaptive tether,
without it, and with ten times the coefficient that it ended on. Every gate is off. The three share data, SFT and reward
model. An interrupted run goes on from its checkpoint; finished ones are not run again.

What is asked of the tethered run: over the last 50 updates the interval of KL's slope holds 0 and the raw score's lies
above 0 (lines of least squares, intervals that allow for autocorrelation, `components.stats.series`). Prompts of its
own would be most of a batch's noise, so every batch asks the same 8 prompts; the gain on held-out prompts stands
beside. So does the rise at equal √KL, since a batch of higher KL also has a higher score.
"""

import itertools
import math
from pathlib import Path
from typing import Any

from components.stats.series import series_mean, series_rise
from flows.config.run_config import load_config
from tests.bench.policies.curves import draw
from tests.bench.tools import REAL, argument_parser, markdown, policy_of_run, with_models

PROFILE, LATE = "hh-smollm2", 50
SIZES = [
    "runtime.dtype=bfloat16", "generation.max_prompt_tokens=48", "generation.max_new_tokens=24",
    "sft.max_demonstrations=768", "sft.evaluate=128",
    "reward.max_pairs=1500", "reward.scale_responses=128", "reward.probe_texts=16",
    "ppo.advantage=rloo", "ppo.group_size=4", "ppo.batch_size=32", "ppo.minibatch_size=16", "ppo.micro_batch_size=16",
    "ppo.decay=linear", "ppo.learning_rate=6e-5", "ppo.kl.coefficient=0.4", "ppo.max_prompts=8",
    "ppo.evaluate_every=null", "ppo.stop_early=false", "ppo.evaluate=64",
]  # fmt: skip
"""Options that make each of the three runs about half an hour on two cores; `--set` changes them."""
TETHERED, CUT, TIGHT = "tethered", "cut (β = 0)", "tight (10 β)"


def run(home: Path, name: str, given: list[str]) -> dict[str, Any]:
    """`history`, the rows of one run, and `metrics`, those of its end."""
    return policy_of_run(home, f"classic-{name.split()[0]}", PROFILE, [*SIZES, *given])


def row(name: str, found: dict[str, Any]) -> list[str]:
    """A row of the table: the last updates' KL and raw score, and how far their lines rise."""
    history = found["history"]
    late = history[-LATE:]
    cells = [name, f"{len(history)}"]
    for metric in ("ppo/kl", "ppo/proxy_reward"):
        values = [update[metric] for update in late]
        mean, rise = series_mean(values), series_rise(values)
        cells += [f"{mean.value:.2f}", f"{rise.value:+.2f} [{rise.low:+.2f}, {rise.high:+.2f}]"]
    score, kl = ([update[f"ppo/{metric}"] for update in late] for metric in ("proxy_reward", "kl"))
    rise = series_rise(score, covariate=[math.copysign(math.sqrt(abs(value)), value) for value in kl])
    held_out = [found["metrics"][f"policy/reward_gain{end}"] for end in ("", "_low", "_high")]
    for value, low, high in ((rise.value, rise.low, rise.high), held_out):
        cells += [f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"]
    last = late[-1]
    return [*cells, f"{last['ppo/beta']:.3f}", f"{last['ppo/response_tokens']:.0f}", f"{last['ppo/ended']:.2f}"]


def main() -> None:
    """Run what is missing, print the table, draw the figure."""
    options = argument_parser(__doc__)
    options.add_argument("--set", action="append", default=[], dest="given", help="as of tether run, for all three")
    options.add_argument("--home", type=Path, default=REAL)
    options.add_argument("--figure", type=Path, default=None, help="write the figure here")
    asked = options.parse_args()
    home = with_models(asked.home)
    found = {TETHERED: run(home, TETHERED, asked.given)}
    fixed = ["ppo.kl.control=fixed", "ppo.kl.ceiling=null"]
    found[CUT] = run(home, CUT, [*asked.given, *fixed, "ppo.kl.coefficient=0"])
    beta = found[TETHERED]["history"][-1]["ppo/beta"]
    found[TIGHT] = run(home, TIGHT, [*asked.given, *fixed, f"ppo.kl.coefficient={10 * beta:.3g}"])
    print(f"Over the last {LATE} updates: mean, and rise along the line of least squares with its 95 % interval.\n")
    columns = ["run", "updates", "KL", "its rise", "raw score", "its rise", "at equal √KL", "held-out gain", "last β"]
    print(markdown([*columns, "tokens", "ended"], itertools.starmap(row, found.items())))
    kl, score = ([row[f"ppo/{m}"] for row in found[TETHERED]["history"][-LATE:]] for m in ("kl", "proxy_reward"))
    flat, rise = series_rise(kl), series_rise(score)
    climbs = "climbs" if rise.low > 0 else "does not climb for certain"
    print(f"\nTethered: KL is {'flat' if flat.low <= 0 <= flat.high else 'not flat'}; the raw score {climbs}.")
    if asked.figure is not None:
        title = "SmolLM2-135M on HH-RLHF: the tether held, cut, and ten times as tight"
        histories = {name: each["history"] for name, each in found.items()}
        draw(histories, title, asked.figure, load_config(PROFILE).ppo.kl.target)


if __name__ == "__main__":
    main()
