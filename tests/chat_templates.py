"""What Tether reads of each chat template in a folder, such as those of model families in TRL's wheel.

`python -m tests.chat_templates FOLDER` prints the table of docs/guide/models.md.
"""
# ruff: noqa: RUF001

import argparse
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from components.base.errors import UserError
from components.models.chat.rendering import rendered_prompt
from components.models.config import ChatTemplateConfig
from components.models.tokenizers import load_tokenizer
from data_contracts.findings.texts import rendered_and_judged

QUESTION = [{"role": "user", "content": "Where?"}]
SYSTEM = [{"role": "system", "content": "Be kind."}]
MARKERS = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]")
PIECES = {"'<|' +": ["<|system|>", "<|user|>", "<|assistant|>"]}
"""Markers that a template writes in pieces."""


def tokenizer_of(template: str) -> Any:
    """Return a tokenizer of bytes whose special tokens are the markers that `template` writes."""
    pieces = [marker for text, markers in PIECES.items() if text in template for marker in markers]
    special = list(dict.fromkeys(["<s>", "</s>", *sorted(MARKERS.findall(template)), *pieces]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", extra_special_tokens=special[2:]
    )
    tokenizer.chat_template = template
    return tokenizer


def loaded(template: str, **options: Any) -> Any:
    """Return the tokenizer of `template` as a run loads it."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_of(template).save_pretrained(folder)
        return load_tokenizer(Path(folder), template=ChatTemplateConfig(**options))


class Reading(NamedTuple):
    """A row of the table."""

    result: str
    end: str = ""
    generation_prompt: str = ""
    system: str = ""


def reading(template: str) -> Reading:
    """Return how a run reads `template`."""
    try:
        tokenizer = loaded(template)
    except UserError as error:
        return Reading("refused: " + str(error).partition("can't be used: ")[2].partition(". Correct")[0])
    if rendered_and_judged(tokenizer, QUESTION, ["Good day.", "No"])[1]:
        return Reading("refused by row: it does not render texts")
    prompt, own = (rendered_prompt(each, QUESTION) for each in (tokenizer, tokenizer_of(template)))
    common = len(prompt.rpartition(QUESTION[0]["content"])[0] + QUESTION[0]["content"])
    change = "its own" if prompt == own else f"`{prompt[common:]!r}` for `{own[common:]!r}`"
    with_system, refusal = rendered_and_judged(tokenizer, SYSTEM + QUESTION, ["Good day."])
    system = "refused" if refusal else "a turn" if SYSTEM[0]["content"] in with_system else "dropped"
    return Reading("read", tokenizer.eos_token, change, system)


def table(folder: Path) -> list[str]:
    """Return the rows of the table in Markdown: templates that are read alike stand in one row."""
    rows = {path.stem: reading(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.jinja"))}
    groups = itertools.groupby(sorted(rows, key=lambda name: rows[name]), key=lambda name: rows[name])
    return [
        f"| {', '.join(sorted(names))} | " + " | ".join(each.replace("|", "\\|") for each in row) + " |"
        for row, names in groups
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print("\n".join(table(parser.parse_args().folder)))
