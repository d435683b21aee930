"""Scores in parts: which token each part falls on, and what it is worth there."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from components.base.errors import UserError
from components.models.tokenizers import token_of_character, visible_text
from components.ppo import experience
from components.ppo.maths import moved_to_tokens
from components.rewards.config import FunctionReward, HttpReward
from components.rewards.function import FunctionSource
from components.rewards.http import HttpSource
from components.rewards.source import Parts, Replies
from components.rewards.stored_scores import StoredScores
from components.rewards.weighted import Rewards
from tests.components.rewards.scorer import Scorer


def byte_level(*merges: tuple[str, str]) -> Any:
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(each) for each in merges)]
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(vocabulary)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


BYTES, MERGED = byte_level(), byte_level(("a", "b"), ("ab", "c"))


@pytest.mark.parametrize(
    ("tokenizer", "text", "tokens"),
    [
        (BYTES, "abc", [0, 1, 2]),
        (MERGED, "abcab", [0, 0, 0, 1, 1]),
        (BYTES, "a\U0001f600b", [0, 4, 5]),  # 4 bytes: the last one makes it a character
        (BYTES, "\u00e9\u4e16", [1, 4]),  # 2 and 3 bytes
        (MERGED, "\U0001f600abc", [3, 4, 4, 4]),
        (BYTES, "\U0001f468\u200d\U0001f469", [3, 6, 10]),  # a family: Python counts 3 characters, and so do offsets
    ],
)
def test_a_part_falls_on_the_token_that_ends_its_character(tokenizer: Any, text: str, tokens: list[int]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [token_of_character(tokenizer, ids, offset) for offset in range(len(text))] == tokens


def test_a_character_that_the_cap_cuts_off_has_a_token(tmp_path: Path) -> None:
    ids = BYTES.encode("a\U0001f600", add_special_tokens=False)[:3]
    text = visible_text(BYTES, ids)
    assert text == "a\ufffd"
    assert [token_of_character(BYTES, ids, offset) for offset in (0, 1)] == [0, 1]


def test_characters_of_a_special_token_that_is_shown_are_its_own() -> None:
    ids = [*BYTES.encode("a", add_special_tokens=False), BYTES.eos_token_id, *BYTES.encode("b")]
    assert visible_text(BYTES, ids) == "a\u27e8|end|\u27e9b"
    assert [token_of_character(BYTES, ids, offset) for offset in (0, 1, 7, 8)] == [0, 1, 1, 2]


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_tokens_of_characters_rise_and_the_last_is_the_last(text: str) -> None:
    ids = MERGED.encode(text, add_special_tokens=False)
    found = [token_of_character(MERGED, ids, offset) for offset in range(len(text))]
    assert found == sorted(found) and found[-1] == len(ids) - 1
    cumulative = [len(text[: offset + 1].encode()) for offset in range(len(text))]
    if not {"ab", "abc"} & {text[i : i + n] for i in range(len(text)) for n in (2, 3)}:
        assert found == [each - 1 for each in cumulative], "a token a byte"


def test_parts_move_the_reward_and_change_no_sum() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards = torch.tensor([[-0.1, 0.0, 2.0], [0.0, 1.0, 0.0]])
    parts = torch.tensor([[0.5, 0.0, 1.0], [-2.0, 0.0, 0.0]])
    found = moved_to_tokens(rewards, parts, mask)
    assert found.tolist() == [pytest.approx([0.4, 0.0, 1.5]), pytest.approx([-2.0, 3.0, 0.0])]
    assert found.sum(1).tolist() == pytest.approx(rewards.sum(1).tolist())


MODULE = """
def tuples(prompts, responses, rows):
    return [[(0, 1.5), (len(each) - 1, -0.5)] for each in responses]

def mixed(prompts, responses, rows):
    return [2, [[1, 0.25]]]

def none(prompts, responses, rows):
    return [[], 1.0]

def beyond(prompts, responses, rows):
    return [[(0, 1.0)], [(5, 1.0)]]

def below(prompts, responses, rows):
    return [[(-1, 1.0)], 0.0]

def half(prompts, responses, rows):
    return [[(0.5, 1.0)], 0.0]

def nan(prompts, responses, rows):
    return [0.0, [(0, float("nan"))]]

def large(prompts, responses, rows):
    return [0.0, [(0, 3e38), (1, 3e38)]]
