"""Tether's DPO against TRL 1.16.0's DPOTrainer: pairs/s and peak memory of training on the same pairs.

    pip install --no-deps --target /tmp/trl trl==1.16.0
    python -m tests.bench.trl.direct --trl /tmp/trl --source ../shared/data/hh-rlhf/helpful-base-test.jsonl.gz
    python -m tests.bench.trl.direct --quick                        # ours alone, tiny: does it start?

Both sides train one pass over the same tokens of the first `--pairs` pairs of `--source`, cut to --prompt and
--response tokens, from the same weights, in batches of `--batch` pairs that are one micro-batch, with AdamW, β 0.1, no
dropout and a constant learning rate. Both compute the reference's log-probabilities before, which is not timed, and
whose means must agree (TRL: `precompute_ref_log_probs=True`). Ours is what the stage does with a reward model as large
as the policy. bfloat16 is each side's own autocast. `--recompute` is gradient checkpointing on both, TRL's default.

Every measurement is a process of its own (`direct_side.py`). Sides alternate, in reversed order every second round;
ratios are medians over `--rounds`, TRL / ours for time, ours / TRL for memory. Memory is the process's peak, less what
the imports took or whole; on a GPU what torch's allocator gave out, and what it reserved.
"""

import argparse
import gzip
import json
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from components.base.jsonl import write_json
from components.data.formats.pairs import parse_pair
from components.data.rows import RawRow
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, load_base, save_model
from components.models.sampling import SftAnswers
from components.models.tokenizers import train_tokenizer
from components.reward.scoring import ScoreScale
from tests.bench.tools import argument_parser, bar, markdown, measured, require_trl
from tests.bench.trl.workload import scalar_model
from tests.splits import published, write_split

SIZES = {
    "17m": ScratchModel(hidden_size=256, layers=6, heads=4),
    "135m": None,
}
"""17m is a Llama with random weights, three quarters of them embeddings of SmolLM2's vocabulary of 49,152; 135m is
SmolLM2-135M."""
TINY = ScratchModel(hidden_size=32, layers=2, heads=2)
SPEED_BAR, MEMORY_BAR = 1.5, 0.8
SAME_REFERENCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest relative difference of the references' mean log-probability of a response."""
VERSION = "1.16.0"


def rows_of(source: Path, count: int) -> list[dict[str, Any]]:
    """Return the first `count` readable pairs of a file of Anthropic's transcripts."""
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        raw = (RawRow(i, json.loads(line)) for i, line in enumerate(lines, 1))
        items = (parse_pair(row, "transcripts", "hh", max_characters=10**6).item for row in raw)
        return list(islice((dict(item) for item in items if item is not None), count))


def write_inputs(folder: Path, size: str, options: argparse.Namespace) -> None:
    """Write what the stage reads: the SFT policy, a reward model on its trunk, and the pairs."""
    if options.quick:
        rows = list(published(generate(0, SupportDeskConfig(demonstrations=50, pairs=options.pairs))[1]))
        texts = [row["chosen"] for row in rows] + [m["content"] for row in rows for m in row["prompt"]]
        model, tokenizer = None, train_tokenizer(texts, 400)
    else:
        rows = rows_of(options.source, options.pairs)
        model, tokenizer = load_base(options.smollm2)
    shape = TINY if options.quick else SIZES[size]
    if shape is not None:
        model = build_causal_lm(shape, tokenizer, max_positions=options.prompt + options.response, seed=0)
    save_model(model, tokenizer, folder / "sft" / "model")
    reward = folder / "reward"
    save_model(scalar_model(model, 1), tokenizer, reward / "model")
    write_json(reward / "sft_scores.json", [[-1.0, 1.0]])
    ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=2).write(reward, {})
    answer = tokenizer("Yes.", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    SftAnswers(0, [0], [answer], [True]).write(reward)
    write_split(folder / "data" / "pairs.train", rows)
    write_split(folder / "data" / "prompts.calibration", ({"prompt": row["prompt"]} for row in rows[:1]))


def measure(options: argparse.Namespace, folder: Path, side: str, number: int, **what: Any) -> dict[str, Any]:
    """Run `direct_side.py`, or take what `--out` says it printed for the same before."""
    given = {name: getattr(options, name) for name in ("threads", "batch", "prompt", "response", "recompute", "device")}
    given |= {"side": side, **what}
    asked = given | {"round": number, "pairs": options.pairs}
    if options.out and options.out.exists():
        for line in map(json.loads, options.out.read_text("utf-8").splitlines()):
            if line["asked"] == asked:
                return dict(line["found"])
    trl = options.trl if side == "trl" else None
    found = measured("tests.bench.trl.direct_side", given | {"folder": str(folder)}, options.threads, trl)
    if options.out:
        with options.out.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps({"asked": asked, "found": found}) + "\n")
    return dict(found)


