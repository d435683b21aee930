"""A user's own suite: expectations on our columns and on further columns of the data, and what is wrong with one."""

import json
import math

import pandas as pd
import pytest

from components.base.errors import UserError
from data_contracts.check import check
from data_contracts.expectations.own import load_suite
from data_contracts.expectations.suites import great_expectations
from data_contracts.findings.drafting import draft


def rows(n=60):
    return [
        {"prompt": f"question number {i}", "chosen": f"good answer {i} indeed", "rejected": f"bad answer {i}",
         "rating": 3 + i % 3, "team": ["north", "south"][i % 2]}
        for i in range(n)
    ]  # fmt: skip


def write(path, content):
    lines = "".join(json.dumps(row) + "\n" for row in content) if isinstance(content, list) else json.dumps(content)
    path.write_text(lines)
    return path


def expect(kind, severity="quarantine", check=None, sentence="as agreed", source=None, **options):
    meta = {"severity": severity, "sentence": sentence} | ({"check": check} if check else {})
    meta |= {"source": source} if source else {}
    return {"type": f"expect_{kind}", "kwargs": options, "meta": meta}


def suite(*expectations, **meta):
    return {"name": "mine", "expectations": list(expectations), "meta": meta}


@pytest.fixture
def examined(tmp_path, job):
    """The report of a check of rows by a suite, and the rows that it quarantines with their reasons."""

    def examined(found, content, **more):
        inputs = {"preferences": write(tmp_path / "p.jsonl", found), "suite": write(tmp_path / "mine.json", content)}
        options = {"preferences": "p.jsonl", "suite": "mine.json"} | more
        scratch = tmp_path / "scratch"
        report = check(job(**options), inputs, scratch, None, lambda *read: None, tokenized=False)
        gone = [json.loads(line) for line in (scratch / "quarantine.jsonl").read_text().splitlines()]
        checks = {each["name"]: each for each in report["checks"]}
        return report, checks, {row["row"]: row["reasons"] for row in gone}

    return examined


TEN = suite(
    expect("column_values_to_be_between", check="rating", column="rating", min_value=1, max_value=5),
    expect("column_values_to_be_in_set", check="team", column="team", value_set=["north", "south"]),
    expect("column_values_to_not_be_null", check="rated", column="rating", severity="warning"),
    expect("column_values_to_match_regex", check="lower", column="team", regex="^[a-z]+$", severity="warning"),
    expect("column_values_to_be_between", check="short", column="chosen_words", max_value=6),
    expect("column_values_to_be_between", check="one turn", column="turns", max_value=1, severity="error", mostly=0.99),
    expect("column_pair_values_a_to_be_greater_than_b", check="longer", column_A="chosen_words",
           column_B="rejected_words", or_equal=True),
    expect("column_values_to_be_between", check="south is strict", column="rating", min_value=4, severity="warning",
           row_condition={"type": "comparison", "column": {"name": "team"}, "operator": "==", "parameter": "south"}),
    expect("column_mean_to_be_between", check="mean rating", column="rating", min_value=3, max_value=4,
           severity="error"),
    expect("table_row_count_to_be_between", check="enough", min_value=50, severity="warning"),
)  # fmt: skip


def test_ten_native_expectations_on_a_file_with_two_further_columns_name_their_rows(examined):
    found = rows()
    found[4]["rating"] = 9
    found[9]["rating"] = "none"
    found[14]["team"] = "West"
    found[19]["rating"] = None
    found[24]["chosen"] = "much too long an answer to this one question"
    found[29]["prompt"] = [
        {"role": role, "content": f"turn {i} of 30"} for i, role in enumerate(["user", "assistant", "user"])
    ]
    found[34]["chosen"] = "yes"
    report, checks, gone = examined(found, TEN)
    names = ("rating", "team", "rated", "lower", "short", "one turn")
    assert {name: checks[name]["row_numbers"] for name in names} == {
        "rating": [5, 10], "team": [15], "rated": [20], "lower": [15], "short": [25], "one turn": [30],
    }  # fmt: skip
    assert checks["longer"]["row_numbers"] == [35]
    rated = [(i + 1, row["rating"]) for i, row in enumerate(found) if i % 2 and row["rating"] is not None]
    strict = [number for number, rating in rated if rating == "none" or rating < 4]
    assert checks["south is strict"]["row_numbers"] == strict and checks["south is strict"]["severity"] == "warn"
    assert set(gone) == {5, 10, 15, 25, 30, 35} and report["pairs"] == 54 and report["quarantined"] == 6
    assert gone[5] == ["rating: rating is '9'. as agreed"] and "turns is 3" in gone[30][0]
    assert not checks["one turn"]["passed"] and not report["passed"]
    assert (
        checks["mean rating"]["passed"] and 3 < checks["mean rating"]["value"] < 4.2 and checks["enough"]["value"] == 54
    )
    assert checks["length_within"]["passed"], "ours are judged too"


