"""Tokenizers: trained on the demonstrations for a model from scratch, or taken from a pretrained model's folder."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from components.base.errors import UserError

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


class Demonstration(TypedDict):
    """A prompt and the response to learn, as a line of a validate artifact's `demonstrations.<split>.jsonl`."""

    prompt: list[dict[str, str]]
    response: str


def texts_of(rows: Iterable[Demonstration]) -> list[str]:
    """What a tokenizer learns from: each prompt turn and each response of demonstrations."""
    return [text for row in rows for text in [*(m["content"] for m in row["prompt"]), row["response"]]]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A tokenizer for a model from scratch: whole words where `texts` hold few enough, else byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    texts = list(texts)
    special = [PAD, UNKNOWN, END, *_ROLES]
    split = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Punctuation()])
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    if len(words) + len(special) <= vocabulary:
        tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, *sorted(words)])}, UNKNOWN))
        tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Metaspace(prepend_scheme="never")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END,
        additional_special_tokens=list(_ROLES), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def gguf_file(folder: Path) -> str | None:
    """The name of the GGUF file in a model's folder; None where it holds safetensors."""
    return next((path.name for path in sorted(folder.glob("*.gguf"))), None)


def load_tokenizer(folder: Path, field: str = "sft.base") -> Any:
    """The tokenizer of a pretrained model's folder, with a pad token of its own: with pad = eos a classifier reads its
    score before EOS.

    Raises:
        UserError: there is none that transformers can load, or it has no EOS or no chat template that works. `field` is
            the config key or option that named the folder.
    """
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf} if (gguf := gguf_file(folder)) else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{field}: {folder} holds no model whose tokenizer transformers can load: {reason}") from error
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise UserError(f"{field}: the tokenizer in {folder} has no chat template or no EOS token; add them to it.")
    try:
        rendered_prompt(tokenizer, [{"role": "user", "content": "Hello."}])
    except Exception as error:  # a template is a program of others
        what = f"the chat template of the tokenizer in {folder} can't render a single question: {error}"
        raise UserError(f"{field}: {what}. Correct the template.") from error
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        if "<|endoftext|>" in tokenizer.get_vocab() and tokenizer.eos_token != "<|endoftext|>":
            tokenizer.pad_token = "<|endoftext|>"
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def rendered_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """A prompt in the tokenizer's chat template, ready for the response."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
