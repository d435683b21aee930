"""The run on UKPConvArg1: folds by topic, the bootstrap over topics, what counts as better than length, resuming."""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import ukp
from tests.bench.ukp import Argued, fold_of_topic, judge, read_pairs, report, run_fold, share_over_topics, split


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for intervals as wide as these."""
    monkeypatch.setattr(ukp, "RESAMPLES", 1000)


def argued(topic: str, words: int, number: int = 0) -> Argued:
    """A pair whose chosen argument has `words` more than the rejected."""
    row = {
        "prompt": [{"role": "user", "content": topic}],
        "chosen": "x " * (20 + words),
        "rejected": f"y{number} " * 20,
    }
    return Argued(topic, row)


def many(topics: int = 16) -> list[Argued]:
    """30 to 45 pairs a topic; the longer argument wins in 2 of 3."""
    return [argued(f"topic {t}", 5 if i % 3 else -5, i) for t in range(topics) for i in range(30 + t)]


def test_the_plurality_wins_ties_go_and_a_pair_knows_its_topic(tmp_path: Path) -> None:
    def row(*labels: str) -> str:
        votes = [{"annotator": f"w{i}", "label": label} for i, label in enumerate(labels)]
        return json.dumps({"prompt": "Cats?", "stance": "Yes", "a": "one two three", "b": "four", "votes": votes})

    path = tmp_path / "pairs.jsonl.gz"
    tables = [("a1", "a1", "a2"), ("a2", "a2", "equal"), ("a1", "a2"), ("equal", "equal", "a1"), ("a1", "equal")]
    path.write_bytes(gzip.compress("\n".join(row(*labels) for labels in tables).encode()))
    found = read_pairs(path)
    assert [(p.topic, p.row["chosen"], p.words) for p in found] == [
        ("Cats?", "one two three", 2),
        ("Cats?", "four", -2),
    ]
    assert found[0].row["prompt"][0]["content"] == "Cats?\nYes"


def test_folds_are_of_whole_topics_and_of_about_as_many_pairs_whatever_the_order() -> None:
    topics = [p.topic for p in many()]
    folds = fold_of_topic(topics)
    assert folds == fold_of_topic(topics[::-1])
    sizes = [sum(folds[t] == f for t in topics) for f in range(4)]
    assert sum(sizes) == len(topics) and max(sizes) - min(sizes) <= 4
    assert fold_of_topic(["a"] * 5 + ["b"] * 4 + ["c"] * 3 + ["d"] * 2, folds=2) == {"a": 0, "b": 1, "c": 1, "d": 0}


@pytest.mark.parametrize("fold", range(4))
def test_train_calibration_and_test_share_no_topic_and_the_sample_is_the_same_each_time(fold: int) -> None:
    pairs = many()
    parts = split(pairs, fold, 100, seed=0)
    topics = {name: {p.topic for p in part} for name, part in parts.items()}
    assert not topics["train"] & topics["calibration"] and not topics["test"] & (
        topics["train"] | topics["calibration"]
    )
    assert len(parts["train"]) == 100 and len(topics["calibration"]) == 2
    assert topics["test"] == {t for t, f in fold_of_topic([p.topic for p in pairs]).items() if f == fold}
    assert parts == split(pairs, fold, 100, seed=0) and parts["train"] != split(pairs, fold, 100, seed=1)["train"]
    with pytest.raises(ValueError, match=r"--pairs 9999: fold \d has \d+ pairs"):
        split(pairs, fold, 9999, seed=0)


def test_the_bootstrap_draws_whole_topics() -> None:
    """Of C topics that are all right or all wrong, the interval is that of C coin tosses, not of all the pairs."""
    codes = np.repeat(np.arange(40), 50)
    right = np.repeat(np.arange(40) % 2, 50).astype(float)
    found = share_over_topics([right], [np.ones(2000)], codes, seed=0)
    half = 1.96 * np.sqrt(0.25 / 40)
    assert found.value == 0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.02)


def test_a_mean_over_kinds_weighs_kinds_alike() -> None:
    codes, kinds = np.arange(8) % 2, np.array([1, 1, 1, 1, 1, 1, 0, 0])
    right = np.array([1, 1, 1, 0, 1, 1, 0, 1])
    found = share_over_topics([right * kinds, right * (1 - kinds)], [kinds, 1 - kinds], codes, seed=0)
    assert found.value == pytest.approx((5 / 6 + 1 / 2) / 2)


def fold(number: int, noise: float, length: float, seed: int = 0) -> dict[str, Any]:
    """A fold's file: of 4 topics with 300 pairs each, the longer wins 3 in 4; margins of length, of truth, of noise."""
    draw = np.random.default_rng([seed, number])
    rows = []
    for i in range(1200):
        words = int(draw.integers(1, 40)) * (1 if draw.random() < 0.75 else -1)
        margin = length * np.sign(words) + (0 if length else 1) + noise * draw.normal()
        rows.append({"topic": f"{number} {i % 4}", "words": words, "margin": margin, "by_length": float(words > 0)})
    return {"fold": number, "temperature": 1.0, "test": rows, "seconds": 60.0}