"""
TWO = Replies([[{"role": "user", "content": "how many?"}]] * 2, ["one", "three"], [{}, {}])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return tmp_path


def scores_of(root: Path, name: str) -> Sequence[Any]:
    source = FunctionSource(FunctionReward(source=f"function:mine:{name}", root=str(root)))
    try:
        return source.score(TWO)
    finally:
        source.close()


def test_a_function_gives_parts_to_some_responses_or_to_all(root: Path) -> None:
    assert scores_of(root, "tuples") == [[(0, 1.5), (2, -0.5)], [(0, 1.5), (4, -0.5)]]
    assert scores_of(root, "mixed") == [2.0, [(1, 0.25)]]
    assert scores_of(root, "none") == [[], 1.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "beyond",
            r"the offset 5 for response 2 of 2 .*'three'\); the response has 5 characters",
        ),
        ("below", "the offset -1 for response 1 of 2 .*; the response has 3 characters"),
        ("half", r"'\(0.5, 1.0\)' in a list for response 1 of 2 .*; the parts of a score are pairs"),
        ("nan", "nan for response 2 of 2 .*; a score must be a finite number"),
        ("large", "6e.38 for response 2 of 2"),
    ],
)
def test_a_part_that_is_none_is_the_users_mistake_and_names_the_response(root: Path, name: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"function:mine:{name}: it gives {said}"):
        scores_of(root, name)


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    with Scorer() as made:
        yield made


def test_a_scorer_gives_parts_and_they_are_kept_for_resuming(scorer: Scorer, tmp_path: Path) -> None:
    scorer.answer = lambda body: (200, {"scores": [[[0, 1.0], [2, 0.5]] if each == "one" else 3.0
                                                   for each in body["responses"]]})  # fmt: skip
    config, expected = HttpReward(source=f"http:{scorer.url}"), [[(0, 1.0), (2, 0.5)], 3.0]
    for _ in range(2):
        kept = StoredScores(HttpSource(config), tmp_path / "scores.jsonl")
        assert kept.score(TWO) == expected
        kept.close()
    assert len(scorer.asked) == 1
    scorer.answer = lambda body: (200, {"scores": [[[3, 1.0]], 0.0]})
    with pytest.raises(UserError, match=r"the offset 3 for response 1 of 2 .*; the response has 3 characters"):
        HttpSource(config).score(TWO)


class Given:
    """Gives each response what `parts` does."""

    def __init__(self, parts: bool) -> None:
        self.parts = parts

    def score(self, replies: Replies) -> list[Any]:
        said: list[Parts] = [[(0, 2.0), (len(text) - 1, 4.0)] if text else [] for text in replies.responses]
        return said if self.parts else [sum(value for _, value in each) for each in said]

    def close(self) -> None:
        pass


def gathered(load: Any, monkeypatch: pytest.MonkeyPatch, parts: bool, **options: Any) -> tuple[Any, torch.Tensor]:
    """The experience of a batch, and its rewards (B, T)."""
    job, loaded, samples = load(**options)
    config = FunctionReward(source="function:mine:any", weight=0.5)
    loaded.rewards = Rewards([config], {"any": Given(parts)}, units={"any": (1.0, 4.0)})
    loaded.scale = loaded.scale.model_copy(update={"shift": 0.25, "scale": 2.0})
    seen, estimate = [], experience.estimate_advantages
    monkeypatch.setattr(
        experience, "estimate_advantages", lambda rewards, *rest: (seen.append(rewards), estimate(rewards, *rest))[1]
    )
    asked = [[{"role": "user", "content": "?"}]] * len(samples.text_ids)
    return experience.gather_experience(loaded, samples, job, 0.1, asked), seen[0]


def test_in_a_batch_each_part_is_scaled_and_weighted_and_what_is_left_comes_last(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part v is worth weight · v / (source's scale · sum's scale) = 0.5 · v / (4 · 2) = v / 16."""
    whole, of_sums = gathered(load, monkeypatch, parts=False)
    found, of_parts = gathered(load, monkeypatch, parts=True)
    assert torch.equal(found.scores, whole.scores) and torch.equal(found.scaled_scores, whole.scaled_scores)
    assert of_parts.sum(1).tolist() == pytest.approx(of_sums.sum(1).tolist(), abs=1e-5)
    moved = (of_parts - of_sums).tolist()
    first, tokenizer = 0, load()[1].tokenizer
    for row, (ids, length) in enumerate(zip(found.samples.text_ids, found.samples.response_lengths, strict=True)):
        expected = [0.0] * len(moved[row])
        if ids:
            text = visible_text(tokenizer, ids)
            for offset, value in ((0, 2.0), (len(text) - 1, 4.0)) if text else ():
                expected[token_of_character(tokenizer, ids, offset)] += value / 16
                expected[length - 1] -= value / 16
                first += 1
        assert moved[row] == pytest.approx(expected, abs=1e-6)
    assert first >= 8, "most responses have text"
    assert not torch.equal(found.advantages, whole.advantages)


def test_parts_have_no_place_in_an_advantage_of_whole_responses(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"ppo.advantage=rloo gives a whole response one advantage.*ppo.advantage=gae"):
        gathered(load, monkeypatch, parts=True, advantage="rloo", group_size=2)
