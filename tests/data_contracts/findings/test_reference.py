"""Data against earlier data: each drift is found by its own check, and no prompt changes its split."""

import json
import random

import numpy as np
import pytest

from components.data.checks_config import SetChecks
from components.data.splits import SPLITS
from components.data.tables.published import read_split
from data_contracts.findings.comparisons import compared_pairs, compared_prompts
from data_contracts.findings.drift import difference
from tests.splits import write

WORDS = "river garden window letter market bridge winter summer forest kitchen teacher doctor village station".split()
OTHERS = "engine circuit voltage battery signal antenna compiler register pointer thread socket packet".split()
GERMAN = "der Fluss fließt langsam durch das alte Tal und die Kinder spielen am Ufer mit ihren Freunden".split()
TOPICS = ("billing", "delivery", "returns")
DRIFTS = {f"reference_{name}" for name in ("length", "language", "category", "words", "preference")}


def sentence(rng, count, words=WORDS):
    return " ".join(rng.choice(words) for _ in range(count))


def pairs(count, seed, asked=WORDS, said=WORDS, topics=TOPICS, longer=0.5, length=8):
    """`count` pairs; the longer response wins in the share `longer` of them."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        words = sorted((sentence(rng, length, said), sentence(rng, length + 2, said)), key=len)
        chosen = words[rng.random() < longer]
        other = next(text for text in words if text != chosen)
        prompt = f"{seed} {number}: {sentence(rng, 20, asked)}"
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": other, "category": rng.choice(topics)})
    return rows


@pytest.fixture
def validated(validate, tmp_path):
    """Validate rows, against the artifact of an earlier validation: its checks by name, and its folder."""

    def validated(name, rows, reference=None):
        inputs = {"preferences": write(tmp_path / f"{name}.jsonl", rows)}
        inputs |= {} if reference is None else {"reference": reference}
        validate(tmp_path / name, inputs)
        artifact = tmp_path / name / "artifact"
        report = json.loads((artifact / "report.json").read_text())
        return {check["name"]: check for check in report}, artifact

    return validated


def test_rankings_show_no_more_drift_than_their_prompts_do():
    """Six pairs of a prompt are one draw: taken for six, chance alone exceeded the level that chance reaches."""
    ours, theirs = (
        [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in pairs(40, seed)] for seed in (1, 2)
    )
    six = [row for row in ours for _ in range(6)]
    assert compared_pairs(six, theirs, 0) == compared_pairs(ours, theirs, 0)
    assert compared_prompts(six, theirs, 0) == compared_prompts(ours, theirs, 0)


def test_data_of_one_kind_pass_and_each_drift_is_found_by_its_own_check():
    def canonical(seed, **drifted):
        return [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in pairs(400, seed, **drifted)]

    before, limits = canonical(1), SetChecks()

    def found(**drifted):
        measured = compared_pairs(canonical(2, **drifted), before, 0)
        assert measured.keys() == DRIFTS
        return {name for name, at in measured.items() if at.value > max(getattr(limits, name).threshold, at.chance)}

    assert found() == set()
    assert found(length=14) == {"reference_length"}
    assert found(asked=OTHERS) == {"reference_words"}
    assert found(topics=("billing", "billing", "returns", "legal")) == {"reference_category"}
    assert found(longer=0.9) == {"reference_preference"}
    assert "reference_language" in found(said=GERMAN)


def test_drift_is_a_check_of_the_contract_that_fails_it_where_the_config_says_error(validated, validate, tmp_path):
    before, reference = validated("before", pairs(60, 1))
    assert not DRIFTS & before.keys() and "reference_apart" not in before, "nothing is asked without a reference"
    after, _ = validated("after", pairs(60, 2, length=14), reference)
    assert after.keys() > DRIFTS and "reference_apart" in after
    assert not after["reference_length"]["passed"] and after["reference_length"]["severity"] == "warn"
    inputs, asked = {"preferences": tmp_path / "after.jsonl", "reference": reference}, {"severity": "error"}
    metrics = validate(tmp_path / "error", inputs, checks={"reference_length": asked})
    assert metrics["data/contract"] == 0 and metrics["data/check_reference_length"] > 0.9


@pytest.mark.whole
def test_a_row_for_training_that_nearly_repeats_a_held_out_prompt_of_the_reference_is_kept_out_by_row(validated):
    rows = pairs(100, 3)
    _, reference = validated("before", rows)
    held_out = [row["prompt"][0]["content"] for split in SPLITS[1:] for row in read_split(reference / f"pairs.{split}")]
    rng = random.Random(8)
    fresh = pairs(30, 4)
    repeated = [
        dict(row, prompt=f"{prompt}!") for row, prompt in zip(pairs(20, 5), rng.sample(held_out, 20), strict=True)
    ]
    checks, after = validated("after", [*fresh, *rows, *repeated], reference)
    gone = [json.loads(line) for line in (after / "quarantine.jsonl").read_text().splitlines()]
    named = checks["reference_apart"]["row_numbers"]
    assert named == [row["row"] for row in gone] and len(named) > 8 and min(named) > 130
    assert all("nearly repeats row" in row["reasons"][0] and "(data.reference)" in row["reasons"][0] for row in gone)
    trained = {row["prompt"][0]["content"] for row in read_split(after / "pairs.train")}
    assert not trained & {f"{prompt}!" for prompt in held_out}
    kept = sum(row["prompt"] in {f"{p}!" for p in held_out} for row in repeated) - len(named)
    assert kept == sum(
        row["prompt"][0]["content"].endswith("!")
        for split in SPLITS[1:]
        for row in read_split(after / f"pairs.{split}")
    ), "those that are held out again stay"


@pytest.mark.whole
def test_every_prompt_stands_in_its_split_in_every_later_version_of_the_data(validated):
    rows = pairs(100, 6)
    _, before = validated("before", rows)
    later = [*pairs(80, 7), *rows]
    random.Random(9).shuffle(later)
    _, after = validated("after", later)
    for split in SPLITS:
        old, new = (
            {row["prompt"][0]["content"] for row in read_split(at / f"pairs.{split}")} for at in (before, after)
        )
        assert old <= new and old, split


def test_a_difference_of_shares_stands_beside_what_chance_reaches():
    found = difference(np.array([1.0] * 60 + [0.0] * 40), np.array([1.0] * 50 + [0.0] * 50 + [np.nan] * 7))
    # p = 0.55: 1.96 sqrt(0.55 * 0.45 * 2 / 100), by hand
    assert found is not None and found.value == pytest.approx(0.1) and found.chance == pytest.approx(0.137899, abs=1e-6)
    assert difference(np.array([np.nan]), np.array([1.0])) is None
    rng = np.random.default_rng(3)
    draws = [difference(*(rng.random((2, 500)) < 0.6).astype(float)) for _ in range(1000)]
    beyond = sum(each.value > each.chance for each in draws if each is not None)
    assert 30 <= beyond <= 72, "about 50 of 1,000 by chance"
