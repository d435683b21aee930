"""A table of held-out prompts with the SFT policy's response and the trained policy's, drawn by a seed.

    python -m tests.bench.samples --home .tether/bench/real --run RUN

The prompts, responses, scores (SFT standard deviations) and KL (nats) are those that the gates of PPO judged.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows
from components.base.text import plain
from components.store.store import ArtifactStore
from tasks.runs.status import load_status
from tests.bench.runs import REAL


def cell(text: str, most: int) -> str:
    """A text in a cell of a Markdown table, its middle left out where it has more characters than `most`."""
    line = " ".join(plain(text).split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= most else f"{line[: most - 60]} … {line[-55:]}"


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table, a prompt's last turn a line."""
    lines = ["| asked | SFT | score | policy | score | KL |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [cell(row["prompt"][-1]["content"], 150)]
        for side in ("sft", "policy"):
            cells += [cell(row[side]["response"], 260), f"{row[side]['score']:+.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row['policy']['kl']:.1f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--home", type=Path, default=REAL)
    options.add_argument("--run", default=None, help="default: the newest")
    options.add_argument("--samples", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    home = asked.home.resolve()
    stage = load_status(home, asked.run).stage("ppo")
    if stage.digest is None:
        options.error("this run has no policy")
    rows = list(read_rows(ArtifactStore(home).path(stage.digest) / "evaluation.jsonl"))
    print(table(random.Random(asked.seed).sample(rows, min(asked.samples, len(rows)))))


if __name__ == "__main__":
    main()
