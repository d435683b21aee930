"""No example lost or doubled, no token lost to padding, and truncation that keeps what matters."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.models.batching import LengthBuckets, encode_prompt, encode_response, length_buckets, pad, position_ids

SEQUENCES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=8)


@given(st.lists(st.integers(1, 100), max_size=300), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_every_index_stands_in_exactly_one_batch(lengths: list[int], size: int, seed: int, shuffle: bool) -> None:
    batches = LengthBuckets(lengths, size, random.Random(seed)) if shuffle else length_buckets(lengths, size)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(1 <= len(b) <= size for b in batches)


def test_batches_are_of_like_length_and_in_another_order_for_another_seed() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 100) for _ in range(256)]
    one, two = (list(LengthBuckets(lengths, 8, random.Random(seed))) for seed in (1, 2))
    assert one != two and one == list(LengthBuckets(lengths, 8, random.Random(1)))
    assert max(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in one) < 25
    assert [lengths[b[0]] for b in one] != sorted(lengths[b[0]] for b in one), "batches don't come shortest first"


def test_batches_for_evaluation_are_sorted_by_length() -> None:
    assert length_buckets([5, 1, 4, 2, 3], 2) == [[1, 3], [4, 2], [0]]


@given(SEQUENCES, st.sampled_from(["left", "right"]))
def test_masked_tokens_are_the_sequences_and_the_rest_is_pad(sequences: list[list[int]], side: Any) -> None:
    ids, mask = pad(sequences, 0, side)
    assert ids.shape == mask.shape == (len(sequences), max(map(len, sequences)))
    assert mask.dtype == torch.bool
    for row, sequence in enumerate(sequences):
        assert ids[row][mask[row]].tolist() == sequence
        assert mask[row, -1 if side == "left" else 0], "the sequence doesn't touch its side"
    assert (ids[~mask] == 0).all()


@given(SEQUENCES, st.sampled_from(["left", "right"]))
def test_positions_count_real_tokens_from_0_on_either_side(sequences: list[list[int]], side: Any) -> None:
    _, mask = pad(sequences, 0, side)
    for row, sequence in enumerate(sequences):
        assert position_ids(mask)[row][mask[row]].tolist() == list(range(len(sequence)))


WORDS = st.lists(st.sampled_from(["Hello", "My", "order", "is", "late"]), min_size=1, max_size=30)
TURNS = st.lists(WORDS, min_size=1, max_size=7)


@given(TURNS, st.booleans(), st.integers(8, 60))
def test_truncation_keeps_the_system_message_and_the_newest_turns(
    language: Any, turns: list[list[str]], system: bool, limit: int
) -> None:
    messages = [{"role": "system", "content": "Promise no date."}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": " ".join(t)} for i, t in enumerate(turns)]
    tokenizer = language.tokenizer

    def whole(some: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(some, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found, rest = encode_prompt(tokenizer, messages, limit), messages[int(system) :]
    assert 0 < len(found) <= limit
    assert found[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    begins = [n for n, m in enumerate(rest) if m["role"] == "user" or n == len(rest) - 1]
    candidates = [whole(messages[: int(system)] + rest[n:]) for n in begins]
    fitting = [c for c in candidates if len(c) <= limit]
    # the most turns from one of the user's on that fit; where even the newest alone doesn't fit, its last tokens
    assert found == (fitting[0] if fitting else candidates[-1][-limit:])


@pytest.mark.parametrize("system", [False, True])
def test_a_template_that_insists_on_the_users_turn_first_takes_what_truncation_leaves(
    language: Any, system: bool
) -> None:
    tokenizer = copy.deepcopy(language.tokenizer)
    tokenizer.chat_template = (
        "{% set turns = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for m in turns %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not alternating') }}{% endif %}"
        "{% endfor %}"
    ) + tokenizer.chat_template
    said = ["My order is late.", "Hello.", "My order is late.", "Hello.", "Hello."]
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    messages = [{"role": "system", "content": "Promise no date."}] * system + turns
    lengths = {len(encode_prompt(tokenizer, messages, limit)) for limit in range(1, 60)}
    whole = [len(encode_prompt(tokenizer, messages[: int(system)] + turns[n:], 60)) for n in (0, 2, 4)]
    assert set(whole) < lengths, "all turns, three, and the last"


def test_a_prompt_that_fits_is_not_touched_and_its_messages_are_not_changed(language: Any) -> None:
    messages = [{"role": "user", "content": "Anna here. I am not happy."}, {"role": "assistant", "content": "Hello."}]
    before = [dict(m) for m in messages]
    ids = encode_prompt(language.tokenizer, messages, 500)
    assert language.tokenizer.decode(ids) == (
        "<|user|>Anna here. I am not happy.<|end|><|assistant|>Hello.<|end|><|assistant|>"
    )
    encode_prompt(language.tokenizer, messages, 4)
    assert messages == before


@given(WORDS, st.integers(1, 40))
def test_a_whole_response_ends_in_eos_and_a_cut_one_has_none(language: Any, words: list[str], limit: int) -> None:
    eos = language.tokenizer.eos_token_id
    ids = encode_response(language.tokenizer, " ".join(words), limit)
    if len(words) + 1 <= limit:
        assert len(ids) == len(words) + 1 and ids[-1] == eos
    else:
        assert len(ids) == limit and eos not in ids


def test_nothing_to_pad_is_an_error_and_not_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="empty"):
        pad([], 0)
