"""The splits that validation publishes: folders of Arrow shards, which later stages read memory-mapped.

A split such as `pairs.train` is a folder with `00000.arrow`, `00001.arrow` and so on, each an Arrow stream that
`datasets.Dataset.from_file` opens. The same rows give the same bytes with the same versions of `datasets` and pyarrow:
the schema of each kind is fixed, and so are the rows of a batch and of a shard.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from components.base.errors import UserError, naming
from components.base.jsonl import read_rows

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = 1_000
"""Most rows of a record batch; a reader has one batch in memory at a time."""
BATCH_CHARACTERS = 2**24
"""A batch ends with the row that reaches this many characters, so that long rows do not fill memory."""
SHARD = 20_000
"""Rows of a shard; the last one may have fewer."""
_COLUMNS: dict[str, tuple[str, ...]] = {
    "pairs": (
        "category", "chosen", "columns", "judged_in", "margin", "objectives", "overlong", "prompt", "rejected", "row",
        "soft_label", "source", "votes", "votes_chosen", "votes_of_models", "weight",
    ),
    "demonstrations": ("prompt", "response", "row", "source"),
    "prompts": ("category", "columns", "prompt"),
    "single_labels": ("desirable", "prompt", "response", "row", "source"),
}  # fmt: skip
"""Maps the kind of a split, the first part of its name, to its columns, in their order."""
_WEIGHTED = "source_weight"
"""A further column of pairs, in data whose sources have weights. Other data keep the bytes that they had without it."""
_KNOWN = frozenset(("category", "margin", "objectives", "soft_label", "votes", "votes_chosen"))
"""Columns in which a null means None. In all others it means that the row lacks the field."""


def _columns(kind: str, weighted: bool) -> tuple[str, ...]:
    return tuple(sorted((*_COLUMNS[kind], _WEIGHTED))) if weighted else _COLUMNS[kind]


def _schema(kind: str, weighted: bool) -> "pa.Schema":
    import pyarrow as pa

    text, number, share = pa.string(), pa.int64(), pa.float64()
    types: dict[str, pa.DataType] = {
        "prompt": pa.list_(pa.struct([("content", text), ("role", text)])),
        "objectives": pa.list_(pa.struct([("name", text), ("share", share)])),
        **dict.fromkeys(("desirable", "overlong"), pa.bool_()),
        **dict.fromkeys(("row", "votes", "votes_chosen", "votes_of_models"), number),
        **dict.fromkeys(("margin", "soft_label", "weight", _WEIGHTED), share),
    }
    return pa.schema([(name, types.get(name, text)) for name in _columns(kind, weighted)])


class SplitWriter:
    """Writes a split shard by shard, with one batch of rows in memory. Use it as a context manager."""

    def __init__(self, folder: Path, weighted: bool = False) -> None:
        """Create `folder`, which must not exist. The first part of its name is the kind: `pairs.train` has pairs.

        Args:
            weighted: whether rows may have `source_weight`.

        Raises:
            FileExistsError: the folder exists.
        """
        self.folder, self.kind = folder, folder.name.partition(".")[0]
        self.schema = _schema(self.kind, weighted)
        self._columns = frozenset(self.schema.names)
        self._texts = sorted(self._columns & {"chosen", "rejected", "response", "columns"})
        self._rows: list[Mapping[str, Any]] = []
        self._characters = self._written = self._shards = 0
        self._shard: Any = None
        folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self._flush()
            if not self._shards:  # a split without rows has its schema
                self._open()
            self._close()
        elif self._shard is not None:
            self._shard.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row.

        Raises:
            UserError: a value does not fit its column: text that is not valid UTF-8, or too large a number.
            ValueError: it has a field for which the kind has no column.
        """
        if not row.keys() <= self._columns:
            unknown = sorted(row.keys() - self._columns)
            raise ValueError(f"{self.folder.name} has no column {', '.join(unknown)}")
        stored = dict(row)
        if row.get("columns") is not None:
            stored["columns"] = json.dumps(row["columns"], sort_keys=True)
        if row.get("objectives") is not None:
            stored["objectives"] = [{"name": n, "share": s} for n, s in sorted(row["objectives"].items())]
        self._rows.append(stored)
        for name in self._texts:
            self._characters += len(stored.get(name) or "")
        for message in row["prompt"]:
            self._characters += len(message["content"])
        if len(self._rows) == BATCH or self._characters >= BATCH_CHARACTERS:
            self._flush()

    def _flush(self) -> None:
        rows = self._rows
        while rows:
            if self._shard is None:
                self._open()
            batch = rows[: SHARD - self._written]
            with naming(self.folder):
                self._shard.write_table(self._table(batch), len(batch))
            rows = rows[len(batch) :]
            self._written += len(batch)
            if self._written == SHARD:
                self._close()
        self._rows, self._characters = [], 0

    def _table(self, rows: list[Mapping[str, Any]]) -> "pa.Table":
        import pyarrow as pa

        try:
            return pa.Table.from_pylist(rows, self.schema)
        except (UnicodeEncodeError, OverflowError):
            for row in rows:
                for name, value in row.items():
                    try:
                        pa.array([value], self.schema.field(name).type)
                    except (UnicodeEncodeError, OverflowError) as error:
                        raise _unfit(row, name, error) from error
            raise

    def _open(self) -> None:
        from datasets.arrow_writer import ArrowWriter

        path = self.folder / f"{self._shards:05d}.arrow"
        with naming(path):
            self._shard = ArrowWriter(schema=self.schema, path=str(path))
        self._shards += 1
        self._written = 0

    def _close(self) -> None:
        if self._shard is not None:
            with naming(self.folder):
                self._shard.finalize()
            self._shard = None


