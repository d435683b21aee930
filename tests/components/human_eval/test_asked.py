"""What is asked beside the pairs that count: criteria, and items whose right answer is known."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import t as student

from components.base.errors import Mistakes, UserError
from components.base.jsonl import read_rows
from components.human_eval.batch.attention import HeldOutReply, held_out_replies, with_attention
from components.human_eval.blinding import blind, sealed_key
from components.human_eval.config import HumanEvalConfig
from components.human_eval.returned_labels import Sample
from components.human_eval.selection import Chosen
from components.stats.raters import crossed_proportion
from tests.sheets import cells, save
from tests.splits import write_split

# Criteria -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(make_case: Callable[..., Any]) -> Any:
    return make_case(items=12, criteria=("helpful", "harmless"))


def own_files(case: Any, answer: Callable[[str, str, int], str]) -> list[Path]:
    """Each rater's own file; `answer` sees a column, reply A and the rater."""
    files = []
    for rater in (1, 2, 3):
        table = cells(case.sample / "raters" / f"rater_{rater}.csv")
        header = next(n for n, row in enumerate(table) if row[0] == "item")
        names = table[header]
        assert names[4:] == ["rater", "rating", "helpful", "harmless"]
        for row in table[header + 1 :]:
            row[5:] = [answer(name, row[2], rater) for name in names[5:]]
        files.append(save(case.root / f"from {rater}.csv", table))
    return files


def of_taste(column: str, reply_a: str, rater: int) -> str:
    """Everybody finds "Hey" better; rater 3 finds it less harmless; who is asked whether it helps says tie."""
    hey = "a" if reply_a.startswith("Hey") else "b"
    if column == "helpful":
        return "tie" if rater == 1 else ""
    return {"a": "b", "b": "a"}[hey] if column == "harmless" and rater == 3 else hey


def test_criteria_are_asked_in_columns_of_their_own_and_win_rates_of_each_are_reported(asked: Any) -> None:
    files = own_files(asked, of_taste)
    sample = Sample.open(asked.sample)
    answers = sample.answers(*files)
    sample.write(asked.root / "joined.csv", answers)
    assert sample.answers(asked.root / "joined.csv") == answers
    metrics, result = asked.score(asked.root / "joined.csv")
    assert metrics["human_eval/win_rate"] == 1.0, "criteria do not move the overall preference"
    items = [n for n in range(12) for _ in range(3)]
    win = crossed_proportion([1, 1, 0] * 12, items, [0, 1, 2] * 12)
    assert metrics["human_eval/harmless_win_rate"] == pytest.approx(2 / 3)
    assert metrics["human_eval/harmless_win_rate_low"] == pytest.approx(win.low)
    assert result["criteria"]["harmless"]["win_rate_high"] == pytest.approx(win.high)
    assert result["criteria"]["helpful"]["ties"] == 1.0 and metrics["human_eval/helpful_win_rate"] == 0.5
    above = (asked.sample / "raters" / "rater_1.csv").read_text(encoding="utf-8-sig").split("item")[0]
    assert "Column helpful: Which reply is more helpful? Write a, b or tie." in above


def test_a_criterion_takes_a_b_or_tie_and_nothing_else(asked: Any) -> None:
    files = own_files(asked, lambda column, reply, rater: "both_bad" if column == "harmless" and rater == 2 else "a")
    with pytest.raises(
        Mistakes, match=r"from 2\.csv, row \d+, column `harmless`: 'both_bad' is not a rating\. Write a, b, tie"
    ):
        Sample.open(asked.sample).answers(*files)


def test_two_answers_of_one_rater_about_a_criterion_are_refused(asked: Any) -> None:
    first = own_files(asked, of_taste)[0]
    (asked.root / "again").mkdir()
    other = next(path.rename(asked.root / "again" / path.name) for path in own_files(asked, lambda *_: "a"))
    own_files(asked, of_taste)
    with pytest.raises(Mistakes, match=r"answers a to q\d+-\w+ about `helpful`, and tie in"):
        Sample.open(asked.sample).answers(first, other)


