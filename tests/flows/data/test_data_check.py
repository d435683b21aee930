"""`tether data check` through the real command."""

import json
import os
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows, write_rows
from components.data.config import DataConfig
from components.human_eval.sheet import SheetRow, write_raters_files
from data_contracts.rows.reading_report import reading_of
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.data.data_check import own_entry

GOOD = [{"prompt": f"question {i}", "chosen": f"good {i} indeed", "rejected": f"bad {i}"} for i in range(40)]


def check(tether, folder: Path, *arguments: str):
    return tether("data", "check", *arguments, home=folder / "home", cwd=folder)


def test_a_bad_row_is_named_by_number_in_the_json_the_table_and_the_folder(tether, tether_here, tmp_path: Path) -> None:
    write_rows(tmp_path / "pairs.jsonl", [*GOOD[:7], GOOD[0] | {"chosen": " "}, *GOOD[7:]])
    done = check(tether, tmp_path, "pairs.jsonl", "--json", "--out", "found")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["pairs"], report["quarantined"]) == (41, 40, 1)
    found = {c["name"]: c for c in report["checks"]}
    assert found["texts_filled"]["row_numbers"] == [8] and found["texts_filled"]["rows"] == 1
    assert set(found["texts_filled"]) >= {"name", "severity", "rows", "row_numbers", "threshold", "value"}
    assert report["kappa"] is report["alpha"] is report["majority"] is None and report["longer_wins"] == 1
    assert "differ_truncated" not in found, "without a profile there is no tokenizer to ask"
    assert [row["row"] for row in read_rows(tmp_path / "found" / "quarantine.jsonl")] == [8]
    assert (tmp_path / "found" / "data_docs" / "index.html").is_file()
    shown = check(tether_here, tmp_path, "pairs.jsonl").stdout
    line = next(line for line in shown.splitlines() if "texts_filled" in line)
    assert line.split()[-1] == "8" and "The contract holds." in shown
    assert "texts_filled: No response and no prompt turn is empty, or holds nothing that a reader would" in shown
    assert "1 row quarantined:\n  row 8: empty response: chosen\n" in shown
    assert not (tmp_path / "home" / "runs").exists()


def test_a_contract_that_fails_ends_with_the_code_of_a_failed_gate_and_its_name(tether_here, tmp_path: Path) -> None:
    write_rows(tmp_path / "pairs.jsonl", [*GOOD[:30], *({**row, "chosen": row["rejected"]} for row in GOOD[30:])])
    done = check(tether_here, tmp_path, "pairs.jsonl")
    assert done.returncode == 3 and "The contract fails: responses_differ." in done.stdout
    assert "To allow a larger share of them, pass --set data.checks.CHECK.threshold=SHARE" in done.stdout
    write_rows(tmp_path / "many.jsonl", [{**row, "chosen": row["rejected"]} for row in GOOD[:12]] + GOOD[12:])
    shown = check(tether_here, tmp_path, "many.jsonl").stdout
    assert "12 rows quarantined:" in shown and "row 10: " in shown and "row 11: " not in shown
    assert "  and 2 more; `--out FOLDER` writes all of them with their reasons." in shown
    allowed = ("--set", "data.checks.responses_differ.threshold=0.5")
    assert check(tether_here, tmp_path, "pairs.jsonl", *allowed).returncode == 0


