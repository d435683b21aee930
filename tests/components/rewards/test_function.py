"""A user's function: its scores, and what is said of each mistake that it can make."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.base.errors import UserError
from components.rewards.code import code_digest
from components.rewards.config import FunctionReward
from components.rewards.function import FunctionSource
from components.rewards.source import Replies
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
TWO = Replies([[{"role": "user", "content": "how many?"}]] * 2, ["one", "three"], [{"answer": 3}, {"answer": 5}])

MODULE = """
import helper
print("this goes to standard error")

def fine(prompts, responses, rows):
    print("and this", open(0, closefd=False).read())
    return [helper.length(each) + row["answer"] for each, row in zip(responses, rows)]

def short(prompts, responses, rows):
    return [1.0]

def not_a_number(prompts, responses, rows):
    return [1.0, float("nan")]

def too_large(prompts, responses, rows):
    return [1.0, 1e39]

def text(prompts, responses, rows):
    return [1.0, "good"]

def none(prompts, responses, rows):
    return [1.0, None]

def packed(prompts, responses, rows):
    return [1.0, b"1.5"]

def raises(prompts, responses, rows):
    return [1 / (len(each) - 5) for each in responses]

def slow(prompts, responses, rows):
    while True:
        pass

def dies(prompts, responses, rows):
    import os
    os._exit(7)

def hidden(prompts, responses, rows):
    import importlib
    importlib.import_module("unseen")
    return [0.0, 0.0]

constant = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "helper.py").write_text("def length(text):\n    return len(text)\n")
    (tmp_path / "unseen.py").write_text("")
    opened: list[FunctionSource] = []

    def make(name: str, **options: Any) -> FunctionSource:
        config = FunctionReward(source=f"function:mine:{name}", root=str(tmp_path), **options)
        opened.append(FunctionSource(config))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_a_function_gets_prompts_responses_and_rows_and_what_it_prints_disturbs_nothing(source: Any) -> None:
    fine = source("fine")
    assert fine.score(TWO) == [6.0, 10.0]
    assert fine.score(TWO) == [6.0, 10.0], "its process stays"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("short", "it gives 1 score for 2 responses"),
        ("not_a_number", "it gives nan for response 2 of 2 (prompt 'how many?', response 'three')"),
        ("too_large", "it gives 1e+39 for response 2 of 2"),
        ("text", "it gives 'good' for response 2 of 2"),
        ("none", "it gives None for response 2 of 2"),
        ("packed", "it gives \"b'1.5'\" for response 2 of 2"),
        ("raises", "ZeroDivisionError: float division by zero (mine.py, line 28, in <listcomp>: return [1 / "),
        ("raises", "for response 2 of 2 (prompt 'how many?', response 'three')"),
        ("dies", "its process ended (exit code 7)"),
        ("hidden", "unseen.py by a name that is not in an import statement"),
    ],
)
def test_each_mistake_of_a_function_is_the_users_and_names_function_and_response(
    source: Any, name: str, said: str
) -> None:
    with pytest.raises(UserError) as raised:
        source(name).score(TWO)
    assert f"ppo.rewards: function:mine:{name}: " in str(raised.value)
    assert said.replace("float division", "division") in str(raised.value).replace("float division", "division")


def test_a_function_that_takes_too_long_is_stopped(source: Any) -> None:
    slow = source("slow", timeout=1.0)
    with pytest.raises(UserError, match="scoring 2 responses takes longer than its time limit of 1 s"):
        slow.score(TWO)
    assert slow.process.poll() is not None


KILLED_STAGE = """
import os, signal, sys, threading
from components.rewards.config import FunctionReward
from components.rewards.function import FunctionSource
from tests.components.rewards.test_function import TWO

slow = FunctionSource(FunctionReward(source="function:mine:slow", root=sys.argv[1], timeout=60))
print(slow.process.pid, flush=True)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
slow.score(TWO)
"""


def test_a_function_without_an_end_ends_when_the_stage_is_killed(source: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_STAGE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Its standard error is the function's too, and open as long as that is.
    killed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    assert killed.returncode == -signal.SIGKILL
    psutil.wait_procs([p for p in psutil.process_iter() if p.pid == int(killed.stdout)], timeout=PATIENCE * 20)
    assert not psutil.pid_exists(int(killed.stdout))


def test_what_is_no_function_or_no_module_is_refused(source: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no function of this name"):
        source("constant")
    with pytest.raises(UserError, match="has no function absent"):
        source("absent")
    (tmp_path / "mine.py").write_text("import helper\nhelper.absent\ndef fine(*_):\n    pass\n")
    with pytest.raises(UserError, match=r"importing mine raises AttributeError.*\(mine.py, line 2"):
        source("fine")
    with pytest.raises(UserError, match="there is no module other"):
        code_digest(FunctionReward(source="function:other:fine", root=str(tmp_path)))


def test_an_edit_of_an_imported_module_changes_the_digest_and_one_of_another_file_does_not(tmp_path: Path) -> None:
    package = tmp_path / "rules"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("def f(p, r, rows):\n    from . import words\n    return words.count(r)\n")
    (package / "words.py").write_text("import deep\ndef count(r):\n    return [0.0 for _ in r]\n")
    for name in ("deep", "other"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    config = FunctionReward(source="function:rules.scores:f", root=str(tmp_path))
    seen = {code_digest(config)}
    (tmp_path / "other.py").write_text("x = 2\n")
    assert code_digest(config) in seen, "nothing imports it"
    for path in (package / "words.py", tmp_path / "deep.py", package / "__init__.py", package / "scores.py"):
        path.write_text(path.read_text() + "y = 2\n")
        assert code_digest(config) not in seen, path
        seen.add(code_digest(config))


def test_a_function_edited_after_the_run_began_is_refused(source: Any, tmp_path: Path) -> None:
    code = code_digest(FunctionReward(source="function:mine:fine", root=str(tmp_path)))
    source("fine", code=code)
    (tmp_path / "helper.py").write_text("def length(text):\n    return 0\n")
    with pytest.raises(UserError, match="its source files changed after the run began"):
        source("fine", code=code)
