"""The list of planted faults and its check: what no longer applies is said, and each fault is planted as it says."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planted import transforms
from tests.planted.catalogue import Fault, edited, problems, read
from tests.planted.copies import plant

FAULT = Fault(
    name="sum_is_a_difference", kind="ppo", stage="ppo", stage_named="ppo", file="components/sums.py", word="sum|add",
    harm="yes", what="A sum subtracts.", before="a + b", after="a - b",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "components").mkdir()
    (tmp_path / "components" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    return tmp_path


def found(fault: Fault, root: Path) -> list[str]:
    """The problems of one fault, without those of the list as a whole."""
    return [text for text in problems([fault], root) if text.startswith(f"{fault.name}: ")]


def test_every_fault_of_the_list_applies_to_todays_code() -> None:
    assert list(problems(read())) == []


def test_a_fault_that_applies_has_no_problem_and_changes_its_file_alone(root: Path) -> None:
    assert found(FAULT, root) == []
    plant(FAULT, root)
    assert (root / "components" / "sums.py").read_text() == "def add(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"before": "a * b"}, "`before` occurs 0 times in components/sums.py"),
        ({"before": "a"}, "`before` occurs 3 times in components/sums.py"),
        ({"after": "a + b"}, "`after` equals `before`"),
        ({"after": "a +"}, "invalid syntax"),
        ({"file": "components/gone.py"}, "there is no file components/gone.py"),
        ({"kind": "weather"}, "kind is 'weather'"),
        ({"stage": "deploy"}, "stage is 'deploy'"),
        ({"word": "("}, "word is not a regular expression"),
        ({"how": "twice"}, "needs again, swap or edit_again"),
        ({"file": "preferences", "transform": "melt"}, "no transformation 'melt' of preferences"),
        ({"what": "No sentence"}, "`what` a sentence"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_named_with_the_reason(
    changes: dict[str, str], said: str, root: Path
) -> None:
    assert any(said in text for text in found(replace(FAULT, **changes), root))


def test_a_short_list_and_two_faults_of_one_name_are_named(root: Path) -> None:
    texts = list(problems([FAULT, FAULT], root))
    assert "sum_is_a_difference: 2 faults have this name" in texts
    assert "2 faults, fewer than 60" in texts


def test_a_text_that_occurs_twice_is_not_edited() -> None:
    with pytest.raises(ValueError, match="occurs 2 times"):
        edited("a + b; a + b", FAULT)


def test_the_digest_changes_with_the_edit_and_not_with_what_is_said_about_it() -> None:
    assert replace(FAULT, after="b").digest() != FAULT.digest()
    assert replace(FAULT, what="It subtracts.", word="minus", harm="no").digest() == FAULT.digest()


def test_a_message_names_a_fault_by_any_of_its_words_in_any_case() -> None:
    assert FAULT.is_named_in("The Sum is wrong")
    assert not FAULT.is_named_in("lower ppo.learning_rate")


def pairs() -> transforms.Rows:
    """Six pairs of five votes; every second chosen reply is the shorter one."""
    return [
        {
            "prompt": [{"role": "system", "content": f"policy {i}"}, {"role": "user", "content": f"question {i}"}],
            "chosen": "Yes. Sure." if i % 2 else "Yes.", "rejected": f"No. It is not. Number {i}.",
            "category": "late" if i < 2 else "broken", "votes": 5, "votes_chosen": 3, "votes_helpful": 4,
        }
        for i in range(6)
    ]  # fmt: skip


def test_each_transformation_changes_rows_and_keeps_their_fields() -> None:
    rows = pairs()
    demonstrations: transforms.Rows = [{"prompt": row["prompt"], "response": row["rejected"] * 9} for row in rows]
    for kind, changes in transforms.FILES.items():
        before = rows if kind == "preferences" else demonstrations
        for name, change in changes.items():
            after = change([dict(row) for row in before], random.Random(1))
            assert after != before, name
            assert {frozenset(row) for row in after} == {frozenset(row) for row in before}, name
    assert rows == pairs()


def test_a_pair_under_another_prompt_keeps_its_replies() -> None:
    after = transforms.prompt_of_previous_row(pairs(), random.Random(0))
    assert [row["prompt"][1]["content"][-1] for row in after] == ["5", "0", "1", "2", "3", "4"]
    assert [row["rejected"] for row in after] == [row["rejected"] for row in pairs()]


def test_only_the_category_late_is_flipped() -> None:
    after = transforms.one_slice_flipped(pairs(), random.Random(0))
    flipped = [row["chosen"] == old["rejected"] for row, old in zip(after, pairs(), strict=True)]
    assert flipped == [True, True, False, False, False, False]


def test_an_inverted_annotator_moves_each_count_by_one_vote_and_the_majority_follows() -> None:
    after = transforms.one_annotator_inverted(pairs(), random.Random(0))
    for row, old in zip(after, pairs(), strict=True):
        lost = row["chosen"] == old["rejected"]
        assert row["votes_chosen"] == (3 if lost else 4)  # 3 of 5 and one more, or 2 of 5, turned round
        assert row["votes_helpful"] == (1 if lost else 4)
    assert {row["votes_chosen"] for row in after} == {3, 4}
