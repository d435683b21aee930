"""The demo over fresh seeds, with the tether, without it and with ten times of it: the table and the README's figure.
`--profile demo-long` takes the larger one.

    python -m tests.bench.policies.seeds --seeds 0-9 --variants 5 --jobs 2 --threads 1 --home .tether-bench
    python -m tests.bench.policies.seeds --choose 0-9 --report 10-19 --until reward --threads 1

Each seed has a TETHER_HOME of its own and starts from nothing; the variants of a seed share its data, SFT and reward
model from that home's store. Finished runs are not run again, so an interrupted bench goes on where it was.

With `--choose` and `--report`, the tethered demo runs once for each seed with every gate off, its final metrics go into
the file `--metrics` (a line of JSON a seed), and the thresholds that the choosing seeds imply are judged on the others.
"""

import argparse
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows
from components.gates.table import GATES
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from tests.bench.policies import thresholds
from tests.bench.policies.curves import draw
from tests.bench.policies.tether import mean_of
from tests.bench.policies.thresholds import Metrics
from tests.bench.tools import argument_parser, markdown, metric, run_with, seed_range

BETA = load_config("demo").ppo.kl.coefficient
VARIANTS = {
    "tethered": [],
    "cut (β = 0)": ["ppo.kl.control=fixed", "ppo.kl.coefficient=0", "ppo.stop_early=false", "ppo.evaluate_every=null"],
    "tight (10 β)": ["ppo.kl.control=fixed", f"ppo.kl.coefficient={10 * BETA:g}"],
}
SHOWN = (
    ("reward", "reward/accuracy_low", "RM acc. low"),
    ("reward", "reward/ece", "ECE"),
    ("ppo", "policy/kl_high", "KL high"),
    ("ppo", "policy/proxy_reward", "proxy"),
    ("ppo", "policy/gold", "gold"),
    ("ppo", "policy/sft_gold", "SFT gold"),
    ("ppo", "policy/violations_excess", "violations − SFT's"),
    ("human_eval", "human_eval/win_rate_low", "win rate low"),
)


def run(home: Path, profile: str, seed: int, variant: str, threads: int) -> dict[str, Any]:
    """One run of the demo; its status with the exit code, taken from `home` if it is there already."""
    kept = home / f"{list(VARIANTS).index(variant)}.json"
    if not kept.exists():
        settings = [f"seed={seed}", f"runtime.threads={threads}", *VARIANTS[variant]]
        kept.write_text(json.dumps(run_with(home, profile, settings, (0, 3)) | {"seed": seed, "variant": variant}))
    return json.loads(kept.read_text())


def measured(home: Path, profile: str, seed: int, until: str, threads: int) -> Metrics:
    """The final metrics of the tethered demo up to a stage, with every gate off, by name."""
    asked = [f"seed={seed}", f"runtime.threads={threads}", *thresholds.settings(until)]
    status = run_with(home, profile, asked, [0 if until == thresholds.STAGES[-1] else 3])
    return {name: value for stage in status["stages"] for name, value in stage["metrics"].items()}


def failed_gates(status: dict[str, Any]) -> list[str]:
    """Names of the gates that stopped the run; those that only warn are left out."""
    gates = [gate for stage in status["stages"] for gate in stage["gates"] if not gate["passed"]]
    return [gate["name"] for gate in gates if not GATES[gate["name"]].warn_only]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """A Markdown table, a run a line."""
    return markdown(
        ["seed", *(title for *_, title in SHOWN), "seconds", "exit", "failed gates"],
        (
            [row["seed"], *(f"{metric(row, stage, name):.3f}" for stage, name, _ in SHOWN), f"{row['seconds']:.0f}",
             row["exit_code"], ", ".join(failed_gates(row))]
            for row in rows
        ),
    )  # fmt: skip


