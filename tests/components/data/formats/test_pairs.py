import pytest

from components.base.errors import UserError
from components.data.formats import demonstrations
from components.data.formats.pairs import detect, parse_pair
from components.data.rows import Problem, RawRow


def test_a_file_of_which_no_row_can_be_read_is_refused_for_that_and_not_for_its_fields():
    rows = [RawRow(n, {"raw": "a;b"}, Problem("readable", "2 cells, the header has 3")) for n in (2, 3)]
    for found in (detect, demonstrations.detect):
        with pytest.raises(UserError, match=r"x\.csv: none of its first 2 rows can be read\. Row 2: 2 cells"):
            found(rows, "x.csv")


def test_an_unreadable_row_keeps_its_problem():
    problem = Problem("readable", "bad JSON")
    row = parse_pair(RawRow(3, {"raw": "{"}, problem), "strings", "preferences", 1000)
    assert row.problems == [problem] and row.data == {"raw": "{"} and row.item is None
