"""Whether reward models that differ disagree more on soup than on the SFT policy's samples, on the built-in task.

    python tests/bench/disagreement.py --members 4

Two ensembles, each of demo-long's sizes and config. `seeds and halves`: every member has an SFT model of a seed of its
own, and trains on one of two halves of the training prompts' pairs, in turn. `pipeline`: what `reward.members` and
`reward.member_share=0.5` make in a run, one SFT model, each member a random half. Both judge the samples of the first
SFT model on the calibration split's prompts, and soup of the same prompts and lengths (`disagreement_report`):
`shuffled`, a sample's tokens in another order, and `random`, tokens drawn from the vocabulary. The AUROC is of a
text's disagreement, the standard deviation of the members' scores; beside it that of their mean score, low for soup:
what a single reward model knows of it. Intervals are clustered by prompt. What is made goes to `--out` and is not made
again.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from components.base.files import whole_folder
from components.training.loop import seeded

BAR = 0.8
"""Least AUROC of disagreement for soup against samples."""
SHARE = 0.5
"""Of the training prompts, each member's."""
KINDS = ("seeds and halves", "pipeline")


def half(rows: Sequence[Mapping[str, Any]], seed: int, which: int) -> list[int]:
    """Indices of the `rows` of half `which` (0 or 1) of the prompts; no prompt is in both."""
    prompts = sorted({str(row["prompt"]) for row in rows})
    first = set(seeded(seed, "disagreement", "halves").sample(prompts, len(prompts) // 2))
    return [i for i, row in enumerate(rows) if (str(row["prompt"]) in first) == (which == 0)]


class Bench:
    """The data of demo-long, and what is trained on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from learning import inputs  # beside this script; the unit tests import it by another name

        from components.data.tables.published import read_split
        from components.models.runtime import activate
        from components.reward.config import RewardJob
        from flows.config.run_config import load_config

        self.out, self.count = options.out.resolve(), options.members
        config = load_config("demo-long").resolved()
        self.config = config.model_copy(
            update={"runtime": config.runtime.model_copy(update={"threads": options.threads})}
        )
        activate(self.config.runtime)
        self.data = Path(inputs(self.out / "inputs", wanted=("validate",))["data"])
        self.rows = read_split(self.data / "pairs.train")
        self.job = RewardJob(
            seed=self.config.seed, runtime=self.config.runtime, generation=self.config.generation,
            reward=self.config.reward,
        )  # fmt: skip

    def made(self, name: str, make: Callable[[Path], Any]) -> Path:
        """The folder `name`, made by `make` where it isn't there."""
        done = self.out / name
        if not done.exists():
            print(f"making {done}", file=sys.stderr)
            with whole_folder(done) as making:
                make(making)
        return done

    def sft(self, seed: int) -> Path:
        """The artifact of demo-long's SFT stage, of the first run's data."""
        from tasks.stages import STAGES

        stage = STAGES["sft"]
        job = self.config.stage_job(stage).model_copy(update={"seed": seed})
        run = stage.load_run()
        return self.made(f"sft-{seed}", lambda folder: run(job, {"data": self.data}, folder, _silent)) / "artifact"

    def members(self, kind: str) -> Iterator[Path]:
        """Folders of the trained members' models."""
        for member in range(self.count):
            yield self.made(f"{kind.split()[0]}-{member}", partial(self._train, kind, member))

    def _train(self, kind: str, member: int, folder: Path) -> None:
        from components.models.folders import load_causal_lm, save_model
        from components.reward.pairs import encode_pairs, member_rows
        from components.reward.train import fit_model, start_model

        own = kind == KINDS[0]
        sft = self.sft(member if own else 0)
        job = self.job.model_copy(update={"seed": member}) if own else self.job
        wanted = half(self.rows, self.job.seed, member % 2) if own else member_rows(self.rows, SHARE, job.seed, member)
        _, tokenizer = load_causal_lm(sft, job.runtime)
        pairs = encode_pairs(tokenizer, [self.rows[i] for i in wanted], job.generation)
        which = 0 if own else member
        model = start_model(job, sft, which)
        fit_model(job, model, pairs, tokenizer.pad_token_id, folder, _silent, which)
        save_model(model, tokenizer, folder / "model")


def _silent(*_: Any, **__: Any) -> None:
    """Reports nothing."""


def judge(bench: Bench, kind: str, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Of the first so many members: held-out accuracies, disagreement and its AUROC, that of the mean score."""
    from components.data.tables.published import read_split
    from components.models.folders import frozen, load_causal_lm, load_reward_model
    from components.reward.evaluation.probes import Scorer, disagreement_report
    from components.reward.pairs import encode_pairs
    from components.reward.scoring import score_sequences
    from components.reward.stage import sample_sft
    from components.stats.calibration.measure import correctness

    job = bench.job
    _, tokenizer = load_causal_lm(bench.sft(0), job.runtime)
    samples = sample_sft(job, {"sft": bench.sft(0), "data": bench.data}, tokenizer)
    test = encode_pairs(tokenizer, read_split(bench.data / "pairs.test"), job.generation)
    members, accuracies = [], []
    for folder in bench.members(kind):
        model, own = load_reward_model(folder / "model", job.runtime)
        assert own.get_vocab() == tokenizer.get_vocab()
        members.append(frozen(model))
        chosen, rejected = (
            score_sequences(model, tokenizer.pad_token_id, side, job.runtime).double().numpy()
            for side in ([p.chosen for p in test], [p.rejected for p in test])
        )
        accuracies.append(float(correctness(chosen - rejected).mean()))
    scorers = [Scorer(model, tokenizer, job.generation, job.runtime) for model in members]
    for size in sizes:
        scale = float(np.mean([scorer(samples.ids) for scorer in scorers[:size]], axis=0).std(ddof=1))
        found = disagreement_report(scorers[:size], samples, scale, job.seed)
        yield {"kind": kind, "members": size, "accuracies": accuracies[:size], **found}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, an ensemble a line, and whether the bar is met."""
    titles = ("ensemble", "members", "accuracy", "disagreement: samples", "shuffled", "random",
              "AUROC, all soup", "shuffled", "random", "by mean score")  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for one in found:
        low, high = min(one["accuracies"]), max(one["accuracies"])
        cells = [one["kind"], str(one["members"]), f"{low:.3f} to {high:.3f}"]
        cells += [f"{one[name]:.2f}" for name in ("sft", "shuffled", "random")]
        verdict = "met" if one["auroc"] >= BAR else "MISSED"
        cells.append(f"{_interval(one, 'auroc')} (≥ {BAR:g} {verdict})")
        cells += [_interval(one, name) for name in ("auroc_shuffled", "auroc_random", "score_auroc")]
        lines.append(f"| {' | '.join(cells)} |")
    best = max(found, key=lambda one: one["auroc"])
    helps = f"Of these, {best['kind']} with {best['members']} members spots soup best (AUROC {best['auroc']:.2f})"
    verdict = "its disagreement is worth a gate" if best["auroc"] >= BAR else "ensembles don't help there"
    return "\n".join([*lines, "", f"{helps}: {verdict}."])


def _interval(found: Mapping[str, Any], name: str) -> str:
    return f"{found[name]:.3f} [{found[f'{name}_low']:.3f}, {found[f'{name}_high']:.3f}]"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("TETHER_HOME", ".tether"))
    parser.add_argument("--members", type=int, default=4, help="of the larger ensemble of each kind; the other has 2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=home / "disagreement", help="models, and found.json")
    return parser.parse_args()


def main() -> None:
    """Train what is missing, judge, print."""
    options = arguments()
    bench = Bench(options)
    sizes = sorted({2, options.members})
    found = [one for kind in KINDS for one in judge(bench, kind, sizes)]
    (bench.out / "found.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
