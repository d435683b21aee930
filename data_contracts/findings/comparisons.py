"""Compare the data with forbidden prompts, with prompts of the deployed model, and with earlier data."""

import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError, about
from components.data.config import DataConfig, NearDuplicateConfig
from components.data.formats.public_fields import prompt_of
from components.data.inputs import label_of
from components.data.rows import BadRow, CanonicalRow, Message, Problem, RawRow
from components.data.splits import SPLITS, loose_key, prompt_key
from components.data.tables.published import read_split, rows_at
from components.data.words import words_of
from data_contracts.findings.drift import DriftMeasure, difference, distance, language_drift, length_drift, told_apart
from data_contracts.findings.near import AT_ONCE, Sketches, near_earlier, runs_of_words, signatures
from data_contracts.findings.texts import SAMPLE, RowTexts
from data_contracts.findings.whole import TRAIN
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import hash64, longer_wins

_CHUNK = 2_000
_LONGEST = 10**9
"""Character limit for texts that are only compared, so that none is rejected for its length."""


class Forbidden(NamedTuple):
    """Prompts that rows must not repeat."""

    column: str
    """The measured column that counts a row's matches."""
    check: str
    """The check of that column."""
    field: str
    """The config option that names the prompts."""
    sketches: Sketches
    loose: NDArray[np.uint64]
    """Hashes of the prompts, ignoring case, punctuation and white space (k,)."""
    named: NDArray[np.int64]
    """For each prompt, its file and its row number there (k, 2)."""
    files: Sequence[str]
    """The names of the files, for messages."""
    splits: tuple[int, ...] = ()
    """The splits whose rows must not repeat them; empty means all."""

    def place_of(self, place: int) -> str:
        """Return where a prompt occurs, for messages."""
        file, number = self.named[place]
        return f"row {number} of {self.files[file]}"


def forbidden_prompts(inputs: Mapping[str, Path], data: DataConfig, folder: Path) -> Forbidden:
    """Read the forbidden prompts of `data.decontaminate` from the files in `inputs`, by input name.

    Args:
        folder: for the prompts' MinHash signatures.

    Raises:
        UserError: a file can't be read, or has no prompt.
    """
    files = [
        (label_of(name), ((row["row"], row["prompt"]) for row in prompts_in(path, data, "data.decontaminate")))
        for name, path in inputs.items()
    ]
    named = ("contaminated", "uncontaminated", "data.decontaminate")
    return _forbidden(named, files, data.near_duplicate, folder)


def held_out_prompts(reference: Path, data: DataConfig, folder: Path) -> Forbidden:
    """Return the prompts of the calibration and test pairs of a `validate` artifact, which training rows must not
    repeat."""
    files = [
        (
            f"pairs.{split} of the reference",
            ((number, row["prompt"]) for number, row in enumerate(read_split(reference / f"pairs.{split}"), 1)),
        )
        for split in SPLITS
        if SPLITS.index(split) != TRAIN
    ]
    named = ("held_out_before", "reference_apart", "data.reference")
    return _forbidden(named, files, data.near_duplicate, folder)._replace(splits=(TRAIN,))


def _forbidden(
    named: tuple[str, str, str], files: Sequence[tuple[str, Iterable[tuple[int, Sequence[Message]]]]],
    near: NearDuplicateConfig, folder: Path,
) -> Forbidden:  # fmt: skip
    loose, places = array("Q"), array("q")
    sketches = Sketches(folder / named[0])
    for file, (_, prompts) in enumerate(files):
        rows = iter(prompts)
        while chunk := list(islice(rows, _CHUNK)):
            texts = (" ".join(m["content"] for m in prompt) for _, prompt in chunk)
            sketches.append(signatures([runs_of_words(text, near.words) for text in texts]))
            for number, prompt in chunk:
                loose.append(hash64(loose_key(prompt)))
                places.extend((file, number))
    where = np.array(places, np.int64).reshape(-1, 2)
    return Forbidden(*named, sketches, np.array(loose, np.uint64), where, [name for name, _ in files])


def mark_forbidden(ledger: Ledger, texts: RowTexts, forbidden: Forbidden, near: NearDuplicateConfig) -> None:
    """Measure which rows of `texts` have a prompt that nearly repeats one of `forbidden`, and write that to its
    column."""
    count = len(forbidden.named)
    index = texts.index
    looked_at = (
        np.isin(ledger.facts["split"][index], forbidden.splits) if forbidden.splits else np.ones(len(index), bool)
    )
    if not count or not looked_at.any():
        ledger.measure(forbidden.column, index[looked_at], np.zeros(looked_at.sum(), bool))
        return
    sketches = Sketches(ledger.path.with_name(f"{ledger.path.name}-{forbidden.column}"))
    for part in (forbidden.sketches, texts.prompt_sketch):
        for start in range(0, len(part), AT_ONCE):
            sketches.append(part[np.arange(start, min(start + AT_ONCE, len(part)))])
    repeated = near_earlier(sketches, near.jaccard, among=count)[count:]
    repeated[~looked_at] = -1
    order = np.argsort(forbidden.loose)
    loose = ledger.facts["loose"][index]
    place = order[np.minimum(np.searchsorted(forbidden.loose, loose, sorter=order), count - 1)]
    repeated = np.where((forbidden.loose[place] == loose) & looked_at, place, repeated)
    for at in np.flatnonzero(repeated >= 0):
        text = f"its prompt nearly repeats {forbidden.place_of(repeated[at])} ({forbidden.field})"
        ledger.note(int(index[at]), Problem(forbidden.check, text))
    ledger.measure(forbidden.column, index[looked_at], repeated[looked_at] >= 0)


