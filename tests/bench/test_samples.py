"""A sample's row stays one row of a Markdown table, whatever the texts hold."""

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.samples import cell, table


@given(st.text(alphabet="a|\n<\\⟨\u202e b", max_size=400))
def test_no_text_breaks_its_row(text: str) -> None:
    side = {"response": text, "score": 0.5, "kl": 1.0}
    *_, row = table([{"prompt": [{"content": text}], "sft": side, "policy": side}]).split("\n")
    assert row.count("|") - row.count("\\|") == 7 and "<" not in row and "\u202e" not in row


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert cell("x" * 300 + "end", 150).endswith("end") and len(cell("x" * 300, 150)) <= 150
