"""Errors that come from outside."""

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel
from safetensors.numpy import save_file

from components.base import files, jsonl
from components.base.errors import UserError, disk_error, naming
from components.data.checks_config import ChecksConfig
from components.data.config import SplitConfig
from components.data.rows import Problem, RawRow, Row
from components.data.spreadsheet import write_csv
from components.store.folder import FolderPlace
from data_contracts.expectations.pages import write_data_docs
from data_contracts.rows.ledger import Ledger
from tasks.runs import config, journal, points


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_unwritable_disk_is_named_with_what_to_do(number: int) -> None:
    found = disk_error(OSError(number, os.strerror(number), "/store/objects/x"))
    assert isinstance(found, UserError) and found.exit_code == 2
    assert str(found).startswith(f"/store/objects/x: {os.strerror(number)}. ")
    assert str(found).endswith(" again. A run continues from its last checkpoint."), "commands without one don't"


@pytest.mark.parametrize("below", ["", "runs/one"])
def test_a_file_in_the_place_of_a_folder_is_named_with_what_to_do(tmp_path: Path, below: str) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(OSError) as caught:
        (tmp_path / "home" / below).mkdir(parents=True, exist_ok=True)
    found = disk_error(caught.value)
    assert isinstance(found, UserError) and found.exit_code == 2
    assert str(found).startswith(f"{tmp_path / 'home'}") and "A file is where a folder must be" in str(found)
    with pytest.raises(FileExistsError) as caught:
        tmp_path.mkdir()
    assert disk_error(caught.value) is None, "a folder that is there is no mistake of the user's"


class Full(NamedTuple):
    """Something that writes a file."""

    name: str
    write: Callable[[Path], object]
    named: str = "written"
    """What the error has to name."""


LONG = "x" * 100_000
ROWS = [{"text": LONG}]


def _replaced(path: Path) -> None:
    with files.replacing(path) as temporary:
        temporary.write_text(LONG)


def _folder(path: Path) -> None:
    with files.whole_folder(path) as temporary:
        (temporary / "inner").write_text(LONG)


def _ledger(path: Path) -> None:
    row = Row("preferences", RawRow(1, {"text": LONG}), problems=[Problem("readable", "")])
    Ledger(path, ChecksConfig(), SplitConfig(), 0).fill([row], lambda seen: None)


def _points(path: Path) -> None:
    spool = points.Spool(path)
    try:
        spool.append(1, {LONG: 1.0})
    finally:
        with suppress(OSError):  # it still holds what didn't fit
            spool.close()


class _Model(BaseModel):
    text: str = LONG


def _safetensors(path: Path) -> None:
    with naming(path):
        save_file({"x": np.zeros(100_000)}, path)


def _docs(path: Path) -> None:
    context = SimpleNamespace(add_data_docs_site=lambda *_: None, build_data_docs=lambda *_: None)
    write_data_docs(context, path, [], {"file": LONG})


WRITERS = [
    Full("rows", lambda path: jsonl.write_rows(path, ROWS)),
    Full("json", lambda path: jsonl.write_json(path, ROWS)),
    Full("csv", lambda path: write_csv(path, ["text"], ROWS)),
    Full("replacing", _replaced),
    Full("folder", _folder),
    Full("store", lambda path: FolderPlace(path.parent).create(path.name, LONG.encode())),
    Full("ledger", _ledger, "written/00000.arrow"),
    Full("run.json", lambda path: journal.write_model(path, _Model())),
    Full("points", _points),
    Full("config.yaml", lambda path: config.write_values(path.parent, {"project": LONG}), "config.yaml"),
    Full("safetensors", _safetensors),
    Full("data docs", _docs),
]


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become larger than 10,000 bytes: a write fails as on a full disk, and names no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full", WRITERS, ids=lambda full: full.name)
def test_a_disk_that_is_full_is_named_by_the_file_that_did_not_fit(tmp_path: Path, full: Full, full_disk: None) -> None:
    with pytest.raises(Exception, match=r"File too large") as caught:
        full.write(tmp_path / "written")
    found = disk_error(caught.value)
    assert isinstance(found, UserError)
    assert str(found).startswith(f"{tmp_path / full.named}: File too large. "), found


def test_of_a_copy_that_does_not_fit_the_copy_is_named() -> None:
    found = disk_error(OSError(errno.ENOSPC, "No space left on device", "/from/x", None, "/to/y"))
    assert str(found).startswith("/to/y: No space left on device.")


def test_any_other_error_stays_what_it_is() -> None:
    assert disk_error(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    assert disk_error(ValueError("28")) is None
    told = UserError("it says what to do itself, of (os error 28)")
    assert disk_error(told) is None
