"""Files in the shapes of public data sets, made here: what the contract reads from them, and what it keeps out."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.config import DataConfig
from components.data.rows import Ballot, Row
from data_contracts.check import NothingValid, check
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.reading import reading_of


def judged(job: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[str, dict[str, Any], Any]:
    """What a file of `rows` is read as, its checks by name, and the report."""
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    reading = reading_of(path, job(**options).data)
    given = job(**options, **{reading.kind: str(path)})
    report = check(given, {reading.kind: path}, folder / "scratch", folder / "out", lambda *read: None, tokenized=False)
    return reading.format, {found["name"]: found for found in report["checks"]}, report


def test_the_undesirable_rows_of_kto_data_are_counted_and_kept_out(job: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"r {i}", "label": i % 3 > 0} for i in range(30)]
    name, checks, report = judged(job, tmp_path, rows)
    assert (name, report["rows"], report["quarantined"], report["passed"]) == ("KTO", 30, 10, True)
    assert checks["desirable"]["row_numbers"] == list(range(1, 31, 3)) and "votes_once" not in checks


@pytest.mark.parametrize(("repeated", "passed"), [(1, True), (3, True), (4, False)])
def test_a_second_vote_of_an_annotator_is_judged_alike_in_rows_of_pairs_and_of_votes(
    job: Any, tmp_path: Path, repeated: int, passed: bool
) -> None:
    """Up to 5 in 100 votes may be repeated: 3 of 63, and not 4 of 64, in either shape."""
    wide: list[dict[str, Any]] = []
    for i in range(20):
        votes = [{"annotator": f"ann {who}", "label": "ab"[i % 2]} for who in range(3)]
        again = [{"annotator": "ann 1", "label": "ba"[i % 2]}] * (4 <= i < 4 + repeated)
        wide.append({"prompt": f"q {i}", "a": f"x {i}", "b": f"y {i}", "votes": [*votes, *again]})
    long = [{k: v for k, v in row.items() if k != "votes"} | vote for row in wide for vote in row["votes"]]
    found = []
    for shape in (wide, long):
        folder = tmp_path / str(len(shape))
        folder.mkdir()
        _, checks, report = judged(job, folder, shape)
        once = checks["votes_once"]
        assert (once["rows"], once["passed"], checks["votes_valid"]["rows"]) == (repeated, passed, 0)
        assert once["value"] == pytest.approx(repeated / (60 + repeated), abs=1e-6)
        found.append((report["pairs"], report["kappa"], report["majority"], report["annotators"]))
    assert found[0] == found[1] and found[0][:2] == (20, 1.0)


USER, ANSWER = {"from": "human", "value": "q"}, {"from": "gpt", "value": "x"}
PAIR = ([("user", "q")], "x", "y")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def read(folder: Path, *rows: dict[str, Any], **options: Any) -> list[Row]:
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    config = DataConfig(**options)
    assert reading_of(path, config).kind == "preferences"
    return list(judged_rows(RowSource.named("preferences", path, config), 1000))


def pair(row: Row) -> tuple[Any, ...]:
    assert row.item is not None and row.problems == [], row
    return [(m["role"], m["content"]) for m in row.item["prompt"]], row.item["chosen"], row.item["rejected"]


TWO = {"label_values": {1: "a", 2: "b", 0: "tie"}}
SHAPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-factory": ({"conversations": [USER], "chosen": ANSWER, "rejected": {"from": "gpt", "value": "y"}}, {}),
    "openai": ({"input": {"messages": turns("q"), "tools": [], "parallel_tool_calls": True},
                "preferred_output": turns("", "x")[1:], "non_preferred_output": turns("", "y")[1:]}, {}),
    "llama-factory, roles": ({"messages": turns("q"), "chosen": {"role": "assistant", "content": "x"},
                              "rejected": {"role": "assistant", "content": "y"}}, {}),
    "llama-factory, alpaca": ({"instruction": "q", "input": "", "chosen": "x", "rejected": "y"}, {}),
    "orca": ({"question": "q", "chosen": "x", "rejected": "y"}, {}),
    "arena": ({"model_a": "m", "model_b": "n", "winner": "model_b", "turn": 1, "language": "English",
               "conversation_a": turns("q", "y"), "conversation_b": turns("q", "x")}, {}),
    "arena, parts": ({"winner": "model_a", "conversation_b": turns("q", "y"), "conversation_a": [
        {"role": "user", "content": [{"type": "text", "text": "q"}]}, turns("", "x")[1]]}, {}),
    "arena, a table": ({"prompt": '["q"]', "response_a": '["y"]', "response_b": '["x"]', "winner_model_a": 0,
                        "winner_model_b": 1, "winner_tie": 0, "model_a": "m", "model_b": "n"}, {}),
    "llmbar": ({"input": "q", "output_1": "y", "output_2": "x", "label": 2}, TWO),
    "alpaca-eval": ({"instruction": "q", "output_1": "x", "output_2": "y", "preference": 1.0, "generator_1": "m",
                     "generator_2": "n", "annotator": "gpt"}, TWO),
    "truth": ({"prompt": "q", "a": "x", "b": "y", "label": True}, {"label_values": {"true": "a", "false": "b"}}),
    "named winner": ({"prompt": "q", "response_a": "y", "response_b": "x", "winner": "n", "model_a": "m",
                      "model_b": "n"}, {}),
    "panda-lm": ({"instruction": "q", "input": "", "response1": "y", "response2": "x", "annotator1": 2,
                  "annotator2": 2, "annotator3": 0}, TWO),
    "columns of votes": ({"prompt": "q", "a": "x", "b": "y", "ann": "1", "ben": "1", "cy": "2"},
                         {"columns": {"votes": ["ann", "ben", "cy"]}, **TWO}),
    "ultra-feedback": ({"instruction": "q", "source": "sharegpt", "completions": [
        {"response": "y", "fine-grained_score": 2.5, "overall_score": 10.0, "model": "m"},
        {"response": "x", "fine-grained_score": 4.0, "overall_score": 7.0, "model": "n"}]}, {}),
    "ultra-feedback, an aspect": ({"instruction": "q", "completions": [
        {"response": "x", "annotations": {"honesty": {"Rating": "5"}}},
        {"response": "y", "annotations": {"honesty": {"Rating": "3"}}},
        {"response": "z", "annotations": {"honesty": {"Rating": "N/A"}}}]}, {"score": {"name": "honesty"}}),
    "help-steer preference": ({"prompt": "q", "response_1": "y", "response_2": "x", "preference_strength": 2}, {}),
    "help-steer 3": ({"context": turns("q"), "response1": "x", "response2": "y", "overall_preference": -1}, {}),
    "transcripts beside their prompt": ({"prompt": "\n\nHuman: q\n\nAssistant:",
                                         "chosen": "\n\nHuman: q\n\nAssistant: x",
                                         "rejected": "\n\nHuman: q\n\nAssistant: y"}, {}),
    "transcripts of Windows": ({"chosen": "Human: q\r\n\r\nAssistant: x",
                                "rejected": "Human: q\r\n\r\nAssistant: y"}, {}),
    "an open turn and a space": ({"prompt": "\n\nHuman: q\n\nAssistant: ", "chosen": "x", "rejected": "y"}, {}),
    "parts": ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
               "chosen": "x", "rejected": "y"}, {}),
    "nectar": ({"prompt": "\n\nHuman: q\n\nAssistant: ", "source": ["lmsys"], "answers": [
        {"answer": "y", "rank": 2.0, "model": "m"}, {"answer": "x", "rank": 1.0, "model": "n"}]}, {}),
    "reward-bench 2": ({"prompt": "q", "chosen": ["x"], "rejected": ["y"], "num_correct": 1}, {}),
    "safe-rlhf": ({"prompt": "q", "response_0": "y", "response_1": "x", "better_response_id": 1,
                   "safer_response_id": 0}, {}),
    "web-gpt": ({"question": {"full_text": "q", "id": "1"}, "answer_0": "y", "answer_1": "x", "score_0": -1.0,
                 "score_1": 1.0}, {}),
    "summaries": ({"info": {"article": "q"}, "summaries": [{"text": "y", "policy": "ref"}, {"text": "x"}],
                   "choice": 1, "worker": "w", "extra": {"confidence": 3}}, {}),
    "scored responses": ({"prompt": "q", "responses": ["y", "x"], "scores": [1.5, 4]}, {}),
    "scored completions": ({"prompt": "q", "completions": ["y", "x"], "scores": [1, 4]}, {}),
    "ranked generations": ({"question": "q", "generations": ["y", "x"], "ranks": [2, 1]}, {}),
    "numbers in a cell of CSV": ({"prompt": "q", "responses": ["y", "x"], "scores": "[1.5, 4]"}, {}),
    "query": ({"query": "q", "chosen": "x", "rejected": "y"}, {}),
    "swift": ({"messages": turns("q", "x"), "rejected_response": "y"}, {}),
    "swift, a message": ({"messages": turns("q", "x"), "rejected_response": turns("q", "y")[1:]}, {}),
    "swift, conversations": ({"messages": turns("q", "x"), "rejected_messages": turns("q", "y")}, {}),
    "swift, a query": ({"query": "q", "response": "x", "rejected_response": "y", "history": []}, {}),
    "argilla.io": ({"instruction": "q", "chosen_response": "x", "rejected_response": "y"}, {}),
    "stack exchange": ({"question": "q", "response_j": "x", "response_k": "y"}, {}),
    "pos and neg answers": ({"query": "q", "pos_answer": "x", "neg_answer": "y"}, {}),
    "llama-factory, lists": ({"conversations": turns("q"), "chosen": turns("q", "x")[1:],
                              "rejected": turns("q", "y")[1:]}, {}),
    "a message and a list": ({"prompt": "q", "chosen": turns("q", "x")[1], "rejected": turns("q", "y")[1:]}, {}),
    "gemini": ({"chosen": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "x"}]}],
                "rejected": [{"role": "user", "parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "y"}]}]},
               {}),
    "argilla's records": ({"prompt": "q", "response_a": "y", "response_b": "x",
                           "preference.responses": ["response_b", "response_a", "response_a"],
                           "preference.responses.users": ["u", "v", "w"],
                           "preference.responses.status": ["submitted", "draft", "discarded"]}, {}),
    "argilla's older records": ({"prompt": "q", "response_1": "x", "response_2": "y", "preference": [
        {"user_id": "u", "value": "response_1", "status": "submitted"},
        {"user_id": "v", "value": "response_2", "status": "draft"}]}, {}),
    "shp": ({"history": "q", "human_ref_A": "y", "human_ref_B": "x", "labels": 0, "score_A": 3, "score_B": 9}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPED)
def test_a_row_of_each_public_shape_is_the_pair_that_it_means(tmp_path: Path, name: str) -> None:
    row, options = SHAPED[name]
    (found,) = read(tmp_path, row, **options)
    prompt = [("user", "Article: q\n\nTL;DR:")] if name == "summaries" else PAIR[0]
    assert pair(found) == (prompt, *PAIR[1:])


EARLIER = {"system": "s", "history": [["p", "r"]]}
OUR_OWN: dict[str, dict[str, Any]] = {
    "strings": {"prompt": "q", "chosen": "x", "rejected": "y"},
    "conversational": {"chosen": turns("q", "x"), "rejected": turns("q", "y")},
    "transcripts": {"chosen": "\n\nHuman: q\n\nAssistant: x", "rejected": "\n\nHuman: q\n\nAssistant: y"},
    "votes": {"prompt": "q", "a": "x", "b": "y", "votes": ["a"]},
    "single votes": {"prompt": "q", "a": "x", "b": "y", "annotator": "ann", "label": "a"},
    "ranking": {"prompt": "q", "responses": ["x", "y"]},
}


@pytest.mark.parametrize("name", OUR_OWN)
def test_the_system_message_and_the_turns_beside_a_pair_are_in_its_prompt(tmp_path: Path, name: str) -> None:
    said = [("system", "s"), ("user", "p"), ("assistant", "r"), ("user", "q")]
    (found,) = read(tmp_path, OUR_OWN[name] | EARLIER)
    assert pair(found) == (said, "x", "y")
    assert "system" not in reading_of(tmp_path / "rows.jsonl", DataConfig()).ignored
    (other,) = read(tmp_path, OUR_OWN[name] | {"system_prompt": "s", "history": turns("p", "r")})
    assert pair(other) == (said, "x", "y")


@pytest.mark.parametrize("asked", ["instruction", "question", "query", "input"])
def test_the_text_that_a_question_is_about_is_part_of_its_prompt(tmp_path: Path, asked: str) -> None:
    row = {asked: "When did it begin?", "context": "It began in 1990."}
    for answers in ({"chosen": "x", "rejected": "y"}, {"response_1": "x", "response_2": "y", "preference": "a"}):
        (found,) = read(tmp_path, row | answers)
        assert pair(found) == ([("user", "When did it begin?\n\nIt began in 1990.")], "x", "y")
        assert reading_of(tmp_path / "rows.jsonl", DataConfig()).ignored == []
    (again,) = read(tmp_path, row | {"context": row[asked], "chosen": "x", "rejected": "y"})
    assert pair(again)[0] == [("user", "When did it begin?")]


@pytest.mark.parametrize("extra", ["context", "input", "question"])
def test_a_text_beside_a_prompt_that_is_not_read_is_among_the_unused_columns(tmp_path: Path, extra: str) -> None:
    for answers in ({"chosen": "x", "rejected": "y"}, {"response_1": "x", "response_2": "y", "preference": "a"}):
        write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", extra: "more"} | answers])
        reading = reading_of(tmp_path / "rows.jsonl", DataConfig())
        assert reading.ignored == [extra]
        hint = reading.as_json(tmp_path / "rows.jsonl")["hint"]
        assert (f"`{extra}` is not read beside `prompt`" in str(hint)) == (extra != "question")


def test_votes_under_two_system_messages_are_on_two_pairs_and_scores_on_two_prompts(tmp_path: Path) -> None:
    votes = [OUR_OWN["single votes"] | {"system": system} for system in ("s", "t")]
    assert [pair(row)[0][0][1] for row in read(tmp_path, *votes)] == ["s", "t"]
    scored = [{"system": system, "prompt": "q", "response": r, "helpfulness": h}
              for system in ("s", "t") for r, h in (("x", 4), ("y", 1))]  # fmt: skip
    assert [pair(row)[0][0][1] for row in read(tmp_path, *scored)] == ["s", "t"]


def test_a_prompt_that_is_one_of_the_conversations_turns_is_not_said_twice(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    row = {
        "prompt": "p",
        "chosen": [system, *turns("p", "r", "q", "x")],
        "rejected": [system, *turns("p", "r", "q", "y")],
    }
    (found,) = read(tmp_path, row)
    assert pair(found)[0] == [("system", "s"), ("user", "p"), ("assistant", "r"), ("user", "q")]
    (other,) = read(tmp_path, row | {"prompt": "another"})
    assert [problem.check for problem in other.problems] == ["prompts_agree"]


def test_help_steers_prompts_of_several_turns_come_apart(tmp_path: Path) -> None:
    asked = "p\n\n<extra_id_1>Assistant\nr\n\n<extra_id_1>User\nq"
    found = read(tmp_path, *({"prompt": asked, "response": r, "helpfulness": h} for r, h in (("y", 0), ("x", 3))))
    assert pair(found[0]) == ([("user", "p"), ("assistant", "r"), ("user", "q")], "x", "y")


def test_ultra_feedbacks_two_scores_are_never_compared_with_each_other(tmp_path: Path) -> None:
    scores = [("x", 4.5, 5.0), ("y", None, 8.0), ("z", 3.0, 9.0)]
    names = ("response", "fine-grained_score", "overall_score")
    completions = [dict(zip(names, each, strict=True)) for each in scores]
    (found,) = read(tmp_path, {"instruction": "q", "completions": completions})
    assert pair(found)[1:] == ("x", "z")


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        ({"margin": -3}, "votes_valid", "`margin` is -3"),
        ({"score_chosen": 2, "score_rejected": 7.5}, "votes_valid", "score_chosen - score_rejected is -5.5"),
        ({"prompt": [{"role": "user", "content": "q", "tool_calls": [{"id": 1}]}]}, "turns_valid", "tool_calls"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "fields_present", "'image'"),
        ({"system": 3}, "fields_present", "`system` is a number"),
        ({"history": "before"}, "fields_present", "`history` is not a list"),
    ],
)
def test_what_a_pair_says_and_cannot_be_learned_is_never_left_out_silently(tmp_path, change, check, said) -> None:
    (found,) = read(tmp_path, OUR_OWN["strings"] | change)
    assert [problem.check for problem in found.problems] == [check] and said in found.problems[0].text


def test_numbers_beside_responses_are_not_passed_over_as_if_these_were_in_order(tmp_path: Path) -> None:
    row = {"prompt": "q", "responses": ["y", "x"], "ratings": [1, 9]}
    (found,) = read(tmp_path, row)
    assert "--set data.columns.scores=ratings" in found.problems[0].text
    (mapped,) = read(tmp_path, row, columns={"scores": "ratings"})
    assert pair(mapped) == PAIR and mapped.item is not None and mapped.item["margin"] == 8
    assert read(tmp_path, row, columns={"scores": "ratings"}, score={"threshold": 8})[0].problems[0].check == "decided"
    assert pair(read(tmp_path, row, columns={"ranks": "ratings"})[0]) == (PAIR[0], "y", "x")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("best", 1, "write `ranks`"),
        ("preferred_index", "1.0", "write `ranks`"),
        ("winner", "B", "write `ranks`"),
        ("chosen", "x", "write `ranks`"),
        ("ratings", ["1", "9"], "--set data.columns.scores=ratings"),
        ("ratings", "[1, 9]", "--set data.columns.scores=ratings"),
        ("annotations", [{"score": 1, "why": "short"}, {"score": 9, "why": "kind"}], "write one of them"),
    ],
)
def test_responses_whose_best_one_another_field_names_are_not_read_as_if_the_first_were_best(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    (found,) = read(tmp_path, {"prompt": "q", "responses": ["y", "x"], field: value})
    assert [problem.check for problem in found.problems] == ["fields_present"] and said in found.problems[0].text
    harmless = {"models": ["m", "n"], "label": "billing", "best_of": "four drafts", "choice": None}
    assert pair(read(tmp_path, {"prompt": "q", "responses": ["x", "y"], **harmless})[0]) == PAIR


@pytest.mark.parametrize("names", ["score_chosen", "chosen_score", "rating_chosen", "chosen-rating", "chosen_reward"])
@pytest.mark.parametrize("asked", ["prompt", "question"])
def test_scores_of_the_two_responses_under_any_of_their_names_are_the_margin_or_contradict_the_pair(
    tmp_path: Path, names: str, asked: str
) -> None:
    other, row = names.replace("chosen", "rejected"), {asked: "q", "chosen": "x", "rejected": "y"}
    right, wrong = read(tmp_path, row | {names: 4.5, other: 3}, row | {names: 3, other: 4})
    assert pair(right) == PAIR and right.item is not None and right.item["margin"] == 1.5
    assert [problem.check for problem in wrong.problems] == ["votes_valid"]
    assert reading_of(tmp_path / "rows.jsonl", DataConfig()).ignored == []


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": "q", "chosen": "x", "rejected": "y", "score_chosen": 4, "score_rejected": "4.0"}, {}),
        ({"question": "q", "chosen": "x", "rejected": "y", "chosen-rating": 4.0, "rejected-rating": 4}, {}),
        ({"chosen": turns("q", "x"), "rejected": turns("q", "y"), "rating_chosen": 1, "rating_rejected": 1}, {}),
        ({"messages": turns("q", "x"), "rejected_response": "y", "chosen_score": 2, "rejected_score": 2}, {}),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "chosen_avg_rating": 2, "rejected_avg_rating": 2.0}, {}),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "rating": [9, 9.0]}, {}),
        ({"chosen": turns("q", "x"), "rejected": turns("q", "y"), "scores": "[3, 3]"}, {}),
        ({"prompt": "q", "chosen": "x", "rejected": "y", "margin": 0}, {}),
        ({"prompt": "q", "responses": ["x", "y"], "scores": [1, 1.0]}, {}),
        ({"prompt": "q", "completions": ["x", "y"], "ranks": ["1", 1]}, {}),
        ({"instruction": "q", "completions": [{"response": "x", "overall_score": 4},
                                              {"response": "y", "overall_score": "4.0"}]}, {}),
        ({"prompt": "q", "response_1": "x", "response_2": "y", "preference_strength": 0}, {}),
        ({"history": "q", "human_ref_A": "x", "human_ref_B": "y", "labels": 1, "score_A": 3, "score_B": 3.0}, {}),
        ({"question": "q", "answer_0": "x", "answer_1": "y", "score_0": 0, "score_1": "0"}, {}),
        ({"prompt": "q", "response_a": "x", "response_b": "y", "winner": "Draw"}, {}),
    ],
)  # fmt: skip
def test_equal_scores_are_a_tie_in_every_format(tmp_path: Path, row: dict[str, Any], options: dict[str, Any]) -> None:
    (found,) = read(tmp_path, row, **options)
    assert [problem.check for problem in found.problems] == ["decided"] and "tie" in found.problems[0].text


@pytest.mark.parametrize("missing", [None, "nan", "N/A"])
@pytest.mark.parametrize("names", ["score_chosen", "chosen-rating"])
def test_a_missing_score_is_no_score_however_it_is_written(tmp_path: Path, names: str, missing: object) -> None:
    row = {"prompt": "q", "chosen": "x", "rejected": "y", names: missing, names.replace("chosen", "rejected"): 6.0}
    (found,) = read(tmp_path, row)
    assert pair(found) == PAIR and found.item is not None and found.item["margin"] is None


def test_a_record_with_drafts_alone_has_no_votes_and_the_drafts_are_told(tmp_path: Path) -> None:
    row = {"prompt": "q", "response_a": "x", "response_b": "y", "best.responses": ["response_a"],
           "best.responses.users": ["u"], "best.responses.status": ["draft"]}  # fmt: skip
    (found,) = read(tmp_path, row)
    assert [tuple(problem) for problem in found.problems] == [("votes_valid", "no annotator has submitted a vote")]
    path = tmp_path / "rows.jsonl"
    assert "1 vote of Argilla's records are not submitted" in str(reading_of(path, DataConfig()).as_json(path)["hint"])


def test_a_record_that_answers_two_questions_is_refused(tmp_path: Path) -> None:
    asked = {f"{name}.responses{part}": [value] for name in ("helpful", "safe")
             for part, value in (("", "response_a"), (".users", "u"), (".status", "submitted"))}  # fmt: skip
    (found,) = read(tmp_path, {"prompt": "q", "response_a": "x", "response_b": "y", **asked})
    assert "helpful.responses and safe.responses answer several questions" in found.problems[0].text
    one = {name: value for name, value in asked.items() if not name.startswith("safe")}
    (found,) = read(tmp_path, {"prompt": "q", "response_a": "x", "response_b": "y", **one})
    assert pair(found) == PAIR


@pytest.mark.parametrize("annotators", [("ann", "bob"), (17, 23)])
def test_annotators_names_beside_a_label_are_no_votes(tmp_path: Path, annotators: tuple[object, object]) -> None:
    row = {"prompt": "q", "response_1": "x", "response_2": "y", "label": "a"}
    (found,) = read(tmp_path, row | dict(zip(("annotator_1", "annotator_2"), annotators, strict=True)))
    assert pair(found) == PAIR and found.ballot is None
    (found,) = read(tmp_path, row | {"annotator_1": "b", "annotator_2": "b"})
    assert found.ballot == Ballot(0, 2, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": turns("e\u0301"), "chosen": turns("\u00e9", "x"), "rejected": turns("\u00e9", "y")},
        {"conversation_a": turns("e\u0301", "x"), "conversation_b": turns("\u00e9", "y"), "winner": "model_a"},
    ],
)  # fmt: skip
def test_prompts_that_look_the_same_are_one_prompt(tmp_path: Path, row: dict[str, Any]) -> None:
    (found,) = read(tmp_path, row)
    assert not found.problems and found.item is not None
    assert (found.item["chosen"], found.item["rejected"]) == ("x", "y")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "q", "answers": [{"answer": "x", "rank": 1}, {"answer": "y", "rank": 2, "reasoning_content": "z"}]},
         "answers[1].reasoning_content"),
        ({"instruction": "q", "completions": [{"response": "x", "overall_score": 4, "reasoning_content": "z"},
                                              {"response": "y", "overall_score": 1}]},
         "completions[0].reasoning_content"),
        ({"prompt": [{"role": "user", "content": "q", "images": ["a"]}], "a": "x", "b": "y", "label": "a"},
         "prompt[0].images"),
    ],
)  # fmt: skip
def test_a_part_inside_a_list_is_refused_by_its_place(tmp_path: Path, row: dict[str, Any], field: str) -> None:
    (found,) = read(tmp_path, row)
    assert [problem.check for problem in found.problems] == ["turns_valid"] and f"`{field}`" in found.problems[0].text


def test_look_alike_texts_are_duplicates_and_one_pair_of_votes(job: Any, tmp_path: Path) -> None:
    one, other = "Für Änderungen: é", "Fu\u0308r A\u0308nderungen: e\u0301"
    rows = [{"prompt": f"q {i}", "chosen": one, "rejected": "n"} for i in range(40)]
    rows += [{"prompt": "q 3", "chosen": other, "rejected": "n\u200b"}]
    _, checks, _ = judged(job, tmp_path, rows)
    assert checks["unique"]["row_numbers"] == [41]
    votes = [{"prompt": "q", "a": a, "b": "n", "annotator": who, "label": "a"} for a, who in ((one, "u"), (other, "v"))]
    (found,) = read(tmp_path, *votes)
    assert found.ballot == Ballot(2, 0, 0)


def test_placeholders_are_a_finding_with_their_rows(job: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(40)]
    rows[3]["rejected"], rows[7]["chosen"] = "nan", '{"error": {"message": "Rate limit"}}'
    _, checks, report = judged(job, tmp_path, rows)
    assert checks["no_placeholder"]["row_numbers"] == [4, 8] and report["pairs"] == 38


@pytest.mark.parametrize("asked", ["prompt", "question"])
@pytest.mark.parametrize("field", ["status", "winner"])
def test_a_pair_that_says_it_is_a_tie_is_not_learned_as_a_decision(tmp_path: Path, field: str, asked: str) -> None:
    row = {asked: "q", "chosen": "x", "rejected": "y"}
    tie, swapped = read(tmp_path, row | {field: "tie"}, row | {field: "swapped"})
    assert [tuple(problem) for problem in tie.problems] == [("decided", "tie")] and tie.lead == 0
    assert pair(swapped) == PAIR and reading_of(tmp_path / "rows.jsonl", DataConfig()).ignored == []
    write_rows(tmp_path / "rows.jsonl", [row | {field: "done"}])
    assert reading_of(tmp_path / "rows.jsonl", DataConfig()).ignored == [field]


MARGINS = {
    "web-gpt": 2,
    "ultra-feedback": 1.5,
    "ultra-feedback, an aspect": 2,
    "help-steer preference": 2,
    "help-steer 3": 1,
    "shp": 6,
}


@pytest.mark.parametrize("name", MARGINS)
def test_a_difference_of_scores_is_the_margin_and_one_up_to_the_threshold_makes_no_pair(tmp_path, name) -> None:
    row, options = SHAPED[name]
    score = options.get("score", {})
    (kept,) = read(tmp_path, row, score=score | {"threshold": MARGINS[name] - 0.5})
    (out,) = read(tmp_path, row, score=score | {"threshold": MARGINS[name]})
    assert kept.item is not None and kept.item["margin"] == MARGINS[name]
    (problem,) = out.problems
    assert (
        problem.check == "decided" and f"{MARGINS[name]:g}" in problem.text and "data.score.threshold" in problem.text
    )


def test_rows_of_one_scored_response_each_become_the_pairs_of_their_prompt(tmp_path: Path) -> None:
    scored = [("q", "x", 4), ("p", "only", 3), ("q", "y", 1), ("q", "z", 4)]
    rows = [{"prompt": p, "response": r, "helpfulness": s, "verbosity": 5 - s} for p, r, s in scored]
    found = read(tmp_path, *rows)
    assert [(*pair(row), row.item["margin"], row.item["weight"]) for row in found[:2]] == [  # type: ignore[index]
        (*PAIR, 3, 0.5), ([("user", "q")], "z", "y", 3, 0.5),
    ]  # fmt: skip
    assert (found[0].number, found[0].others) == (1, (3, 4))
    assert [(row.number, row.problems[0].check) for row in found[2:]] == [(2, "decided")]
    assert pair(read(tmp_path, *rows, score={"name": "verbosity"})[0])[1:] == ("y", "x")
    assert len(read(tmp_path, *rows, score={"name": "verbosity", "threshold": 3})[0].problems) == 1


def test_fine_grained_feedback_gives_a_pair_for_each_two_predictions_that_differ(tmp_path: Path) -> None:
    row = {"question": "q", "passages": [["Title", "One.", "Two."]], "preference": [1, 2, 0, 0, 2, 1],
           **{f"prediction {n}": f"p{n}" for n in range(1, 5)}}  # fmt: skip
    found = [pair(each) for each in read(tmp_path, row)]
    assert [each[1:] for each in found] == [("p1", "p2"), ("p3", "p1"), ("p4", "p2"), ("p3", "p4")]
    assert found[0][0] == [("user", "q\n\nTitle One. Two.")]
    (bad,) = read(tmp_path, row | {"preference": [1, 2]})
    assert bad.problems[0].check == "votes_valid"


def test_votes_of_judges_on_one_pair_are_gathered_and_the_second_turn_is_one_of_two_responses(tmp_path: Path) -> None:
    base = {"model_a": "m", "model_b": "n", "conversation_a": turns("q", "x", "more", "x2"),
            "conversation_b": turns("q", "y", "more", "y2")}  # fmt: skip
    swapped = {"model_a": "n", "model_b": "m", "conversation_a": base["conversation_b"],
               "conversation_b": base["conversation_a"], "turn": 1, "judge": "ben", "winner": "model_b"}  # fmt: skip
    found = read(tmp_path, base | {"turn": 1, "judge": "ann", "winner": "model_a"}, swapped,
                 base | {"turn": 1, "judge": "cy", "winner": "tie"},
                 base | {"turn": 2, "judge": "ann", "winner": "model_a"})  # fmt: skip
    by_number = {row.number: row for row in found}
    assert sorted(by_number) == [1, 4] and pair(by_number[1]) == PAIR
    assert (by_number[1].ballot, by_number[1].models) == (Ballot(2, 0, 1), ("m", "n"))
    assert [problem.check for problem in by_number[4].problems] == ["prompts_agree"]


@pytest.mark.parametrize("name", ["llmbar", "panda-lm", "alpaca-eval", "truth", "columns of votes"])
def test_numbers_are_refused_with_the_option_that_says_what_they_mean(tmp_path: Path, name: str) -> None:
    row, options = SHAPED[name]
    found = read(tmp_path, row, **{key: value for key, value in options.items() if key != "label_values"})
    texts = [problem.text for each in found for problem in each.problems]
    assert any("say what others mean with data.label_values" in text for text in texts), texts


def test_a_number_that_pandas_wrote_with_a_point_has_the_meaning_that_its_label_was_given(tmp_path: Path) -> None:
    """One missing label makes pandas write 1.0 for 1, and the message advised a value that did not match either."""
    path = tmp_path / "votes.csv"
    path.write_text("prompt,response_1,response_2,label\nq,x,y,1.0\nq2,y2,x2,2.0\nq3,x,y,\n")
    for values in ({1: "a", 2: "b"}, {1.0: "a", 2.0: "b"}, {"1.0": "a", "2.0": "b"}):
        rows = list(judged_rows(RowSource.named("preferences", path, DataConfig(label_values=values)), 1000))
        assert pair(rows[0]) == PAIR and pair(rows[1])[1:] == ("x2", "y2")
        assert [problem.check for problem in rows[2].problems] == ["votes_valid"]


@pytest.mark.parametrize(
    ("row", "check"),
    [
        ({"prompt": "another row", "chosen": "x"}, "fields_present"),
        (SHAPED["shp"][0] | {"labels": 1}, "votes_valid"),
        (SHAPED["shp"][0] | {"score_A": 9, "labels": None}, "decided"),
        (SHAPED["arena"][0] | {"turn": 2}, "turns_valid"),
        (SHAPED["arena, a table"][0] | {"winner_tie": 1}, "votes_valid"),
        (SHAPED["arena, a table"][0] | {"response_a": '["y", "more"]'}, "turns_valid"),
        (SHAPED["llama-factory"][0] | {"chosen": USER}, "turns_valid"),
        (SHAPED["openai"][0] | {"input": {"messages": turns("q"), "tools": [{"type": "function"}]}}, "turns_valid"),
        (SHAPED["openai"][0] | {"input": {}}, "fields_present"),
        (SHAPED["llama-factory, alpaca"][0] | {"instruction": 3}, "fields_present"),
        (SHAPED["help-steer preference"][0] | {"preference_strength": None}, "fields_present"),
        (SHAPED["ultra-feedback"][0] | {"completions": [{"response": "x", "overall_score": "high"}]}, "fields_present"),
    ],
)
def test_what_a_public_row_lacks_or_contradicts_keeps_it_out_under_the_fitting_check(tmp_path, row, check) -> None:
    good = [next((data for data, _ in SHAPED.values() if data.keys() == row.keys()), SHAPED["shp"][0])] * 2
    found = read(tmp_path, *good, row)
    assert [problem.check for problem in found[-1].problems] == [check] and found[-1].data


def test_a_list_of_columns_is_for_votes_alone_and_a_missing_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only `votes` takes several columns"):
        DataConfig(columns={"chosen": ["x", "y"]})
    with pytest.raises(ValueError, match="label_values"):
        DataConfig(label_values={1: "first"})
    row, options = SHAPED["columns of votes"]
    write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match="names the column 'di'"):
        config = DataConfig(**options | {"columns": {"votes": ["ann", "di"]}})
        list(judged_rows(RowSource.named("preferences", tmp_path / "rows.jsonl", config), 1000))


def arena(votes: int) -> list[dict[str, Any]]:
    """Votes on pairs of three models, of which `strong` wins 8 in 10 and `weak` 2 in 10, by two judges."""
    rows = []
    for i in range(votes):
        a, b, wins = (("strong", "weak", 8), ("strong", "fair", 7), ("fair", "weak", 7))[i % 3]
        winner = "model_a" if i // 3 % 10 < wins else "model_b"
        rows += [
            {"model_a": a, "model_b": b, "conversation_a": turns(f"question {i}", f"{a} says {i}"), "judge": judge,
             "conversation_b": turns(f"question {i}", f"{b} says {i}"), "winner": winner, "turn": 1}
            for judge in ("ann", "ben")
        ]  # fmt: skip
    rows[0]["winner"] = "tie"
    return rows


def test_votes_that_name_models_rank_them_and_their_judges_are_compared(job: Any, tmp_path: Path) -> None:
    name, _, report = judged(job, tmp_path, arena(150))
    assert name == "MT-Bench and Chatbot Arena votes" and (report["pairs"], report["rows"]) == (149, 300)
    assert [row["model"] for row in report["models"]] == ["strong", "fair", "weak"]
    assert [row["votes"] for row in report["models"]] == [200, 200, 200]
    strong, fair, weak = report["models"]
    assert strong["interval"] == [0, 0] and -1.5 < fair["strength"] < -0.4, "relative to the first of most votes"
    assert weak["interval"][0] < weak["strength"] < weak["interval"][1] < fair["strength"]
    assert report["raw_agreement"] == pytest.approx(149 / 150)
    assert report["raw_agreement_interval"][0] < 149 / 150
    (pair,) = report["pairwise"]
    assert (pair["annotators"], pair["rows"], pair["agreement"]) == (["ann", "ben"], 150, pytest.approx(149 / 150))
    assert 0.97 < pair["kappa"] < 0.99 and report["languages"]["en"] > 0.5
    assert sum(report["languages"].values()) == pytest.approx(1)


def test_a_label_without_an_annotator_counts_as_one_vote_for_its_models(job: Any, tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "judge"} for row in arena(150)[1::2]]
    _, _, report = judged(job, tmp_path, rows)
    assert report["kappa"] is None and [row["votes"] for row in report["models"]] == [100, 100, 100]
    assert [row["model"] for row in report["models"]] == ["strong", "fair", "weak"]


def test_numbers_that_nobody_explained_end_with_the_option_that_explains_them(job: Any, tmp_path: Path) -> None:
    with pytest.raises(NothingValid, match=r"what their values mean with data\.label_values") as raised:
        judged(job, tmp_path, [SHAPED["llmbar"][0] | {"input": f"q {i}"} for i in range(5)])
    assert not raised.value.report["passed"]


def test_a_model_that_won_everything_has_no_strength_and_the_reason_is_said(job: Any, tmp_path: Path) -> None:
    rows = [row | {"winner": "model_a"} for row in arena(30)]
    _, _, report = judged(job, tmp_path, rows)
    assert {row["strength"] for row in report["models"]} == {None}
    assert "one side won every comparison" in report["inseparable"] and "strong" in report["inseparable"]


def test_the_languages_of_a_file_are_shown(job: Any, tmp_path: Path) -> None:
    english = "The parcel that you ordered last week is late, and we are sorry for the delay."
    german = "Das Paket, das Sie letzte Woche bestellt haben, kommt leider erst am Dienstag bei Ihnen an."
    rows = [{"prompt": f"q {i}", "response": f"{german if i < 10 else english} {i}"} for i in range(40)]
    _, _, report = judged(job, tmp_path, rows)
    assert report["languages"] == {"en": 0.75, "de": 0.25}


def test_one_row_with_a_field_of_a_public_set_does_not_decide_how_the_others_are_read(job: Any, tmp_path: Path) -> None:
    """A single `question` in place of `prompt` made LLaMA-Factory pairs of the file, and all its good rows bad."""
    rows: list[dict[str, Any]] = [{"prompt": f"q {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)]
    rows.insert(0, {"question": "Can I pay later?", "chosen": "Yes, within 30 days.", "rejected": "No."})
    name, checks, report = judged(job, tmp_path, rows)
    assert (name, report["pairs"]) == ("strings", 20)
    assert checks["fields_present"]["row_numbers"] == [1]
    assert report["kept_out"] == [{"file": "preferences", "row": 1, "reasons": ["`prompt` is missing"]}]


def test_rows_of_a_public_set_are_read_as_such_beside_one_of_our_own(job: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": f"q {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)
    ]
    rows.insert(0, {"prompt": "Can I pay later?", "chosen": "Yes, within 30 days.", "rejected": "No."})
    name, checks, _ = judged(job, tmp_path, rows)
    assert name == "LLaMA-Factory pairs" and checks["fields_present"]["row_numbers"] == [1]


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"prompt": "a", "chosen": "b", "rejectd": "c"}, {"rejected": "rejectd"}),
        ({"prompt": "a", "chosenn": "b", "rejected": "c"}, {"chosen": "chosenn"}),
        ({"prompt_": "a", "chosen": "b", "rejected": "c"}, {"prompt": "prompt_"}),
        ({"prompt": "a", "chosen": "b", "other": "c"}, {}),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "prompts": "d"}, {}),
    ],
)
def test_a_misspelt_field_of_a_pair_is_named_with_the_option_that_maps_it(
    row: dict[str, str], names: dict[str, str], tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", [row])
    reading = reading_of(tmp_path / "rows.jsonl", DataConfig())
    assert reading.names == names and set(names.values()) <= set(reading.ignored)
    told = reading.as_json(tmp_path / "rows.jsonl")["hint"]
    assert all(f"--set 'data.columns={{{ours}: {own}}}'" in str(told) for ours, own in names.items())


TOLD: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "pos and neg": ({"prompt": "q", "pos_resp": "x", "neg_resp": "y", "pos_type": "t"}, {}, PAIR),
    "annotators as columns": ({"prompt": "q", "response_a": "y", "response_b": "x", "rater1": "b", "rater2": "b"}, {},
                              PAIR),
    "label studio's table": ({"id": 1, "prompt": "q", "answer1": "x", "answer2": "y", "comparison": "left"},
                             {"label_values": {"left": "a", "right": "b"}}, PAIR),
    "a trajectory": ({"trajectory": [{"from": "user", "value": "q"}], "chosen": "x", "rejected": "y"}, {}, PAIR),
    "a judge's own prompt": ({"orig_instruction": "q", "orig_response_A": "x", "orig_response_B": "y",
                              "orig_preference": "A", "instruction": "Judge.", "output": "A"}, {}, PAIR),
    "generations": ({"prompt": "q", "generations": ["y", "x"], "ratings": [1, 9]}, {}, PAIR),
    "a worker": ({"prompt": "q", "response_a": "x", "response_b": "y", "preference": "A", "worker_id": "w"}, {},
                 (("w", 0),)),
    "a worker of votes": ({"prompt": "q", "a": "x", "b": "y", "label": "A", "worker": "w"}, {}, (("w", 0),)),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_the_hint_for_columns_of_other_names_makes_the_pair_that_they_mean(tmp_path: Path, name: str) -> None:
    row, options, meant = TOLD[name]
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row])
    reading = reading_of(path, DataConfig(**options))
    told = re.search(r"--set '?data\.columns([.\w]*)=([^']*?)'?\.$", str(reading.as_json(path)["hint"]))
    assert told is not None and reading.mistaken == (reading.kind != "preferences")
    value = yaml.safe_load(told[2])
    columns = {told[1].removeprefix("."): value} if told[1] else value
    (found,) = judged_rows(RowSource.named("preferences", path, DataConfig(columns=columns, **options)), 1000)
    assert (pair(found) if meant == PAIR else found.votes) == meant


@pytest.mark.parametrize(("name", "values"), [("feedback", ("positive", "negative")), ("is_harmful", (False, True))])
def test_a_column_that_judges_demonstrations_is_shown_and_the_hint_keeps_the_bad_ones_out(
    tmp_path: Path, name: str, values: tuple[object, object]
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"q {value}", "response": "x", name: value, "topic": "parcels"} for value in values]
    write_rows(path, rows)
    assert f"data.demonstration_columns.label={name}," in str(reading_of(path, DataConfig()).as_json(path)["hint"])
    meanings = dict(zip(values, ("desirable", "undesirable"), strict=True))
    config = DataConfig(demonstration_columns={"label": name}, label_values=meanings)
    found = judged_rows(RowSource.named("demonstrations", path, config), 1000)
    assert [[problem.check for problem in row.problems] for row in found] == [[], ["desirable"]]
    write_rows(path, [row | {name: "parcels"} for row in rows])
    assert reading_of(path, DataConfig()).as_json(path)["hint"] is None


@pytest.mark.parametrize("row", [{"option_a": "1", "option_b": "2"}, {"name_1": "ann", "name_2": "ben"}])
def test_prompts_with_columns_in_twos_that_are_not_responses_stay_prompts(tmp_path: Path, row: dict[str, str]) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "q"} | row])
    reading = reading_of(tmp_path / "rows.jsonl", DataConfig())
    assert (reading.kind, reading.mistaken, reading.names) == ("prompts", False, {})


def test_responses_that_repeat_their_prompt_are_shown(tmp_path: Path) -> None:
    """Reward models that score one text are given data of this kind, and the prompt would stand in them twice."""
    path, asked = tmp_path / "rows.jsonl", "Write a line about parcels."
    rows = [
        {"prompt": f"{asked} {n}", "chosen": f"{asked} {n}\nA good one.", "rejected": f"{asked} {n} No."}
        for n in range(3)
    ]
    for changed, doubled in (({}, True), ({"rejected": "No."}, False), ({"prompt": "Write"}, False)):
        write_rows(path, [row | changed for row in rows])
        hint = str(reading_of(path, DataConfig()).as_json(path)["hint"])
        assert ("Both responses begin with the text of the prompt" in hint) == doubled
