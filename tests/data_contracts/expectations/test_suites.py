import gc
import os
import socket
import threading
import weakref
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from components.base.errors import CheckFailed, UserError
from components.data.checks_config import CheckConfig, ChecksConfig
from components.data.config import DataConfig, SplitConfig
from components.models.config import GenerationConfig
from data_contracts.contract import pair_frame
from data_contracts.expectations import suites
from data_contracts.expectations.pages import write_data_docs
from data_contracts.expectations.row_expectations import row_checks
from data_contracts.findings.row_judging import RowJudge
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import FACTS, length_preference


@pytest.fixture(scope="module")
def context():
    return suites.context()


CHECKS = ChecksConfig()
LENGTHS = GenerationConfig(max_prompt_tokens=64, max_new_tokens=64)
NAMES = (f"suite{n}" for n in range(1000))


def facts(of=100):
    """Clean pairs that were read to their end."""
    out = np.zeros(of, FACTS)
    out["row"] = range(1, of + 1)
    out["made"], out["lead"], out["deciding"], out["turns"] = True, 1.0, 5, 1
    return out


def ledger_of(found):
    ledger = Ledger(Path("never-written"), SplitConfig(), 0)
    ledger.facts, ledger.out, ledger.files = found, np.zeros(len(found), bool), ["pairs"]
    ledger.roles = {"u": 0, "uu": 1}
    of_others = ("copies_before", "contradictions", "near_copies_before", "contaminated")
    for column in (*of_others, "special_texts", "template"):
        ledger.measure(column, np.arange(len(found)), 0)
    ledger.measure("distinct_cut_responses", np.arange(len(found)), 2)
    ledger.measure("prompt_tokens", np.arange(len(found)), 5)
    ledger.measure("response_tokens", np.arange(len(found)), 5)
    return ledger


def frame_of_kept(found):
    everyone = np.ones(len(found), bool)
    return pair_frame(ledger_of(found), everyone, everyone, ~everyone)


def judged(context, frame, checks):
    outcomes = suites.judge(context, suites.Suite(next(NAMES), frame, checks))
    return {outcome["name"]: outcome for outcome in outcomes}


def kept(n=100, **columns):
    out = np.zeros(n, FACTS)
    out["row"] = range(1, n + 1)
    out["words"] = [(2, 1) if i % 2 else (1, 2) for i in range(n)]
    out["first_wins"] = [i % 2 for i in range(n)]
    for name, values in columns.items():
        out[name] = values
    return out


def failing(context, found):
    frame = frame_of_kept(found)
    outcomes = judged(context, frame, suites.pair_checks(CHECKS, frame))
    return [name for name, outcome in outcomes.items() if not outcome["passed"]]


def test_pairs_of_equal_length_or_without_order_say_nothing(context):
    assert length_preference(np.array([[1, 1]])) is None
    assert length_preference(np.array([[1, 1], [2, 1], [1, 2]])) == 0.5
    assert failing(context, kept(words=(1, 1))) == failing(context, kept(first_wins=-1)) == []
    assert failing(context, kept(words=(2, 1), first_wins=1)) == ["length_preference", "label_position"]


@pytest.mark.parametrize(
    ("check", "value", "chance", "passed"),
    [
        ("every_split", 1, 0, True), ("every_split", 0, 0, False),
        ("enough_test_pairs", 200, 0, True), ("enough_test_pairs", 199, 0, False),
        ("enough_pairs", 499, 0, False), ("length_drift", 0.1, 0.05, True), ("length_drift", 0.2, 0.05, False),
        ("length_drift", 0.2, 0.25, True), ("known_tokens", 0.02, 0, False),
    ],
)  # fmt: skip
def test_a_measure_is_judged_by_its_threshold_or_by_what_chance_allows(context, check, value, chance, passed):
    asked = suites.measure_checks(CHECKS, {check: chance})
    found = judged(context, pd.DataFrame({"row_id": [0], check: [float(value)]}), asked)[check]
    assert (found["passed"], found["value"]) == (passed, value)


def test_a_share_beyond_0_to_1_is_refused_by_name_and_every_other_threshold_may_be_any_number():
    of_pairs = suites.pair_checks(CHECKS, frame_of_kept(kept()))
    beside = ("decontaminate", "reference")
    of_rows = [
        each for kind in ("preferences", "demonstrations") for each in row_checks(DataConfig(), LENGTHS, kind, beside)
    ]
    checks = [*of_rows, *of_pairs]
    shares = {check.name for check in checks if "mostly" in check.options}
    assert shares > {"unique", "no_leak", "no_near_duplicate"}
    for name, asked in CHECKS:
        for threshold in (5, -0.1):
            given = {name: {"threshold": threshold}}
            if name in shares:
                with pytest.raises(ValidationError, match=f"{name}.threshold is {threshold}, but it is the share"):
                    ChecksConfig.model_validate(given)
            elif isinstance(asked, CheckConfig):
                assert getattr(ChecksConfig.model_validate(given), name).threshold == threshold


def test_a_check_that_great_expectations_cannot_judge_is_no_pass(context):
    options = {"value_set": [True]}
    check = suites.Check(
        "lost", "x", "error", 0, "ExpectColumnValuesToBeInSet", {"column": "no_such_column", **options}
    )
    with pytest.raises(CheckFailed, match="could not judge lost"):
        judged(context, frame_of_kept(facts()), [check])


def test_judging_and_its_pages_ask_nobody_for_anything(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fresh = suites.context()
    one = next(c for c in row_checks(DataConfig(), None, "preferences") if c.name == "prompts_agree")
    judge = RowJudge(fresh, "preferences", ledger_of(facts()), [one], [])
    judge.judge("read")
    write_data_docs(fresh, tmp_path / "docs", judge.outcomes(), {})
    assert os.environ["GX_ANALYTICS_ENABLED"] == "False"


def of_user(kind, **options):
    return suites.Check("mine", "as agreed", "error", 0.0, kind, options, of_user=True)


def test_a_frame_that_was_judged_does_not_stay_in_memory(context):
    check = suites.Check("one", "", "error", 0.0, "ExpectColumnValuesToBeInSet", {"column": "a", "value_set": [1]})
    frames = []
    for name in ("first", "second"):
        frame = pd.DataFrame({"row_id": [0, 1], "a": [1, 1]})
        frames.append(weakref.ref(frame))
        assert suites.judge(context, suites.Suite(name, frame, [check]))[0]["passed"]
        del frame
    gc.collect()
    assert [frame() for frame in frames] == [None, None]


def test_an_expectation_on_quantiles_is_judged(context):
    """Great Expectations 1.9 gives its success as NumPy's boolean, and then cannot write it."""
    for median, passed in ((2, True), (3, False)):
        quantiles = {"quantiles": [0.5], "value_ranges": [[median, 9]]}
        check = of_user("ExpectColumnQuantileValuesToBeBetween", column="rating", quantile_ranges=quantiles)
        found = judged(context, pd.DataFrame({"row_id": [1, 2, 3], "rating": [1, 2, 3]}), [check])
        assert found["mine"]["passed"] is passed


def test_an_error_that_great_expectations_does_not_catch_is_the_suites(context):
    check = of_user("ExpectColumnValuesToBeBetween", column="rating", min_value={"$PARAMETER": "least"})
    with pytest.raises(UserError, match=r"judge your suite \(data.suite\): SuiteParameterError.*leave it out: mine\."):
        judged(context, pd.DataFrame({"row_id": [1], "rating": [1]}), [check])