def prompts_in(path: Path, data: DataConfig, field: str) -> Iterator[CanonicalRow]:
    """Yield the prompts of a file: rows with a `prompt` (`data.prompt_columns` maps names), preference pairs, or rows
    that name it as public sets do (`question`, `instruction` and `input`, `messages` and the like).

    Raises:
        UserError: the file can't be read, or has no prompt. The message names `field` and the file.
    """
    some = False
    source = RowSource.named("prompts", path, data)
    renamed = (_asked(raw, data.prompt_columns) for raw in source.rows)
    with about(field):
        for row in judged_rows(source._replace(rows=renamed, columns={}), _LONGEST):
            if row.item is not None:
                some = True
                yield row.item
        if not some:
            raise UserError(
                f"{path} holds no prompt. Give rows with a `prompt` (text or messages), or map the name of their "
                "column with data.prompt_columns."
            )


def _asked(raw: RawRow, columns: Mapping[str, str]) -> RawRow:
    """Return a row with its prompt under the name `prompt`. Each of several files may have its own name for it."""
    data = {ours: raw.data[theirs] for ours, theirs in columns.items() if theirs in raw.data}
    data = {name: value for name, value in raw.data.items() if name not in columns.values()} | data
    if raw.problem or data.get("prompt") is not None or {"chosen", "rejected"} <= data.keys():
        return raw._replace(data=data)
    try:
        prompt = prompt_of(data)
    except BadRow:
        return raw._replace(data=data)
    while prompt and prompt[-1]["role"] == "assistant":  # the answer of a conversation is not asked
        prompt = prompt[:-1]
    return raw._replace(data={"prompt": prompt, "category": data.get("category")} if prompt else data)


def sampled_prompts(path: Path, data: DataConfig, seed: int) -> list[CanonicalRow]:
    """Return a uniform sample of up to `SAMPLE` prompts of a file of any size (reservoir sampling, Vitter 1985)."""
    rng, chosen = random.Random(f"deployment {seed}"), list[CanonicalRow]()
    for n, row in enumerate(prompts_in(path, data, "data.deployment_prompts")):
        if n < SAMPLE:
            chosen.append(row)
        elif (place := rng.randrange(n + 1)) < SAMPLE:
            chosen[place] = row
    return chosen


def one_a_prompt(rows: Sequence[CanonicalRow]) -> list[CanonicalRow]:
    """Return one row of each prompt: what chance alone reaches is computed as if rows were independent."""
    return list({prompt_key(row["prompt"]): row for row in rows}.values())


def compared_prompts(
    ours: Sequence[CanonicalRow], theirs: Sequence[CanonicalRow], seed: int
) -> dict[str, DriftMeasure]:
    """Return how far the preferences' prompts (`ours`) differ from deployment prompts, by check of `data.checks`."""
    sides = one_a_prompt(ours), theirs
    prompts = [prompt_texts(side) for side in sides]
    lengths = [np.array([len(words_of(text)) for text in texts]) for texts in prompts]
    return _compared("deployment", sides, prompts, prompts, lengths, seed)


def sampled_pairs(reference: Path, seed: int) -> list[CanonicalRow]:
    """Return a seeded sample of up to `SAMPLE` pairs from all splits of a `validate` artifact."""
    splits = [read_split(reference / f"pairs.{split}") for split in SPLITS]
    starts = np.cumsum([0, *map(len, splits)])
    total = int(starts[-1])
    chosen = np.sort(random.Random(f"reference {seed}").sample(range(total), min(SAMPLE, total)))
    return [
        row
        for start, rows in zip(starts, splits, strict=False)
        for row in rows_at(rows, chosen[(chosen >= start) & (chosen < start + len(rows))] - start)
    ]


def compared_pairs(ours: Sequence[CanonicalRow], theirs: Sequence[CanonicalRow], seed: int) -> dict[str, DriftMeasure]:
    """Return how far the pairs (`ours`) differ from those of earlier data, by check of `data.checks`."""
    sides = one_a_prompt(ours), one_a_prompt(theirs)
    answers = [[f"{row['chosen']} {row['rejected']}" for row in side] for side in sides]
    words = [
        np.array([[len(words_of(row["chosen"])), len(words_of(row["rejected"]))] for row in side]).reshape(-1, 2)
        for side in sides
    ]
    preference, lengths = difference(*map(longer_wins, words)), [counts.max(1) for counts in words]
    return _compared("reference", sides, list(map(prompt_texts, sides)), answers, lengths, seed, preference)


def prompt_texts(rows: Iterable[CanonicalRow]) -> list[str]:
    """Return the text of each row's prompt, a line for each message."""
    return ["\n".join(m["content"] for m in row["prompt"]) for row in rows]


def _compared(
    what: str, sides: Sequence[Sequence[CanonicalRow]], prompts: Sequence[list[str]], texts: Sequence[list[str]],
    lengths: Sequence[NDArray[np.int64]], seed: int, preference: DriftMeasure | None = None,
) -> dict[str, DriftMeasure]:  # fmt: skip
    """Return the drift between two sides, by check: of the words of their `prompts`, the languages of their `texts`,
    their `lengths`, their preference for length if it is measured, and their categories if both have some."""
    categories = [[str(row["category"]) for row in side if row.get("category")] for side in sides]
    measures = {
        f"{what}_length": length_drift(*lengths),
        f"{what}_language": language_drift(texts[0], texts[1], seed),
        f"{what}_words": told_apart(prompts[0], prompts[1], seed),
        f"{what}_preference": preference,
        f"{what}_category": distance(categories[0], categories[1], seed),
    }
    return {name: measured for name, measured in measures.items() if measured is not None}
