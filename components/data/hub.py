"""Fetch Hugging Face datasets: a hub name becomes a local file, whose digest identifies it like any other input."""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError, disk_error
from components.base.files import make_folder, replacing
from components.base.jsonl import json_line
from components.base.paths import files_read, user_path
from components.data.config import HubConfig
from components.data.rows import RawRow
from components.data.tables.cells import arrow_rows, check_batch

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATA_SUFFIX = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|pq|gz)$", re.IGNORECASE)


def resolve_source(value: str, hub: HubConfig | None, cache: Path, field: str) -> Path:
    """Return the file (or saved folder) that `value` of `field` names; a hub dataset is fetched once, to `cache`.

    `hub` is None for files that cannot come from a hub, such as a suite of expectations.

    Raises:
        UserError: the file does not exist, or is a device or a pipe; the hub cannot be reached or lacks the dataset.
    """
    path = user_path(value, field)
    if path.exists():
        return path
    if hub is None:
        raise UserError(f"{field}: there is no file {path.absolute()}. Give the path of the file.")
    if _NAME.fullmatch(value) and not _DATA_SUFFIX.search(value):
        return fetch(value, hub, cache, field)
    raise UserError(
        f"{field}: there is no file {path.absolute()}. Give the path of a data file, or a hub name (owner/name)."
    )


def fetch(name: str, hub: HubConfig, cache: Path, field: str = "data.preferences") -> Path:
    """Return dataset `name` as a JSON Lines file in `cache`; an existing copy is used without the network.

    The commit is written beside the copy (`NAME.commit`) before anything is read. If the copy is lost, the same commit
    is fetched again, although its branch may have moved. A commit in the cache of `datasets` needs no network.
    """
    part = "--".join(x for x in (name.replace("/", "--"), hub.subset, hub.split, hub.revision) if x)
    target = cache / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', part)}.jsonl"
    if target.exists():
        return target
    make_folder(cache)
    try:
        import datasets

        for chatty in ("datasets", "huggingface_hub"):  # they warn at each retry; the error below reports it once
            logging.getLogger(chatty).setLevel(logging.ERROR)
        commit = _commit(name, hub.revision, target.with_suffix(".commit"))
        dataset = _load(name, hub, commit)
        by_arrow = isinstance(dataset, datasets.Dataset | datasets.IterableDataset)
        with replacing(target) as temporary, temporary.open("wb") as out:
            out.writelines(map(_line, (row.data for row in _rows(dataset)) if by_arrow else dataset))
    except Exception as error:  # datasets passes on errors of its network, file system and parser
        if isinstance(error, UserError) or disk_error(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{field}: {name!r} is no file here, and as a hub dataset (split {hub.split!r}) it can't be loaded: "
            f"{reason}. Check the name and the network (or HF_TOKEN for a private one), or give a local file. Without "
            "a network, give the full commit (40 digits) as data.hub.revision if the cache of `datasets` holds it."
        ) from error
    return target


def hub_commit(value: str, path: Path) -> str:
    """Return `owner/name@commit` if `path` is the copy that `resolve_source` returned for the hub dataset `value`.

    Empty for other files, and for copies of earlier versions, whose commit is not known.
    """
    pin = path.with_suffix(".commit")
    if path == Path(value) or not _NAME.fullmatch(value) or not pin.is_file():
        return ""
    return f"{value}@{pin.read_text(encoding='utf-8').strip()}"


def _commit(name: str, revision: str | None, pin: Path) -> str:
    """Return the commit that `pin` names; if there is no such file, ask the hub for that of `revision` and write it.

    The hub is not asked if `revision` is a full commit.
    """
    if not pin.exists():
        from huggingface_hub import HfApi

        is_commit = revision is not None and _COMMIT.fullmatch(revision)
        commit = revision if is_commit else HfApi().dataset_info(name, revision=revision).sha
        with replacing(pin) as temporary:
            temporary.write_text(f"{commit}\n", encoding="utf-8")
    return pin.read_text(encoding="utf-8").strip()


def _load(name: str, hub: HubConfig, commit: str) -> Any:
    """Return dataset `name` at `commit`, or an iterable of its rows.

    If the hub fails, `datasets` reads the newest entry of its cache whatever the revision; another commit is refused.
    """
    import datasets

    builder = datasets.load_dataset_builder(name, hub.subset, revision=commit)
    if builder.hash != commit:
        raise LookupError(f"the hub does not answer, and the newest copy in the cache of `datasets` is not {commit}")
    if hub.streaming:
        return builder.as_streaming_dataset(split=hub.split)
    builder.download_and_prepare()
    return builder.as_dataset(split=hub.split)


def _line(data: Mapping[str, object]) -> bytes:
    """Return a row as JSON. Types that JSON lacks (dates, bytes) and invalid UTF-8 become text."""
    try:
        return json_line(data)
    except (TypeError, UnicodeEncodeError):
        return (json.dumps(data, sort_keys=True, default=str) + "\n").encode()


def read_saved(folder: Path, split: str) -> Iterator[RawRow]:
    """Yield the rows of a folder written by `save_to_disk` of `datasets`, numbered from 1."""
    wrong = UserError(f"{folder} is a folder, and none written by datasets' save_to_disk. Give a file.")
    if not any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
        raise wrong
    files_read(folder)
    import datasets

    try:
        saved: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets raises whatever its JSON and Arrow files make it
        raise wrong from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise UserError(f"{folder} has no split {split!r}, only {', '.join(sorted(saved))}. Set data.hub.split.")
        saved = saved[split]
    number = 0
    try:
        for row in _rows(saved):
            number = row.number
            yield row
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{folder} can't be read after row {number}: {reason}. Save the dataset again."
        ) from error


def _rows(dataset: Any) -> Iterator[RawRow]:
    """Yield the rows of a `datasets.Dataset` or `IterableDataset`, numbered from 1.

    They are read as Arrow, not as Python objects, so that a cell that Python cannot represent is a problem of its row
    only.
    """
    number = 0
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        for batch in table.to_batches():
            check_batch(batch)
            for data, problem in arrow_rows(batch):
                number += 1
                yield RawRow(number, data, problem)