def contrast(tethered: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Paired over seeds with a 95 % t interval: proxy against the tethered run's, gold against SFT's own."""

    def interval(differences: list[float]) -> str:
        mean = mean_of(differences)
        return f"{mean.value:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]"

    proxy = [
        metric(b, "ppo", "policy/proxy_reward") - metric(a, "ppo", "policy/proxy_reward")
        for a, b in zip(tethered, other, strict=True)
    ]
    gold = [metric(b, "ppo", "policy/gold") - metric(b, "ppo", "policy/sft_gold") for b in other]
    return f"proxy − tethered proxy {interval(proxy)}; gold − SFT gold {interval(gold)} ({len(other)} seeds)"


def figure(home: Path, profile: str, seed: int, path: Path) -> None:
    """The curves of the three variants of one seed."""
    histories = {}
    for index, variant in enumerate(VARIANTS):
        stages = json.loads((home / f"{index}.json").read_text())["stages"]
        policy = ArtifactStore(home).path(next(s["digest"] for s in stages if s["name"] == "ppo"))
        histories[variant] = read_rows(policy / "history.jsonl")
    title = f"The built-in task, seed {seed}: the tether held, cut, and ten times as tight"
    draw(histories, title, path, load_config(profile).ppo.kl.target)


def choose_and_report(given: argparse.Namespace) -> None:
    """Measure the seeds that are lacking, one after the other, and print what they say of the thresholds."""

    def run_of(seed: int) -> Metrics:
        home = (given.home / f"gates-{seed}").resolve()
        home.mkdir(parents=True, exist_ok=True)
        return measured(home, given.profile, seed, given.until, given.threads)

    code = thresholds.code_version()
    choosing, reporting = (
        thresholds.measure(given.metrics, seeds, given.until, code, run_of) for seeds in (given.choose, given.report)
    )
    print(thresholds.report(choosing, reporting, load_config(given.profile).gates, given.until))


def main() -> None:
    """Run what is missing, print the table and the contrasts, draw the figure."""
    options = argument_parser(__doc__)
    options.add_argument("--seeds", type=seed_range, default="0-9", help="pipeline seeds, as 10-19 or 0-4,8")
    options.add_argument("--profile", default="demo", help="demo or demo-long; a home holds runs of one of them")
    options.add_argument("--variants", type=int, default=5, help="the first seeds also run cut and ten times as tight")
    options.add_argument("--choose", type=seed_range, default=[], help="seeds that imply thresholds")
    options.add_argument("--report", type=seed_range, default=[], help="other seeds, that are judged by them")
    options.add_argument("--until", choices=thresholds.STAGES, default="human_eval", help="the last stage to run")
    options.add_argument("--metrics", type=Path, default=Path(".tether/bench/metrics.jsonl"))
    options.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options.add_argument("--threads", type=int, default=0, help="runtime.threads of each run; 0 is every core")
    options.add_argument("--home", type=Path, default=Path(".tether/bench"))
    options.add_argument("--figure", type=Path, default=None, help="write the figure of the first seed here")
    given = options.parse_args()
    if both := set(given.choose) & set(given.report):
        options.error(f"seeds {sorted(both)} are to choose and to report: a threshold is reported on other seeds")
    if given.choose or given.report:
        return choose_and_report(given)

    def runs_of(seed: int) -> dict[str, dict[str, Any]]:
        home = (given.home / f"seed-{seed}").resolve()
        home.mkdir(parents=True, exist_ok=True)
        wanted = list(VARIANTS) if seed in given.seeds[: given.variants] else ["tethered"]
        return {variant: run(home, given.profile, seed, variant, given.threads) for variant in wanted}

    with ThreadPoolExecutor(given.jobs) as pool:
        seeds = list(pool.map(runs_of, given.seeds))
    print(f"tethered: {sum(r['tethered']['exit_code'] == 0 for r in seeds)} of {len(seeds)} seeds pass every gate\n")
    for variant in VARIANTS:
        rows = [r[variant] for r in seeds if variant in r]
        if rows:
            print(f"{variant}\n\n{table(rows)}\n")
        if variant != "tethered" and len(rows) > 1:
            print(contrast([r["tethered"] for r in seeds if variant in r], rows) + "\n")
    if given.figure and given.variants:
        first = given.seeds[0]
        figure(given.home.resolve() / f"seed-{first}", given.profile, first, given.figure)


if __name__ == "__main__":
    main()
