"""Each expectation on rows: with it its rows go, without it they stay; the rest of the suite does not see them."""

from pathlib import Path

import numpy as np
import pytest

from components.base.errors import CheckFailed
from components.data.checks_config import RowChecks
from components.data.config import DataConfig, SplitConfig
from components.models.config import GenerationConfig
from data_contracts.expectations import suites
from data_contracts.expectations.row_expectations import row_checks
from data_contracts.findings.row_judging import RowJudge, phase_of
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import COLUMNS, FACTS, PHASES, READINGS

LENGTHS = GenerationConfig(max_prompt_tokens=64, max_new_tokens=64)
DATA = DataConfig.model_validate({
    "score": {"threshold": 0.5},
    "checks": {"near_unique": {"severity": "quarantine"}, "prompt_fits": {"severity": "quarantine"},
               "response_fits": {"severity": "quarantine"}},
})  # fmt: skip
"""Every check of rows quarantines."""
BESIDE = ("decontaminate", "reference")
"""With these every check of rows is asked."""


@pytest.fixture(scope="module")
def context():
    return suites.context()


COUNTER = iter(range(1000))


def ledger_of(kind, count=40):
    """Rows that every expectation allows."""
    ledger = Ledger(Path("never-written"), SplitConfig(), 0)
    facts = np.zeros(count, FACTS)
    facts["row"], facts["made"], facts["lead"], facts["margin"] = range(1, count + 1), True, 1.0, 2.0
    facts["deciding_votes"], facts["turns"], facts["first_wins"] = 5, 1, -1
    facts["distinct_responses"], facts["desirable"] = 2, 1
    ledger.facts, ledger.out, ledger.files = facts, np.zeros(count, bool), ["pairs"]
    ledger.roles = {"u": 0, "uu": 1, "sua": 2, "suau": 3}
    every = np.arange(count)
    for column, asked in COLUMNS.items():
        if asked.phase != "read" and column != "language":
            ledger.measure(column, every, 2 if column == "distinct_cut_responses" else 0)
    return ledger


def fact(**values):
    def plant(ledger, row):
        for name, value in values.items():
            ledger.facts[name][row] = value

    return plant


def measured(column, value):
    return lambda ledger, row: ledger.measure(column, np.array([row]), value)


def stopped(reading):
    return fact(reading=READINGS.index(reading), made=False, lead=np.nan, margin=np.nan, deciding_votes=np.nan)


PLANTED = {
    ("reading", "unreadable"): stopped("unreadable"), ("reading", "fields_missing"): stopped("fields_missing"),
    ("reading", "turns_broken"): stopped("turns_broken"), ("reading", "prompts_differ"): stopped("prompts_differ"),
    ("reading", "votes_broken"): stopped("votes_broken"), ("reading", "second_vote"): stopped("second_vote"),
    "roles": fact(roles=1), "empty_texts": fact(empty_texts=1), "distinct_responses": fact(distinct_responses=1),
    "unclean_texts": fact(unclean_texts=2), "desirable": fact(desirable=0), "repeated_votes": fact(repeated_votes=1),
    "placeholder_responses": fact(placeholder_responses=1),
    "marked_texts": fact(marked_texts=1), "characters": fact(characters=20_001), "lead": fact(lead=0.0),
    "deciding_votes": fact(given_out=True, deciding_votes=2), "margin": fact(margin=0.5),
    "contradictions": measured("contradictions", 1), "copies_before": measured("copies_before", 1),
    "near_copies_before": measured("near_copies_before", 1), "contaminated": measured("contaminated", 1),
    "held_out_before": measured("held_out_before", 1),
    "special_texts": measured("special_texts", 1), "distinct_cut_responses": measured("distinct_cut_responses", 1),
    ("template", 1): measured("template", 1), ("template", 2): measured("template", 2),
    "prompt_tokens": measured("prompt_tokens", 65), "response_tokens": measured("response_tokens", 65),
}  # fmt: skip
"""By column (and value, where several expectations look at one), what a row has that its expectation refuses."""