def test_an_expectation_of_the_whole_that_fails_with_severity_error_fails_the_contract(examined):
    high = suite(expect("column_mean_to_be_between", "error", check="mean", column="rating", min_value=4.5))
    report, checks, gone = examined(rows(), high)
    assert not report["passed"] and not checks["mean"]["passed"] and gone == {} and checks["mean"]["threshold"] == 4.5


def test_a_suite_built_in_python_is_judged_and_no_text_of_a_row_reaches_its_pages(tmp_path, job, caplog):
    gx = great_expectations()
    made = gx.expectations
    even = {"values": ["north", "south"], "weights": [0.5, 0.5]}
    asked = {
        "even": made.ExpectColumnKLDivergenceToBeLessThan(column="team", partition_object=even, threshold=0.1),
        "uneven": made.ExpectColumnKLDivergenceToBeLessThan(
            column="team", partition_object=even | {"weights": [0.99, 0.01]}, threshold=0.1
        ),
        "apart": made.ExpectCompoundColumnsToBeUnique(column_list=["team", "note"]),
        "sum": made.ExpectMulticolumnSumToEqual(column_list=["turns", "rating"], sum_total=5, mostly=0.3),
        "known": made.ExpectColumnDistinctValuesToBeInSet(column="note", value_set=["no"]),
        "common": made.ExpectColumnMostCommonValueToBeInSet(column="note", value_set=["no"]),
        "distinct": made.ExpectColumnProportionOfUniqueValuesToBeBetween(column="note", min_value=0.9),
    }
    for name, each in asked.items():
        each.meta = {"check": name, "severity": "warning"}
    document = gx.ExpectationSuite(name="mine", expectations=list(asked.values())).to_json_dict()
    found = [row | {"note": f"a private remark {i}"} for i, row in enumerate(rows())]
    inputs = {"preferences": write(tmp_path / "p.jsonl", found), "suite": write(tmp_path / "mine.json", document)}
    given = job(preferences="p.jsonl", suite="mine.json")
    report = check(given, inputs, tmp_path / "scratch", tmp_path, lambda *read: None, tokenized=False)
    checks = {each["name"]: each["passed"] for each in report["checks"]}
    failed = {"uneven", "known", "common"}
    assert {name: checks[name] for name in asked} == {name: name not in failed for name in asked}
    pages = {path.name: path.read_text() for path in (tmp_path / "data_docs").rglob("*.html")}
    assert len(pages) > 2 and not [name for name, page in pages.items() if "private remark" in page]
    assert "rendering" not in caplog.text


def test_an_expectation_takes_the_place_of_ours_by_its_name_and_a_suite_of_all_that_can_be_left_out(examined):
    found = rows()
    found[3]["rejected"] = found[3]["chosen"]
    found[5]["prompt"] += "\n\nHuman: and then?"
    assert set(examined(found, TEN)[2]) == {4, 6}
    named = suite(
        expect("column_values_to_be_between", "warning", check="no_markers", column="marked_texts", max_value=0)
    )
    _, checks, gone = examined(found, named)
    assert set(gone) == {4} and checks["no_markers"]["row_numbers"] == [6] and not checks["no_markers"]["passed"]
    _, checks, gone = examined(found, suite(*TEN["expectations"], replaces_ours=True))
    assert "no_markers" not in checks and set(gone) == {4}, "two equal responses can't be used, whoever asks"


