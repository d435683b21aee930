"""Write the splits that validation publishes."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import datasets  # noqa: F401  (the splits are written with it: a stage that can't does not begin)
import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming
from components.base.hashing import hash8
from components.data.config import SplitConfig
from components.data.rows import CanonicalRow
from components.data.splits import SPLITS
from components.data.tables.published import SplitWriter, has_split, read_split
from components.gates.self_checks import SelfChecks
from data_contracts.examine import Examination, Examined
from data_contracts.findings.texts import overlong
from data_contracts.findings.whole import TRAIN
from data_contracts.label_direction import check_direction
from data_contracts.rows.ledger import Ledger, combined, first_of_each
from data_contracts.rows.measuring import places


def write_splits(data: Examination, artifact: Path) -> dict[str, float]:
    """Write pairs, demonstrations, prompts and single labels (if any) of each split into the folder `artifact`.

    Returns:
        The numbers of published rows, and the shares that exceed the token limit, as metrics.

    Raises:
        CheckFailed: as for `check_splits` and `check_direction`, whose results are written to the attachments.
    """
    published = _published(data)
    for rows in published:
        _write(artifact, rows)
    sizes, checks = _sizes(data, *published), SelfChecks()
    check_splits(checks, artifact, sizes, data.job.data.split)
    check_direction(checks, artifact, data.pairs.sources)
    checks.write(artifact.parent)
    return sizes


def check_splits(checks: SelfChecks, artifact: Path, sizes: Mapping[str, float], shares: SplitConfig) -> None:
    """Judge the splits of `artifact` as they lie on disk; `sizes` are the metrics of `write_splits`.

    Of N prompts, a split with the share p has about N p: its count has the deviation sqrt(N p (1 - p)).

    Raises:
        CheckFailed: a held-out prompt is also a training prompt, or the numbers of rows are not those of `sizes`.
    """
    names = [path.name for path in sorted(artifact.iterdir()) if path.is_dir() and has_split(path)]
    rows, heldout = {name: read_split(artifact / name) for name in names}, set[bytes]()
    for name in names:
        if not name.endswith(".train"):
            heldout.update(_prompts(rows[name]))
    shared = {name: sum(p in heldout for p in _prompts(rows[name])) for name in names if name.endswith(".train")}
    written = {name.replace(".", "_"): len(rows[name]) for name in names}
    demonstrations = sum(n for name, n in written.items() if name.startswith("demonstrations_"))
    expected = {name: int(sizes[f"data/{name}"]) for name in written if f"data/{name}" in sizes}
    others = {name: (written[name], n) for name, n in expected.items() if written[name] != n}
    if demonstrations != sizes["data/demonstrations"]:
        others["demonstrations"] = demonstrations, int(sizes["data/demonstrations"])
    leaks = ", ".join(f"{n} of the {len(rows[name])} rows of {name}" for name, n in shared.items() if n)
    wrong = [f"{leaks} have a prompt that is also held out"] if leaks else []
    wrong += [f"{name} has {n} rows on disk and {counted} in the metrics" for name, (n, counted) in others.items()]
    numbers = f"{len(heldout)} held-out prompts, none in the {sum(len(rows[name]) for name in shared)} training rows"
    checks.judge("validate.splits", not wrong, "; ".join(wrong) or numbers)
    total = sum(written[f"prompts_{split}"] for split in SPLITS)
    named = {split: (written[f"prompts_{split}"], getattr(shares, split)) for split in SPLITS}
    holds = all(abs(n - total * share) <= 5 * math.sqrt(total * share * (1 - share)) + 1 for n, share in named.values())
    numbers = ", ".join(
        f"{n / total:.3f} of the prompts are in {split} ({share:g})" for split, (n, share) in named.items()
    )
    checks.judge("validate.shares", holds, numbers, fails=False)


def _prompts(rows: Any) -> Iterator[bytes]:
    columns = rows.dataset.select_columns("prompt") if hasattr(rows, "dataset") else rows
    return (hash8(str(row["prompt"])) for row in columns)


class _Published(NamedTuple):
    """The rows of one kind that are published, and what to add to them."""

    kind: str
    """`pairs`, `demonstrations`, `prompts` or `single_labels`."""
    ledger: Ledger
    wanted: NDArray[np.bool_]
    """Which rows (n,)."""
    split: NDArray[np.int8]
    """Each row's place in SPLITS (n,)."""
    weights: Mapping[int, float] = {}
    """Maps the index of a pair to its weight, unless it is 1."""
    overlong: NDArray[np.bool_] = np.zeros(0, np.bool_)
    """Which pairs have a response that exceeds the token limit (n,)."""
    source_weights: NDArray[np.float64] | None = None
    """The `source_weight` of each pair (n,), if there is one."""


