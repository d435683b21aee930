"""What watching costs PPO on demo-long: monitors alone, and held-out evaluation, against the same updates without them.

    python -m tests.bench.watch_cost --updates 12 --rounds 3

Data, SFT policy and reward model are those of `tether run demo-long --until reward` in the home, which are hits the
second time. Each round trains the same updates three times, in an order that turns: with nothing watched, with the
monitors, and with monitors and evaluations as demo-long has them. Printed are ratios of processor seconds within a
round, so that what else the machine does matters little, with their least and greatest: of the monitors to the updates,
and of an evaluation to an update, times the evaluations of demo-long's 60 updates. They should not exceed 3 % and 15 %.
What is done once, before the first update (SFT's responses, for the limits) and after the last (the final evaluation),
is not counted; the first evaluation samples SFT's responses too, and counts twice.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from components.models.runtime import activate
from components.ppo import stage
from components.ppo.config import PpoJob
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tests.bench.watching import learned

KINDS = {
    "nothing": ("ppo.monitors.responses=null", "ppo.evaluate_every=null"),
    "monitors": ("ppo.evaluate_every=null",),
    "both": (),
}


DEMO_UPDATES = 60


def seconds_of(inputs: dict[str, Path], out: Path, changes: list[str]) -> tuple[float, int]:
    """Processor seconds after the first update until the end of the last, and passes over the watched prompts."""
    job = load_config("demo-long", [parse_override(each) for each in changes]).resolved().job(PpoJob)
    activate(job.runtime)
    ends: list[float] = []

    def observe(step: int, metrics: Any, total: Any = None, **_: Any) -> None:
        if metrics:
            ends.append(time.process_time())

    stage.run(job, dict(inputs), out, observe)
    looks = json.loads((out / "artifact" / "metadata.json").read_text())["evaluations"]
    return ends[-1] - ends[0], len(looks) + bool(looks)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--updates", type=int, default=12, help="the first is not counted")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seed", type=int, default=100)
    options.add_argument("--home", type=Path, default=Path(".tether/bench/watching"))
    given = options.parse_args()
    home = given.home.resolve()
    measure(learned(home / f"seed-{given.seed}", given.seed), home, given.seed, given.updates, given.rounds)


def measure(inputs: dict[str, Path], home: Path, seed: int, updates: int, rounds: int) -> None:
    """Train in rounds and print the ratios."""
    common = [f"seed={seed}", "runtime.threads=1", f"ppo.updates={updates}", "ppo.kl.control=fixed", "ppo.evaluate=2",
              "ppo.stop_early=false"]  # fmt: skip
    found: dict[str, list[float]] = {"monitors": [], "evaluations of demo-long": []}
    names = list(KINDS)
    for turn in range(rounds):
        took = {}
        for name in names[turn % 3 :] + names[: turn % 3]:
            took[name] = seconds_of(inputs, home / f"cost-{time.time_ns()}", [*common, *KINDS[name]])
            print(f"round {turn + 1}, {name}: {took[name][0]:.1f} s", flush=True)
        nothing, monitors, (both, passes) = took["nothing"][0], took["monitors"][0], took["both"]
        every = load_config("demo-long", []).ppo.evaluate_every or DEMO_UPDATES
        a_pass = (both - monitors) / passes / (nothing / (updates - 1))
        found["monitors"].append(monitors / nothing - 1)
        found["evaluations of demo-long"].append(a_pass * (DEMO_UPDATES // every + 1) / DEMO_UPDATES)
    for name, ratios in found.items():
        print(f"{name}: {median(ratios):+.1%} of the updates' time ({min(ratios):+.1%} to {max(ratios):+.1%})")


if __name__ == "__main__":
    main()
