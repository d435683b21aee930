"""Two rounds of `tether iterate` on the built-in task: whether people's votes make reward model and policy better.

    nice -n 10 python -m tests.bench.rounds --seeds 20-22

Simulated annotators judge each policy's own samples (`human_eval.judges=simulated`), and their votes train the next
reward model. `rounds.yaml` says how the task is made smaller, and its first reward model weaker, than demo-long's.
Every gate is off; a seed has a home of its own, and what is computed there is not computed again.

At the end all rounds are measured on the same prompts, which no round trained on: each reward model's agreement with
the votes of all rounds that only judge, and each policy's true score, with paired intervals of what the rounds gained.
"""

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from components.base.jsonl import write_json
from components.data.readers import read_source
from components.data.splits import prompt_key
from components.data.support_desk.desk import gold
from components.data.tables.published import read_split
from components.human_eval.batch.halves import JUDGED, JUDGED_IN
from components.models.folders import load_causal_lm
from components.models.sampling import generate_responses
from components.reward.loading import load_scorer
from components.reward.refresh.agreement import agreement
from components.stats.intervals import Interval, paired_gain
from components.store.store import ArtifactStore
from data_contracts.rows.gather import RowSource, judged_rows
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.launch.begin import Launch, new_run
from flows.launch.rounds import next_round
from flows.rlhf import pipeline
from tasks.execution.runner import run_stage
from tasks.runs.status import load_status
from tasks.stages import PIPELINE, STAGES
from tests.bench.thresholds import seed_range, settings

PROFILE = Path(__file__).with_suffix(".yaml")
PROMPTS = 512
"""Held-out prompts on which the policies' true scores are compared."""


def run(launch: Launch) -> str:
    """Compute a run in this process, without Prefect and MLflow; returns its id."""
    launch.ctx.track, launch.ctx.at_end = False, None
    with launch.ctx as ctx:
        pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx))
    return launch.ctx.run


def measure(home: Path, runs: Sequence[str], config: RunConfig) -> list[dict[str, Any]]:
    """What each round's reward model and policy are worth, all on the prompts that no round trained on."""
    store, statuses = ArtifactStore(home), [load_status(home, name) for name in runs]
    of = {stage: [store.path(each.stage(stage).digest or "") for each in statuses] for stage in PIPELINE}
    judged = [
        row.item
        for path in of["human_eval"]
        for row in judged_rows(
            RowSource("preferences", str(path), read_source(path / JUDGED), {}, "data.columns"), 20_000
        )
        if row.item is not None and not row.problems
    ]
    prompts = [row["prompt"] for row in read_split(of["validate"][-1] / "prompts.test")[:PROMPTS]]
    reward_job: Any = config.stage_job(STAGES["reward"])
    right, true = [], []
    for reward, policy in zip(of["reward"], of["ppo"], strict=True):
        right.append(agreement(reward_job, *load_scorer(reward, config.runtime), judged))
        responses = generate_responses(
            *load_causal_lm(policy, config.runtime), prompts, config.generation, 0, config.runtime
        )
        true.append(np.array([gold(p, r.text) for p, r in zip(prompts, responses, strict=True)]))
    pairs, asked = [prompt_key(row["prompt"]) for row in judged], [prompt_key(prompt) for prompt in prompts]
    return [
        {
            "round": number, "agreement": float(right[number].mean()), "gold": float(true[number].mean()),
            "agreement_gain": paired_gain(right[number], right[0], pairs)._asdict(),
            "gold_gain": paired_gain(true[number], true[0], asked)._asdict(),
            "judged": len(judged), "prompts": len(prompts), "votes": len(voted(of["validate"][number])),
            **{name: value for stage in status.stages for name, value in stage.metrics.items()},
        }
        for number, status in enumerate(statuses)
    ]  # fmt: skip


def voted(data: Path) -> list[Any]:
    """The training pairs that people judged in earlier rounds."""
    return [row for row in read_split(data / "pairs.train") if JUDGED_IN in row]


def rounds(home: Path, seed: int, count: int, profile: Path, given: Sequence[str]) -> list[dict[str, Any]]:
    """The measures of each round of a seed; kept in its home."""
    kept = home / f"{count}.json"
    if not kept.exists():
        asked = [f"seed={seed}", *settings(PIPELINE[-1]), *given]
        config = load_config(profile, [parse_override(text) for text in asked]).resolved()
        runs = [run(new_run(home, profile.stem, config))]
        for _ in range(count):
            runs.append(run(next_round(home, runs[-1])))
        write_json(kept, measure(home, runs, config))
    return list(json.loads(kept.read_text()))


def table(found: dict[int, list[dict[str, Any]]]) -> str:
    """A Markdown table, a round a line, and what the rounds gained."""

    def gained(interval: dict[str, float]) -> str:
        value, low, high = Interval(**interval)
        return f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"

    lines = [
        "| seed | round | votes trained on | reward agrees | gained | gold | gained | KL | win rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, each in found.items():
        for row in each:
            gains = [gained(row[name]) if row["round"] else "" for name in ("agreement_gain", "gold_gain")]
            lines.append(
                f"| {seed} | {row['round']} | {row['votes']} | {row['agreement']:.3f} | {gains[0]} | "
                f"{row['gold']:.3f} | {gains[1]} | {row.get('ppo/kl', math.nan):.2f} | "
                f"{row.get('human_eval/win_rate', math.nan):.3f} |"
            )
    return "\n".join(lines)


def rises(rows: Sequence[dict[str, Any]], name: str) -> bool:
    """Whether a measure is higher after the last round than before the first."""
    return bool(rows[-1][name] > rows[0][name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seed_range, default=[20, 21, 22], help="as 20-22")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--home", type=Path, default=Path(".tether/bench/rounds"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args()
    found = {}
    for seed in asked.seeds:
        home = asked.home.resolve() / str(seed)
        home.mkdir(parents=True, exist_ok=True)
        found[seed] = rounds(home, seed, asked.rounds, asked.profile, asked.set)
        print(table(found), flush=True)
    for name in ("agreement", "gold"):
        print(f"{name} rises in {sum(rises(rows, name) for rows in found.values())} of {len(found)} seeds")


if __name__ == "__main__":
    main()