def test_numbers_of_a_csv_are_numbers(tmp_path, job):
    lines = ["prompt,chosen,rejected,rating", *(f"question {i},good {i},bad {i},{i % 5}.5" for i in range(40))]
    (tmp_path / "p.csv").write_text("\n".join(lines) + "\n")
    asked = suite(expect("column_values_to_be_between", check="rating", column="rating", max_value=3.5))
    inputs = {"preferences": tmp_path / "p.csv", "suite": write(tmp_path / "mine.json", asked)}
    given = job(preferences="p.csv", suite="mine.json")
    report = check(given, inputs, tmp_path / "scratch", None, lambda *read: None, tokenized=False)
    named = next(each for each in report["checks"] if each["name"] == "rating")["row_numbers"]
    assert named == [i + 2 for i in range(40) if i % 5 == 4], "the header is row 1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"mine\.json is not JSON"),
        ({"expectations": []}, "has no `expectations`"),
        (suite({"kwargs": {}}), r"expectations\[0\]: it has no `type`"),
        (suite(expect("colum_values_to_be_null", column="team")), r"\[0\].*you mean expect_column_values_to_be_null"),
        (suite(expect("column_values_to_be_between", column="a", max_value=1, least=1)), r"kwargs\.least: extra"),
        *((suite(expect(kind, "error", **options)), "only those that your suite names") for kind, options in (
            ("table_column_count_to_equal", {"value": 3}),
            ("table_columns_to_match_set", {"column_set": ["team"]}),
        )),
        (suite(TEN["expectations"][0], expect("column_values_to_be_in_set", value_set=[1])),
         r"expectations\[1\] \(expect_column_values_to_be_in_set\): kwargs\.column: field required"),
        (suite(expect("column_values_to_be_null", "fatal", column="team")), r"meta\.severity is 'fatal'"),
        (suite(expect("column_values_to_be_null", ["error"], column="team")), r"meta\.severity is \['error'\]"),
        (suite(expect("column_mean_to_be_between", column="a", max_value=1)), "is quarantine, but this expectation"),
        (suite(expect("column_values_to_be_null", column="team", source="pairs")), "meta.source is 'pairs'"),
        (suite(expect("column_values_to_be_null", check="decided", column="a")), "can't replace"),
        (suite(*[expect("column_values_to_be_null", column="a")] * 2), r"\[1\].*another expectation has the name"),
        (suite(expect("column_values_to_be_between", column="a", min_value={"$PARAMETER": "m"})),
         r"kwargs\.min_value is a suite parameter"),
        (suite(expect("column_values_to_be_null", column="a", row_condition="a > 1", condition_parser="pandas")),
         "row_condition is the text 'a > 1'.*Write it as an object"),
        (suite(TEN["expectations"][0], replaces_ours="yes"), "replaces_ours is \"yes\", expected true or false"),
    ],
)  # fmt: skip
def test_a_broken_suite_is_the_users_error_by_file_expectation_and_field(tmp_path, content, said):
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=said) as error:
        load_suite(path)
    assert str(path) in str(error.value) and error.value.exit_code == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["ratings", "desirable"])
def test_a_column_that_the_data_do_not_have_is_the_users_error_with_those_that_are_there(examined, column):
    with pytest.raises(
        UserError, match=rf"mine\.json: the expectation 'mine' names the column '{column}'.*rating, team"
    ):
        examined(rows(), suite(expect("column_values_to_not_be_null", check="mine", column=column)))


def test_a_value_that_is_no_number_counts_only_where_its_row_is_asked(examined):
    found = rows()
    found[0]["rating"], found[1]["rating"] = "none", "none"
    condition = {"type": "comparison", "column": {"name": "team"}, "operator": "==", "parameter": "south"}
    ends = {"least": {"min_value": 1}, "most": {"max_value": 5}}
    asked = [expect("column_values_to_be_between", check=name, column="rating", row_condition=condition, **end)
             for name, end in ends.items()]  # fmt: skip
    _, checks, gone = examined(found, suite(*asked))
    assert [checks[name]["row_numbers"] for name in ends] == [[2], [2]] and set(gone) == {2}


def test_a_column_whose_text_is_no_utf8_is_drafted_and_judged_with_its_characters_escaped(tmp_path, job, examined):
    found = [row | {"team": "\ud800"} for row in rows()]
    drafted = draft(write(tmp_path / "good.jsonl", found), job().data, tmp_path)
    (team,) = [each for each in drafted["expectations"] if each["kwargs"]["column"] == "team"]
    assert team["kwargs"]["value_set"] == ["\\ud800"]
    assert examined(found, drafted)[2] == {}


def test_a_draft_from_a_good_file_holds_for_it_and_names_what_leaves_its_ranges(tmp_path, job, examined):
    good = [row | {"share": (i % 2 + 1) / 3} for i, row in enumerate(rows())]
    drafted = draft(write(tmp_path / "good.jsonl", good), job().data, tmp_path)
    by_column = {each["kwargs"]["column"]: each["kwargs"] for each in drafted["expectations"]}
    assert (by_column["rating"]["min_value"], by_column["rating"]["max_value"]) == (3, 5)
    assert by_column["team"]["value_set"] == ["north", "south"] and by_column["roles"]["value_set"] == ["u"]
    assert (by_column["share"]["min_value"], by_column["share"]["max_value"]) == (0.333333, 0.666667)
    assert examined(good, drafted)[2] == {}, "rounded ends hold the values that they come from"
    good = [row | {"share": 1 / 3} for row in good]
    drafted = draft(write(tmp_path / "good.jsonl", good), job().data, tmp_path)
    assert examined(good, drafted)[2] == {}
    found = good
    found[7]["rating"], found[8]["team"] = 9, "east"
    assert set(examined(found, drafted)[2]) == {8, 9}


