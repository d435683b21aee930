"""Files in the shapes of public data sets, made here: what the contract reads from them, and what it keeps out."""

from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import write_rows
from components.data.config import DataConfig
from components.data.rows import Ballot
from data_contracts.check import check
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.reading_report import reading_of


def judged(job: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[str, dict[str, Any], Any]:
    """What a file of `rows` is read as, its checks by name, and the report."""
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    reading = reading_of(path, job(**options).data)
    given = job(**options, **{reading.kind: str(path)})
    report = check(given, {reading.kind: path}, folder / "scratch", folder / "out", lambda *read: None, tokenized=False)
    return reading.format, {found["name"]: found for found in report["checks"]}, report


def test_the_undesirable_rows_of_kto_data_are_counted_and_kept(job: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"r {i}", "label": i % 3 > 0} for i in range(30)]
    name, checks, report = judged(job, tmp_path, rows)
    assert (name, report["rows"], report["quarantined"], report["passed"]) == ("KTO", 30, 0, True)
    assert report["single_labels"] == {"desirable": 20, "undesirable": 10}
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


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def test_look_alike_texts_are_duplicates_and_one_pair_of_votes(job: Any, tmp_path: Path) -> None:
    one, other = "Für Änderungen: é", "Fu\u0308r A\u0308nderungen: e\u0301"
    rows = [{"prompt": f"q {i}", "chosen": one, "rejected": "n"} for i in range(40)]
    rows += [{"prompt": "q 3", "chosen": other, "rejected": "n\u200b"}]
    _, checks, _ = judged(job, tmp_path, rows)
    assert checks["unique"]["row_numbers"] == [41]
    votes = [{"prompt": "q", "a": a, "b": "n", "annotator": who, "label": "a"} for a, who in ((one, "u"), (other, "v"))]
    write_rows(tmp_path / "rows.jsonl", votes)
    (found,) = judged_rows(RowSource.named("preferences", tmp_path / "rows.jsonl", DataConfig()), 1000)
    assert found.ballot == Ballot(2, 0, 0)


def test_a_number_that_pandas_wrote_with_a_point_has_the_meaning_that_its_label_was_given(tmp_path: Path) -> None:
    """One missing label makes pandas write 1.0 for 1, and the message advised a value that did not match either."""
    path = tmp_path / "votes.csv"
    path.write_text("prompt,response_1,response_2,label\nq,x,y,1.0\nq2,y2,x2,2.0\nq3,x,y,\n")
    for values in ({1: "a", 2: "b"}, {1.0: "a", 2.0: "b"}, {"1.0": "a", "2.0": "b"}):
        rows = list(judged_rows(RowSource.named("preferences", path, DataConfig(label_values=values)), 1000))
        assert [row.item and row.item["chosen"] for row in rows[:2]] == ["x", "x2"]
        assert [problem.check for problem in rows[2].problems] == ["votes_valid"]


def test_a_list_of_columns_is_for_votes_alone() -> None:
    with pytest.raises(ValueError, match="only `votes` takes several columns"):
        DataConfig(columns={"chosen": ["x", "y"]})
    with pytest.raises(ValueError, match="label_values"):
        DataConfig(label_values={1: "first"})


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
    rows = [{"input": f"q {i}", "output_1": "y", "output_2": "x", "label": 2} for i in range(5)]
    _, _, report = judged(job, tmp_path, rows)
    assert not report["passed"] and "what their values mean with data.label_values" in report["reasons"][0]


def test_a_model_that_won_everything_has_no_strength_and_the_reason_is_said(job: Any, tmp_path: Path) -> None:
    rows = [row | {"winner": "model_a"} for row in arena(30)]
    _, _, report = judged(job, tmp_path, rows)
    assert {row["strength"] for row in report["models"]} == {None}
    assert "one side won every comparison" in report["inseparable"] and "strong" in report["inseparable"]


def test_votes_of_argilla_that_are_no_lists_keep_their_row_out(job: Any, tmp_path: Path) -> None:
    whole = {".responses": ["response_a"], ".responses.users": ["ann"], ".responses.status": ["submitted"]}
    rows = [
        {"prompt": f"q {i}", "response_a": f"x {i}", "response_b": f"y {i}"}
        | {f"preference{name}": 5 if i == 3 else value for name, value in whole.items()}
        for i in range(20)
    ]
    _, checks, report = judged(job, tmp_path, rows)
    assert (checks["votes_valid"]["row_numbers"], report["pairs"]) == ([4], 19)


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
    reason = "`prompt` is missing, expected text or a list of messages"
    assert report["kept_out"] == [{"file": "preferences", "row": 1, "reasons": [reason]}]


def test_rows_of_a_public_set_are_read_as_such_beside_one_of_our_own(job: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": f"q {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(20)
    ]
    rows.insert(0, {"prompt": "Can I pay later?", "chosen": "Yes, within 30 days.", "rejected": "No."})
    name, checks, _ = judged(job, tmp_path, rows)
    assert name == "LLaMA-Factory pairs" and checks["fields_present"]["row_numbers"] == [1]
