"""Tokenizers: trained on the demonstrations for a model from scratch, or taken from a pretrained model's folder."""

import bisect
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from components.base.errors import UserError
from components.models.weights import as_folder, load_from, refusing

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")


class Demonstration(TypedDict):
    """A prompt and the response to learn, as a row of a validate artifact's `demonstrations.<split>`."""

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

    Args:
        folder: the folder, or a GGUF file.
        field: the config key or option that named the folder, for the error.

    Raises:
        UserError: there is none that transformers can load, or it has no EOS or no chat template that works.
    """
    with as_folder(folder) as found:
        return _load_tokenizer(found, field)


def _load_tokenizer(folder: Path, field: str) -> Any:
    from transformers import AutoTokenizer

    gguf = gguf_file(folder)
    tokenizer = load_from(AutoTokenizer, folder, field, **({"gguf_file": gguf} if gguf else {}))
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise UserError(f"{field}: the tokenizer in {folder} has no chat template or no EOS token; add them to it.")
    try_template(tokenizer, folder, field)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        if "<|endoftext|>" in tokenizer.get_vocab() and tokenizer.eos_token != "<|endoftext|>":
            tokenizer.pad_token = "<|endoftext|>"
        else:
            tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


_FIXED = {"date_string": "26 Jul 2024"}
"""What chat templates of Llama 3 write in place of today's date; the day is the one that they fall back to."""
_PROBES = (
    [{"role": "user", "content": "Hello."}],
    [{"role": "user", "content": "a" * 4000}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
)
TEMPLATE_SECONDS = 5
"""Processor time that a chat template may take."""
_RENDER = """
import datetime, json, random, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from transformers.utils import chat_template_utils
asked = json.load(sys.stdin)

def rendered(probe, day):
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2001 + 7 * day, 1 + day, 1 + day, 2 * day, tzinfo=tz)
    chat_template_utils.datetime = Clock
    random.seed(day)
    return chat_template_utils.render_jinja_template([probe], add_generation_prompt=True, **asked)

for number, probe in enumerate(asked.pop("probes")):
    try:
        if len({str(rendered(probe, day)) for day in range(9)}) > 1:
            sys.exit("it renders the same question differently each time (strftime_now or random), so the same "
                     "configuration would not give the same model again")
    except Exception as error:
        if number == 0 or isinstance(error, MemoryError):
            sys.exit(f"{type(error).__name__}: {error}"[:400])
"""


def try_template(tokenizer: Any, folder: Path, field: str) -> None:
    """Render a question with the chat template, a program of others, in a process of limited time and memory.

    It may refuse a conversation of several turns (the contract counts these), but not a question, and not run on. It
    renders on nine days with nine seeds of Python's random numbers, which must not show.

    Raises:
        UserError: it fails, takes more than `TEMPLATE_SECONDS`, or more than 2 GiB, or depends on day or chance.
    """
    with refusing(folder, field, "holds a tokenizer without one chat template"):
        asked = {
            "chat_template": tokenizer.get_chat_template(),
            "probes": _PROBES,
            **_FIXED,
            **tokenizer.special_tokens_map,
        }
    command, text = [sys.executable, "-c", _RENDER, str(TEMPLATE_SECONDS)], json.dumps(asked, default=str)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        limited = done.returncode < 0 or "MemoryError" in done.stderr
        by_limit = f"it takes more than {TEMPLATE_SECONDS} s or 2 GiB" if limited else ""
        reason = by_limit or (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(
            f"{field}: the chat template of the tokenizer in {folder} can't be used: {reason}. Correct the template."
        )


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Every token that the tokenizer marks as special, by id: often more than it has a use for (SmolLM2 marks 17 and
    names 3)."""
    marked = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return marked | {i: str(token) for i, token in named}


def visible_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode `ids` with each special token shown where it stands, as ⟨|system|⟩.

    The angle brackets are replaced (U+27E8, U+27E9), so that no chat template, tokenizer or HTML page reads the text as
    markup. Without special tokens among `ids` this is the tokenizer's own decoding.
    """
    special = special_tokens(tokenizer)
    places = [place for place, token in enumerate(ids) if token in special]
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    cuts = [len(tokenizer.decode(ids[:place], skip_special_tokens=True)) for place in places]
    for place, cut in zip(reversed(places), reversed(cuts), strict=True):
        shown = special[ids[place]].replace("<", "⟨").replace(">", "⟩")
        text = text[:cut] + shown + text[cut:]
    return text


def token_of_character(tokenizer: Any, ids: Sequence[int], offset: int) -> int:
    """The number of the token that ends the character at `offset` of `visible_text(tokenizer, ids)`, both from 0.

    A character of several tokens, as an emoji of bytes, has come with the last of them. By bisection: once a prefix of
    the tokens shows the characters up to this one as the whole text does, so does every longer one.
    """
    wanted = visible_text(tokenizer, ids)[: offset + 1]
    return bisect.bisect_left(
        range(len(ids) - 1), True, key=lambda last: visible_text(tokenizer, ids[: last + 1]).startswith(wanted)
    )


def rendered_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """A prompt in the tokenizer's chat template, ready for the response."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **_FIXED)


def rendered_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """A whole conversation, its last response included, in the tokenizer's chat template."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **_FIXED)
