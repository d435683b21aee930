"""Training a tokenizer: its texts are read again and again and never held, and byte pairs come from a bounded part."""

import pytest

from components.models import tokenizers
from components.models.tokenizers import TrainingTexts, texts_of, train_tokenizer


class Counted(str):
    """A text that counts how many of its kind are alive."""

    alive = most = 0

    def __new__(cls, text: str) -> "Counted":
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, text)

    def __del__(self) -> None:
        type(self).alive -= 1


def demonstrations(count: int, words: int):
    for i in range(count):
        yield {"prompt": [{"role": "user", "content": Counted(f"word{i % words} ")}], "response": Counted("yes indeed")}


@pytest.mark.parametrize("words", [50, 3000], ids=["whole words", "byte pairs"])
def test_a_tokenizer_is_trained_without_holding_its_texts_and_as_from_a_list(words: int) -> None:
    Counted.alive = Counted.most = 0
    texts = TrainingTexts(lambda: demonstrations(3000, words), 3000)
    trained = train_tokenizer(texts, 600)
    assert Counted.most < 1500, "of 6,000; the trainer takes some hundred at a time"
    known = train_tokenizer([str(text) for text in texts], 600)
    assert trained.backend_tokenizer.to_str() == known.backend_tokenizer.to_str()
    assert ("word49" in trained.get_vocab()) == (words == 50)


def test_byte_pairs_are_merged_from_every_kth_demonstration_and_all_words_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"ask {i}"}], "response": f"say {i}"} for i in range(10)]
    assert list(texts_of(rows).part(4)) == [text for i in (0, 3, 6, 9) for text in (f"ask {i}", f"say {i}")]
    assert list(texts_of(rows).part(10)) == list(texts_of(rows)) and len(list(texts_of(rows).part(1))) == 2
    monkeypatch.setattr(tokenizers, "BPE_DEMONSTRATIONS", 2)
    assert {"\u25810", "\u25815", "\u25819"} <= train_tokenizer(texts_of(rows), 100).get_vocab().keys(), (
        "whole words: all texts count"
    )
    many = [
        {"prompt": [{"role": "user", "content": f"ask {i}"}], "response": "zebra" if i % 5 else "say"}
        for i in range(400)
    ]
    vocabulary = train_tokenizer(texts_of(many), 300).get_vocab()
    assert "say" in vocabulary and "zebra" not in vocabulary, "only the demonstrations 0 and 200 are read"
