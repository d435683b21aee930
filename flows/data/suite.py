"""`tether data suite`: draft a suite of expectations from a good file."""

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
from flows.data.check import DEFAULTS


def draft_suite(home: Path, file: str, overrides: Sequence[Override], out: Path | None) -> str:
    """Draft a suite from `file`, return it as JSON, and write it to `out` if given.

    Raises:
        UserError: the file can't be read or has no valid row, or `out` exists or is in no folder.
    """
    if out is not None and out.exists():
        raise UserError(f"--out {out}: this file already exists. Name a new one.")
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.absolute().parent}. Create it, or name another file.")
    data = load_config(DEFAULTS, overrides).data
    path = resolve_source(file, data.hub, home / "datasets", "--from")
    with tempfile.TemporaryDirectory(prefix="tether-suite-") as scratch:
        text = json.dumps(draft(path, data, Path(scratch)), indent=2) + "\n"
    if out is not None:
        write_whole(out, text)
    return text