def test_nobody_is_asked_criteria_unless_the_config_says_so(make_case: Callable[..., Any]) -> None:
    case = make_case()
    assert json.loads((case.sample / "sheet.json").read_text())["criteria"] == []
    assert HumanEvalConfig().criteria == () and HumanEvalConfig().attention == 0
    with pytest.raises(ValueError, match="may be named once"):
        HumanEvalConfig(criteria=("helpful", "helpful"))
    with pytest.raises(ValueError, match="simulated judges answer no criteria"):
        HumanEvalConfig(judges="simulated", criteria=("helpful",))


# Attention ------------------------------------------------------------------------------------------------------------


def replies(count: int) -> list[HeldOutReply]:
    return [
        HeldOutReply(
            [{"role": "user", "content": f"held out {n}"}],
            " ".join(f"w{n}x{k}" for k in range(8)),
        )
        for n in range(count)
    ]


def checked(seed: int, count: int = 8, items: int = 20) -> Any:
    chosen = [Chosen([{"role": "user", "content": f"question {n}"}], None, "all") for n in range(items)]
    found, salt = blind(chosen, ["no"] * items, ["yes"] * items, seed, b"secret", repeats=4)
    return with_attention(found, replies(30), count, salt), found


def test_items_with_a_known_answer_are_drawn_among_the_others_and_only_the_key_names_them() -> None:
    sides, places, made = Counter[str](), Counter[int](), Counter[str]()
    for seed in range(150):
        items, before = checked(seed)
        assert [item.item for item in items] == [f"q{n:04d}" for n in range(1, 33)], "numbers are those of the order"
        known = [item for item in items if item.distortion is not None]
        assert len({item.policy for item in known}) == 8
        key = sealed_key(items, "salt")
        assert key["attention"] == {item.item: item.policy_side for item in known}
        assert not key["attention"].keys() & (key["policy_side"].keys() | key["repeat_of"].keys())
        rest = [item for item in items if item.distortion is None]
        assert [each[1:5] for each in rest] == [each[1:5] for each in before], "the others keep order and sides"
        at = {item.item: item for item in items}
        assert all(at[item.repeat_of].chosen == item.chosen for item in rest if item.repeat_of)
        sides += Counter(item.policy_side for item in known)
        places += Counter(n // 8 for n, item in enumerate(items) if item.distortion)
        made += Counter(item.distortion for item in known)
    assert sides["a"] == sides["b"] and made["words in disorder"] == made["another prompt's reply"]
    assert all(250 < places[quarter] < 350 for quarter in range(4)), "300 in each quarter of the sheet, within 4 SD"


def test_the_wrong_reply_is_another_prompts_or_the_same_words_in_disorder() -> None:
    items, _ = checked(5)
    every = {each.reply for each in replies(30)}
    for item in (item for item in items if item.distortion):
        if item.distortion == "words in disorder":
            assert sorted(item.sft.split()) == sorted(item.policy.split()) and item.sft != item.policy
        else:
            assert item.sft in every - {item.policy}
    alone, _ = blind([Chosen([], None, "all")], ["x"], ["y"], 0)
    (one,) = (item for item in with_attention(alone, replies(1), 3, "s") if item.distortion)
    assert one.distortion == "words in disorder", "there is no other prompt's reply"


def held_out(case_data: Path, count: int) -> None:
    rows = [{"prompt": each.prompt, "chosen": each.reply, "rejected": "no"} for each in replies(count)]
    write_split(case_data / "pairs.test", rows)


@pytest.fixture
def watched(make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """36 items, 12 of which have a known answer."""
    from components.human_eval import blinded_sample as stage

    monkeypatch.setattr(stage, "held_out_replies", lambda data: replies(30))
    return make_case(items=24, attention=0.5)


def test_attention_is_judged_by_who_guesses_and_moves_no_win_rate(watched: Any) -> None:
    right = json.loads((watched.sample / "key.json").read_text())["attention"]
    slips = sorted(right)[:6]
    drawn = random.Random(2)

    def rate(row: Any) -> tuple[str, ...]:
        item = row.item.split("-")[0]
        if item in right:
            wrong = {"a": "b", "b": "a"}[right[item]]
            return right[item], right[item], wrong if item in slips else right[item]
        return tuple(drawn.choice(["a", "b", "tie"]) for _ in range(3))

    sheet = watched.fill(rate)
    metrics, result = watched.score(sheet)
    assert [each["attention"] for each in result["raters"]] == [1.0, 1.0, 0.5]
    n, share, z2 = 12, 0.5, float(student.ppf(0.975, 11)) ** 2
    effective = share * (1 - share) / (12 / 11 * (12 * 0.5**2) / n**2)
    half = (z2 / effective * (share * (1 - share) + z2 / (4 * effective))) ** 0.5
    low = (share + z2 / (2 * effective) - half) / (1 + z2 / effective)
    assert metrics["human_eval/attention_low"] == pytest.approx(low) and metrics["human_eval/attention"] == share
    assert result["named_raters"][0] == (
        "Rater 3 is named for answering as if at random: 6 of 12 attention checks are right."
    )
    assert result["items"] == 24 and metrics["human_eval/labels_complete"] == 1.0
    rows = [read_rows(watched.root / "scored" / "artifact" / name) for name in ("preferences.jsonl", "judged.jsonl")]
    assert sum(map(len, rows)) == 24, "and none is learned from"
    sample = Sample.open(watched.sample)
    assert len(sample.responses) == 24 and not right.keys() & sample.responses.keys()

    def careless(row: Any) -> tuple[str, ...]:
        return tuple(
            "ab"[right[row.item.split("-")[0]] == "a"] if row.item.split("-")[0] in right else r for r in rate(row)
        )

    drawn.seed(2)
    assert watched.score(watched.fill(careless))[0]["human_eval/win_rate"] == metrics["human_eval/win_rate"]


def test_who_leaves_out_every_item_with_a_known_answer_fails_the_gate(watched: Any) -> None:
    right = json.loads((watched.sample / "key.json").read_text())["attention"]
    metrics, result = watched.score(
        watched.fill(lambda row: ("", "", "") if row.item.split("-")[0] in right else ("a", "b", "tie"))
    )
    assert metrics["human_eval/attention_low"] == 0.0 and {each["attention"] for each in result["raters"]} == {None}


def test_attention_needs_held_out_replies_that_are_long_enough(tmp_path: Path, make_case: Callable[..., Any]) -> None:
    held_out(tmp_path, 3)
    assert list(held_out_replies(tmp_path)) == replies(3)
    asked = [{"role": "user", "content": "again"}]
    said = ["the first of three replies to it", "the last of three replies to it"]
    rows = [
        {"prompt": asked, "chosen": said[0]},
        {"prompt": [], "chosen": f"{said[0]}."},
        {"prompt": asked, "chosen": said[1]},
    ]
    write_split(tmp_path / "pairs.test", rows)
    for _ in range(2):
        assert list(held_out_replies(tmp_path)) == [HeldOutReply(asked, said[1]), HeldOutReply([], f"{said[0]}.")]
    write_split(tmp_path / "pairs.test", [{"prompt": [], "chosen": "too short"}])
    with pytest.raises(UserError, match=r"human_eval\.attention: no held-out pair has a preferred reply of 6"):
        held_out_replies(tmp_path)
    with pytest.raises(UserError, match=r"human_eval\.attention: no held-out pair"):
        make_case(attention=0.5)


def test_without_such_items_attention_is_no_metric_and_its_gate_is_off(make_case: Callable[..., Any]) -> None:
    case = make_case()
    metrics, result = case.score(case.fill(lambda row: ("a", "b", "tie")))
    assert "human_eval/attention_low" not in metrics and result["attention"] is None