def _unfit(row: Mapping[str, Any], name: str, error: Exception) -> UserError:
    where = f"row {row['row']} of {row['source']!r}" if row.get("row") and row.get("source") else "a row"
    if isinstance(error, UnicodeEncodeError):
        what = f"has a character in {name} that UTF-8 cannot encode ({error.object[error.start]!a})"
        return UserError(f"{ascii(where)[1:-1]} {what}. Correct the text, or leave the row out.")
    return UserError(f"{where} has a number in {name} that does not fit in 64 bits. Correct it, or leave the row out.")


class SplitRows(Sequence[Any]):
    """The rows of a split, or some of them, in a memory-mapped `datasets.Dataset`; each is read on access.

    They equal the rows that were written, except that fields of `CanonicalRow` that may be None are None if not given.
    """

    def __init__(self, dataset: Any, places: range | NDArray[np.int64] | None = None) -> None:
        """`places` (n,) are the rows' indices in the dataset; None means all, in order."""
        self.dataset = dataset
        self._arrow = dataset.with_format("arrow")
        self.places = range(len(dataset)) if places is None else places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return SplitRows(self.dataset, self.places[which])
        return _row(self._arrow[int(self.places[which])].to_pylist()[0])

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), BATCH):
            places = self.places[start : start + BATCH]
            table = self._arrow[places if isinstance(places, range) else places.tolist()]
            yield from map(_row, table.to_pylist())

    def choose(self, which: NDArray[np.int64]) -> "SplitRows":
        """Return the rows at the indices `which` (n,), in their order."""
        return SplitRows(self.dataset, np.asarray(self.places, np.int64)[which])


def _row(stored: dict[str, Any]) -> dict[str, Any]:
    row = {name: value for name, value in stored.items() if value is not None or name in _KNOWN}
    if row.get("objectives") is not None:
        row["objectives"] = {objective["name"]: objective["share"] for objective in row["objectives"]}
    if "columns" in row:
        row["columns"] = json.loads(row["columns"])
    return row


class SplitColumn(Sequence[Any]):
    """One field of rows, read on access."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return SplitColumn(self.rows[which], self.name)
        return self.rows[which][self.name]

    def __iter__(self) -> Iterator[Any]:
        return (row[self.name] for row in self.rows)


def rows_by_category(rows: Sequence[Any], named: str) -> dict[str, list[int]]:
    """Map each `category` to its rows, in order. Raises UserError, which begins with `named`, if a row has none."""
    by_category: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_category.setdefault(row.get("category") or "", []).append(index)
    if lacking := by_category.get(""):
        text = rows[lacking[0]]["prompt"][-1]["content"]
        raise UserError(
            f"{named}: {len(lacking)} of the {len(rows)} prompts that PPO trains on have no category, such as "
            f"{text!r:.80}. Add the field `category` to their rows, or leave ppo.balance out."
        )
    return by_category


def read_split(folder: Path) -> Sequence[Any]:
    """Return the rows of the split `folder`. Their type is not checked.

    (For artifacts of earlier versions, with a file `pairs.train.jsonl` instead of a folder, return a list.)

    Raises:
        FileNotFoundError: the split does not exist.
    """
    before = folder.with_name(f"{folder.name}.jsonl")
    if not folder.is_dir() and before.is_file():
        return read_rows(before)
    import datasets

    shards = sorted(folder.glob("*.arrow"))
    if not shards:
        raise FileNotFoundError(f"{folder} holds no shard of a split (00000.arrow)")
    opened = [datasets.Dataset.from_file(str(shard)) for shard in shards]
    return SplitRows(opened[0] if len(opened) == 1 else datasets.concatenate_datasets(opened))


def rows_at(rows: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Return the rows at these places, in order; rows that are read on access are not read yet."""
    choose = getattr(rows, "choose", None)
    chosen: Sequence[Any] = [rows[i] for i in places] if choose is None else choose(np.array(places, np.int64))
    return chosen


def characters_of(rows: Sequence[Any]) -> NDArray[np.int64]:
    """Return the approximate length (n,) of each pair: characters of its prompt and the longer response. For a split
    only the texts' offsets are read, and the lengths are in bytes."""
    if not isinstance(rows, SplitRows):
        prompts = (sum(len(message["content"]) for message in row["prompt"]) for row in rows)
        longer = (max(len(row["chosen"]), len(row["rejected"])) for row in rows)
        return np.array([*map(sum, zip(prompts, longer, strict=True))], np.int64)
    import pyarrow.compute as pc

    sizes = [np.empty(0, np.int64)]
    for batch in rows.dataset.data.table.to_batches():
        prompt = batch.column("prompt")
        of_texts = [
            pc.binary_length(texts).to_numpy(zero_copy_only=False)
            for texts in (prompt.values.field("content"), batch.column("chosen"), batch.column("rejected"))
        ]
        of_prompts = np.diff(np.append(0, np.cumsum(of_texts[0]))[prompt.offsets.to_numpy()])
        sizes.append(of_prompts + np.maximum(*of_texts[1:]))
    return np.concatenate(sizes)[np.asarray(rows.places, np.int64)]


def has_split(folder: Path) -> bool:
    """Return whether the split `folder` exists, in either form that `read_split` reads."""
    return folder.is_dir() or folder.with_name(f"{folder.name}.jsonl").is_file()
