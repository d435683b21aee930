"""How long the contract takes on many pairs, and how much memory: the validate stage, tokenizer and pages included.

    python tests/bench/contract.py --source helpful-base-test.jsonl.gz --model .tether/models/smollm2
    python tests/bench/contract.py --source helpful-base-test.jsonl.gz --pairs 1600000

The pairs are those of --source (Anthropic transcripts), over and over with a fifth of the words of each text drawn from
the whole file, so that lengths are real and hardly two texts alike. The stage is a process of its own, started anew;
memory is its peak resident set.
"""

import argparse
import gzip
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_BAR, GIGABYTES_BAR = 180.0, 3.0
"""At 160,000 pairs."""
CHANGED = 0.2
TURN = re.compile(r"(\n\nHuman: |\n\nAssistant: )")

STAGE = """
import json, sys
from pathlib import Path
from components.data.config import DataConfig
from components.models.config import GenerationConfig
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.validate import run
source, out, model = sys.argv[1:4]
inputs = {"preferences": Path(source)} | ({"base": Path(model)} if model else {})
job = ValidateJob(
    seed=0, generation=GenerationConfig(max_prompt_tokens=1024, max_new_tokens=512),
    data=DataConfig(preferences=source), sft=TokenizerConfig(vocabulary=8000, max_demonstrations=2000),
)
print(json.dumps(run(job, inputs, Path(out), lambda *args, **more: None)))
"""


def changed(text: str, words: list[str], rng: random.Random) -> str:
    """`text` with a share of its words drawn anew."""
    return " ".join(rng.choice(words) if rng.random() < CHANGED else word for word in text.split(" "))


def pairs(source: Path, count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` pairs in the manner of `source`."""
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(seed)
    words = [word for row in rows for word in TURN.sub(" ", row["chosen"]).split(" ") if "\n" not in word]
    for number in range(count):
        prompt, _, chosen = rows[number % len(rows)]["chosen"].rpartition("\n\nAssistant:")
        rejected = rows[number % len(rows)]["rejected"].rpartition("\n\nAssistant:")[2]
        turns = TURN.split(prompt)
        prompt = "".join(turn if TURN.match(turn) else changed(turn, words, rng) for turn in turns)
        yield {
            side: f"{prompt}\n\nAssistant:{changed(said, words, rng)}"
            for side, said in (("chosen", chosen), ("rejected", rejected))
        }


def main() -> None:
    """Write the pairs, run the stage, print its time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="helpful-base-test.jsonl.gz")
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--model", default="", help="a pretrained model's folder, for its tokenizer (default: a BPE)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        with path.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in pairs(options.source, options.pairs, 0))
        began = time.perf_counter()
        command = [sys.executable, "-c", STAGE, str(path), str(Path(folder) / "out"), options.model]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        metrics = json.loads(done.stdout.splitlines()[-1])
        size = path.stat().st_size
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    memory = used.ru_maxrss * 1024 / 1e9
    print(
        f"{options.pairs} pairs, {size / 1e9:.2f} GB: {seconds:.0f} s ({used.ru_utime + used.ru_stime:.0f} s of the "
        f"processor, {options.pairs / seconds:.0f} pairs/s), peak {memory:.2f} GB; kept {metrics['data/pairs']:.0f}, "
        f"quarantined {metrics['data/quarantined']:.0f}"
    )
    if options.pairs == 160_000:
        for name, value, bar in (("seconds", seconds, SECONDS_BAR), ("GB", memory, GIGABYTES_BAR)):
            print(f"{name}: {value:.3g} (≤ {bar:g} {'met' if value <= bar else 'MISSED'})")


if __name__ == "__main__":
    main()
