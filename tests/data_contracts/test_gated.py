"""Every number that a gate of `validate` judges, counted again from the rows that went in and those that came out."""

import itertools
import json
import math
import random
import statistics

import pytest
from scipy.stats import t as student

from components.base.errors import CheckFailed
from components.data.tables.published import read_split
from components.gates.table import GATES
from data_contracts import published_splits
from data_contracts.rows import measuring


@pytest.fixture
def source(tmp_path):
    """Three to five votes on each pair, ties among them; prompts stand in the file one to four times."""
    rng, rows = random.Random(4), []
    for i in range(120):
        true, voters = rng.choice("ab"), rng.randint(3, 5)
        votes = [true if rng.random() < 0.7 else rng.choice(["a", "b", "tie"]) for _ in range(voters)]
        prompt = f"question {i - i % (1 + i // 30)} of today"
        rows.append({"prompt": prompt, "a": f"first answer {i}", "b": f"answer {i} the second", "votes": votes})
    rows[7] |= {"b": rows[7]["a"]}
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "no json"]) + "\n")
    return path, rows


def kappa(rows):
    """Agreement beyond chance of the votes of `rows`, pair of votes by pair, each row in both orders."""
    agreeing, shares = [], []
    swap = {"a": "b", "b": "a", "tie": "tie"}
    for votes in [r["votes"] for r in rows] + [[swap[v] for v in r["votes"]] for r in rows]:
        two = list(itertools.combinations(votes, 2))
        agreeing.append(sum(one == other for one, other in two) / len(two))
        shares.append({label: votes.count(label) / len(votes) for label in swap})
    chance = sum((sum(s[label] for s in shares) / len(shares)) ** 2 for label in swap)
    observed = sum(agreeing) / len(agreeing)
    return (observed - chance) / (1 - chance)


def kappa_low(rows):
    """The lower end of its 95 % interval, by leaving out one prompt at a time."""
    prompts = {row["prompt"] for row in rows}
    without = [kappa([row for row in rows if row["prompt"] != prompt]) for prompt in prompts]
    spread = math.sqrt((len(prompts) - 1) * statistics.pvariance(without))
    return kappa(rows) - student.ppf(0.975, len(prompts) - 1) * spread


def recounted(artifact, rows):
    """The gated numbers, by counting."""
    stands = {}
    for split in ("train", "calibration", "test"):
        for row in read_split(artifact / f"pairs.{split}"):
            stands.setdefault(json.dumps(row["prompt"]), []).append(split)
    checks = json.loads((artifact / "report.json").read_text())
    broken = [check["name"] for check in checks if check["severity"] == "error" and not check["passed"]]
    return {
        "data/pairs": float(sum(map(len, stands.values()))),
        "data/leaked_prompts": float(sum(len(set(splits)) > 1 for splits in stands.values())),
        "data/contract": float(not broken),
        "data/annotator_agreement_low": kappa_low(rows),
    }, broken


def test_the_gated_numbers_are_those_of_the_rows(tmp_path, validate, source):
    path, rows = source
    metrics = validate(tmp_path / "out", {"preferences": path})
    voted = [row for i, row in enumerate(rows) if i != 7] + [rows[7]]
    expected, broken = recounted(tmp_path / "out" / "artifact", voted)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert not broken and expected["data/contract"] == 1 and 80 < expected["data/pairs"] < 120
    assert metrics["data/annotator_agreement"] == pytest.approx(kappa(voted)) and len({r["prompt"] for r in rows}) < 90
    judged = {gate.metric for gate in GATES.values() if gate.stage == "validate"}
    own = {name for name in judged if name.startswith("data/judge_")}
    assert {name.replace("judge_", "") for name in own} <= expected.keys(), "the same numbers: test_judge.py"
    assert expected.keys() == judged - own - {"data/label_noise_high"}, "needs 1,000 pairs: findings/test_noise.py"


def test_prompts_in_two_splits_are_counted_and_break_the_contract(tmp_path, validate, source, monkeypatch):
    path, rows = source
    places = itertools.cycle(["train", "train", "test", "calibration", "train"])
    monkeypatch.setattr(measuring, "split_of", lambda key, shares: next(places))
    with pytest.raises(CheckFailed, match=r"validate.splits failed.* rows of pairs.train"):
        validate(tmp_path / "stopped", {"preferences": path})
    monkeypatch.setattr(published_splits, "check_splits", lambda *arguments: None)
    metrics = validate(tmp_path / "out", {"preferences": path})
    expected, broken = recounted(tmp_path / "out" / "artifact", rows)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert broken == ["no_leak"] and expected["data/contract"] == 0 and 10 < expected["data/leaked_prompts"] < 60
