"""Every number that a gate of human_eval judges, computed again from the filled sheet, the key and the responses.

Items share their prompts in threes, so that an interval that takes items for independent is too narrow.
"""

import csv
import itertools
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import t as student

from components.base.jsonl import read_rows, write_rows
from components.gates.table import GATES
from components.human_eval.sheet import SheetRow

LEVEL = 0.9


def kappa(given: list[list[str]]) -> float:
    """Agreement beyond chance, pair of ratings by pair."""
    pairs = [list(itertools.combinations(ratings, 2)) for ratings in given if len(ratings) > 1]
    observed = sum(sum(a == b for a, b in each) / len(each) for each in pairs) / len(pairs)
    shares = [sum(r.count(v) / len(r) for r in given) / len(given) for v in ("a", "b", "tie")]
    chance = sum(share**2 for share in shares)
    return (observed - chance) / (1 - chance)


def test_the_gated_numbers_are_those_of_the_filled_sheet(make_case: Callable[..., Any]) -> None:
    case = make_case(items=36, raters=4, level=LEVEL)
    responses = read_rows(case.sample / "responses.jsonl")
    for i, row in enumerate(responses):
        row["prompt"] = responses[i - i % 3]["prompt"]
    write_rows(case.sample / "responses.jsonl", responses)
    rng = random.Random(2)

    def rate(row: SheetRow) -> tuple[str, ...]:
        number = int(row.item[1:5])
        if number % 9 == 0:
            return ("",) * 4
        if number % 7 == 0:
            return ("", rng.choice("ab"), "", "")
        liked = "a" if row.response_a.startswith("Hey" if rng.random() < 0.7 else "Dear") else "b"
        return tuple(rng.choice([liked, liked, liked, "a", "tie", ""]) for _ in range(4))

    sheet = case.fill(rate)
    metrics, _ = case.score(sheet)

    with sheet.open(encoding="utf-8-sig", newline="") as file:
        rows = {row["item"].split("-")[0]: [row[f"rating_{i}"] for i in range(1, 5)] for row in csv.DictReader(file)}
    key = json.loads((case.sample / "key.json").read_text())["policy_side"]
    prompts = {row["item"]: json.dumps(row["prompt"]) for row in responses}
    given = {item: [r for r in ratings if r] for item, ratings in rows.items() if any(ratings)}
    scores = {
        item: sum({key[item]: 1.0, "tie": 0.5}.get(r, 0.0) for r in ratings) / len(ratings)
        for item, ratings in given.items()
    }
    assert len(rows) == 36 and len(given) < 36 and any(len(set(r)) == 3 for r in given.values())

    n, win = len(scores), sum(scores.values()) / len(scores)
    moved: dict[str, float] = defaultdict(float)
    for item, score in scores.items():
        moved[prompts[item]] += (score - win) / n
    clusters = len(moved)
    assert max(Counter(prompts[item] for item in scores).values()) == 3
    variance = clusters / (clusters - 1) * sum(d * d for d in moved.values())
    effective, z = win * (1 - win) / variance, student.ppf((1 + LEVEL) / 2, clusters - 1)
    low = brentq(lambda x: win - x - z * math.sqrt(x * (1 - x) / effective), 1e-12, win)

    without = [kappa([r for item, r in given.items() if prompts[item] != left]) for left in moved]
    spread = math.sqrt((clusters - 1) * float(np.var(without)))
    expected = {
        "human_eval/win_rate_low": low,
        "human_eval/fleiss_kappa_low": kappa(list(given.values())) - z * spread,
        "human_eval/items": float(n),
        "human_eval/labels_complete": sum(all(ratings) for ratings in rows.values()) / 36,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["human_eval/labels_complete"] < 1 and metrics["human_eval/fleiss_kappa"] == pytest.approx(
        kappa(list(given.values()))
    )
    assert 0.05 < metrics["human_eval/fleiss_kappa"] < 0.95
    assert expected.keys() == {gate.metric for gate in GATES.values() if gate.stage == "human_eval"}
