"""Errors that come from outside."""

import errno
import os
from pathlib import Path

import pytest
from safetensors import SafetensorError

from components.base.errors import UserError, disk_error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_full_or_unwritable_disk_is_named_with_what_to_do(number: int) -> None:
    found = disk_error(OSError(number, os.strerror(number), "/store/objects/x"))
    assert isinstance(found, UserError) and found.exit_code == 2
    assert str(found).startswith(f"/store/objects/x: {os.strerror(number)}. ") and "last checkpoint" in str(found)


def test_what_safetensors_says_of_a_full_disk_is_understood() -> None:
    error = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert "No space left on device. Make room there" in str(disk_error(error))


@pytest.mark.parametrize("below", ["", "runs/one"])
def test_a_file_in_the_place_of_a_folder_is_named_with_what_to_do(tmp_path: Path, below: str) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(OSError) as caught:
        (tmp_path / "home" / below).mkdir(parents=True, exist_ok=True)
    found = disk_error(caught.value)
    assert isinstance(found, UserError) and found.exit_code == 2
    assert str(found).startswith(f"{tmp_path / 'home'}") and "A file stands where a folder must be" in str(found)
    with pytest.raises(FileExistsError) as caught:
        tmp_path.mkdir()
    assert disk_error(caught.value) is None, "a folder that is there is no mistake of the user's"


def test_any_other_error_stays_what_it_is() -> None:
    assert disk_error(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    assert disk_error(ValueError("28")) is None
    told = UserError("it says what to do itself, of (os error 28)")
    assert disk_error(told) is None