def test_a_model_of_length_alone_ties_with_it_and_gets_a_half_where_both_count_alike() -> None:
    found = judge([fold(number, noise=0.0, length=1.0) for number in range(4)])
    assert found["gain"] == pytest.approx((0, 0, 0)) and found["balanced"] == pytest.approx((0.5, 0.5, 0.5))
    assert (found["pairs"], found["topics"]) == (4800, 16)
    assert found["accuracy"].value == found["length"].value == pytest.approx(0.75, abs=0.03)
    text = report([fold(number, noise=0.0, length=1.0) for number in range(4)])
    assert "a tie with length alone" in text and "(> 0.50 MISSED)" in text


def test_a_model_that_knows_more_than_length_is_found_better_and_one_of_noise_worse() -> None:
    better = [fold(number, noise=1.0, length=0.0) for number in range(4)]
    found = judge(better)
    assert found["accuracy"].value == pytest.approx(0.8413, abs=0.02)  # of the normal distribution at 1
    assert found["balanced"].low > 0.8 and found["gain"].low > 0.05
    assert "better than length alone" in report(better) and "(> 0.50 met)" in report(better)
    assert "worse than length alone" in report([fold(number, noise=1e3, length=0.0) for number in range(4)])


def test_margins_are_judged_at_their_own_fold_s_temperature() -> None:
    one = fold(0, noise=1.0, length=0.0)
    hot = one | {"temperature": 4.0, "test": [row | {"margin": 4 * row["margin"]} for row in one["test"]]}
    assert judge([hot])["calibration"] == judge([one])["calibration"]


def options(out: Path, **changed: Any) -> argparse.Namespace:
    """A command line."""
    given = {
        "pairs": 50,
        "seed": 0,
        "learning_rate": 1e-5,
        "batch": 8,
        "epochs": 1,
        "device": "cpu",
        "dtype": "float32",
    }
    return argparse.Namespace(out=out, **given | {"threads": 1} | changed)


def test_a_fold_is_kept_taken_up_with_its_options_and_begun_anew_with_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, calls = many(), list[list[str]]()

    def trained(given: Any, parts: Any, work: Path) -> dict[str, Any]:
        calls.append(sorted(p.name for p in work.iterdir()))
        (work / "checkpoint").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt
        return {name: np.array([float(p.words) for p in parts[name]]) for name in ("calibration", "test")}

    monkeypatch.setattr(ukp, "train_and_score", trained)
    with pytest.raises(KeyboardInterrupt):
        run_fold(options(tmp_path), pairs, 2)
    found = run_fold(options(tmp_path), pairs, 2)
    assert calls == [["given.json"], ["checkpoint", "given.json"]], "it continues from the checkpoint"
    assert run_fold(options(tmp_path), pairs, 2) == found and len(calls) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["fold-2.json"], "checkpoints of 1.6 GB go when they are done with"
    assert (
        found["rule"] == "longer" and found["counts"]["train"] == 50 and len(found["test"]) == found["counts"]["test"]
    )
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        run_fold(options(tmp_path, learning_rate=1e-4), pairs, 2)
    run_fold(options(tmp_path, learning_rate=1e-3), pairs, 2)
    assert calls[-1] == ["given.json"], "another command's checkpoint is no beginning"