def _published(data: Examination) -> list[_Published]:
    pairs, demonstrations, prompts, labels = data.pairs, data.demonstrations, data.prompts, data.single_labels
    texts = demonstrations.ledger.facts

    def rows(kind: str, of: Examined, wanted: NDArray[np.bool_], *more: Any) -> _Published:
        return _Published(kind, of.ledger, wanted, of.ledger.facts["split"], *more)

    source_weights: NDArray[np.float64] | None = None
    if weights := weights_of_sources(data):
        of_files = np.array([weights[file] for file in pairs.ledger.files])
        source_weights = of_files[places(pairs.ledger.facts["row"])[0]]
    of_pairs = weights_of_rankings(pairs), _overlong(data, pairs).any(1), source_weights
    return [
        rows("pairs", pairs, pairs.selected, *of_pairs),
        rows("demonstrations", demonstrations,
             first_of_each(demonstrations.selected, combined(texts["prompt"], texts["chosen"]))),
        rows("prompts", prompts, first_of_each(prompts.selected, prompts.ledger.facts["prompt"])),
        *([rows("single_labels", labels, labels.selected)] if labels else ()),
    ]  # fmt: skip


def _overlong(data: Examination, of: Examined) -> NDArray[np.bool_]:
    return overlong(of.texts, len(of.ledger.facts), data.job.generation.max_new_tokens)


def _write(artifact: Path, rows: _Published) -> None:
    of_pairs = rows.kind != "demonstrations"
    names = [name if of_pairs or split == TRAIN else "heldout" for split, name in enumerate(SPLITS)]
    weighted = rows.source_weights is not None
    with naming(artifact), ExitStack() as splits:
        writers = {
            name: splits.enter_context(SplitWriter(artifact / f"{rows.kind}.{name}", weighted))
            for name in dict.fromkeys(names)
        }
        for index, item in rows.ledger.items(rows.wanted, mixed=True):
            writers[names[rows.split[index]]].write(_row(rows, index, item))


def _row(rows: _Published, index: int, item: CanonicalRow) -> dict[str, Any]:
    if rows.kind == "prompts":
        return {name: item[name] for name in ("prompt", "category", "columns") if name in item}
    if rows.kind == "demonstrations":
        response = item.get("response", item.get("chosen"))
        return {"response": response} | {name: item[name] for name in ("prompt", "source", "row")}
    if rows.kind == "single_labels":
        return dict(item)
    more: dict[str, Any] = {"weight": weight} if (weight := rows.weights.get(index)) else {}
    if rows.source_weights is not None:
        more["source_weight"] = float(rows.source_weights[index])
    return item | more | ({"overlong": True} if rows.overlong[index] else {})


def _sizes(
    data: Examination, pairs: _Published, demonstrations: _Published, prompts: _Published, *labels: _Published
) -> dict[str, float]:
    sizes: dict[str, float] = {}
    for rows in (pairs, prompts, *labels):
        counts = np.bincount(rows.split[rows.wanted], minlength=len(SPLITS))
        sizes |= {f"data/{rows.kind}_{split}": float(n) for split, n in zip(SPLITS, counts, strict=True)}
    sizes["data/demonstrations"] = float(demonstrations.wanted.sum())
    sizes |= {f"data/{label}": float(count) for label, count in data.label_counts.items()}
    if data.tokenizer is not None:
        of_pairs = _overlong(data, data.pairs)[pairs.wanted]
        of_demonstrations = _overlong(data, data.demonstrations)[demonstrations.wanted, 0]
        for name, exceeding in (
            ("overlong", of_pairs.any(axis=1)), ("overlong_chosen", of_pairs[:, 0]),
            ("overlong_rejected", of_pairs[:, 1]), ("overlong_demonstrations", of_demonstrations),
        ):  # fmt: skip
            sizes[f"data/{name}"] = float(exceeding.mean())
    return sizes


def weights_of_rankings(examined: Examined) -> dict[int, float]:
    """Map the index of each selected pair of a ranking that lost some pairs to its weight; the remaining pairs count as
    one."""
    rows, selected = examined.ledger.facts["row"], np.flatnonzero(examined.selected)
    numbers, made = np.unique(rows, return_counts=True)
    of_row = np.searchsorted(numbers, rows[selected])
    left = np.bincount(of_row, minlength=len(made))
    fewer = left[of_row] < made[of_row]
    return {int(index): 1 / int(n) for index, n in zip(selected[fewer], left[of_row[fewer]], strict=True)}


def weights_of_sources(data: Examination) -> dict[str, float]:
    """Map each file of pairs to the weight of its rows in the training loss; empty if no file has a weight.

    A file's weight is w / (Σ w n / Σ n), with its `data.sources` weight w (1 by default) and the number n of its source
    rows with kept training pairs, so that the mean over these rows is 1: the learning rate keeps its meaning.
    """
    options = {name: source.weight for name, source in data.job.data.sources.items() if source.weight != 1}
    if not options:
        return {}
    ledger, facts = data.pairs.ledger, data.pairs.ledger.facts
    train = data.pairs.selected & (facts["split"] == TRAIN)
    rows = {file: len(np.unique(facts["row"][train & ledger.of(file)])) for file in ledger.files}
    weights = {file: options.get(file, 1.0) for file in ledger.files}
    mean = math.fsum(weights[file] * n for file, n in rows.items()) / sum(rows.values())
    return {file: weight / mean for file, weight in weights.items()}
