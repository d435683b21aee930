"""The key changes with what changes the result, and with nothing else."""

import subprocess
import sys

import pytest

from components.errors import TetherError
from components.fingerprint import ROOT, source_fingerprint, source_modules, stage_key
from components.settings import Settings, unkeyed

STAGE = '''"""A stage."""
from components.toy.maths import double

RATE = 2.0


def run(job):
    """Runs."""
    from components import late
    return double(RATE) + late.value
'''


class Job(Settings):
    seed: int = 1
    learning_rate: float = 0.1
    checkpoint_every: int = unkeyed(10)


@pytest.fixture
def repo(tmp_path):
    files = {
        "components/__init__.py": "",
        "components/toy/__init__.py": "",
        "components/toy/stage.py": STAGE,
        "components/toy/maths.py": "from . import helper\n\n\ndef double(x):\n    return helper.twice * x\n",
        "components/toy/helper.py": "twice = 2\n",
        "components/late.py": "from components.deep.inner.leaf import value\n",
        "components/deep/__init__.py": "",
        "components/deep/inner/__init__.py": "",
        "components/deep/inner/leaf.py": "value = 1\n",
        "components/other.py": "unrelated = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def edit(repo, name, old, new):
    path = repo / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def fingerprint(repo):
    return source_fingerprint("components.toy.stage", repo)


def test_imports_are_followed_transitively_and_inside_functions_and_by_relative_name(repo):
    assert list(source_modules("components.toy.stage", repo)) == [
        "components",
        "components.deep",
        "components.deep.inner",
        "components.deep.inner.leaf",
        "components.late",
        "components.toy",
        "components.toy.helper",
        "components.toy.maths",
        "components.toy.stage",
    ]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("components/toy/stage.py", "RATE = 2.0", "# why 2\nRATE  =  2.0  # twice"),
        ("components/toy/stage.py", "Runs.", "Runs, and how."),
        ("components/toy/stage.py", '"""A stage."""', ""),
        ("components/toy/stage.py", "RATE = 2.0", 'RATE = 2.0\n"""Described below its name."""'),
        ("components/other.py", "1", "2"),
    ],
)
def test_comments_docstrings_layout_and_unrelated_modules_keep_the_fingerprint(repo, name, old, new):
    before = fingerprint(repo)
    edit(repo, name, old, new)
    assert fingerprint(repo) == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("components/toy/stage.py", "2.0", "2.5"),
        ("components/toy/helper.py", "2", "3"),
        ("components/deep/inner/leaf.py", "1", "None"),
        ("components/deep/inner/leaf.py", "1", "0"),
        ("components/deep/inner/leaf.py", "1", "[]"),
        ("components/deep/__init__.py", "", "import os\n"),
        ("components/toy/maths.py", "*", "+"),
    ],
)
def test_a_change_of_code_anywhere_below_the_stage_alters_the_fingerprint(repo, name, old, new):
    before = fingerprint(repo)
    path = repo / name
    path.write_text(path.read_text().replace(old, new) if old else new)
    assert fingerprint(repo) != before


def test_a_missing_stage_module_is_an_error_and_not_an_empty_fingerprint(repo):
    with pytest.raises(TetherError, match="nothing"):
        source_fingerprint("components.nothing", repo)


def key(repo, job=None, inputs=None, stage="toy"):
    return stage_key(stage, job or Job(), inputs or {"data": "0" * 64}, "components.toy.stage", ["pydantic"], repo)[0]


def test_what_changes_a_result_changes_the_key(repo):
    keys = [
        key(repo),
        key(repo, Job(seed=2)),
        key(repo, Job(learning_rate=0.2)),
        key(repo, inputs={"data": "1" * 64}),
        key(repo, inputs={"base": "0" * 64}),
        key(repo, stage="toy2"),
    ]
    edit(repo, "components/toy/helper.py", "2", "3")
    keys.append(key(repo))
    assert len(set(keys)) == len(keys)


def test_an_unkeyed_field_keeps_the_key(repo):
    assert key(repo) == key(repo, Job(checkpoint_every=99))


def test_a_library_version_is_part_of_the_key(repo, monkeypatch):
    before = key(repo)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "999")
    assert key(repo) != before


def test_the_parts_say_what_the_key_is_made_of(repo):
    parts = stage_key("toy", Job(), {"data": "ab"}, "components.toy.stage", ["pydantic"], repo)[1]
    assert parts["job"] == {"seed": 1, "learning_rate": 0.1}
    assert parts["inputs"] == {"data": "ab"}
    assert set(parts) == {"stage", "job", "inputs", "source", "libraries"}
    assert "components.toy.helper" in parts["source"]


def test_fingerprinting_imports_neither_torch_nor_the_stage():
    code = (
        "import sys; from components.fingerprint import source_fingerprint as f; f('components.checkpoint');"
        "import components.artifacts, components.gates;"
        "print([m for m in ('torch', 'transformers', 'components.checkpoint', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
