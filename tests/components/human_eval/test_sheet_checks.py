"""A sheet with other texts than the models', and scores that are unblinded wrongly, are stopped by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import CheckFailed
from components.base.jsonl import read_rows
from components.gates.self_checks import FILE
from components.human_eval import blinded_sample
from components.human_eval.blinding import Item
from components.human_eval.results import summary
from tests.splits import write_split

Faulty = Callable[[list[Item]], list[Item]]


def results(folder: Path) -> dict[str, str]:
    import json

    return {row["name"]: row["verdict"] for row in json.loads((folder / "attachments" / FILE).read_text())}


def replaced(items: list[Item], fault: Callable[[int, Item], Item]) -> list[Item]:
    return [fault(i, item) for i, item in enumerate(items)]


FAULTS: dict[str, tuple[Faulty, str]] = {
    "cut": (lambda items: replaced(items, lambda _, item: item._replace(policy=item.policy[:9])), "12 of 12 items"),
    "of the next prompt": (
        lambda items: replaced(items, lambda i, item: item._replace(sft=items[(i + 1) % len(items)].sft)), "of 12 items"
    ),
    "of the other author": (
        lambda items: replaced(items, lambda i, item: item._replace(sft=item.policy, policy=item.sft) if i == 3
                               else item), "1 of 12 items",
    ),
    "always on one side": (
        lambda items: replaced(items, lambda _, item: item._replace(policy_side="a")), "side A of 12 of the 12 items"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "named"), FAULTS.values(), ids=FAULTS)
def test_a_reply_that_is_not_its_authors_stops_the_sheet(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: Faulty, named: str
) -> None:
    case, blind = make_case(), blinded_sample.blind
    assert results(case.root) == dict.fromkeys(("human_eval.prompts", "human_eval.sheet", "human_eval.sides"), "held")

    def faulty(*arguments: Any) -> tuple[list[Item], str]:
        items, salt = blind(*arguments)
        return fault(items), salt

    monkeypatch.setattr(blinded_sample, "blind", faulty)
    with pytest.raises(CheckFailed, match=f"human_eval.s(heet|ides) failed.*{named}"):
        make_case("other")


@pytest.mark.parametrize("options", [{"repeats": 0.5}, {"items": 11}, {"sft": "=Dear\r\n", "policy": "'Hey\t"}])
def test_repeated_items_odd_numbers_and_texts_that_spreadsheets_change_are_no_fault(
    make_case: Callable[..., Any], options: dict[str, Any]
) -> None:
    case = make_case(**options)
    assert set(results(case.root).values()) == {"held"}
    case.score(case.fill(lambda row: ("a", "b", "tie")))
    assert results(case.root / "scored") == {"human_eval.unblinding": "held"}


def test_prompts_that_are_not_held_out_stop_the_sheet(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_prompts(data: Path) -> Any:
        write_split(data / "prompts.train", ({"prompt": [{"role": "user", "content": f"Asked {i}"}], "category": "x"}
                                             for i in range(40)))  # fmt: skip
        return blinded_sample.read_split(data / "prompts.train")

    monkeypatch.setattr(blinded_sample, "held_out_prompts", training_prompts)
    with pytest.raises(CheckFailed, match=r"human_eval.prompts failed.*12 of the 12 prompts"):
        make_case()


@pytest.mark.parametrize(
    ("score", "rates"),
    [
        (lambda rating, side: 0.5 if rating == "tie" else float(rating != side), "0.00 .*, 1.00 .*, 0.50 "),
        (lambda rating, side: float(rating in (side, "tie")), "1.00 .*, 0.00 .*, 1.00 "),
        (lambda rating, side: 0.5 if rating == "tie" else float(rating == "a"), "0.50 .*, 0.50 .*, 0.50 "),
    ],
    ids=["sides exchanged", "ties win", "not unblinded"],
)
def test_a_planted_preference_that_unblinding_does_not_give_back_stops_the_scoring(
    make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, score: Any, rates: str
) -> None:
    case = make_case()
    sheet = case.fill(lambda row: ("a", "b", "tie"))
    monkeypatch.setattr(summary, "rating_score", score)
    with pytest.raises(CheckFailed, match=f"human_eval.unblinding failed.*{rates}"):
        case.score(sheet)


def test_two_replies_that_are_the_same_cannot_tell_sides(make_case: Callable[..., Any]) -> None:
    case = make_case(sft="Hey", policy="Hey")
    case.score(case.fill(lambda row: ("a", "b", "tie")))
    assert results(case.root / "scored") == {"human_eval.unblinding": "not judged"}
    assert all(row["sft"] == row["policy"] for row in read_rows(case.sample / "responses.jsonl"))
