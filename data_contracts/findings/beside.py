"""What the data are compared with: prompts that they must not repeat, and prompts of the model in use."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from components.base.errors import UserError
from components.data.config import DataConfig, NearDuplicateConfig
from components.data.inputs import label_of
from components.data.rows import CanonicalRow, Message, Problem
from components.data.splits import loose_key
from components.data.words import words_of
from data_contracts.findings.drift import DriftMeasure, distance, language_drift, length_drift, told_apart
from data_contracts.findings.near import AT_ONCE, Signatures, SketchFile, near_earlier, runs_of_words, signatures
from data_contracts.findings.texts import SAMPLE, RowTexts
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import hash64

_CHUNK = 2_000
_LONGEST = 10**9
"""Characters: what is only compared may be as long as it is."""


class Forbidden(NamedTuple):
    """The prompts of `data.decontaminate`."""

    sketches: Signatures
    loose: np.ndarray
    """The same but for case, punctuation and white space, as hashes (k,)."""
    named: list[str]
    """Where each stands, for messages (k,)."""


def forbidden_prompts(inputs: Mapping[str, Path], data: DataConfig) -> Forbidden:
    """Read the prompts of the files `inputs` (by name of the input).

    Raises:
        UserError: a file can't be read, or holds no prompt.
    """
    parts, loose, named = [signatures([])], [], []
    for name, path in inputs.items():
        runs: list[list[str]] = []
        for row in prompts_in(path, data, "data.decontaminate"):
            runs.append(_runs(row["prompt"], data.near_duplicate))
            loose.append(hash64(loose_key(row["prompt"])))
            named.append(f"row {row['row']} of {label_of(name)}")
            if len(runs) == _CHUNK:
                parts.append(signatures(runs))
                runs = []
        parts.append(signatures(runs))
    return Forbidden(np.concatenate(parts), np.array(loose, np.uint64), named)


def mark_contaminated(ledger: Ledger, texts: RowTexts, forbidden: Forbidden, near: NearDuplicateConfig) -> None:
    """Measure which rows (of `texts`) have a prompt that nearly repeats one of `forbidden` (`contaminated`)."""
    count = len(forbidden.named)
    index = texts.index
    sketched = SketchFile(ledger.path.with_name(f"{ledger.path.name}-contaminated"))
    sketched.append(forbidden.sketches)
    for start in range(0, len(texts.prompt_sketch), AT_ONCE):
        sketched.append(texts.prompt_sketch[np.arange(start, min(start + AT_ONCE, len(texts.prompt_sketch)))])
    found = near_earlier(sketched.written(), near.jaccard, among=count)[count:]
    order = np.argsort(forbidden.loose)
    loose = ledger.facts["loose"][index]
    place = order[np.minimum(np.searchsorted(forbidden.loose, loose, sorter=order), count - 1)]
    found = np.where(forbidden.loose[place] == loose, place, found)
    for at in np.flatnonzero(found >= 0):
        text = f"its prompt nearly repeats {forbidden.named[found[at]]} (data.decontaminate)"
        ledger.note(int(index[at]), Problem("uncontaminated", text))
    ledger.measure("contaminated", index, found >= 0)


def prompts_in(path: Path, data: DataConfig, field: str) -> Iterator[CanonicalRow]:
    """The prompts of a file: rows with a `prompt` (`data.prompt_columns` maps names), or preference pairs.

    Raises:
        UserError: it can't be read, or holds no prompt.
    """
    some = False
    for row in judged_rows(RowSource.named("prompts", path, data), _LONGEST):
        if row.item is not None:
            some = True
            yield row.item
    if not some:
        raise UserError(
            f"{field}: {path} holds no prompt. Give rows with a `prompt` (text or messages), or map the name of "
            "their column with data.prompt_columns."
        )


def sampled_prompts(path: Path, data: DataConfig, seed: int) -> list[CanonicalRow]:
    """Up to `SAMPLE` prompts of a file, each as likely (reservoir sampling, Vitter 1985), whatever its size."""
    rng, kept = random.Random(f"deployment {seed}"), list[CanonicalRow]()
    for n, row in enumerate(prompts_in(path, data, "data.deployment_prompts")):
        if n < SAMPLE:
            kept.append(row)
        elif (place := rng.randrange(n + 1)) < SAMPLE:
            kept[place] = row
    return kept


def compared_prompts(
    ours: Sequence[CanonicalRow], theirs: Sequence[CanonicalRow], seed: int
) -> dict[str, DriftMeasure]:
    """Return the distance of the preferences' prompts (`ours`) from those of deployment, by check of `data.checks`."""
    texts = [["\n".join(m["content"] for m in row["prompt"]) for row in rows] for rows in (ours, theirs)]
    lengths = [np.array([len(words_of(text)) for text in side]) for side in texts]
    categories = [[row["category"] for row in rows if row.get("category")] for rows in (ours, theirs)]
    found = {
        "deployment_length": length_drift(*lengths),
        "deployment_language": language_drift(texts[0], texts[1], seed),
        "deployment_words": told_apart(texts[0], texts[1], seed),
    }
    if all(categories):
        found["deployment_category"] = distance([str(c) for c in categories[0]], [str(c) for c in categories[1]], seed)
    return {name: measured for name, measured in found.items() if measured is not None}


def _runs(prompt: Sequence[Message], near: NearDuplicateConfig) -> list[str]:
    return runs_of_words(" ".join(m["content"] for m in prompt), near.words)
