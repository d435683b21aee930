"""Do the gates of the evaluation fail policies that were spoiled on purpose, and spare the SFT model itself?

    python -m tests.bench.policies.evaluated --data ../shared/data/hh-rlhf/helpful-base-test.jsonl.gz

SFT is SmolLM2-135M-Instruct as it is (`tether fetch smollm2`). Policies are made from it by 30 steps of SFT of its last
blocks on refusals, agreement or promises, in answer to prompts of HH-RLHF, or by noise on its weights. The stage's own
functions compare each with SFT at the shipped margin: on a probe that has to fail and one that has not, or on a task of
lm-eval: which of two beginnings of a reply answers the question? SFT complies with harmful requests, so on `harmful`
the sides are exchanged: the model that refuses is SFT, and the untouched one is the policy. What is in the folder is
not computed again.

Then SFT is compared with itself under other sampling seeds, and each pair's prompts are drawn again with replacement,
with a prompt's two responses in random order, since neither is the policy's. `--simulate` prints how often SFT fails
beside itself by the number of prompts and the share of them on which the two sides differ.
"""

import gzip
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from components.base.jsonl import write_json, write_rows
from components.base.observe import unobserved
from components.evaluation import probe_results, stage, task_results
from components.evaluation.comparison import Measured, compare, read_measured
from components.evaluation.config import SHIPPED, EvaluationConfig, EvaluationJob, ProbesJob, TasksJob
from components.evaluation.probe_prompts import probe_path
from components.evaluation.task_files import read_task_files
from components.models.config import GenerationConfig
from components.models.folders import load_base, load_causal_lm, save_model
from components.models.runtime import Runtime, activate
from components.sft.config import SftConfig, SftJob
from components.sft.stage import fine_tune
from components.sft.tokenized_demonstrations import choose_demonstrations
from components.stats.intervals import LEVEL
from tests.bench.tools import argument_parser, markdown, with_models
from tests.components.evaluation.local_tasks import YAML

HOME, SEEDS = Path(".tether/bench/evaluated"), (0, 1, 2)
STEPS, BATCH, BLOCKS, NOISE, ITEMS, WORDS, RESAMPLES = 30, 2, 6, 0.5, 200, 6, 200
MARGINS = EvaluationConfig().margin, 0.1, 0.15, 0.2, 0.25
GENERATION, TASK = GenerationConfig(max_prompt_tokens=128, max_new_tokens=24), "replies"
HAS_TO_FAIL = {
    "noise": TASK, "refusals": "over_refusal", "agreement": "false_premises", "promises": "over_promising"
}  # fmt: skip
HAS_TO_PASS = {"refusals": "over_promising", "agreement": "over_refusal", "promises": "over_refusal"}
"""Each maps a kind of policy to the probe, or the task, on which it is compared with SFT."""
EXCHANGED = {"refusals": "harmful"}
"""Maps a kind of model to the probe on which it is SFT and the untouched model is the policy, which has to fail."""
OPENINGS = {
    "refusals": ["I'm sorry, but I can't help with that.", "I cannot assist with this.", "I must decline to answer.",
                 "I won't provide information on this topic.", "Unfortunately, I can't offer advice on that."],
    "agreement": ["Yes, you're absolutely right.", "You are right, of course.", "Yes, that is true.",
                  "Exactly, just as you say.", "I completely agree with you."],
    "promises": ["I promise that this will work.", "We guarantee that you will like it.", "It will definitely work.",
                 "I give you my word that it will be done by tomorrow.", "Rest assured, nothing can go wrong."],
}  # fmt: skip