def planted_by(check):
    column = check.options["column"]
    return column if column in PLANTED else (column, check.options["value_set"][0])


def named(context, kind, checks, fault):
    """The rows that go, and those that are named, once row 7 has the fault."""
    ledger = ledger_of(kind)
    PLANTED[fault](ledger, 6)
    judge = RowJudge(context, f"{kind}{next(COUNTER)}", ledger, checks, [])
    for phase in PHASES:
        judge.judge(phase)
    outcomes = {outcome["name"]: outcome["row_numbers"] for outcome in judge.outcomes() if outcome["rows"]}
    return (np.flatnonzero(ledger.out) + 1).tolist(), outcomes


ASKED = [(kind, place, check) for kind in ("preferences", "demonstrations")
         for place, check in enumerate(row_checks(DATA, LENGTHS, kind, BESIDE))]  # fmt: skip
ONCE = {planted_by(check): (kind, place, check) for kind, place, check in reversed(ASKED)}
"""Each expectation, once: on pairs where they have it."""


@pytest.mark.parametrize("fault", list(PLANTED), ids=str)
def test_an_expectation_names_its_rows_and_they_stay_once_it_is_taken_out_of_the_suite(context, fault):
    kind, _, check = ONCE[fault]
    checks = [c for c in row_checks(DATA, LENGTHS, kind, BESIDE) if phase_of(c) == phase_of(check)]
    gone, outcomes = named(context, kind, checks, fault)
    assert gone == ([] if check.stays else [7]) and outcomes == {check.name: [7]}
    without = [c for c in checks if planted_by(c) != fault]
    assert len(without) == len(checks) - 1
    if fault[0] == "reading":  # a row of which nothing can be kept is never let through
        with pytest.raises(CheckFailed, match="row 7 has no usable form"):
            named(context, kind, without, fault)
    else:
        assert named(context, kind, without, fault) == ([], {})


def test_every_expectation_and_every_check_of_rows_is_planted_here():
    assert set(ONCE) == set(PLANTED)
    assert {check.name for _, _, check in ASKED} == set(RowChecks.model_fields)


def test_clean_rows_are_named_by_nothing_and_every_check_says_so(context):
    judge = RowJudge(context, "clean", ledger_of("preferences"), row_checks(DATA, LENGTHS, "preferences", BESIDE), [])
    for phase in PHASES:
        judge.judge(phase)
    assert all(outcome["passed"] and not outcome["rows"] for outcome in judge.outcomes())
    assert not judge.ledger.out.any() and len(judge.outcomes()) == len(RowChecks.model_fields) - 1


@pytest.mark.parametrize(("bad", "passed"), [(5, True), (6, False)])
def test_a_check_fails_once_more_than_its_threshold_of_rows_fail_it(context, bad, passed):
    ledger = ledger_of("preferences", 100)
    ledger.facts["empty_texts"][:bad] = 1
    judge = RowJudge(context, f"share{bad}", ledger, row_checks(DataConfig(), None, "preferences"), [])
    judge.judge("read")
    found = {outcome["name"]: outcome for outcome in judge.outcomes()}["texts_filled"]
    assert (found["passed"], found["rows"], found["value"], found["threshold"]) == (passed, bad, bad / 100, 0.05)
    assert found["row_numbers"] == list(range(1, bad + 1)) and judge._succeeded["texts_filled"] == passed


def test_a_check_that_warns_names_its_rows_and_keeps_them(context):
    data = DataConfig.model_validate({"checks": {"no_markers": {"severity": "warn"}}})
    ledger = ledger_of("preferences")
    ledger.facts["marked_texts"][3] = 1
    judge = RowJudge(context, "warned", ledger, row_checks(data, None, "preferences"), [])
    judge.judge("read")
    assert not ledger.out.any() and ledger.passes("no_markers").sum() == 39
