"""`make check` reads what people read: a planted sentence fails, code does not."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.prose import ROOT, main

ODD = 'def f(name):\n    """Return it."""\n    raise ValueError(f"{name} is damaged, so it goes on from there")\n'
CLICHE = '"""Return what is left, in a word.\n\nNothing else.\n"""\n'


@pytest.mark.parametrize(
    ("name", "text", "line", "finding"),
    [
        ("a.md", "# A page\n\nThe run goes on from its\ncheckpoint.\n", 3, "instead of 'goes on from' write: continue"),
        ("b.md", "A run\ngoes on\nfrom there.\n", 2, "goes on from"),  # across lines
        ("c.md", "One sentence.\n\nIt is, in a word, a run.\n", 3, "clich"),
        ("d.md", 'It says "the run goes on from here".\n', 1, "goes on from"),
        ("e.py", ODD, 3, "goes on from"),
        ("f.py", CLICHE, 1, "clich"),
    ],
)
def test_a_phrase_that_we_do_not_write_is_found_at_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, line: int, finding: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)]) == 1
    (found,) = capsys.readouterr().out.splitlines()
    assert found.startswith(f"{tmp_path / name}:{line}: ") and finding in found


def test_code_and_plain_sentences_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.md").write_text(
        "See `goes on from`.\n\n    tether goes on from\n\n```\ngoes on from\n```\n<!-- goes on from -->\n"
    )
    (tmp_path / "a.py").write_text('goes_on_from = "goes on from"  # goes on from\n')  # three words: not prose
    assert main([str(tmp_path / "a.md"), str(tmp_path / "a.py")]) == 0
    assert capsys.readouterr().out == ""


def test_every_phrase_of_the_list_is_one_that_the_linter_finds(tmp_path: Path) -> None:
    phrases = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]["phrases"]
    for phrase in phrases:
        words = re.sub(r"\w\?", "", re.sub(r"\(([^|()]*)[^()]*\)", r"\1", phrase.split("|isn't w")[0]))
        (tmp_path / "a.md").write_text(f"Here {words} today.\n")
        assert main([str(tmp_path / "a.md")]) == 1, (phrase, words)
