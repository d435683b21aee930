"""What ends a response beside EOS: further tokens and strings, from the sampler to what a reward model reads."""

from typing import Any

import pytest

from components.models.batching import encode_response, encode_responses
from components.models.chat.endings import before_stop, endings_of, set_endings
from components.models.config import GenerationConfig
from components.models.sampling import generate_responses, rollout_engine, with_endings
from components.models.tokenizers import StopFinder, load_tokenizer, train_tokenizer, visible_text

FREE = GenerationConfig(max_new_tokens=24)


@pytest.fixture
def tokenizer(language: Any) -> Any:
    """The language's tokenizer, its endings as they were afterwards."""
    yield language.tokenizer
    set_endings(language.tokenizer)


def draw(language: Any, runtime: Any) -> Any:
    with rollout_engine(language.model, language.tokenizer, runtime) as engine:
        return engine.sample(language.prompts, FREE, 7)


def rows(samples: Any) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(samples.response_ids.tolist(), samples.response_lengths, strict=True)]


def test_another_token_ends_a_response_as_eos_does(language: Any, tokenizer: Any, runtime: Any) -> None:
    """The free responses, cut by hand behind the first ending, are what the sampler gives with these endings."""
    free = rows(draw(language, runtime))
    others = tokenizer.convert_ids_to_tokens([free[0][3], free[1][5]])
    set_endings(tokenizer, others)
    ids = endings_of(tokenizer).ids
    assert ids == (tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(others))
    found = draw(language, runtime)
    expected = [row[: next((i + 1 for i, t in enumerate(row) if t in ids), len(row))] for row in free]
    assert rows(found) == expected and any(len(a) < len(b) for a, b in zip(expected, free, strict=True))
    assert found.ended.tolist() == [row[-1] in ids for row in expected]
    for number, row in enumerate(expected):
        said = row[:-1] if row[-1] in ids else row
        assert found.text_ids[number] == said and found.texts(tokenizer)[number] == visible_text(tokenizer, said)
        judged = [*said, tokenizer.eos_token_id] if row[-1] in ids else row
        assert found.reward_ids(number) == judged, "a reward model was trained on texts that end with EOS"
    assert found.other_endings.keys() == {n for n, row in enumerate(expected) if row[-1] in ids[1:]} != set()


def test_a_response_ends_where_a_stop_string_is_complete(language: Any, tokenizer: Any, runtime: Any) -> None:
    """By brute force: the first prefix of the free response whose text holds a string."""
    free = rows(draw(language, runtime))
    said = [visible_text(tokenizer, row) for row in free]
    strings = (said[0][9:13], said[2][4:6])
    set_endings(tokenizer, strings=strings)
    found = draw(language, runtime)
    stopped = 0
    for number, row in enumerate(free):
        ends = (n for n in range(1, len(row) + 1) if any(s in visible_text(tokenizer, row[:n]) for s in strings))
        length = next(ends, None)
        assert rows(found)[number] == row[:length]
        text = visible_text(tokenizer, row[: length or len(row) - bool(row[-1] == tokenizer.eos_token_id)])
        assert found.texts(tokenizer)[number] == before_stop(tokenizer, text)
        if length is not None:
            stopped += 1
            assert found.ended[number]
            before = before_stop(tokenizer, text)
            heads = (row[:n] for n in range(length + 1) if visible_text(tokenizer, row[:n]) == before)
            said_again = tokenizer(before, add_special_tokens=False)["input_ids"]  # it stops within a token
            assert found.reward_ids(number) == [*next(heads, said_again), tokenizer.eos_token_id]
    assert 2 <= stopped < len(free), "some stop, some do not"
    messages = [[{"role": "user", "content": "Hello."}]]
    answer = generate_responses(language.model, tokenizer, messages, FREE, 7, runtime)[0]
    assert not any(text in answer.text for text in strings)


def test_the_order_of_ranks_and_batches_changes_no_ending(language: Any, tokenizer: Any, runtime: Any) -> None:
    set_endings(tokenizer, strings=(visible_text(tokenizer, rows(draw(language, runtime))[0])[9:13],))
    whole = draw(language, runtime)
    with rollout_engine(language.model, tokenizer, runtime) as engine:
        part = engine.sample([language.prompts[i] for i in (4, 0)], FREE, 7, [4, 0])
    assert [rows(part)[1], part.texts(tokenizer)[1]] == [rows(whole)[0], whole.texts(tokenizer)[0]]
    assert with_endings(whole, tokenizer).other_endings == whole.other_endings


@pytest.mark.parametrize("text", ["Bitte schön. Schluss", "a👋b Schluss", "x\n\nUser: y", "nothing here"])
def test_a_stop_string_is_found_whatever_tokens_it_stands_in(text: str) -> None:
    """Of bytes: a token may hold a part of a character, and a string begin and end within tokens."""
    tokenizer = train_tokenizer([f"{n} {n * 7} some words of more kinds than fit" for n in range(400)], 300)
    set_endings(tokenizer, strings=("Schluss", "👋", "\n\nUser:", "ön."))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = [visible_text(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
    ends = (n for n, text in enumerate(shown) if before_stop(tokenizer, text) != text)
    assert StopFinder(tokenizer).first(ids) == next(ends, None)
    assert StopFinder(tokenizer).first(ids, since=len(ids) - 1) in (None, len(ids))


def test_a_text_to_learn_ends_before_its_first_stop_string(tokenizer: Any) -> None:
    plain = encode_response(tokenizer, "We will replace ", 64)
    set_endings(tokenizer, strings=("what", "broken"))
    assert encode_response(tokenizer, "We will replace what is broken.", 64) == plain
    assert encode_responses(tokenizer, ["We will replace what is broken."], 64) == [plain]
    assert plain[-1] == tokenizer.eos_token_id


def test_a_stop_string_that_is_a_token_is_a_token_and_pad_never_ends(tokenizer: Any) -> None:
    set_endings(tokenizer, [tokenizer.pad_token, "no such token"], ["<|user|>", "Schluss"])
    assert endings_of(tokenizer).ids == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>"))
    assert endings_of(tokenizer).strings == ("Schluss",)


def test_endings_are_saved_with_the_tokenizer_and_none_leaves_no_trace(tokenizer: Any, tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path / "plain")
    set_endings(tokenizer, ["<|user|>"], ["Schluss"])
    tokenizer.save_pretrained(tmp_path / "with")
    assert endings_of(AutoTokenizer.from_pretrained(tmp_path / "with")) == endings_of(tokenizer)
    set_endings(tokenizer)
    tokenizer.save_pretrained(tmp_path / "again")
    plain, again = ((tmp_path / name / "tokenizer_config.json").read_bytes() for name in ("plain", "again"))
    assert plain == again and b"stop_strings" not in plain


def test_a_saved_tokenizers_stop_strings_stay_unless_others_are_named(tokenizer: Any, tmp_path: Any) -> None:
    """Candidates of a policy that learned to stop at a string went on beyond it."""
    set_endings(tokenizer, strings=["Schluss"])
    tokenizer.save_pretrained(tmp_path)
    assert endings_of(load_tokenizer(tmp_path)).strings == ("Schluss",)
    assert endings_of(load_tokenizer(tmp_path, stop=("Punkt",))).strings == ("Punkt",)
