"""Nothing on a sheet but the texts tells which reply is the policy's: who guesses is right in 45 to 55 % of items.

A classifier sees what a rater's files hold beside the texts: an item's number, its place in the file, white space, the
order of fields, empty cells. It is fitted on half of many batches and judged on the others.
"""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from components.base.jsonl import read_rows, write_json
from components.human_eval.batch.attention import HeldOutReply, with_attention
from components.human_eval.blinded_sample import write_sheet
from components.human_eval.blinding import Item, blind, sealed_key
from components.human_eval.config import HumanEvalConfig
from components.human_eval.selection import Chosen
from flows.people.tools import write_tasks
from flows.review.review_batches import sample_batch

BATCHES, ITEMS = 40, 60


def batch(folder: Path, seed: int) -> list[Item]:
    """A batch whose texts differ in nothing but their words; names sort as their authors do."""
    chosen = [
        Chosen([{"role": "user", "content": f"q {n:03d}"}], "xyz"[n % 3], f"stratum {n % 4}") for n in range(ITEMS)
    ]
    drawn = np.random.default_rng(seed).permutation(2 * ITEMS)
    replies = [f"reply {n:03d}" for n in drawn]
    secret = f"secret {seed}".encode()
    items, salt = blind(chosen, replies[:ITEMS], replies[ITEMS:], seed, secret, repeats=6)
    known = [HeldOutReply([{"role": "user", "content": f"k {n:03d}"}], "a b c d e f g h") for n in range(6)]
    items = with_attention(items, known, 6, salt)
    write_json(folder / "key.json", sealed_key(items, salt))
    write_sheet(folder, items, HumanEvalConfig(criteria=("helpful",)))
    write_tasks(sample_batch(folder, folder), folder / "tasks.json")
    return items


def rows_of(folder: Path, form: str) -> list[str]:
    """The lines, records or tasks of a file, each as its raw text."""
    if form == "csv":
        text = (folder / "raters" / "rater_1.csv").read_text(encoding="utf-8-sig")
        table = list(csv.reader(io.StringIO(text, newline="")))
        return [json.dumps(row) for row in table[next(n for n, row in enumerate(table) if row[0] == "item") + 1 :]]
    if form == "jsonl":
        return (folder / "sheet.jsonl").read_text().splitlines()
    return [json.dumps(task) for task in json.loads((folder / "tasks.json").read_text())]


def replies_of(row: str) -> list[str]:
    """The two replies as they stand in a row, for the white space around them."""
    cells = json.loads(row)
    if isinstance(cells, list):
        return [str(cell) for cell in cells[2:4]]
    texts = cells.get("data", cells)
    return [texts["response_a"], texts["response_b"]]


def features(rows: list[str]) -> np.ndarray:
    """(rows, features) of all but the texts, the item's name among them."""
    names = [row[row.index("q0") : row.index("q0") + 14] for row in rows]
    found = []
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        number = int(name[1:5])
        marks = [row.count(mark) for mark in (" ", "\\n", '"', ",", '""', "\t", "'", ":")]
        digits = [int(each, 16) for each in name[6:]]
        place_of_name = [row.index(name), len(row) - row.rindex(name)]
        bits = [place >> k & 1 for k in range(3)] + [number % 3, number % 5]
        shown = replies_of(row)
        spaces = [len(text) - len(text.strip()) for text in shown] + [text.count("  ") for text in shown]
        found.append([place, number, place - number, len(row), *marks, *digits, *place_of_name, *bits, *spaces])
    values = np.array(found, dtype=float)
    return (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-9)


def accuracy(samples: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Share of the second half of the batches that a classifier gets right which saw the first."""
    half = len(samples) // 2
    fit, judged = (map(np.concatenate, zip(*part, strict=True)) for part in (samples[:half], samples[half:]))
    return float(LogisticRegression(max_iter=500).fit(*fit).score(*judged))


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, np.ndarray]]:
    found = []
    for seed in range(BATCHES):
        folder = tmp_path_factory.mktemp(f"batch{seed}")
        items = batch(folder, seed)
        judged = [item.distortion is None for item in items]
        found.append((folder, np.array([item.policy_side == "a" for item in items]), np.array(judged)))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("form", ["csv", "jsonl", "label studio"])
def test_all_but_the_texts_tells_the_sides_no_better_than_a_coin(batches: list, form: str) -> None:  # type: ignore[type-arg]
    samples = [(features(rows_of(folder, form))[judged], side[judged]) for folder, side, judged in batches]
    assert sum(len(side) for _, side in samples) == BATCHES * (ITEMS + 6)
    assert 0.45 <= accuracy(samples) <= 0.55
    with_tell = [
        (np.column_stack([seen, side + np.random.default_rng(1).normal(0, 1, len(side))]), side)
        for seen, side in samples
    ]
    assert accuracy(with_tell) > 0.6, "the classifier finds what there is to find"


def test_nor_does_it_tell_which_items_have_a_known_answer(batches: list) -> None:  # type: ignore[type-arg]
    for form in ("csv", "jsonl", "label studio"):
        seen = [features(rows_of(folder, form)) for folder, _, _ in batches]
        places = np.concatenate([x[~judged, 0] for x, (_, _, judged) in zip(seen, batches, strict=True)])
        assert abs(places.mean()) < 4 / np.sqrt(len(places)), "place in the file, in its standard deviations"
    rows = read_rows(batches[0][0] / "sheet.jsonl")
    assert len({tuple(row) for row in rows}) == 1, "every row has the same fields"
