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


def agreement_low(votes: dict[str, list[float]], leads: dict[str, float], prompts: dict[str, str]) -> float:
    """The lower end of the agreement with majorities, over prompts and raters, each rater left out in turn."""

    def right(left_out: int) -> dict[str, float]:
        sums = {i: sum(v for r, v in enumerate(own) if r != left_out and v == v) for i, own in votes.items()}
        return {item: float((leads[item] > 0) == (lead > 0)) for item, lead in sums.items() if lead}

    def parts(found: dict[str, float], about: float) -> dict[str, float]:
        of: dict[str, float] = defaultdict(float)
        for item, value in found.items():
            of[prompts[item]] += (value - about) / len(found)
        return of

    own = right(-1)
    share = sum(own.values()) / len(own)
    by_prompt = parts(own, share)
    without = [right(rater) for rater in range(4)]
    thetas = [sum(each.values()) / len(each) for each in without]
    n, centre = len(by_prompt), sum(thetas) / 4
    prompts_part = n / (n - 1) * sum(d * d for d in by_prompt.values())
    raters_part = 3 / 4 * sum((theta - centre) ** 2 for theta in thetas)
    shifts = [parts(each, share) for each in without]
    cells = (3 / 4) ** 2 * sum(
        (now.get(p, 0.0) - by_prompt.get(p, 0.0)) ** 2 for now in shifts for p in by_prompt.keys() | now.keys()
    )
    variance = max(prompts_part + raters_part - cells, prompts_part, raters_part)
    assert variance > prompts_part, "raters who differ widen it"
    spread = prompts_part**2 / (n - 1) + raters_part**2 / 3
    spread += cells**2 / (3 * (n - 1)) if variance > max(prompts_part, raters_part) else 0
    effective, z = share * (1 - share) / variance, student.ppf((1 + LEVEL) / 2, max(variance**2 / spread, 1))
    return brentq(lambda x: share - x - z * math.sqrt(x * (1 - x) / effective), 1e-12, share)


def calibration_error(margins: list[float], bins: int) -> float:
    """Mean over bins of equally many pairs (a pair is where its middle falls) of |confidence - accuracy|, weighted."""
    ranked = sorted(margins, key=abs)
    edges = [sum((rank + 0.5) / len(ranked) < i / bins for rank in range(len(ranked))) for i in range(bins + 1)]
    parts = [ranked[low:high] for low, high in itertools.pairwise(edges)]
    off = [abs(sum(1 / (1 + math.exp(-abs(d))) - (d > 0) for d in part)) for part in parts]
    return sum(off) / len(ranked)


def test_the_gated_numbers_are_those_of_the_filled_sheet(make_case: Callable[..., Any]) -> None:
    case = make_case(items=36, raters=4, level=LEVEL)
    responses = read_rows(case.sample / "responses.jsonl")
    for i, row in enumerate(responses):
        row["prompt"] = responses[i - i % 3]["prompt"]
    write_rows(case.sample / "responses.jsonl", responses)
    rng = random.Random(4)

    def rate(row: SheetRow) -> tuple[str, ...]:
        number = int(row.item[1:5])
        if number % 9 == 0:
            return ("",) * 4
        if number % 7 == 0:
            return ("", rng.choice("ab"), "", "")
        liked = "a" if row.response_a.startswith("Hey" if rng.random() < 0.7 else "Dear") else "b"
        return tuple(rng.choice([liked, liked, liked, "a", "tie", ""]) for _ in range(4))

    sheet = case.fill(rate)
    raw = {row.item.split("-")[0]: (rng.gauss(0, 2), rng.gauss(0, 2)) for row in case.rows()}
    case.believe(lambda row, text: raw[row.item.split("-")[0]][text == row.response_b], temperature=1.5)
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
    of_prompt: dict[str, float] = defaultdict(float)
    of_rater: dict[int, float] = defaultdict(float)
    of_both: dict[tuple[str, int], float] = defaultdict(float)
    for item, ratings in rows.items():
        for rater, rating in enumerate(ratings):
            if rating:
                value = {key[item]: 1.0, "tie": 0.5}.get(rating, 0.0)
                moved = (value - win) / len(given[item]) / n
                of_prompt[prompts[item]] += moved
                of_rater[rater] += moved
                of_both[prompts[item], rater] += moved
    clusters = len(of_prompt)
    assert max(Counter(prompts[item] for item in scores).values()) == 3
    by_prompt = clusters / (clusters - 1) * sum(d * d for d in of_prompt.values())
    by_rater = 4 / 3 * sum(d * d for d in of_rater.values())
    crossed = by_prompt + by_rater - sum(d * d for d in of_both.values())
    variance = max(crossed, by_prompt, by_rater)
    assert variance == crossed > max(by_prompt, by_rater), "of answers whose spread is not of one kind alone"
    spread = by_prompt**2 / (clusters - 1) + by_rater**2 / 3
    spread += sum(d * d for d in of_both.values()) ** 2 / (3 * (clusters - 1))
    effective, wide = win * (1 - win) / variance, student.ppf((1 + LEVEL) / 2, max(variance**2 / spread, 1))
    low = brentq(lambda x: win - x - wide * math.sqrt(x * (1 - x) / effective), 1e-12, win)
    z = student.ppf((1 + LEVEL) / 2, clusters - 1)

    without = [kappa([r for item, r in given.items() if prompts[item] != left]) for left in of_prompt]
    spread = math.sqrt((clusters - 1) * float(np.var(without)))
    enough = [item for item, ratings in given.items() if len(ratings) >= 3]
    decided = [item for item in enough if scores[item] != 0.5]
    leads = {item: (raw[item][0] - raw[item][1]) * (1 if key[item] == "a" else -1) / 1.5 for item in given}
    votes = {
        item: [math.nan if not r else 0.0 if r == "tie" else 1.0 if r == key[item] else -1.0 for r in rows[item]]
        for item in enough
    }
    margins = [leads[item] * (1 if scores[item] > 0.5 else -1) for item in decided]
    right = [float(margin > 0) for margin in margins]
    assert 0 < sum(right) < len(right) == len(decided) < len(enough) < len(given)
    every = [rating for ratings in given.values() for rating in ratings]  # no rater has enough ratings to be named
    expected = {
        "human_eval/win_rate_low": low,
        "human_eval/reward_agreement_low": agreement_low(votes, leads, prompts),
        "human_eval/reward_ece": calibration_error(margins, 5),
        "human_eval/fleiss_kappa_low": kappa(list(given.values())) - z * spread,
        "human_eval/items": float(n),
        "human_eval/labels_complete": sum(len(ratings) for ratings in given.values()) / (36 * 4),
        "human_eval/position_bias_high": abs(every.count("a") / (every.count("a") + every.count("b")) - 0.5),
        "human_eval/raters_alike": sum(
            r[i] == r[j] for r in rows.values() for i, j in itertools.combinations(range(4), 2) if r[i] and r[j]
        )
        / sum(bool(r[i] and r[j]) for r in rows.values() for i, j in itertools.combinations(range(4), 2)),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["human_eval/labels_complete"] < 1 and metrics["human_eval/fleiss_kappa"] == pytest.approx(
        kappa(list(given.values()))
    )
    assert 0.05 < metrics["human_eval/fleiss_kappa"] < 0.95
    gated = {gate.metric for gate in GATES.values() if gate.stage == "human_eval"}
    assert expected.keys() == gated - {"human_eval/self_agreement_low", "human_eval/attention_low"}, (
        "tests/.../test_raters.py has that one's"
    )