def compare(options: argparse.Namespace, folder: Path, size: str, dtype: str) -> str:
    """Measure both sides in turns; return a Markdown table."""
    sides = ["tether"] if options.quick else ["trl", "tether"]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            runs[side].append(measure(options, folder, side, number, size=size, dtype=dtype))
            print(f"{size} {dtype} {side}, round {number + 1}", file=sys.stderr)
    if not options.quick:
        ours, theirs = (runs[side][0]["reference"] for side in ("tether", "trl"))
        assert abs(ours - theirs) <= SAME_REFERENCE[dtype] * abs(theirs), (ours, theirs)
    table = []
    for name, title, unit, limit in (
        ("pairs_per_second", "pairs/s", 1.0, SPEED_BAR),
        ("pairs_per_cpu_second", "pairs/s of processor time", 1.0, None),
        ("peak", "memory less imports, GB", 1e9, MEMORY_BAR), ("whole", "memory, whole process, GB", 1e9, None),
    ):  # fmt: skip
        values = {side: [found[name] / unit for found in found_by_side] for side, found_by_side in runs.items()}
        cells = [title, *(f"{median(values[side]):.2f}" for side in sides)]
        if not options.quick:
            ratios = [ours / theirs for ours, theirs in zip(values["tether"], values["trl"], strict=True)]
            cells += [bar(median(ratios), limit, unit > 1), f"{min(ratios):.2f} to {max(ratios):.2f}"]
        table.append(cells)
    return markdown(["", *sides, *([] if options.quick else ["ratio", "of each round"])], table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argument_parser(__doc__)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", choices=SAME_REFERENCE, default=["float32"])
    parser.add_argument("--pairs", type=int, default=48, help="pairs of the pass")
    parser.add_argument("--batch", type=int, default=8, help="pairs of an optimiser step")
    parser.add_argument("--prompt", type=int, default=96, help="most tokens of a prompt: its last ones stay")
    parser.add_argument("--response", type=int, default=64, help="most tokens of a response")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--quick", action="store_true", help="ours alone, once, on a tiny model and the built-in task")
    parser.add_argument("--source", type=Path, help="Anthropic's transcripts, .jsonl.gz")
    parser.add_argument("--smollm2", type=Path, default=home / "models" / "smollm2", help="from `tether fetch smollm2`")
    parser.add_argument("--trl", type=Path, default=Path("/tmp/trl"), help="the folder TRL was installed into")
    parser.add_argument("--out", type=Path, default=None, help="a journal: what is in it isn't measured again")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.pairs, options.rounds = ["tiny"], 50, 1
    elif options.source is None:
        parser.error("--source: give the pairs, or --quick")
    return options


def main() -> None:
    """Measure size after size and print as they come."""
    options = arguments()
    if not options.quick:
        require_trl(options.trl, VERSION)
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), size, options)
            for dtype in options.dtype:
                print(f"\n{size}, {dtype}, {options.rounds} rounds\n\n{compare(options, Path(folder), size, dtype)}\n")


if __name__ == "__main__":
    main()