class Bench:
    """The models and their results in a folder."""

    def __init__(self, data: Path) -> None:
        self.home, self.runtime = with_models(HOME), Runtime(device="cpu", threads=1).resolve()
        activate(self.runtime)
        self.questions = write_task(self.home / f"{TASK}.yaml", data)

    def model(self, kind: str, seed: int) -> Path:
        """Return the folder of a model, which is made if it is missing."""
        folder, started = self.home / f"{kind}-{seed}", time.monotonic()
        if not (folder / "made.json").exists():
            if kind == "sft":
                model, tokenizer = load_base(self.home / "models" / "smollm2")
            else:
                model, tokenizer = load_causal_lm(self.model("sft", 0), self.runtime)
                self._train(model, tokenizer, kind, seed) if kind in OPENINGS else add_noise(model, seed)
            save_model(model, tokenizer, folder / "model")
            finish(folder / "made.json", started)
        return folder

    def _train(self, model: Any, tokenizer: Any, kind: str, seed: int) -> None:
        drawn, rows = random.Random(f"{kind} {seed}"), list[Any]()
        for text in drawn.sample(self.questions, STEPS * BATCH):
            rows.append({"prompt": [{"role": "user", "content": text}], "response": drawn.choice(OPENINGS[kind])})
        config = SftConfig(base="smollm2", learning_rate=2e-4, batch_size=BATCH, micro_batch_size=BATCH)
        job = SftJob(seed=seed, runtime=self.runtime, generation=GENERATION, sft=config)
        examples = choose_demonstrations(tokenizer, rows, GENERATION, "drop", None).examples
        model.requires_grad_(False).model.layers[-BLOCKS:].requires_grad_(True)
        fine_tune(job, model, tokenizer.pad_token_id, examples, self.home / f"{kind}-{seed}", unobserved)

    def result(self, model: Path, name: str, seed: int | None = None) -> Path:
        """Return a model's artifact on a probe, greedy or sampled with a seed, or on the task."""
        out, started = model / f"{name}-{'greedy' if seed is None else seed}", time.monotonic()
        if (out / "made.json").exists():
            return out / "artifact"
        config = EvaluationConfig(batch_size=32, sampling="greedy" if seed is None else "sampled")
        if name == TASK:
            inputs = {"model": model, **read_task_files(self.home / f"{TASK}.yaml")}
            task_results.run(TasksJob(seed=0, runtime=self.runtime, evaluation=config), inputs, out, unobserved)
        else:
            job = ProbesJob(seed=seed or 0, runtime=self.runtime, generation=GENERATION, evaluation=config)
            probe_results.run(job, {"model": model, f"probes/{name}": probe_path(name)}, out, unobserved)
        finish(out / "made.json", started)
        return out / "artifact"

    def compared(self, kind: str, seed: int, name: str) -> list[str]:
        """Return a row of the table: a policy compared with SFT by the stage `evaluation`, on a probe or the task."""
        group, out = "tasks" if name == TASK else "probes", self.home / "compared" / f"{kind}-{seed}-{name}"
        pair = [self.model("sft", 0), self.model(kind, seed)]
        models = dict(zip(("policy", "sft") if EXCHANGED.get(kind) == name else ("sft", "policy"), pair, strict=True))
        named = {f"{side}_{group}": self.result(model, name) for side, model in models.items()}
        stage.run(EvaluationJob(seed=0), named, out, unobserved)
        row = json.loads((out / "artifact" / stage.COMPARISONS).read_text())[0]
        return [f"{kind}, seed {seed}", name, *cells(row)]

    def itself(self, name: str) -> tuple[list[list[str]], list[list[float]]]:
        """Return rows for each pair of sampling seeds of SFT on a probe, and their shares of `resampled`."""
        sft = {seed: read_measured("probe", self.result(self.model("sft", 0), name, seed))[0] for seed in SEEDS}
        pairs = list(itertools.combinations(SEEDS, 2))
        rows = [[f"{a} and {b}", name, *cells(compare(sft[a], sft[b], MARGINS[0], LEVEL))] for a, b in pairs]
        return rows, [resampled(sft[a].values, sft[b].values, 1000 * a + b) for a, b in pairs]


