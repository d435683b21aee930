"""The benchmark of SFT and reward training: its examples, that both sides' work is compared, its ratios."""

from typing import Any

import pytest

from tests.bench.process import measured
from tests.bench.supervised import SIDES, Runs, check_equal_work, table
from tests.bench.workload import SIZES, numbers_tokenizer, ragged_examples


def examples(count: int, responses: int) -> list[tuple[list[int], ...]]:
    """Of the 1m size."""
    shape = SIZES["1m"]
    assert shape
    return ragged_examples(numbers_tokenizer(shape.vocabulary), count, responses)


def test_examples_are_ragged_within_their_bounds_end_once_and_are_the_same_for_both_sides() -> None:
    found = examples(400, responses=2)
    assert found == examples(400, responses=2)
    prompts, responses = [e[0] for e in found], [r for e in found for r in e[1:]]
    assert len(responses) == 800
    assert {min(map(len, prompts)), max(map(len, prompts))} == {16, 64}
    assert {min(map(len, responses)), max(map(len, responses))} == {8, 64}
    assert all(r[-1] == 1 and min(r[:-1]) > 1 for r in responses), "EOS at the end alone, and no pad"
    assert all(min(p) > 1 for p in prompts)


@pytest.mark.whole
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_our_side_counts_the_tokens_and_steps_of_its_examples(stage: str) -> None:
    given = {
        "stage": stage, "side": "tether", "size": "1m", "dtype": "float32", "threads": 1, "smollm2": "", "batch": 4,
        "batches": 2, "micro": 2, "padding_free": False,
    }  # fmt: skip
    found = measured("supervised_side.py", given, threads=1)
    rows = examples(8, responses=1 if stage == "sft" else 2)
    if stage == "sft":
        counts = {"tokens": sum(len(p) + len(r) for p, r in rows), "loss tokens": sum(len(r) for _, r in rows)}
    else:
        counts = {"tokens": sum(2 * len(p) + len(c) + len(r) for p, c, r in rows)}
    assert found["counts"] == counts | {"steps": 2, "slots": found["counts"]["slots"]}
    computed = counts["tokens"] if stage == "sft" else sum(len(p) + len(c) + len(r) for p, c, r in rows)
    assert computed <= found["counts"]["slots"] < 1.5 * computed
    seconds = found["seconds"]
    phases = ("data", "forward and the rest", "backward", "optimizer")
    assert all(seconds[p] > 0 for p in phases) and sum(seconds[p] for p in phases) == pytest.approx(seconds["all"])


def run(seconds: float, loss: float = 7.6, **counts: int) -> dict[str, Any]:
    """A measurement of `seconds`, half of them backward."""
    phases = {"all": seconds, "all cpu": 2 * seconds, "backward": seconds / 2, "forward and the rest": seconds / 2}
    return {
        "seconds": phases, "counts": {"tokens": 600, "loss tokens": 200, "slots": 800, "steps": 4} | counts,
        "loss": loss,
    }  # fmt: skip


def test_ratios_are_medians_of_pairs_beside_the_bar() -> None:
    runs: Runs = {"trl": [run(3.0), run(8.0), run(6.0)], "tether": [run(2.0, slots=640), run(4.0), run(2.0)]}
    lines = table(runs, "reward", examples=24).splitlines()
    assert lines[2] == "| all, s | 6.00 | 2.00 | 2.00 |"
    assert lines[-2] == "| slots computed a token | 1.33 | 1.07 | 1.25 |"
    assert lines[-1] == "| pairs/s | 4.0 | 12.0 | 2.00 (≥ 1.3 met) |"
    runs = {"trl": [run(5.0)], "tether": [run(4.0)]}
    assert table(runs, "sft", 24).splitlines()[-1] == "| tokens/s | 120.0 | 150.0 | 1.25 (≥ 1.3 MISSED) |"


@pytest.mark.parametrize("counts", [{"tokens": 599}, {"loss tokens": 201}, {"steps": 5}])
def test_sides_that_did_different_work_are_not_compared(counts: dict[str, int]) -> None:
    runs: Runs = {side: [run(1.0)] for side in SIDES}
    check_equal_work(runs)
    with pytest.raises(ValueError, match="different work"):
        check_equal_work(runs | {"tether": [run(1.0), run(1.0, **counts)]})


def test_sides_whose_losses_differ_are_not_compared() -> None:
    check_equal_work({"trl": [run(1.0)], "tether": [run(1.0, loss=7.65)]})
    with pytest.raises(ValueError, match=r"mean losses differ: 7\.6 and 7\.7"):
        check_equal_work({"trl": [run(1.0)], "tether": [run(1.0, loss=7.7)]})
