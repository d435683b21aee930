import pytest

from data_contracts.rows.schemas import schema_problems

PAIR = {
    "prompt": [{"role": "user", "content": "hi"}], "chosen": "x", "rejected": "y", "margin": None, "votes_chosen": 3,
    "votes": 5, "soft_label": 0.6, "objectives": None, "weight": 1.0, "category": "c", "source": "preferences",
    "row": 1,
}  # fmt: skip


def test_a_whole_pair_and_a_whole_demonstration_hold():
    assert schema_problems(PAIR) == []
    assert schema_problems({"prompt": PAIR["prompt"], "response": "x", "source": "s", "row": 1}) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        *(({name: ...}, "fields_present") for name in ("margin", "rejected", "source")),
        ({"chosen": 5}, "fields_present"),
        ({"chosen": ""}, "fields_present"),
        ({"prompt": []}, "fields_present"),
        ({"prompt": [{"role": "judge", "content": "hi"}]}, "fields_present"),
        ({"margin": float("nan")}, "fields_present"),
        ({"rejected": "x"}, "fields_present"),
        ({"row": 0}, "fields_present"),
        ({"extra": 1}, "fields_present"),
        ({"votes": 2}, "votes_valid"),
        ({"votes": None}, "votes_valid"),
        ({"votes": "5"}, "votes_valid"),
    ],
)
def test_each_breach_of_the_schema_is_found(change, check):
    """`...` stands for a field that is missing."""
    row = {name: value for name, value in (PAIR | change).items() if value is not ...}
    assert [p.check for p in schema_problems(row)] == [check]
