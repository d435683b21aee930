"""The stage stands on Great Expectations, datasets and pandas: without one of them it fails before it reads a row."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("library", "ends_with"),
    [
        *((name, f"ModuleNotFoundError: import of {name}") for name in ("great_expectations", "datasets", "pandas")),
        ("no_such_library", "components.base.errors.UserError: There is no file none.jsonl."),
    ],
)
def test_the_stage_does_not_begin_without_a_library_that_it_needs(library: str, ends_with: str, tmp_path: Path) -> None:
    """With all of them it begins, and asks for its file."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, library, str(tmp_path / "out")],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(ends_with)
    assert not (tmp_path / "out" / "artifact").exists()
