import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.human_eval import selection
from components.human_eval.blinding import blind
from components.human_eval.config import HumanEvalConfig
from components.human_eval.selection import Chosen, allocate, choose, strata


def rows(categories: str) -> list[dict]:
    return [
        {"prompt": [{"role": "user", "content": f"{i} {'x' * i}"}], "category": c if c != "-" else None}
        for i, c in enumerate(categories)
    ]


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1), st.data())
def test_allocation_is_whole_and_proportional_and_never_more_than_there_is(sizes: dict, data: st.DataObject) -> None:
    total = sum(sizes.values())
    items = data.draw(st.integers(0, total))
    counts = allocate(sizes, items)
    assert sum(counts.values()) == items
    for name, size in sizes.items():
        assert counts[name] <= size and abs(counts[name] - items * size / total) < 1


def test_the_sample_keeps_the_categories_in_proportion() -> None:
    chosen = choose(rows("x" * 60 + "y" * 30 + "z" * 10), HumanEvalConfig(items=20), seed=0)
    assert Counter(c.stratum for c in chosen) == {"x": 12, "y": 6, "z": 2}
    assert len({c.prompt[0]["content"] for c in chosen}) == 20
    assert len(choose(rows("xxyyz"), HumanEvalConfig(items=256), seed=0)) == 5, "a small split is judged whole"


def test_the_sample_depends_on_the_seed_and_not_on_the_order_of_the_file() -> None:
    source, config = rows("xy" * 100), HumanEvalConfig(items=20)
    shuffled = random.Random(0).sample(source, len(source))
    assert choose(source, config, seed=1) == choose(shuffled, config, seed=1)
    assert choose(source, config, seed=1) != choose(source, config, seed=2)


def test_prompts_without_categories_are_spread_over_lengths() -> None:
    source = rows("-" * 40)
    names = strata(source, HumanEvalConfig())
    assert names == [f"length {i // 10 + 1} of 4" for i in range(40)]
    chosen = choose(source, HumanEvalConfig(items=8), seed=0)
    assert set(Counter(c.stratum for c in chosen).values()) == {2}
    assert set(strata(source, HumanEvalConfig(strata="none"))) == {"all"}
    assert set(strata(rows("x-"), HumanEvalConfig(strata="category"))) == {"x", "none"}
    assert all(name.startswith("length") for name in strata(rows("x-"), HumanEvalConfig()))


def test_short_and_long_prompts_of_a_rare_category_are_both_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By category alone its few items may all be short ones; by length alone it may have none."""
    source = rows("xyxx" * 10)  # the n-th prompt is longer than all before it
    config = HumanEvalConfig(items=8, strata="category_and_length")
    monkeypatch.setattr(selection, "LENGTH_STRATA", 2)
    names = strata(source, config)
    assert [names[i] for i in (1, 17, 21, 37)] == ["y, length 1 of 2"] * 2 + ["y, length 2 of 2"] * 2
    assert [names[i] for i in (0, 18, 20, 39)] == ["x, length 1 of 2"] * 2 + ["x, length 2 of 2"] * 2
    assert Counter(c.stratum for c in choose(source, config, seed=0)) == {
        "x, length 1 of 2": 3, "x, length 2 of 2": 3, "y, length 1 of 2": 1, "y, length 2 of 2": 1,
    }  # fmt: skip


def test_sides_are_balanced_in_every_stratum_and_unpredictable() -> None:
    chosen = [Chosen([{"role": "user", "content": str(i)}], None, "xy"[i % 2]) for i in range(400)]
    texts = [[f"{who} {i}" for i in range(400)] for who in ("sft", "policy")]
    items, _ = blind(chosen, *texts, seed=0)
    for stratum in "xy":
        assert Counter(i.policy_side for i in items if i.chosen.stratum == stratum) == {"a": 100, "b": 100}
    sides = [i.policy_side for i in items]
    repeats = sum(a == b for a, b in itertools.pairwise(sides))
    assert 150 < repeats < 250, "neighbours on the sheet must tell nothing about each other"
    assert [i.chosen.prompt[0]["content"] for i in items] != [str(i) for i in range(400)]
    other, _ = blind(chosen, texts[0], ["another " + t for t in texts[1]], seed=0)
    assert [i.policy_side for i in other] != sides, "the seed alone must not give the sides away"


@pytest.mark.parametrize(
    "wrong",
    [{"items": 1}, {"raters": 0}, {"level": 1.0}, {"judges": "me"}, {"scale": "1-5"},
     {"judges": "simulated", "scale": "a/b"}],
)  # fmt: skip
def test_impossible_options_are_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        HumanEvalConfig(**wrong)