def test_votes_are_told_with_their_annotators_and_one_prompt_leaves_intervals_null(tether_here, tmp_path: Path) -> None:
    names = ("ann[/x]", "ben[bot]", "c\udcf6y")

    def row(i: int, *labels: str) -> dict[str, object]:
        votes = [{"annotator": name, "label": label} for name, label in zip(names, labels, strict=True)]
        return {"prompt": "Which?", "a": f"the one {i}", "b": f"other {i}", "votes": votes}

    def write(*rows: dict[str, object]) -> None:  # as ASCII: one name is no UTF-8
        (tmp_path / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows = [row(i, "a", "ab"[i % 2], "a") for i in range(9)]
    write(*rows)
    text = check(tether_here, tmp_path, "votes.jsonl", "--json").stdout
    report = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert report["kappa"] is not None and report["kappa_interval"] is None, "one prompt is one cluster"
    assert {a["annotator"]: a["votes"] for a in report["annotators"]} == {
        "ann[/x]": 9, "ben[bot]": 9, "c\\udcf6y": 9,
    }  # fmt: skip
    write(*rows, row(9, "a", "b", "equal"))
    shown = check(tether_here, tmp_path, "votes.jsonl", "--out", "found").stdout
    assert "3 annotators. Least in agreement with the" in shown and "Fleiss' kappa" in shown and "nan" not in shown
    assert "ann[/x]" in shown and "ben[bot]" in shown and "c\\udcf6y" in shown, "names are no markup"
    assert "Written to found: annotators.json, data_docs, quarantine.jsonl, review.jsonl" in shown
    assert "Most frequent answers: a 9, b 0, tie 0, none 1." in shown
    assert [r["row"] for r in read_rows(tmp_path / "found" / "review.jsonl")] == [10], "for experts"


VOTES = "prompt,response_a,response_b,annotator,choice\n" + "".join(
    f"question {n},good answer {n},bad {n},ann{k},{'ab'[k == 4]}\n" for n in range(40) for k in range(5)
)


def test_votes_under_other_names_are_pairs_once_they_are_mapped(tether_here, tmp_path) -> None:
    (tmp_path / "votes.csv").write_text(VOTES)
    done = check(tether_here, tmp_path, "votes.csv")
    assert done.returncode == 3, done.stdout
    assert "votes.csv: read as prompts." in done.stdout and "The contract fails" in done.stdout
    assert "not used: response_a, response_b, annotator, choice." in done.stdout
    report = json.loads(check(tether_here, tmp_path, "votes.csv", "--json").stdout)
    (read,) = report["read"]
    assert not report["passed"] and (read["source"], read["format"]) == ("prompts", "prompts")
    assert read["ignored"] == ["response_a", "response_b", "annotator", "choice"]
    setting = "data.columns={a: response_a, b: response_b, label: choice}"
    named = check(tether_here, tmp_path, "votes.csv", "--set", setting, "--json")
    report = json.loads(named.stdout)
    assert named.returncode == 0 and (report["rows"], report["pairs"]) == (200, 40)
    assert report["read"][0]["format"] == "single votes"


def test_a_column_that_the_users_suite_judges_is_not_listed_as_unused(tether_here, tmp_path: Path) -> None:
    write_rows(tmp_path / "pairs.jsonl", [row | {"rating": 3, "team": "north"} for row in GOOD])
    named = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "rating"}}
    (tmp_path / "mine.json").write_text(json.dumps({"expectations": [named]}))
    shown = check(tether_here, tmp_path, "pairs.jsonl", "--set", "data.suite=mine.json").stdout
    assert "Columns that are not used: team." in shown


def test_preferences_of_which_not_one_is_valid_fail_the_contract_and_name_their_rows(
    tether_here, tmp_path: Path
) -> None:
    write_rows(tmp_path / "pairs.jsonl", [row | {"chosen": ""} for row in GOOD])
    done = check(tether_here, tmp_path, "pairs.jsonl", "--json", "--out", "found")
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert (report["pairs"], report["quarantined"], report["passed"]) == (0, 40, False)
    assert "no valid preference pair in 40 rows. The most common reason: empty response" in report["reasons"][0]
    assert len(read_rows(tmp_path / "found" / "quarantine.jsonl")) == 40


