import pytest

from components.base.errors import UserError
from components.data.formats import demonstrations
from components.data.formats.pairs import detect, parse_pair
from components.data.formats.public import shape_of
from components.data.formats.public_fields import ReadingOptions
from components.data.rows import Problem, RawRow


def test_a_file_of_which_no_row_can_be_read_is_refused_for_that_and_not_for_its_fields():
    rows = [RawRow(n, {"raw": "a;b"}, Problem("readable", "2 cells, the header has 3")) for n in (2, 3)]
    for found in (detect, demonstrations.detect):
        with pytest.raises(UserError, match=r"x\.csv: none of its first 2 rows can be read\. Row 2: 2 cells"):
            found(rows, "x.csv")


@pytest.mark.parametrize("pair", [{"chosen": "x", "rejected": "y"}, {"a": "x", "b": "y", "label": "a"}])
def test_a_column_that_is_called_scored_makes_no_row_a_public_sets(pair):
    assert shape_of([RawRow(1, {"prompt": "q", "scored": True} | pair)], ReadingOptions()) is None


def test_an_unreadable_row_keeps_its_problem():
    problem = Problem("readable", "bad JSON")
    row = parse_pair(RawRow(3, {"raw": "{"}, problem), "strings", "preferences", 1000)
    assert row.problems == [problem] and row.data == {"raw": "{"} and row.item is None