def test_a_draft_from_ties_and_undesirable_responses_and_odd_columns_is_json_and_holds_for_its_file(
    tmp_path, job, examined
):
    odd = {"tags": ["x"], "meta": {"k": 1}, "huge": 1e300, "one": "a", "none": None}
    votes = [
        {"prompt": f"question number {i}", "a": f"good answer {i}", "b": f"bad answer {i}",
         "votes": ["a", "b"] if i % 3 else ["a", "a"], "day": f"day {i % 3}", **odd}
        for i in range(30)
    ]  # fmt: skip
    drafted = draft(write(tmp_path / "good.jsonl", votes), job().data, tmp_path / "a")
    assert {each["kwargs"]["column"] for each in drafted["expectations"]}.isdisjoint({"tags", "meta", "none"})
    sentences = {each["kwargs"]["column"]: each["meta"]["sentence"] for each in drafted["expectations"]}
    assert sentences["one"] == "one is 'a' in good.jsonl" and sentences["huge"] == "huge is 1e+300 in good.jsonl"
    assert sentences["day"] == "day is one of 3 values in good.jsonl"
    _, checks, gone = examined(votes, drafted)
    assert {name for name, check in checks.items() if name.startswith("column_") and check["rows"]} == set()
    assert len(gone) == 20 and all(reasons == ["tie"] for reasons in gone.values())
    kto = [{"prompt": f"question {i}", "completion": "yes", "label": i % 2 == 0, "flag": i % 2} for i in range(20)]
    drafted = draft(write(tmp_path / "kto.jsonl", kto), job().data, tmp_path / "b")
    (flag,) = [each["kwargs"] for each in drafted["expectations"] if each["kwargs"]["column"] == "flag"]
    assert (flag["min_value"], flag["max_value"]) == (0, 1), "undesirable responses are part of a good file"
    infinite = draft(write_parquet(tmp_path / "p.parquet", rows(), score=math.inf), job().data, tmp_path / "c")
    assert "score" not in {each["kwargs"]["column"] for each in infinite["expectations"]}
    json.dumps([drafted, infinite], allow_nan=False)


def write_parquet(path, content, **more):
    pd.DataFrame([row | more for row in content]).to_parquet(path)
    return path


def test_numbers_are_texts_to_a_regular_expression_and_one_typing_error_leaves_the_others_numbers(examined):
    found = [row | {"typed": "4x" if i == 3 else i % 5} for i, row in enumerate(rows(30))]
    asked = suite(
        expect("column_values_to_match_regex", "warning", "regex", column="rating", regex="^[345]$"),
        expect("column_values_to_not_match_regex", "warning", "not 5", column="rating", regex="5"),
        expect("column_value_lengths_to_equal", "warning", "one digit", column="turns", value=1),
        expect("column_values_to_be_in_set", "warning", "in", column="typed", value_set=[0, 1, 2, 3, 4]),
        expect("column_values_to_not_be_in_set", "warning", "not in", column="typed", value_set=[4]),
        expect("column_values_to_be_between", "error", "tokens", column="chosen_tokens", max_value=1),
        expect("column_values_to_be_between", "error", "votes", column="votes", min_value=3),
    )
    report, checks, _ = examined(found, asked)
    numbers = {name: check["row_numbers"] for name, check in checks.items()}
    assert numbers["regex"] == numbers["one digit"] == [] and numbers["not 5"] == list(range(3, 31, 3))
    assert numbers["in"] == [4] and numbers["not in"] == list(range(5, 31, 5))
    assert sorted(report["unjudged"]) == ["tokens", "votes"], "they judged nothing, and that is said"


def test_every_expectation_of_a_run_is_written_with_its_data_as_a_suite_that_great_expectations_reads(
    validate, tmp_path
):
    own = expect("column_values_to_be_between", "warning", "short", "No essays.", column="chosen_words", max_value=500)
    inputs = {"preferences": write(tmp_path / "p.jsonl", rows()), "suite": write(tmp_path / "mine.json", suite(own))}
    validate(tmp_path / "out", inputs)
    written = (tmp_path / "out/artifact/suite.json").read_bytes()
    entries = json.loads(written)["expectations"]
    read = great_expectations().ExpectationSuite(name="read", expectations=entries)
    assert [each.severity.value for each in read.expectations] == [entry["severity"] for entry in entries]
    judged = {each["name"] for each in json.loads((tmp_path / "out/artifact/report.json").read_text())}
    assert {entry["meta"]["check"] for entry in entries} == judged
    (users,) = [entry for entry in entries if entry["meta"]["of_user"]]
    assert users["type"] == own["type"] and users["kwargs"] == own["kwargs"] and users["severity"] == "info"
    assert users["meta"] == own["meta"] | {"of_user": True, "source": "preferences"}
    assert (tmp_path / "out/attachments/suite.json").read_bytes() == written