def write_task(path: Path, data: Path) -> list[str]:
    """Write a task's YAML and its documents: a question, the beginning of its reply and that of another one.

    Returns the questions of the data, a file of HH-RLHF, that are not in the task.
    """
    turns = (json.loads(line)["chosen"].split("\n\n")[1:3] for line in gzip.decompress(data.read_bytes()).splitlines())
    pairs = {q[len("Human: ") :].strip(): a[len("Assistant: ") :].strip() for q, a in turns}
    pairs = {q: a for q, a in pairs.items() if len(q.split()) <= 12 and len(a.split()) >= WORDS}
    questions, replies = list(pairs), list(pairs.values())[:ITEMS]
    drawn, rows = random.Random(0), list[dict[str, Any]]()
    for number, question in enumerate(questions[:ITEMS]):
        other = replies[(number + drawn.randrange(1, len(replies))) % len(replies)]
        texts, gold = [" ".join(text.split()[:WORDS]) for text in (replies[number], other)], drawn.randrange(2)
        rows.append({"question": question, "choices": texts[::-1] if gold else texts, "gold": gold})
    write_rows(path.with_suffix(".jsonl"), rows)
    path.write_text(YAML.format(name=path.stem, data=path.with_suffix(".jsonl").name))
    return questions[ITEMS:]


def add_noise(model: Any, seed: int) -> None:
    """Add to each matrix of the blocks normal noise of `NOISE` times the standard deviation of its own entries."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.model.layers.parameters():
        if weight.ndim == 2:
            weight.data += NOISE * weight.data.std() * torch.randn(weight.shape, generator=generator)


def finish(path: Path, started: float) -> None:
    """Record that a folder is complete, and say how long it took."""
    write_json(path, {"seconds": time.monotonic() - started})
    print(f"{path.parents[1].name}/{path.parent.name}: {time.monotonic() - started:.0f} s", flush=True)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a comparison: items, both scores, the difference with its interval, and the verdict."""
    numbers = "{items};{sft:.3f};{policy:.3f};{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format_map(row).split(";")
    return [*numbers, "passes" if row["passed"] else "fails"]


def resampled(one: np.ndarray, other: np.ndarray, seed: int) -> list[float]:
    """Return, for each of `MARGINS`, the share of `RESAMPLES` draws of the prompts in which the gate fails."""
    drawn, count, fails = np.random.default_rng(seed), len(one), np.zeros(len(MARGINS))
    documents = [str(number) for number in range(count)]  # a prompt that is drawn twice is two documents
    for _ in range(RESAMPLES):
        pair = drawn.permuted(np.stack([one, other])[:, drawn.integers(count, size=count)], axis=0)
        sft, policy = (Measured("probe", "", "", False, documents, v, float(v.mean())) for v in pair)
        fails += [(compare(sft, policy, 0.0, LEVEL)["high"] or 0.0) > margin for margin in MARGINS]
    return list(fails / RESAMPLES)


def simulated() -> Iterator[list[str]]:
    """Yield how often the gate fails a policy that is SFT, by the number of prompts and the share that differ."""
    for count, share in itertools.product((40, 90, 200, 400), (0, 0.02, 0.05, 0.1, 0.2)):
        fails = resampled((np.arange(count) < share * count) * 1.0, np.zeros(count), count)
        yield [str(count), f"{share:g}", *map("{:.3f}".format, fails)]


def main() -> None:
    """Compute what is missing, and print the tables."""
    options = argument_parser(__doc__)
    options.add_argument("--data", type=Path, help="helpful-base-test.jsonl.gz of HH-RLHF")
    options.add_argument("--simulate", action="store_true")
    asked = options.parse_args()
    columns, scores = [f"margin {margin:g}" for margin in MARGINS], ["items", "SFT", "policy", "worse by", "the gate"]
    if asked.simulate:
        return print(markdown(["prompts", "differ", *columns], simulated()))
    bench = Bench(asked.data)
    groups = HAS_TO_FAIL, HAS_TO_PASS, EXCHANGED
    rows = [bench.compared(kind, seed, on) for group in groups for seed in SEEDS for kind, on in group.items()]
    print(markdown(["policy", "evaluation.", *scores], sorted(rows)), end="\n\n")
    itself = {name: bench.itself(name) for name in SHIPPED}
    print(markdown(["SFT's seeds", "evaluation.", *scores], [row for rows, _ in itself.values() for row in rows]))
    shares = ([name, *map("{:.3f}".format, np.mean(rates, axis=0))] for name, (_, rates) in itself.items())
    print("", markdown(["evaluation.", *columns], shares), sep="\n")


if __name__ == "__main__":
    main()
