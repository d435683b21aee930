"""`tether data check --draft-suite`: draft a suite of expectations from a good file."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from components.base.errors import UserError
from components.base.files import write_whole
from components.data.hub import resolve_source
from data_contracts.findings.drafting import draft
from flows.config.profiles import Override
from flows.config.run_config import load_config
from flows.data.data_check import DEFAULTS


def draft_suite(home: Path, file: str, overrides: Sequence[Override], out: Path) -> None:
    """Draft a suite from `file` and write it to `out` as JSON.

    Raises:
        UserError: the file can't be read or has no valid row, or `out` exists or is in no folder.
    """
    if out.exists():
        raise UserError(f"--draft-suite {out}: this file already exists. Name a new one.")
    if not out.absolute().parent.is_dir():
        folder = out.absolute().parent
        raise UserError(f"--draft-suite {out}: there is no folder {folder}. Create it, or name another file.")
    data = load_config(DEFAULTS, overrides).data
    path = resolve_source(file, data.hub, home / "datasets", "FILE")
    with tempfile.TemporaryDirectory(prefix="tether-suite-") as scratch:
        write_whole(out, json.dumps(draft(path, data, Path(scratch)), indent=2) + "\n")
