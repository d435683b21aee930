import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from components.data.config import DataConfig, SplitConfig
from components.data.splits import loose_key, prompt_key, split_of

SHARES = SplitConfig(train=0.7, calibration=0.1, test=0.2)
roles = st.sampled_from(["system", "user", "assistant"])
texts = st.text(st.characters(blacklist_categories=("Cs",)))
prompts = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=3)


@given(st.lists(prompts, max_size=20), st.randoms(use_true_random=False))
def test_no_prompt_stands_in_two_splits_whatever_the_order_of_rows(found, rng):
    rows = [{"prompt": p} for p in found + found]
    by_split = {}
    for row in rows:
        by_split.setdefault(split_of(prompt_key(row["prompt"]), SHARES), []).append(row)
    keys = {split: {prompt_key(row["prompt"]) for row in rows} for split, rows in by_split.items()}
    assert sum(map(len, keys.values())) == len(set().union(*keys.values()))
    shuffled = rng.sample(rows, len(rows))
    assert {prompt_key(r["prompt"]): split_of(prompt_key(r["prompt"]), SHARES) for r in shuffled} == {
        key: split for split, of_split in keys.items() for key in of_split
    }


def test_the_order_of_a_messages_keys_is_no_part_of_a_prompt():
    assert prompt_key([{"role": "user", "content": "é"}]) == prompt_key([{"content": "é", "role": "user"}])


def test_the_split_is_the_documented_hash_of_the_prompt():
    prompt = [{"role": "user", "content": "Where is my kettle?"}]
    text = 'split[{"content":"Where is my kettle?","role":"user"}]'
    u = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    key = prompt_key(prompt)
    assert split_of(key, SplitConfig(train=u + 0.001, calibration=0.001, test=0.998 - u)) == "train"
    assert split_of(key, SplitConfig(train=u - 0.001, calibration=0.002, test=0.999 - u)) == "calibration"
    assert split_of(key, SplitConfig(train=u - 0.002, calibration=0.001, test=1.001 - u)) == "test"


def test_the_shares_are_those_asked_for():
    found = [split_of(prompt_key([{"role": "user", "content": str(i)}]), SHARES) for i in range(20_000)]
    for name, share in SHARES.model_dump().items():
        assert found.count(name) / 20_000 == pytest.approx(share, abs=4 * (share * (1 - share) / 20_000) ** 0.5)


def key(text):
    return loose_key([{"role": "user", "content": text}])


def test_near_duplicates_share_a_loose_key_and_other_numbers_do_not():
    assert key("Where  is my ORDER 12?") == key("where is my order 12")
    assert key("order 12") != key("order 13")


def test_a_loose_key_keeps_combined_marks_and_symbols_that_stand_alone_and_drops_what_nobody_sees():
    assert key("दिन") != key("दान") and key("มีน้ำ") != key("มาน้ำ"), "vowel signs of Hindi and Thai"
    assert key("N\u00e9?") == key("ne\u0301"), "one accent, written as one character or two"
    assert key("good\u200bness \u200fme") == key("goodness me") and key("\uff21\uff22C") == key("abc")
    assert len({key(text) for text in ("?", "…", "👍", "😀 👍")}) == 4 and key(" ? ") == key("?")


@pytest.mark.parametrize(
    "shares", [{"train": 0.5}, {"train": 0.9, "calibration": 0.2, "test": -0.1}, {"train": 0.8, "test": 0.3}]
)
def test_shares_that_are_no_division_of_the_whole_are_refused(shares):
    with pytest.raises(ValidationError):
        SplitConfig(**shares)


def test_a_path_is_no_part_of_a_key():
    from components.base.settings import keyed_values

    here, there = (DataConfig(preferences=f"/{where}/a.jsonl", demonstrations=where) for where in ("here", "there"))
    assert keyed_values(here) == keyed_values(there)
    assert "max_pairs" in keyed_values(here) and "preferences" not in keyed_values(here)


@pytest.mark.parametrize("other", ["Cafe\u0301 T?", "Caf\u00e9\u00a0T?", "Caf\u00e9\u200b T?"])
def test_prompts_that_look_the_same_are_in_one_split(other):
    one, two = ([{"role": "user", "content": text}] for text in ("Caf\u00e9 T?", other))
    assert prompt_key(one) == prompt_key(two) != prompt_key([{"role": "user", "content": "Cafe T?"}])
