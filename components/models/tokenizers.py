"""Tokenizers: trained on the demonstrations for a model from scratch, or loaded from a pretrained model's folder."""

import bisect
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from components.base.errors import UserError
from components.models.chat.endings import endings_of, set_endings, special_tokens
from components.models.chat.rendering import rendered_prompt
from components.models.chat.templates import (
    CHAT_TEMPLATES,
    QUESTION,
    add_markers,
    completed_template,
    fixed_template,
    lacking,
    renderings,
    turn_end,
)
from components.models.chat.trial import failure_of
from components.models.config import ChatTemplateConfig, GivenTemplate
from components.models.weights import as_folder, load_from, refusing

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


class Demonstration(TypedDict):
    """A prompt and the response to learn; a row of a validate artifact's `demonstrations.<split>`."""

    prompt: list[dict[str, str]]
    response: str


BPE_DEMONSTRATIONS = 200_000
"""Most demonstrations from which byte pairs are merged; of more, every k-th. The trainer's memory grows with the number
of distinct words."""


class TrainingTexts(Iterable[str]):
    """The texts to train a tokenizer on: each prompt turn and each response of demonstrations, read anew each time."""

    def __init__(self, rows: Callable[[], Iterable[Demonstration]], count: int) -> None:
        """`rows` returns the demonstrations, of which there are `count`."""
        self.rows, self.count = rows, count

    def __iter__(self) -> Iterator[str]:
        for row in self.rows():
            yield from (message["content"] for message in row["prompt"])
            yield row["response"]

    def part(self, most: int) -> "TrainingTexts":
        """Return the texts of every k-th demonstration, so that there are at most `most`."""
        step = max(1, -(-self.count // most))
        return TrainingTexts(lambda: islice(self.rows(), 0, None, step), -(-self.count // step))


def texts_of(rows: Sequence[Demonstration]) -> TrainingTexts:
    """Return the texts to train a tokenizer on, read from `rows` when they are needed."""
    return TrainingTexts(lambda: rows, len(rows))


def train_tokenizer(texts: Iterable[str], vocabulary: int, stop: Sequence[str] = ()) -> Any:
    """Train a tokenizer for a model from scratch: whole words if `texts` have few enough, else byte-level BPE.

    Args:
        texts: read two times, so no iterator. They are not kept in memory.
        stop: strings that end a response, in addition to EOS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, UNKNOWN, END, *_ROLES]
    split = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Punctuation()])
    words: set[str] = set()
    for text in texts:
        words.update(word for word, _ in split.pre_tokenize_str(text))
        if len(words) + len(special) > vocabulary:
            break
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
        merged = texts.part(BPE_DEMONSTRATIONS) if isinstance(texts, TrainingTexts) else texts
        tokenizer.train_from_iterator(merged, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=UNKNOWN, eos_token=END,
        additional_special_tokens=list(_ROLES), clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    set_endings(wrapped, strings=stop)
    return wrapped


def gguf_file(folder: Path) -> str | None:
    """Return the name of the GGUF file in a model's folder; None if it has safetensors."""
    return next((path.name for path in sorted(folder.glob("*.gguf"))), None)


def load_tokenizer(
    folder: Path, field: str = "sft.base", template: GivenTemplate = None, stop: Sequence[str] = ()
) -> Any:
    """Load the tokenizer of a pretrained model's folder, with a separate pad token.

    (If pad were eos, Hugging Face's classifiers would read the score before EOS.) Its EOS is the token with which its
    chat template closes a response, if there is one. Its former EOS and those that the model's generation_config.json
    lists end a response too (`endings_of`). Its chat template renders the same text on each day, and its prompts end
    where the response begins (`completed_template`).

    Args:
        folder: the folder, or a GGUF file.
        field: the config key or option that names the folder, for the error.
        template: one of `CHAT_TEMPLATES`, a template's text, or all its options. It replaces the tokenizer's own.
            Markers that it writes, such as <|im_start|>, are added if the tokenizer lacks them.
        stop: strings that end a response too (`generation.stop`). If empty, those saved with the tokenizer.

    Raises:
        UserError: transformers cannot load it, or it has no EOS or no working chat template.
    """
    with as_folder(folder) as whole:
        return load_with_new_tokens(whole, field, template, stop)[0]


def load_with_new_tokens(
    folder: Path, field: str, template: GivenTemplate, stop: Sequence[str]
) -> tuple[Any, list[str]]:
    """As `load_tokenizer`, for a folder; also return the tokens that were added, which the model may lack."""
    from transformers import AutoTokenizer

    options = template if isinstance(template, ChatTemplateConfig) else ChatTemplateConfig(chat_template=template)
    gguf = gguf_file(folder)
    tokenizer = load_from(AutoTokenizer, folder, field, **({"gguf_file": gguf} if gguf else {}))
    by_option = " Or set sft.chat_template, as in --set sft.chat_template=chatml." if field == "sft.base" else ""
    source = field if options.chat_template is None else "sft.chat_template"
    if options.chat_template is not None:
        tokenizer.chat_template = CHAT_TEMPLATES.get(options.chat_template, options.chat_template)
    elif tokenizer.chat_template is None:
        raise UserError(lacking(folder, field))
    try_template(tokenizer, folder, source, options)
    added = [] if options.chat_template is None else add_markers(tokenizer)
    before = tokenizer.eos_token
    try:
        if (end := turn_end(tokenizer)) not in (None, before):
            tokenizer.eos_token = end
        tokenizer.chat_template = completed_template(tokenizer)
    except ValueError as error:
        raise _unusable(folder, source, error) from error
    if tokenizer.eos_token is None:
        raise UserError(f"{field}: the tokenizer in {folder} has no EOS token; add one to it.{by_option}")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        if "<|endoftext|>" in tokenizer.get_vocab() and tokenizer.eos_token != "<|endoftext|>":
            tokenizer.pad_token = "<|endoftext|>"
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
            added.append(PAD)
    listed = tokenizer.convert_ids_to_tokens(_listed_ends(folder))
    stop = stop or endings_of(tokenizer).strings
    set_endings(tokenizer, [token for token in (before, *listed) if token is not None], stop)
    return tokenizer, added


def _listed_ends(folder: Path) -> list[int]:
    """Return the EOS ids of a model's generation_config.json, or else its config.json, if it lists several."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        with contextlib.suppress(OSError, ValueError):
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if isinstance(ends, list):
                return [token_id for token_id in ends if type(token_id) is int and token_id >= 0]
    return []


TEMPLATE_SECONDS = 5
"""Seconds of processor time that a chat template may take."""


def try_template(tokenizer: Any, folder: Path, field: str, options: ChatTemplateConfig | None = None) -> None:
    """Fix date and chance in the chat template, apply `options`, and render with it in a limited process.

    It is untrusted code. It may refuse a conversation of several turns (the data contract counts these), but not a
    single question.

    Raises:
        UserError: it fails, takes more than `TEMPLATE_SECONDS` or 2 GiB, or does not read a variable of `options`.
    """
    from jinja2 import TemplateSyntaxError

    with refusing(folder, field, "holds a tokenizer without one chat template"):
        template = tokenizer.get_chat_template()
    try:
        tokenizer.chat_template = fixed_template(template, options or ChatTemplateConfig())
    except (TemplateSyntaxError, ValueError) as error:
        raise _unusable(folder, field, f"{type(error).__name__}: {error}") from error

    def render() -> None:
        rendered_prompt(tokenizer, QUESTION)
        renderings(tokenizer)

    if reason := failure_of(render, TEMPLATE_SECONDS):
        raise _unusable(folder, field, reason)


def _unusable(folder: Path, field: str, reason: object) -> UserError:
    other = " or give another one as sft.chat_template=FILE" if field.startswith("sft.") else ""
    return UserError(
        f"{field}: the chat template of the tokenizer in {folder} can't be used: {reason}. Correct the template{other}."
    )


def visible_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode `ids` and show each special token in its place, as ⟨|system|⟩.

    Its angle brackets are replaced (by U+27E8 and U+27E9), so that no chat template, tokenizer or HTML page reads the
    text as markup. Without special tokens in `ids` this is the tokenizer's own decoding.
    """
    special = special_tokens(tokenizer)
    places = [place for place, token in enumerate(ids) if token in special]
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    cuts = [len(tokenizer.decode(ids[:place], skip_special_tokens=True)) for place in places]
    for place, cut in zip(reversed(places), reversed(cuts), strict=True):
        visible = special[ids[place]].replace("<", "⟨").replace(">", "⟩")
        text = text[:cut] + visible + text[cut:]
    return text


class StopFinder:
    """Finds where a response's tokens complete a stop string of the tokenizer (`endings_of`)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._strings = tokenizer, endings_of(tokenizer).strings
        self._special = special_tokens(tokenizer)
        self.window = max(len(text.encode()) for text in self._strings) + 1
        """Most tokens in which a stop string can be contained: each token has at least one byte of text."""

    def first(self, ids: Sequence[int], since: int = 0) -> int | None:
        """Return the first number of tokens above `since` after which a stop string is complete; None if none is.

        Stop strings are searched in the text that `visible_text` shows of the last `window` tokens.
        """
        for end in range(since + 1, len(ids) + 1):
            recent = ids[max(0, end - self.window) : end]
            plain = self._special.keys().isdisjoint(recent)
            visible = self._tokenizer.decode(recent) if plain else visible_text(self._tokenizer, recent)
            if any(text in visible for text in self._strings):
                return end
        return None


def token_of_character(tokenizer: Any, ids: Sequence[int], offset: int) -> int:
    """Return the index of the token that completes the character at `offset` of `visible_text(tokenizer, ids)`.

    Both count from 0. A character of several tokens, such as an emoji of several bytes, belongs to the last of them.
    Found by bisection: if a prefix of the tokens shows the characters up to this one correctly, so does every longer
    prefix.
    """
    wanted = visible_text(tokenizer, ids)[: offset + 1]
    return bisect.bisect_left(
        range(len(ids) - 1), True, key=lambda last: visible_text(tokenizer, ids[: last + 1]).startswith(wanted)
    )
