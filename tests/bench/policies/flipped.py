"""Plain and robust DPO, and PPO, where a share of the labels is wrong: the demo's rows as files, and gold afterwards.

    python -m tests.bench.policies.flipped write FOLDER [--share 0.3]
    python -m tests.bench.policies.flipped gold HOME/sweeps/NAME/sweep.json

`write` writes the demo's demonstrations, its pairs with that share of labels flipped (without their votes, which would
give the flips away), and 1,000 careful pairs for a judge. `gold` prints each group's KL and gold gain: a run on files
does not know that its prompts are those of the built-in task. docs/guide/methods.md has the sweeps and the outcome.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from components.base.jsonl import read_rows, write_rows
from components.data.support_desk.desk import generate, generate_careful, gold
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from tests.bench.tools import argument_parser, markdown

JUDGE_PAIRS = 1000


def write(folder: Path, share: float) -> None:
    """Write `demonstrations.jsonl`, `preferences.jsonl` and `judge.jsonl`, the same ones at each call."""
    config = load_config("demo", [])
    demonstrations, pairs = generate(config.seed, config.data.generator)
    draw = random.Random(f"flipped {config.seed}")
    labelled = [{name: row[name] for name in ("prompt", "chosen", "rejected", "category")} for row in pairs]
    flips = [draw.random() < share for _ in labelled]
    for row in (row for row, flip in zip(labelled, flips, strict=True) if flip):
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    careful = generate_careful(config.seed, config.data.generator.model_copy(update={"judge_pairs": JUDGE_PAIRS}))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("demonstrations", demonstrations), ("preferences", labelled), ("judge", careful)):
        write_rows(folder / f"{name}.jsonl", rows)
    print(f"{sum(flips)} of {len(flips)} labels are flipped")


def gold_gain(evaluation: Path) -> float:
    """Return the mean gold score of the policy's responses over that of SFT's to the same prompts, as the stage does on
    the built-in task (`policy/gold` less `policy/sft_gold`)."""
    rows = list(read_rows(evaluation))
    by_model = ([gold(row["prompt"], row[name]["response"]) for row in rows] for name in ("policy", "sft"))
    mine, its = (sum(scores) / len(scores) for scores in by_model)
    return mine - its


def table(sweep: Path) -> str:
    """Return a row for each group: medians over its seeds, with the lowest and the highest."""
    store = ArtifactStore(sweep.parents[2])
    rows = []
    for group in json.loads(sweep.read_text())["groups"]:
        if cells := [cell for cell in group["cells"] if "ppo" in cell["models"]]:
            kl = [cell["measures"]["policy/kl"] for cell in cells]
            gains = [gold_gain(store.path(cell["models"]["ppo"]) / "evaluation.jsonl") for cell in cells]
            rows.append([group["name"], len(cells), _ranged(kl), _ranged(gains)])
    return markdown(("group", "seeds", "KL", "gold gain"), rows)


def _ranged(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Write the files, or print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("what", choices=("write", "gold"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--share", type=float, default=0.3)
    args = parser.parse_args()
    if args.what == "write":
        write(args.path, args.share)
    else:
        print(table(args.path))


if __name__ == "__main__":
    main()
