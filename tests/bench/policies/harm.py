"""Stored policies prompt by prompt: how many prompts get worse, how many responses are beyond the KL ceiling.

    python -m tests.bench.policies.harm --home HOME --seeds 20-29

`HOME/seed-N` is the TETHER_HOME of a seed's run, as `tests.bench.policies.seeds` leaves it. Policy, SFT policy, reward
model and prompts come from its store, and the stage's own `evaluate` samples them, so this needs no training after a
change of what is measured. Metrics that the run recorded come out the same, or the bench stops. The seconds are those
of the further samples, beside those of the whole evaluation.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from components.gates.judging import judge
from components.models.folders import load_causal_lm
from components.models.runtime import activate
from components.ppo import evaluate
from components.ppo.config import PpoJob
from components.ppo.models import Models
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from tasks.runs.status import load_status
from tests.bench.tools import argument_parser, markdown, seed_range

GATES = ("policy.worse_prompts", "policy.kl_beyond_ceiling")


def measured(home: Path, seed: int, profile: str, out: Path) -> dict[str, float]:
    """The evaluation's metrics for the policy in `home`, kept in `out/seed-N.json`, with the seconds that it took."""
    kept = out / f"seed-{seed}.json"
    if not kept.exists():
        config = load_config(profile, [(("seed",), seed), (("runtime", "threads"), 1)]).resolved()
        activate(config.runtime)
        status, store = load_status(home, None), ArtifactStore(home)
        folders = {name: store.path(digest) for name, digest in digests(status)}
        inputs = {"data": folders["validate"], "sft": folders["sft"], "reward": folders["reward"]}
        job = PpoJob(seed=seed, runtime=config.runtime, generation=config.generation, ppo=config.ppo)
        models = Models.load(job, inputs)
        models.policy = load_causal_lm(folders["ppo"], config.runtime)[0].eval()
        seconds = {"whole": time.perf_counter()}
        by_prompt = evaluate._by_prompt

        def timed(*given: Any) -> dict[str, float]:
            began = time.perf_counter()
            found = by_prompt(*given)
            seconds["further"] = time.perf_counter() - began
            return found

        with patch.object(evaluate, "_by_prompt", timed):
            metrics = evaluate.evaluate(models, job, inputs["data"], out / f"seed-{seed}")
        seconds["whole"] = time.perf_counter() - seconds["whole"]
        stored = status.stage("ppo").metrics
        names = "policy/kl", "policy/reward_gain"
        changed = [name for name in names if abs(metrics[name] - (stored[name] or 0)) > 1e-3]
        if changed:
            raise SystemExit(f"seed {seed}: {', '.join(changed)} differ from what the run recorded")
        kept.write_text(json.dumps(metrics | {f"seconds/{name}": value for name, value in seconds.items()}))
    return dict(json.loads(kept.read_text()))


def digests(status: Any) -> Iterator[tuple[str, str]]:
    """The stages' artifacts, by name."""
    for name in ("validate", "sft", "reward", "ppo"):
        if (digest := status.stage(name).digest) is None:
            raise SystemExit(f"{status.run}: no artifact of {name}")
        yield name, digest


def table(found: dict[int, dict[str, float]], profile: str) -> str:
    """A Markdown table, a seed a line."""
    titles = ("seed", "KL", "gain", "prompts that fall", "less chance", "upper end", "beyond the ceiling", "upper end",
              "seconds", "of all", "failed gates")  # fmt: skip
    rows, gates = [], load_config(profile).gates
    for seed, metrics in found.items():
        verdicts = judge("ppo", metrics, gates)
        failed = [v.name for v in verdicts if v.name in GATES and not v.passed]
        numbers = ("kl", "reward_gain", "worse_prompts", "worse_prompts_excess", "worse_prompts_excess_high",
                   "kl_beyond_ceiling", "kl_beyond_ceiling_high")  # fmt: skip
        cells = [f"{metrics[f'policy/{name}']:.3f}" for name in numbers]
        cells += [f"{metrics[f'seconds/{name}']:.0f}" for name in ("further", "whole")]
        rows.append([seed, *cells, ", ".join(failed)])
    return markdown(titles, rows)


def main() -> None:
    """Measure what is missing and print the table."""
    options = argument_parser(__doc__)
    options.add_argument("--home", type=Path, default=Path(".tether-bench"))
    options.add_argument("--seeds", type=seed_range, default="20-29")
    options.add_argument("--profile", default="demo-long")
    options.add_argument("--out", type=Path, default=Path(".tether/bench/harm"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = {
        seed: measured((given.home / f"seed-{seed}").resolve(), seed, given.profile, given.out)
        for seed in given.seeds
    }
    print(table(found, given.profile))


if __name__ == "__main__":
    main()
