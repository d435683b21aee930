"""fastokens gives the ids that `tokenizers` gives, also of odd texts; where it cannot, `tokenizers` encodes."""

import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from components.models.tokenizers import train_tokenizer
from data_contracts.findings import encoding
from data_contracts.findings.encoding import Encoder

SAID = "The river's old bridge: don't ask why it DOES, we've 12 of 345 words & more...\n\nNobody asks (it's odd).  No?"
PARTS = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x85", "\x1c", "\u2028", "\u180e", "'s", "'S", "don't",
    "é", "e\u0301", "\ufb01", "Å", "ß", "İ", "'\u017f", "漢", "字", "ก", "\u0903", "🙂", "\u200d", "\x00", "\ufeff",
    "<|end|>", " <|end|>", "<|end", "123", "\u0663", "½", "²", "_", "...", "!?", "http://x.y/z?q=1", "\U0001f1e9",
    "ि", "Word", " the", "▁", "Ġ",
]  # fmt: skip
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def split_by(pattern):
    splits = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_of(pre_tokenizer, normalizer=None):
    """A byte-level BPE as the name's model has it, with a vocabulary of its own."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.normalizer = pre_tokenizer, normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([SAID] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<|end|>")


def odd_texts():
    rng = random.Random(3)
    mixed = ["".join(rng.choice(PARTS) for _ in range(rng.randint(0, 30))) for _ in range(500)]
    points = (*range(1, 0xD800), *range(0xE000, 0x11000), *range(0x1F000, 0x20000))
    drawn = ["".join(map(chr, rng.choices(points, k=rng.randint(1, 20)))) for _ in range(500)]
    return [*mixed, *drawn, SAID, "", " " * 500, "ab" * 2_000]


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(lambda: tokenizer_of(BYTES), id="gpt-2"),
        pytest.param(lambda: tokenizer_of(pre_tokenizers.Sequence([DIGITS, BYTES])), id="smollm2"),
        pytest.param(lambda: tokenizer_of(split_by(QWEN), normalizers.NFC()), id="qwen"),
        pytest.param(lambda: tokenizer_of(split_by(LLAMA_3)), id="llama-3"),
        pytest.param(lambda: train_tokenizer([SAID], 20), id="trained from scratch"),
    ],
)
def test_fastokens_gives_the_ids_of_tokenizers_also_of_odd_texts(tokenizer):
    tokenizer, texts = tokenizer(), odd_texts()
    encode = Encoder(tokenizer)
    found, expected = encode(texts), tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert encode._fast is not None, "fastokens encodes: it did not refuse the tokenizer, nor disagree about it"
    assert [found.of(place).tolist() for place in range(len(texts))] == [each.ids for each in expected]
    assert found.lengths().tolist() == [len(each.ids) for each in expected]


@pytest.mark.parametrize("refused", [True, False])
def test_where_fastokens_refuses_a_tokenizer_or_disagrees_the_ids_are_those_of_tokenizers(refused, monkeypatch, caplog):
    tokenizer = train_tokenizer([SAID], 20) if not refused else train_tokenizer(["the river runs"], 300)
    true = encoding._by_fastokens
    if not refused:  # a library that gives each text a token more
        monkeypatch.setattr(encoding, "_by_fastokens", lambda fast, texts: true(fast, [f"{text}!" for text in texts]))
    encode = Encoder(tokenizer)
    for texts in (["the river", "runs"], ["an old bridge", ""]):
        found = encode(texts)
        assert [found.of(place).tolist() for place in (0, 1)] == [
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts
        ]
    assert ("disagree about this tokenizer" in caplog.text) is not refused
    nothing = encode([])
    assert (nothing.ids.tolist(), nothing.lengths().tolist()) == ([], [])
    assert np.array_equal(nothing.ends, [0])