def test_ratings_are_told_for_what_they_are_with_the_command_that_is_meant_for_them(
    tether_here, tmp_path: Path
) -> None:
    (tmp_path / "ratings.csv").write_text("item,stratum,prompt,sft,policy,policy_side,rating_1\nq1,x,p,s,t,a,policy\n")
    (tmp_path / "sheet.csv").write_text("item,prompt,response_a,response_b,rating_1\nq1,p,x,y,a\n")
    done = check(tether_here, tmp_path, "ratings.csv")
    assert done.returncode == 2 and "is the unblinded result of a rating" in done.stderr
    assert "tether people score" in done.stderr and "--html" in done.stderr
    done = check(tether_here, tmp_path, "sheet.csv")
    assert done.returncode == 2 and "tether people status RUN --sheet sheet.csv` checks it" in done.stderr
    for setting, said in (
        ("data.preferences=sheet.csv", "data.preferences: sheet.csv is a rating sheet"),
        ("data.prompts=sheet.csv", "data.prompts: sheet.csv is a rating sheet"),
        ("data.demonstrations=ratings.csv", "ratings.csv is the unblinded result"),
    ):
        done = tether_here("run", "tiny", "--set", setting, home=tmp_path / "home", cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and "people score" in done.stderr, done.stderr
    assert not (tmp_path / "home" / "runs").exists()


def test_names_out_of_a_file_reach_the_terminal_without_their_escape_sequences(
    tether, tether_here, tmp_path: Path
) -> None:
    rows = "".join(json.dumps({"prompt": f"q {n}", "\x1b[2J\udcff": 1}) + "\n" for n in range(9))
    name = os.fsdecode(b"r\xff.jsonl")
    (tmp_path / name).write_text(rows)
    (tmp_path / "none.jsonl").write_text('{"\\u001b[2J": 1}\n')
    done = check(tether, tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert r"not used: \x1b[2J\udcff." in done.stdout and r"r\udcff.jsonl: read as prompts." in done.stdout
    refused = check(tether_here, tmp_path, "none.jsonl")
    assert refused.returncode == 2 and r"\x1b[2J" in refused.stderr and "\x1b" not in refused.stderr + done.stdout


def test_a_message_names_at_most_twenty_of_a_files_columns(tether_here, tmp_path: Path) -> None:
    write_rows(tmp_path / "wide.jsonl", [{f"column {n}": n for n in range(5000)}])
    done = check(tether_here, tmp_path, "wide.jsonl")
    assert done.returncode == 2 and "and 4980 more" in done.stderr and len(done.stderr) < 2000


def test_a_profile_brings_its_tokenizer_and_lengths(tether_here, tmp_path: Path) -> None:
    long = " ".join(["indeed"] * 20)
    write_rows(tmp_path / "pairs.jsonl", [*GOOD, {"prompt": "q", "chosen": f"{long} a", "rejected": f"{long} b"}])
    done = check(tether_here, tmp_path, "pairs.jsonl", "--profile", "tiny", "--json")
    found = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert found["differ_truncated"]["row_numbers"] == [41], "tiny cuts responses to 10 tokens"


def test_models_without_a_strength_are_named_with_the_reason(tether_here, tmp_path: Path) -> None:
    sides = {"label": "a", "model_a": "m", "model_b": "n"}
    votes = [{"prompt": f"q {i}", "a": f"x {i}", "b": f"y {i}", **sides} for i in range(30)]
    write_rows(tmp_path / "votes.jsonl", votes)
    said = " ".join(check(tether_here, tmp_path, "votes.jsonl").stdout.split())
    assert "2 models are compared; their strengths cannot be estimated: one side won every comparison" in said


def test_demonstrations_alone_are_judged_as_such(tether_here, tmp_path: Path) -> None:
    write_rows(tmp_path / "taught.jsonl", [{"prompt": f"q {i}", "response": "r" * (i != 3)} for i in range(9)])
    report = json.loads(check(tether_here, tmp_path, "taught.jsonl", "--json").stdout)
    assert (report["rows"], report["pairs"], report["quarantined"]) == (9, 0, 1)
    assert {c["source"] for c in report["checks"]} == {"demonstrations"}
    assert next(c for c in report["checks"] if c["name"] == "texts_filled")["row_numbers"] == [4]


@pytest.mark.parametrize(
    ("row", "setting", "source"),
    [
        ({"prompt": "q", "good": "x", "bad": "y"}, "data.columns={chosen: good, rejected: bad}", "preferences"),
        ({"prompt": "q", "answer": "x"}, "data.demonstration_columns={response: answer}", "demonstrations"),
        ({"question": "q"}, "data.prompt_columns={prompt: question}", "prompts"),
        ({"prompt": "q", "response": "x"}, "data.columns={chosen: good, rejected: bad}", "demonstrations"),
    ],
)
def test_a_file_is_told_by_the_names_that_the_config_has_for_its_columns(
    tmp_path: Path, row: dict[str, str], setting: str, source: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{name: f"{text} {i}" for name, text in row.items()} for i in range(9)])
    data = load_config("demo", [parse_override(setting)]).data
    assert reading_of(tmp_path / "rows.jsonl", data).kind == source


def test_renamed_pairs_are_judged_as_pairs_and_a_column_they_lack_is_no_reason_to_call_them_prompts(
    tether_here, tmp_path: Path
) -> None:
    rows = [{"prompt": row["prompt"], "better": row["chosen"], "worse": row["rejected"]} for row in GOOD]
    write_rows(tmp_path / "renamed.jsonl", [*rows[:3], rows[3] | {"worse": " "}, *rows[4:]])
    names = ("--set", "data.columns={chosen: better, rejected: worse}")
    report = json.loads(check(tether_here, tmp_path, "renamed.jsonl", *names, "--json").stdout)
    assert (report["rows"], report["pairs"], report["quarantined"]) == (40, 39, 1)
    write_rows(tmp_path / "pairs.jsonl", GOOD)
    done = check(tether_here, tmp_path, "pairs.jsonl", *names)
    assert done.returncode == 2 and "data.columns names the column 'better', which" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl",), "there is no file"),
        (("other.jsonl",), "its rows are not preference pairs"),
        (("other.jsonl", "--out", "."), "already exists"),
        (("other.jsonl", "--set", "data.checks.texts_filled.severity=warn"), "can't be used"),
    ],
)
def test_the_users_mistakes_end_in_one_paragraph_and_code_2(tether_here, tmp_path: Path, arguments, said: str) -> None:
    write_rows(tmp_path / "other.jsonl", [{"colour": "red"}])
    done = check(tether_here, tmp_path, *arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_table_of_single_votes_is_counted_in_votes_so_that_few_bad_ones_fail_nothing(
    tether_here, tmp_path: Path
) -> None:
    """2 % of the votes are none: as shares of the pairs they would be 10 %, beyond `votes_valid`'s 5 %."""
    table = ["prompt,a,b,annotator,label"]
    for i in range(50):
        labels = "c" if i % 10 == 0 else "a", "a", "b", "tie" if i == 7 else "a", "b" if i == 7 else "a"
        table += [f"question {i},good {i} indeed,bad {i},ann {j},{label}" for j, label in enumerate(labels)]
    (tmp_path / "votes.csv").write_text("\n".join(table) + "\n")
    done = check(tether_here, tmp_path, "votes.csv", "--json", "--out", "found")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["rows"], report["pairs"], report["quarantined"]) == (250, 49, 5 + 5)
    found = {c["name"]: c for c in report["checks"]}
    assert (found["votes_valid"]["row_numbers"], found["votes_valid"]["value"]) == (
        [2 + 50 * n for n in range(5)],
        0.02,
    )
    assert found["decided"]["row_numbers"] == [37, 38, 39, 40, 41], "of pair 7, which is tied, every row"
    kept_out = [
        (row["row"], len(row["data"].get("votes", ()))) for row in read_rows(tmp_path / "found/quarantine.jsonl")
    ]
    assert sorted(kept_out) == [(2, 0), (37, 5), (52, 0), (102, 0), (152, 0), (202, 0)]


