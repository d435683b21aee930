"""Judge the examined data as a whole, and gather the outcome of every check."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.data.inputs import DEPLOYMENT, KINDS, REFERENCE
from components.data.splits import SPLITS
from data_contracts.examine import Examination, sample
from data_contracts.expectations import suites
from data_contracts.findings.comparisons import (
    compared_pairs,
    compared_prompts,
    prompt_texts,
    sampled_pairs,
    sampled_prompts,
)
from data_contracts.findings.drift import DriftMeasure, length_drift, told_apart
from data_contracts.findings.whole import TEST, TRAIN, near_training
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import longer_wins, places


class ContractResult(NamedTuple):
    """The outcome of every check of the contract."""

    checks: list[suites.JudgedCheck]
    expectations: Mapping[str, Sequence[suites.Check]]
    """Maps what is judged to its expectations: a kind of data, the selected pairs, or measures of the whole."""


def contract_result(data: Examination) -> ContractResult:
    """Judge the data as a whole (see `suites.judge`), and return every check's outcome."""
    outcomes: list[suites.JudgedCheck] = []
    for examined in data.kinds.values():
        outcomes += [*examined.judge.outcomes(), *examined.judge.judge_whole(examined.selected)]
    whole = _suites(data)
    outcomes += [outcome for suite in whole for outcome in suites.judge(data.context, suite)]
    for outcome in outcomes:
        kind = outcome["suite"].partition("_")[0]
        outcome["source"] = kind if kind in KINDS else "kept"
        if outcome["name"] == "length_preference" and data.longer_wins is not None:
            outcome |= {"interval": ends} if (ends := data.longer_wins.ends) else {}
    expectations = {kind: [*rows.judge.checks, *rows.judge.whole] for kind, rows in data.kinds.items()}
    return ContractResult(outcomes, expectations | {suite.name: list(suite.checks) for suite in whole})


def _suites(data: Examination) -> list[suites.Suite]:
    """Return the suites on the selected pairs and on measures of the whole."""
    checks, contract = data.job.data.checks, list[suites.Suite]()
    if "preferences" in data.kinds:
        pairs, (prompts, splits) = data.pairs, data.splits_of_prompts
        near = near_training(pairs.ledger, pairs.selected, pairs.texts, data.job.data.near_duplicate)
        splits_of_prompt = splits[np.searchsorted(prompts, pairs.facts["prompt"])]
        frame = pair_frame(pairs.ledger, pairs.selected, splits_of_prompt, near)
        contract.append(suites.Suite("kept_pairs", frame, suites.pair_checks(checks, frame)))
    if measures := {name: measure for name, measure in _measures(data).items() if measure is not None}:
        frame = pd.DataFrame({"row_id": [0], **{name: [float(measure.value)] for name, measure in measures.items()}})
        chance = {name: measure.chance for name, measure in measures.items()}
        contract.append(suites.Suite("whole", frame, suites.measure_checks(checks, chance)))
    return contract


def pair_frame(
    ledger: Ledger, selected: NDArray[np.bool_], splits_of_prompt: NDArray[Any], near: NDArray[Any]
) -> pd.DataFrame:
    """Return a frame with a row for each selected pair, identified by `row_id`, and by `file` if there are several.

    Args:
        splits_of_prompt: number of splits in which each selected pair's prompt occurs (k,).
        near: as `near_training` (k,).
    """
    facts = ledger.facts[selected]
    file, numbers = places(facts["row"])
    return pd.DataFrame(
        {
            "row_id": numbers,
            **({"file": np.array(ledger.files)[file]} if len(ledger.files) > 1 else {}),
            "splits_of_prompt": splits_of_prompt,
            "near_training": near,
            "longer_wins": longer_wins(facts["words"]),
            "first_wins": np.where(facts["first_wins"] < 0, np.nan, facts["first_wins"]).astype(float),
        }
    )


def _measures(data: Examination) -> dict[str, DriftMeasure | None]:
    measures: dict[str, DriftMeasure | None] = {}
    seed = data.job.seed
    if "preferences" in data.kinds:
        pairs, rows = data.pairs, sample(data.job, data.pairs.texts)
        sizes = np.bincount(pairs.facts["split"], minlength=len(SPLITS))
        counts = {"every_split": sizes.min(), "enough_pairs": sizes.sum(), "enough_test_pairs": sizes[TEST]}
        measures |= {name: DriftMeasure(float(count), 0) for name, count in counts.items()}
        if data.tokenizer is not None:
            measures["length_drift"] = length_drift(pairs.token_lengths(TRAIN), pairs.token_lengths(TRAIN, True))
        measures["language_drift"] = data.language_drift
        if (prompts := data.kinds.get("prompts")) is not None:
            measures["prompts_alike"] = told_apart(
                prompt_texts(rows), prompt_texts(sample(data.job, prompts.texts)), seed
            )
        if (deployment := data.inputs.get(DEPLOYMENT)) is not None:
            measures |= compared_prompts(rows, sampled_prompts(deployment, data.job.data, seed), seed)
        if (reference := data.inputs.get(REFERENCE)) is not None:
            measures |= compared_pairs(rows, sampled_pairs(reference, seed), seed)
    if data.tokenizer is not None:
        measures["known_tokens"] = DriftMeasure(next(iter(data.kinds.values())).texts.unknown, 0)
    return measures
