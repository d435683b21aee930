"""docs/scaling.md holds what the plan computes now."""

from tests import scaling


def test_the_page_is_what_its_command_writes() -> None:
    page = scaling.PAGE.read_text(encoding="utf-8")
    assert list(scaling.stale(page)) == [], "python -m tests.scaling"


def test_a_number_or_a_table_that_is_not_the_plans_is_noticed() -> None:
    page = scaling.PAGE.read_text(encoding="utf-8")
    changed = page.replace("| llama-3.1-8b | LoRA | ", "| llama-3.1-8b | LoRA | 1", 1)
    assert changed != page and list(scaling.stale(changed)) == ["tables"]
    assert list(scaling.stale(page.replace("<!-- table: ranks -->", ""))) == ["ranks"]
