"""Random rounds of sampling, voting and validating: who may train and who only judges, and that every vote stands once.

Models are replaced by fakes; the sample, the sheets, the scoring and the splits are the pipeline's own.
"""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from components.base.jsonl import read_rows, write_rows
from components.data.splits import loose_key
from components.data.spreadsheet import write_csv
from components.data.tables.published import read_split
from components.human_eval import blinded_sample, unblinded_score
from components.human_eval.batch.halves import HELD_OUT, JUDGED_IN, PREFERENCES, may_train
from components.human_eval.config import HumanEvalConfig, SampleJob, ScoreJob
from components.human_eval.sheet import as_record
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.store.store import digest_folder
from data_contracts.examine import examine
from data_contracts.published_splits import write_splits
from data_contracts.validate import write_quarantine
from tests.sheets import read_sheet

SPLITS = ("train", "calibration", "test")
SHOWN = ("{}", "{}!", "  {}", "{} ?")
"""One prompt in several ways: they are near-duplicates, and go where it goes."""


class Drawn:
    """What hypothesis chose, and a generator for what it need not see one by one."""

    def __init__(self, prompts: int, copies: float, rounds: int, items: int, raters: int, empty: float, seed: int):
        self.prompts, self.rounds, self.items, self.raters, self.seed = prompts, rounds, items, raters, seed
        self.empty, self.chance = empty, random.Random(seed)
        names = [f"Question {i % prompts}" for i in range(prompts + round(copies * prompts))]
        self.shown = [self.chance.choice(SHOWN if copies else SHOWN[:1]).format(name) for name in names]


anything = st.builds(
    Drawn,
    prompts=st.integers(30, 120),
    copies=st.sampled_from([0.0, 0.3]),
    rounds=st.integers(1, 3),
    items=st.integers(2, 40),
    raters=st.integers(1, 4),
    empty=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 2**31),
)


def keys(rows: Iterator[Any] | list[Any]) -> set[str]:
    return {loose_key(row["prompt"]) for row in rows}


def validated(job: Any, drawn: Drawn, place: Path, batches: list[Path]) -> Path:
    """The splits of the base data and of all batches so far."""
    base = place / "base.jsonl"
    write_rows(base, ({"prompt": p, "chosen": f"good {i}", "rejected": f"bad {i}"} for i, p in enumerate(drawn.shown)))
    inputs = {"preferences": base} | {f"votes/{n}": path for n, path in enumerate(batches, 1)}
    out = place / f"data {len(batches)}"
    found = examine(job(preferences="base.jsonl"), inputs, place / f"scratch {len(batches)}", lambda *read: None)
    write_splits(found, out)
    write_quarantine(found, out)
    (out / "task.json").write_text('{"name": "none"}')
    return out


def sampled(drawn: Drawn, data: Path, out: Path, number: int) -> Path:
    """The batch of a round, whose policy says so."""

    def respond(job: Any, inputs: Any, prompts: Any, *_: Any, **__: Any) -> dict[str, list[dict[str, Any]]]:
        said = {"sft": "sft", "policy": f"policy {number}"}
        return {side: [{"text": f"{v} {p[0]['content']}", "ended": True} for p in prompts] for side, v in said.items()}

    config = HumanEvalConfig(items=drawn.items, raters=drawn.raters, repeats=0.2)
    job = SampleJob(seed=drawn.seed, runtime=Runtime(), generation=GenerationConfig(), human_eval=config)
    seal = data.parent / "seal"
    seal.write_text("secret")
    with patch.object(blinded_sample, "respond", respond):
        blinded_sample.run(job, {"data": data, "seal": seal, "sft": data, "ppo": data}, out, lambda *a, **k: None)
    return out / "artifact"


def scored(drawn: Drawn, batch: Path, out: Path) -> tuple[Path, Counter[tuple[str, str, str, str]]]:
    """The votes on a batch as an artifact, and the votes that were given: prompt, replies, rater and label."""
    config = HumanEvalConfig(items=drawn.items, raters=drawn.raters, repeats=0.2)
    rows = read_sheet(batch / "sheet.csv", drawn.raters, config.ratings)
    judged = {row["item"] for row in read_rows(batch / "responses.jsonl")}
    repeats = sample_repeats(batch)
    given: Counter[tuple[str, str, str, str]] = Counter()
    filled = []
    for number, row in enumerate(rows):
        ratings = tuple(
            "" if drawn.chance.random() < drawn.empty and number else drawn.chance.choice(config.ratings)
            for _ in range(drawn.raters)
        )
        filled.append(row._replace(ratings=ratings))
        item = row.item.split("-")[0]
        if item in judged and item not in repeats:
            for rater, rating in enumerate(ratings, 1):
                if rating:
                    given[loose(row.prompt), f"{row.response_a} | {row.response_b}", f"rating_{rater}", rating] += 1
    write_csv(out.parent / "filled.csv", list(as_record(filled[0])), map(as_record, filled))
    job = ScoreJob(seed=drawn.seed, human_eval=config)
    unblinded_score.run(job, {"sample": batch, "sheet": out.parent / "filled.csv"}, out, lambda *a, **k: None)
    return out / "artifact", given


def loose(shown: str) -> str:
    """What a sheet shows of a prompt, as `loose_key` has it."""
    return loose_key([{"role": "user", "content": shown.removeprefix("[user]\n")}])


def sample_repeats(batch: Path) -> set[str]:
    return set(json.loads((batch / "key.json").read_text()).get("repeat_of", {}))


def returned(artifact: Path) -> Counter[tuple[str, str, str, str]]:
    """The votes that a scored batch gives back."""
    return Counter(
        (loose_key(row["prompt"]), f"{row['a']} | {row['b']}", vote["annotator"], vote["label"])
        for file in (PREFERENCES, HELD_OUT)
        for row in read_rows(artifact / file)
        for vote in row["votes"]
    )


@settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(drawn=anything)
def test_in_any_rounds_who_judges_never_trains_who_trains_is_held_out_nowhere_and_no_vote_is_lost(
    job: Any, drawn: Drawn
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        batches: list[Path] = []
        for number in range(drawn.rounds + 1):
            data = validated(job, drawn, place, batches)
            of = {
                (kind, split): read_split(data / f"{kind}.{split}") for kind in ("pairs", "prompts") for split in SPLITS
            }
            of |= {("demonstrations", s): read_split(data / f"demonstrations.{s}") for s in ("train", "heldout")}
            training = keys([row for (_, split), rows in of.items() if split == "train" for row in rows])
            held_out = keys([row for (_, split), rows in of.items() if split != "train" for row in rows])
            votes = [row for path in batches for name in (PREFERENCES, HELD_OUT) for row in read_rows(path / name)]
            judges = keys([row for row in votes if not may_train(row["prompt"])])
            trains = keys([row for row in of["pairs", "train"] if JUDGED_IN in row])  # whose votes decide something
            assert not judges & training and not trains & held_out
            kept = sum(JUDGED_IN in row for (kind, _), rows in of.items() if kind == "pairs" for row in rows)
            aside = [row for row in read_rows(data / "quarantine.jsonl") if row["file"].startswith(("votes", "judged"))]
            assert kept + len(aside) == len(votes), "each judged pair stands once, kept or put aside"
            if number == drawn.rounds or not of["prompts", "test"]:
                return
            batch = sampled(drawn, data, place / f"batch {number}", number)
            assert digest_folder(batch) == digest_folder(sampled(drawn, data, place / f"again {number}", number))
            artifact, given = scored(drawn, batch, place / f"scored {number}")
            assert returned(artifact) == given
            batches.append(artifact)
