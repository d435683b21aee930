"""How long the contract takes on many pairs, and how much memory: the validate stage, tokenizer and pages included.

    python -m tests.bench.operations.contract --source helpful-base-test.jsonl.gz --model .tether/models/smollm2
    python -m tests.bench.operations.contract --source helpful-base-test.jsonl.gz --pairs 1600000 --processes 2
    python -m tests.bench.operations.contract --source helpful-base-test.jsonl.gz --pairs 10000000 --words 6

The pairs are those of --source (Anthropic transcripts), over and over with a fifth of the words of each text drawn from
the whole file, so that lengths are real and hardly two texts alike. With --words N a prompt is one turn, and each text
is N words drawn from the file. The stage is a process of its own, started anew; memory is the most that it and its
processes hold together, shared pages counted once (PSS, looked at twice a second).
"""

import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from tests.bench.tools import ROOT, argument_parser, bar

BARS = {160_000: (90.0, 1.0), 1_600_000: (900.0, 1.5)}
"""By number of pairs: most seconds on two quiet cores, and most gigabytes."""
CHANGED = 0.2
TURN = re.compile(r"(\n\nHuman: |\n\nAssistant: )")

STAGE = """
import json, sys
from pathlib import Path
from components.data.config import DataConfig
from components.models.config import GenerationConfig
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.validate import run
source, out, model, processes = sys.argv[1:5]
inputs = {"preferences": Path(source)} | ({"base": Path(model)} if model else {})
job = ValidateJob(
    seed=0, generation=GenerationConfig(max_prompt_tokens=1024, max_new_tokens=512),
    data=DataConfig(preferences=source, processes=processes),
    sft=TokenizerConfig(vocabulary=8000, max_demonstrations=2000),
)
print(json.dumps(run(job, inputs, Path(out), lambda *args, **more: None)))
"""


def changed(text: str, words: list[str], rng: random.Random) -> str:
    """`text` with a share of its words drawn anew."""
    return " ".join(rng.choice(words) if rng.random() < CHANGED else word for word in text.split(" "))


def pairs(source: Path, count: int, seed: int, short: int | None = None) -> Iterator[dict[str, str]]:
    """`count` pairs in the manner of `source`, or of texts of `short` words."""
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rng = random.Random(seed)
    words = [word for row in rows for word in TURN.sub(" ", row["chosen"]).split(" ") if "\n" not in word]
    for number in range(count):
        if short is not None:
            asked, *said = (" ".join(rng.choices(words, k=short)) for _ in range(3))
            whole = (f"\n\nHuman: {asked}\n\nAssistant: {each}" for each in said)
            yield dict(zip(("chosen", "rejected"), whole, strict=True))
            continue
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
    parser = argument_parser(__doc__)
    parser.add_argument("--source", type=Path, required=True, help="helpful-base-test.jsonl.gz")
    parser.add_argument("--pairs", type=int, default=160_000)
    parser.add_argument("--words", type=int, default=None, help="make texts of so many words (default: real lengths)")
    parser.add_argument("--model", default="", help="a pretrained model's folder, for its tokenizer (default: a BPE)")
    parser.add_argument("--processes", default="auto", help="data.processes (default: auto)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.jsonl"
        with path.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in pairs(options.source, options.pairs, 0, options.words))
        began = time.perf_counter()
        command = [sys.executable, "-c", STAGE, str(path), str(Path(folder) / "out"), options.model, options.processes]
        started = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        peaks: list[int] = []
        spent: dict[int, float] = {}
        watch = threading.Thread(target=_watch, args=(started, peaks, spent))
        watch.start()
        printed, errors = started.communicate()
        seconds = time.perf_counter() - began
        watch.join()
        if started.returncode:
            raise SystemExit(errors[-3000:])
        metrics = json.loads(printed.splitlines()[-1])
        size = path.stat().st_size
    memory, used = max(peaks, default=0) / 1e9, sum(spent.values())
    print(
        f"{options.pairs} pairs, {size / 1e9:.2f} GB: {seconds:.0f} s ({used:.0f} s of the "
        f"processor, {options.pairs / seconds:.0f} pairs/s), peak {memory:.2f} GB; kept {metrics['data/pairs']:.0f}, "
        f"quarantined {metrics['data/quarantined']:.0f}"
    )
    for name, value, limit in zip(
        ("seconds", "GB"), (seconds, memory), BARS.get(0 if options.words else options.pairs, ()), strict=False
    ):
        print(f"{name}: {bar(value, limit, largest=True)}")


def _watch(started: "subprocess.Popen[str]", peaks: list[int], spent: dict[int, float]) -> None:
    """Note memory, in which shared pages count once (PSS), and processor time so far of a process and its children.

    What a fork server's processes used is no part of what `resource` says of children.
    """
    main = psutil.Process(started.pid)
    while started.poll() is None:
        total = 0
        with suppress(psutil.Error):  # it has ended
            for process in (main, *main.children(recursive=True)):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
                    spent[process.pid] = sum(process.cpu_times()[:2])
        peaks.append(total)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
