"""Text of others commands nothing: no terminal, no Markdown."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.text import counted, line, markdown, markdown_code, plain


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "a\rb", "\u202egnp.exe", "\x7f", "\ud83d", "\x85", "\u2066x"]
)
def test_a_terminal_is_given_no_command(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable() and shown != text
    assert shown.encode(), "and it can be written"


def test_ordinary_text_stays_as_it_is() -> None:
    text = "naïve ファイル\n\tκ = 0.4, 10 % – “so”"
    assert plain(text) == text and plain("one\r\ntwo") == "one\ntwo"
    assert (
        markdown("reward/ece_null_95 is 0.1, by run 2026-a: fine.") == "reward/ece_null_95 is 0.1, by run 2026-a: fine."
    )


@given(st.text())
def test_a_line_is_one_line_without_commands(text: str) -> None:
    assert line(text).isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e]", line(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("fine\n\n# Passed", "fine # Passed"),
        ("# Passed", r"\# Passed"),
        ("- item", r"\- item"),
        ("1. item", r"1\. item"),
        ("12) item", r"12\) item"),
        ("---", r"\---"),
        ("## Passed", r"\## Passed"),
        ("-1e-07", "-1e-07"),
        ("0.1", "0.1"),
        ("> quote", r"\> quote"),
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("</p><!-- <?x", "&lt;/p>&lt;!-- &lt;?x"),
        ("must be <= 1, not > 2 <3", "must be <= 1, not > 2 <3"),
        ("[x](http://y) ![x](y)", r"\[x\](http://y) !\[x\](y)"),
        ("a | b", r"a \| b"),
        ("**bold** _it_ a_b", r"\*\*bold\*\* \_it\_ a_b"),
        ("&lt;b&gt; R&D", r"\&lt;b\&gt; R&D"),
        ("back\\slash", r"back\\slash"),
    ],
)
def test_markdown_takes_it_for_words(text: str, shown: str) -> None:
    assert markdown(text) == shown


def test_a_code_span_does_not_end_before_its_text() -> None:
    assert markdown_code("a`b | c\nd") == r"`a'b \| c d`"


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (11, "11 rows"), (101, "101 rows")]
)
def test_one_is_singular_and_any_other_count_plural(number: int, said: str) -> None:
    assert counted(number, "row") == said
    assert counted(number, "row is", "rows are") == f"{said} {'is' if number == 1 else 'are'}"