def test_three_peoples_labels_one_below_the_other_are_told_to_name_their_annotators(
    tether_here, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"question {n} of many", "a": f"one {n}", "b": f"two {n}"} for n in range(30)]
    labels = ("a", "b", "tie", "both_bad")
    rows = [pair | {"label": labels[(n + who) % 4]} for who in range(3) for n, pair in enumerate(pairs)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    told = check(tether_here, tmp_path, "pairs.jsonl").stdout
    assert (
        "rows contradict others on the same pair. If several people labelled, name them in a column `annotator`" in told
    )
    named = [row | {"annotator": f"ann {n // 30}"} for n, row in enumerate(rows)]
    write_rows(tmp_path / "named.jsonl", named)
    report = json.loads(check(tether_here, tmp_path, "named.jsonl", "--json").stdout)
    assert not any("contradict" in (read["hint"] or "") for read in report["read"])
    assert not any(each["name"] == "consistent" and each["rows"] for each in report["checks"])


def test_a_raters_own_file_with_its_instructions_is_a_sheet_wherever_it_is_named(tether_here, tmp_path: Path) -> None:
    row = SheetRow(2, "q0001-abcdef01", "[user]\nHi", "x", "y", ("",))
    write_raters_files(tmp_path, [row], 1, ["Read both.", "Ratings: a, b."])
    text = (tmp_path / "rater_1.csv").read_text(encoding="utf-8-sig")
    (tmp_path / "rater_1.csv").write_text(text.replace('"1",""', '"1","both_bad"'), encoding="utf-8-sig")
    with pytest.raises(UserError, match="is a rating sheet, not training data"):
        reading_of(tmp_path / "rater_1.csv", DataConfig())
    (tmp_path / "ratings.csv").write_text("item,stratum,prompt,sft,policy,policy_side,rating_1\nq1,x,p,s,t,a,policy\n")
    with pytest.raises(UserError, match=r"preferences\.jsonl beside it has the same votes as data"):
        reading_of(tmp_path / "ratings.csv", DataConfig())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("check", "pairs.jsonl", "--draft-suite", "none/suite.json"), "there is no folder"),
        (("check", "pairs.jsonl", "--draft-suite", "pairs.jsonl/suite.json"), "there is no folder"),
        (("label", "pairs.jsonl", "--judge", "http://127.0.0.1:9", "--model", "m", "--out", "pairs.jsonl"), "folder"),
        (("label", "pairs.jsonl", "--judge", "http://127.0.0.1:9", "--model", "m", "--out", "pairs.jsonl/x"), "folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_the_users_mistake_by_name(
    tether_here, tmp_path: Path, asked: tuple[str, ...], told: str
) -> None:
    write_rows(tmp_path / "pairs.jsonl", GOOD)
    done = tether_here("data", *asked, home=tmp_path / "home", cwd=tmp_path)
    assert done.returncode == 2 and told in done.stderr, done.stderr


