"""How long reward training on many pairs takes to its first step, and how much memory it holds beside the model.

    python -m tests.bench.reward_start ARTIFACT --pairs 1600000

ARTIFACT is what validate made of many pairs (of `tests/bench/contract.py`, say); its shards are linked as often as it
takes to have that many pairs in all splits. The model is a small one from scratch, so that what is measured is what
stands beside it. The stage is a process of its own, ended after its first steps; memory is the most that it held (PSS,
looked at twice a second).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from components.data.splits import SPLITS
from components.data.tables.published import read_split
from tests.bench.contract import ROOT, session_bytes

BARS = (60.0, 2.0)
"""Most seconds to the first step of 1.6 million pairs on two cores, and most gigabytes beside the model."""
STEPS = 3

STAGE = """
import sys
from pathlib import Path
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.reward.config import RewardConfig, RewardJob
from components.reward.stage import run
data, sft, out, steps = sys.argv[1:5]
job = RewardJob(
    seed=0, runtime=Runtime(device="cpu", dtype="float32").resolve(),
    generation=GenerationConfig(max_prompt_tokens=1024, max_new_tokens=512),
    reward=RewardConfig(batch_size=32, micro_batch_size=8, learning_rate=1e-3),
)
def observe(step, metrics, total=None, **more):
    print(step, total, flush=True)
    if step >= int(steps):
        raise KeyboardInterrupt
try:
    run(job, {"data": Path(data), "sft": Path(sft)}, Path(out), observe)
except KeyboardInterrupt:
    pass
"""


def linked(artifact: Path, pairs: int, out: Path) -> int:
    """An artifact with the shards of `artifact` linked so often that its splits have at least so many pairs; returns
    how many they have."""
    have = sum(len(read_split(artifact / f"pairs.{split}")) for split in SPLITS)
    times = -(-pairs // have)
    for split in (*(f"pairs.{name}" for name in SPLITS), *(f"prompts.{name}" for name in SPLITS)):
        shards = sorted((artifact / split).glob("*.arrow"))
        (out / split).mkdir(parents=True)
        for number in range(times * len(shards)):
            (out / split / f"{number:05d}.arrow").symlink_to(shards[number % len(shards)].absolute())
    (out / "task.json").write_text('{"name": "none"}')
    return times * have


def small_model(artifact: Path, out: Path) -> None:
    """A language model of random weights with a BPE of the artifact's pairs."""
    from components.models.config import ScratchModel
    from components.models.folders import build_causal_lm, save_model
    from components.models.tokenizers import train_tokenizer

    rows = read_split(artifact / "pairs.train")[:2000]
    tokenizer = train_tokenizer((text for row in rows for text in (row["chosen"], row["rejected"])), 8000)
    save_model(
        build_causal_lm(ScratchModel(hidden_size=32, layers=2, heads=2), tokenizer, 2048, seed=0), tokenizer, out
    )


def main() -> None:
    """Link the pairs, begin the stage, print its time to the first step and its memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--pairs", type=int, default=1_600_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, sft, out = (Path(folder) / name for name in ("data", "sft", "out"))
        pairs = linked(options.artifact, options.pairs, data)
        small_model(options.artifact, sft / "model")
        out.mkdir()
        began = time.perf_counter()
        command = [sys.executable, "-c", STAGE, str(data), str(sft), str(out), str(STEPS)]
        stage = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert stage.stdout is not None
        os.set_blocking(stage.stdout.fileno(), False)
        first, peak = float("nan"), 0
        while stage.poll() is None:
            peak = max(peak, session_bytes(stage.pid))
            if first != first and stage.stdout.readline():
                first = time.perf_counter() - began
            time.sleep(0.2)
        if stage.returncode or first != first:
            assert stage.stderr is not None
            raise SystemExit(stage.stderr.read()[-3000:])
    print(json.dumps({"pairs": pairs, "seconds": round(first, 1), "gigabytes": round(peak / 1e9, 2)}))
    for name, value, bar in zip(("seconds", "GB"), (first, peak / 1e9), BARS, strict=True):
        print(f"{name}: {value:.3g} (≤ {bar:g} {'met' if value <= bar else 'MISSED'})")


if __name__ == "__main__":
    main()
