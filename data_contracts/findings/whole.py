"""Analyses that need all rows: annotator competence, duplicates, contradictions and near-duplicates."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError
from components.data.config import NearDuplicateConfig
from components.data.rows import Problem, Row
from components.data.splits import SPLITS
from components.stats.annotator_votes import EQUAL, SECOND, Votes
from components.stats.dawid_skene import DawidSkene, dawid_skene
from data_contracts.findings.near import near_earlier
from data_contracts.findings.texts import RowTexts
from data_contracts.rows.ledger import Ledger, combined
from data_contracts.rows.measuring import places

_log = logging.getLogger(__name__)

COMPARED_ROWS = 2_000_000
"""Number of rows whose text hashes are compared at once."""
TRAIN, TEST = SPLITS.index("train"), SPLITS.index("test")


def competence(rows: Iterable[Row], title: str) -> DawidSkene:
    """Fit the Dawid-Skene annotator model to `rows`. Raises UserError if no row names its voters."""
    annotators: dict[str, int] = {}
    votes, index = [], -1
    for index, row in enumerate(rows):
        votes += [(index, annotators.setdefault(name, len(annotators)), side) for name, side in row.votes]
    if not votes:
        raise UserError(
            f"data.labels is dawid_skene, which weighs each annotator's votes, but no row of {title} says who voted: "
            "`votes` must be a list of {annotator, label}. Add the annotators, or set data.labels=majority."
        )
    item, annotator, label = np.array(votes).T
    fit = dawid_skene(Votes(item, annotator, label, items=index + 1))
    if not fit.converged:
        _log.warning(
            "%s: Dawid and Skene's model has not converged, so its labels may depend on where it was stopped. "
            "Compare them with data.labels=majority.",
            title,
        )
    return fit


def relabelled(rows: Iterable[Row], posterior: NDArray[np.float64]) -> Iterator[Row]:
    """Yield `rows` with the most probable label of `posterior` (I, 3), and its probability as their soft label."""
    for row, (first, second, equal) in zip(rows, posterior, strict=True):
        if row.item is not None and np.isfinite(first):
            label = int(np.argmax([first, second, equal]))
            row.problems = [problem for problem in row.problems if problem.check != "decided"]
            row.decided_otherwise, row.lead = True, 0.0 if label == EQUAL else abs(float(first - second))
            if label == EQUAL:
                row.problems.append(Problem("decided", "most likely a tie (Dawid-Skene)"))
            elif (label == SECOND) == bool(row.first_wins):
                row.item["chosen"], row.item["rejected"] = row.item["rejected"], row.item["chosen"]
                row.first_wins = not row.first_wins
            row.item["soft_label"] = float(max(first, second) + equal / 2)
            if row.ballot:
                row.item["votes_chosen"] = row.ballot.first if row.first_wins else row.ballot.second
        yield row


def mark_duplicates(ledger: Ledger) -> None:
    """Measure for each good row whether it repeats an earlier one (`copies_before`), and whether its two responses are
    also preferred the other way round (`contradictions`)."""
    facts, every = ledger.facts, np.flatnonzero(ledger.good())
    # Rows that repeat or contradict each other share a prompt, so the rows can be processed in groups of prompts.
    parts = 1 + len(every) // COMPARED_ROWS
    share = facts["prompt"] % np.uint64(parts) if parts > 1 else np.zeros(len(facts), np.uint64)
    for part in range(parts):
        _compare(ledger, every[share[every] == part])


def _compare(ledger: Ledger, good: NDArray[np.int64]) -> None:
    facts = ledger.facts[good]
    prompt, chosen, rejected, row = (facts[name] for name in ("prompt", "chosen", "rejected", "row"))
    texts, turned_texts = combined(prompt, chosen, rejected), combined(prompt, rejected, chosen)
    _, first, group = np.unique(texts, return_index=True, return_inverse=True)
    repeats = first[group] != np.arange(len(good))
    for index, before in zip(good[repeats].tolist(), row[first[group[repeats]]].tolist(), strict=True):
        ledger.note(index, Problem("unique", f"duplicate of {ledger.named(before)}"))
    once = np.flatnonzero(~repeats)
    order = np.argsort(texts[once])
    place = np.searchsorted(texts[once], turned_texts[once], sorter=order)
    other = once[order[np.minimum(place, len(once) - 1)]] if len(once) else once
    turned = (texts[other] == turned_texts[once]) & (other != once)
    for index, against in zip(good[once[turned]].tolist(), row[other[turned]].tolist(), strict=True):
        ledger.note(index, Problem("consistent", f"contradicts {ledger.named(against)}"))
    ledger.measure("copies_before", good, repeats)
    ledger.measure("contradictions", good[once], turned)


def place_rated(ledgers: Sequence[Ledger]) -> None:
    """Move prompts that people judged in a batch. Those that may be used for training move to the training split, so
    that they are in no held-out set; those for evaluation only move to the test split.

    Only rows of a batch carry this mark (`half` of the facts). Rows of any kind with the same prompt, ignoring case,
    punctuation and white space, move with them.
    """
    facts = [ledger.facts for ledger in ledgers]
    for half, split in ((1, TRAIN), (0, TEST)):
        prompts = np.concatenate([columns["loose"][columns["half"] == half] for columns in facts])
        for columns in facts if len(prompts) else ():
            columns["split"][np.isin(columns["loose"], prompts)] = split


def mark_near_duplicates(ledger: Ledger, texts: RowTexts, near: NearDuplicateConfig) -> None:
    """Measure which rows nearly repeat an earlier one (`near_copies_before`). Pairs of one ranking resemble each other,
    so the first pair decides for all. Desirable responses are not compared with undesirable ones, which SFT does not
    learn."""
    undesirable = ledger.facts["desirable"][texts.index] == 0
    for some in (np.flatnonzero(~undesirable), np.flatnonzero(undesirable)):
        index = texts.index[some]
        rows = ledger.facts["row"][index]
        _, first, of_row = np.unique(rows, return_index=True, return_inverse=True)
        earlier = near_earlier(texts.sketch, near.jaccard, order=some[first])[of_row]
        for place in np.flatnonzero(earlier >= 0):
            text = f"nearly repeats {ledger.named(rows[first[earlier[place]]])}"
            ledger.note(int(index[place]), Problem("near_unique", text))
        ledger.measure("near_copies_before", index, earlier >= 0)


def near_training(
    ledger: Ledger, selected: NDArray[np.bool_], texts: RowTexts, near: NearDuplicateConfig
) -> NDArray[Any]:
    """Return for each selected pair (k,): 1 if it is held out and its prompt nearly repeats a training prompt, 0 if
    held out and it does not, NaN for training pairs."""
    facts, places = ledger.facts[selected], np.searchsorted(texts.index, np.flatnonzero(selected))
    train, heldout = np.flatnonzero(facts["split"] == TRAIN), np.flatnonzero(facts["split"] != TRAIN)
    out = np.full(len(facts), np.nan)
    out[heldout] = 0
    # A prompt that is in both is a leak, which another check reports.
    heldout = heldout[~np.isin(facts["prompt"][heldout], facts["prompt"][train])]
    order = places[np.concatenate([train, heldout])]
    earlier = near_earlier(texts.prompt_sketch, near.jaccard, len(train), order)[len(train) :]
    out[heldout] = (earlier >= 0) | np.isin(facts["loose"][heldout], facts["loose"][train])
    return out


def selected_by_rank(ledger: Ledger, most: int | None, of_files: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return which good rows are selected (n,): those of lowest rank, whatever their positions.

    Args:
        most: the largest number of rows in all; None keeps all.
        of_files: the largest number of rows of some files. It applies before `most`, which then takes each file's rows
            in their share: by rank alone it would take all rows of a strictly limited file, since they have low ranks.
    """
    selected = ledger.good()
    for file, limit in of_files.items():
        rows = np.flatnonzero(selected & ledger.of(file))
        selected[rows[_in_order(ledger, rows)[limit:]]] = False
    if most is None or selected.sum() <= most:
        return selected
    rows = np.flatnonzero(selected)
    order = _in_order(ledger, rows)
    if of_files:
        share = np.empty(len(rows))
        file = places(ledger.facts["row"][rows])[0]
        for number in np.unique(file):
            of_file = order[file[order] == number]
            share[of_file] = (np.arange(len(of_file)) + 0.5) / len(of_file)
        order = order[np.argsort(share[order], kind="stable")]
    selected[rows[order[most:]]] = False
    return selected


def _in_order(ledger: Ledger, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places (m,) in `index` (m,) of these rows, by rank."""
    order: NDArray[np.int64] = np.argsort(ledger.facts["rank"][index], kind="stable")
    return order
