"""The stage stands on Great Expectations, datasets and pandas: without one of them it fails before it reads a row."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from data_contracts.validate import run

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # as if it were not installed
from pathlib import Path
from components.data.config import DataConfig
from components.models.config import GenerationConfig
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.validate import run

job = ValidateJob(
    seed=0, generation=GenerationConfig(max_prompt_tokens=8, max_new_tokens=8),
    data=DataConfig(preferences="none.jsonl"),
    sft=TokenizerConfig(vocabulary=100, max_demonstrations=None),
)
run(job, {"preferences": Path("none.jsonl")}, Path(sys.argv[2]), print)
"""


@pytest.mark.parametrize("library", ["datasets", "pandas"])
def test_the_stage_is_not_imported_without_a_library_that_it_needs(library: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, library, str(tmp_path / "out")],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ModuleNotFoundError: import of {library}")
    assert not (tmp_path / "out" / "artifact").exists()


@pytest.mark.parametrize(
    ("library", "error", "said"),
    [
        ("great_expectations", ModuleNotFoundError, "import of great_expectations"),
        ("no_such_library", UserError, r"^none\.jsonl: there is no such file\."),
    ],
)
def test_the_stage_does_not_begin_without_great_expectations(
    job: Any, library: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of them it begins, and asks for its file."""
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    with pytest.raises(error, match=said):
        run(job(preferences="none.jsonl"), {"preferences": Path("none.jsonl")}, tmp_path / "out", lambda *_, **__: None)
    assert not (tmp_path / "out" / "artifact").exists()