def test_files_beside_the_data_that_hold_the_same_bytes_are_refused_as_a_run_refuses_them(
    tether_here, tmp_path: Path
) -> None:
    for name in ("pairs.jsonl", "a.jsonl", "copy.jsonl"):
        write_rows(tmp_path / name, GOOD if name == "pairs.jsonl" else [{"prompt": "q"}])
    for named in ("[a.jsonl, a.jsonl]", "[a.jsonl, copy.jsonl]"):
        asked = ("--set", f"data.decontaminate={named}")
        done = check(tether_here, tmp_path, "pairs.jsonl", *asked)
        assert done.returncode == 2 and "data.decontaminate: a.jsonl and " in done.stderr, named
        assert "hold the same bytes" in done.stderr
        run = tether_here("run", "tiny", *asked, "--set", "data.preferences=pairs.jsonl", home=tmp_path, cwd=tmp_path)
        assert run.returncode == 2 and run.stderr == done.stderr


def test_a_check_of_one_file_applies_its_own_cap_of_a_profile_and_refuses_what_names_no_file(
    tether_here, tmp_path: Path
) -> None:
    write_rows(tmp_path / "a.jsonl", GOOD)
    several = ("--set", "data.preferences=[a.jsonl, b.jsonl]", "--set")
    own = check(tether_here, tmp_path, "a.jsonl", "--json", *several, "data.sources={a.jsonl: {max_pairs: 12}, b: {}}")
    assert own.returncode == 0 and json.loads(own.stdout)["pairs"] == 12
    config = load_config("tiny", [parse_override("data.sources={preferences: {max_pairs: 12}}")])
    assert own_entry(config, tmp_path / "a.jsonl")["preferences"].max_pairs == 12
    wrong = load_config("tiny", [parse_override("data.sources={preferences: {}, b.jsonl: {weight: 2}}")])
    with pytest.raises(UserError, match=r"names 'b\.jsonl'.*the only one is called preferences"):
        own_entry(wrong, tmp_path / "a.jsonl")


def test_fields_that_are_not_read_are_named_with_their_rows(tether_here, tmp_path: Path) -> None:
    def row(i: int) -> dict[str, object]:
        asked = [{"role": "user", "content": f"question {i}"} | ({"name": "ann"} if i < 12 else {})]
        answers = ({"role": "assistant", "content": text} for text in (f"good {i}", f"bad {i}"))
        return dict(zip(("prompt", "chosen", "rejected", "topic"), (asked, *([a] for a in answers), "t"), strict=True))

    write_rows(tmp_path / "pairs.jsonl", [row(i) for i in range(40)])
    done = check(tether_here, tmp_path, "pairs.jsonl")
    assert "Columns that are not used: topic, prompt[].name (12 rows).\n" in done.stdout
    report = json.loads(check(tether_here, tmp_path, "pairs.jsonl", "--json").stdout)
    assert report["unread"] == {"preferences": {"topic": 40, "prompt[].name": 12}}
