"""Pairs are tokenised when training asks for them: each once, and no more than needed."""

import random

import numpy as np
import pytest

from components.data.tables.published import characters_of, read_split
from components.models.batching import RUN, LengthBuckets
from components.models.config import GenerationConfig
from components.reward.config import RewardConfig
from components.reward.training_pairs import Pairs, encode_pairs, longer, packed_length
from tests.splits import write_split

GENERATION = GenerationConfig(max_prompt_tokens=24, max_new_tokens=12)
ROWS = [
    {
        "prompt": [{"role": "user", "content": "where is my parcel " * (1 + i % 4)}],
        "chosen": f"it is at {i} " * (i % 5 + 1), "rejected": "no " * (i % 7 + 1),
        "weight": 0.5 if i % 2 else 1.0,
        **({"source_weight": 1.5} if i % 5 else {}), "row": i + 1, "source": "s", "category": None,
    }
    for i in range(150)
]  # fmt: skip


@pytest.fixture
def pairs(language, tmp_path):
    return Pairs(language.tokenizer, ROWS, GENERATION, RewardConfig(), tmp_path)


def test_pairs_are_the_same_in_whatever_order_they_are_encoded(language, pairs):
    at_once = list(encode_pairs(language.tokenizer, ROWS, GENERATION))
    order = random.Random(0).sample(range(len(ROWS)), len(ROWS))
    for start in range(0, len(ROWS), 11):
        some = order[start : start + 11]
        assert pairs.at(some) == [at_once[i] for i in some]
    assert list(pairs) == at_once and pairs[3:5] == at_once[3:5] and pairs.at([4, 4]) == [at_once[4]] * 2
    assert pairs.weights[:2] == [1.0, 0.5] and [pair.source_weight for pair in pairs[:2]] == [1.0, 1.5]
    chosen = pairs.choose(np.array([2, 5, 140]))
    assert list(chosen) == [at_once[i] for i in (2, 5, 140)] and chosen.weights[1] == 0.5
    assert pairs.choose(np.arange(len(ROWS))) is pairs


def test_the_first_batch_encodes_its_own_run_and_no_row_twice(pairs, monkeypatch):
    rows, encoded = [], pairs._encoded
    monkeypatch.setattr(pairs, "_encoded", lambda some: rows.extend(row["row"] for row in some) or encoded(some))
    batches = LengthBuckets(pairs.lengths, 2, random.Random(1))
    assert not rows, "nothing is read before a batch is asked for"
    first = batches[0]
    assert len(rows) <= RUN * 2 < len(ROWS) and set(first) <= {row - 1 for row in rows}
    assert sorted(i for batch in batches for i in batch) == list(range(len(ROWS)))
    assert sorted(rows) == list(range(1, len(ROWS) + 1))


def buckets_before(lengths, size, rng):
    """`LengthBuckets` as they were written when all lengths were known before the first batch (November 2026)."""
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), size * 32):
        chunk = sorted(order[start : start + size * 32], key=lambda i: lengths[i])
        batches += [chunk[i : i + size] for i in range(0, len(chunk), size)]
    rng.shuffle(batches)
    return batches


@pytest.mark.parametrize(("count", "size"), [(0, 4), (1, 4), (63, 2), (64, 2), (65, 2), (1000, 3)])
def test_batches_of_lengths_that_are_computed_late_are_those_of_lengths_that_are_known(count, size):
    lengths = random.Random(2).choices(range(1, 30), k=count)
    assert list(LengthBuckets(lengths, size, random.Random(3))) == buckets_before(lengths, size, random.Random(3))


@pytest.mark.parametrize(("shared", "of"), [(True, packed_length), (False, longer)])
def test_lengths_are_those_of_the_tokens(language, tmp_path, shared, of):
    config = RewardConfig(shared_prompts=shared)
    pairs = Pairs(language.tokenizer, ROWS, GENERATION, config, tmp_path)
    lengths = pairs.lengths
    assert [lengths[i] for i in (7, 3, 7)] == [of(pairs[i]) for i in (7, 3, 7)]
    assert lengths[10:13] == [of(pair) for pair in pairs[10:13]] and len(lengths) == len(ROWS)


def test_the_longest_pairs_are_known_without_reading_texts(pairs, tmp_path):
    write_split(tmp_path / "pairs.train", ROWS, weighted=True)
    rows = read_split(tmp_path / "pairs.train")
    np.testing.assert_array_equal(characters_of(rows), characters_of(ROWS))
    np.testing.assert_array_equal(characters_of(rows[5:9]), characters_of(ROWS[5:9]))
    longest = pairs.longest(3)
    assert max(map(longer, pairs)) == longer(longest[-1])
