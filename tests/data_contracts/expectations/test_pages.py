import re

import pytest

from components.data.config import DataConfig, SplitConfig
from components.data.rows import Problem, RawRow, Row
from data_contracts.expectations import suites
from data_contracts.expectations.pages import index_page, sanitized, write_data_docs
from data_contracts.expectations.row_expectations import row_checks
from data_contracts.findings.row_judging import RowJudge
from data_contracts.rows.ledger import Ledger

SECRET = "a very private response"


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs") / "data_docs"
    rows = [
        Row("p", RawRow(n, {"chosen": SECRET}), problems=[Problem("turns_valid" if n < 9 else "readable", SECRET)])
        for n in range(1, 21)
    ]
    ledger = Ledger(folder.parent / "rows.jsonl", SplitConfig(), 0)
    ledger.fill(rows, lambda rows: None)
    context = suites.context()
    judge = RowJudge(context, "preferences", ledger, row_checks(DataConfig(), None, "preferences"), [])
    judge.judge("read")
    assert ledger.out.all()
    write_data_docs(context, folder, judge.outcomes(), {"preferences": "<mine>.jsonl"})
    return {page.relative_to(folder).as_posix(): page.read_text() for page in folder.rglob("*") if page.is_file()}


def test_the_index_and_a_page_of_results_are_written(docs):
    assert "index.html" in docs
    assert [name for name in docs if name.startswith("validations/preferences_read/")]


def test_no_page_loads_or_links_anything_from_elsewhere(docs):
    for name, page in docs.items():
        assert not re.search(r"<(script|img|link|iframe)\b|@import|url\(", page), name
        assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", page), name


def test_every_page_has_a_content_policy_that_lets_no_script_run(docs):
    for name, page in docs.items():
        head = page.partition("<body")[0]
        assert head.count("Content-Security-Policy") == 1 and "default-src 'none'" in head, name
        assert "script-src" not in head, name


def test_the_status_is_said_in_words(docs):
    result = next(page for name, page in docs.items() if name.startswith("validations/"))
    assert ">FAIL</strong>" in result and ">PASS</strong>" in result and "fa-times" not in result
    row = next(line for line in docs["index.html"].split("<tr>") if "turns_valid" in line)
    assert ">FAIL</strong>" in row and "1, 2, 3, 4, 5, 6, 7, 8" in row


def test_no_text_of_a_row_reaches_a_page(docs):
    assert not any(SECRET in page for page in docs.values())


def test_what_was_read_is_escaped(docs):
    assert "&lt;mine&gt;.jsonl" in docs["index.html"]


def test_a_failed_warning_is_told_from_a_failed_error_and_an_interval_stands_by_its_value():
    check = {
        "name": "c", "suite": "s", "description": "d", "rows": 0, "row_numbers": [], "value": 0.25, "threshold": 0.2,
        "passed": False,
    }  # fmt: skip
    assert ">WARN<" in index_page([check | {"severity": "warn"}], {}, [])
    assert ">FAIL<" in index_page([check | {"severity": "error"}], {}, [])
    assert "0.25 (0.2 to 0.3)" in index_page([check | {"severity": "warn", "interval": [0.2, 0.3]}], {}, [])


def test_links_within_the_pages_stay():
    assert (
        sanitized('<a href="../index.html">x</a><a href="https://x.test/">y</a>')
        == '<a href="../index.html">x</a><a href="#">y</a>'
    )
