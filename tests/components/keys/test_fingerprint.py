"""The key changes with what changes the result, and with nothing else."""

import subprocess
import sys

import pytest

from components.base.errors import TetherError
from components.base.settings import Settings, unkeyed
from components.keys import fingerprint as fingerprints
from components.keys.fingerprint import ROOT, code_parts, stage_key

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
    return code_parts("components.toy.stage", repo)


def test_imports_are_followed_transitively_and_inside_functions_and_by_relative_name(repo):
    assert list(code_parts("components.toy.stage", repo)["source"]) == [
        "components.deep.inner.leaf",
        "components.late",
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
        code_parts("components.nothing", repo)


def test_a_package_stands_in_the_key_once_its_init_holds_code(repo):
    edit(repo, "components/deep/__init__.py", "", '"""What is deep."""')
    assert "components.deep" not in fingerprint(repo)["source"]
    edit(repo, "components/deep/__init__.py", '"""', "import os  # ")
    assert "components.deep" in fingerprint(repo)["source"]


RAISES = """from components.base.errors import UserError

def check(x):
    if x > 1:
        raise {}
    return x
"""


@pytest.mark.parametrize("raised", ['UserError(f"{x} is more than {1}.") from None', "UserError(x) from None"])
def test_the_text_of_an_error_of_ours_keeps_the_fingerprint(repo, raised):
    path = repo / "components/toy/helper.py"
    path.write_text(RAISES.format('UserError("too large") from None'))
    before = fingerprint(repo)
    path.write_text(RAISES.format(raised))
    assert fingerprint(repo) == before


@pytest.mark.parametrize("raised", ['BadRow("larger")', 'TetherError("large")', "x", ""])
def test_another_error_and_the_text_of_one_that_is_not_ours_alter_the_fingerprint(repo, raised):
    """The text of a bad row stands in the quarantine."""
    path = repo / "components/toy/helper.py"
    prints = []
    for each in ('BadRow("large")', 'UserError("large")', raised):
        path.write_text(RAISES.format(each))
        prints.append(str(fingerprint(repo)))
    assert len(set(prints)) == 3


@pytest.fixture
def task(repo, monkeypatch):
    """A built-in task of two modules, of which the toy stage imports one, through a module that is none of them."""
    monkeypatch.setattr(fingerprints, "TASKS", {"toys": ("components.toys.rules", "components.toys.words")})
    (repo / "components/toys").mkdir()
    (repo / "components/toys/rules.py").write_text(
        "from components.toys.words import WORDS\nfrom components import only\n"
    )
    (repo / "components/toys/words.py").write_text("WORDS = 1\n")
    (repo / "components/only.py").write_text("used_by = 'the task alone'\n")
    edit(repo, "components/late.py", "from", "from components.toys.rules import WORDS\nfrom")
    return lambda name: code_parts("components.toy.stage", repo, name)


@pytest.mark.parametrize(("file", "old"), [("toys/words.py", "1"), ("toys/rules.py", "only"), ("only.py", "alone")])
def test_a_built_in_task_is_one_digest_where_the_data_are_its_and_nothing_elsewhere(repo, task, file, old):
    before, elsewhere = task("toys"), task(None)
    assert list(before["task"]) == ["toys"] and elsewhere["task"] == {}
    assert set(before["source"]) - set(elsewhere["source"]) == {"components.only"}
    edit(repo, f"components/{file}", old, "2" if old == "1" else "other")
    assert task("toys") != before and task(None) == elsewhere == task("of another name")
    assert (task("toys")["task"] == before["task"]) == (file == "only.py")  # which stands in the source instead


def test_what_is_left_out_by_name_is_not_followed(repo, monkeypatch):
    monkeypatch.setattr(fingerprints, "LEFT_OUT", {"components.late": "a test"})
    assert not {"components.late", "components.deep.inner.leaf"} & set(fingerprint(repo)["source"])


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


def test_a_library_that_is_not_installed_is_named(repo):
    with pytest.raises(TetherError, match="no-such-library is not installed"):
        stage_key("toy", Job(), {}, "components.toy.stage", ["pydantic", "no-such-library"], repo)


def test_the_parts_say_what_the_key_is_made_of(repo):
    parts = stage_key("toy", Job(), {"data": "ab"}, "components.toy.stage", ["pydantic"], repo)[1]
    assert parts["job"] == {"seed": 1, "learning_rate": 0.1}
    assert parts["inputs"] == {"data": "ab"}
    assert set(parts) == {"stage", "job", "inputs", "source", "task", "libraries"}
    assert "components.toy.helper" in parts["source"]


def test_fingerprinting_imports_neither_torch_nor_the_stage():
    code = (
        "import sys; from components.keys.fingerprint import code_parts as f; f('components.training.checkpoint');"
        "import components.store.store, components.gates.judging, tasks.execution.keying;"
        "print([m for m in ('torch', 'transformers', 'components.training.checkpoint', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["components", "components/toy", "components/deep", "components/deep/inner"])
def test_code_in_any_package_that_an_import_runs_is_in_the_key(repo, package):
    modules = ["components.toy.stage", *(["components.other"] if package == "components" else [])]
    before = [code_parts(module, repo) for module in modules]
    (repo / package / "__init__.py").write_text("setting = 1\n")
    for module, parts in zip(modules, before, strict=True):
        assert code_parts(module, repo) != parts
