import json
import os
from collections import Counter
from pathlib import Path

import pytest

from data_contracts.check import check

DATA = Path(os.environ.get("TETHER_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
pytestmark = pytest.mark.real_data
TWO = "two assistant turns in a row"
LABEL = "'Human"
"""A text that begins with `Human:`, a label after the turn's own (found since markers count at a text's start too)."""


def real(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent (set TETHER_DATA to the folder of real data)")
    return {"preferences": path}


def reasons(out):
    rows = [json.loads(line) for line in (out / "artifact/quarantine.jsonl").read_text().splitlines()]
    return Counter(row["reasons"][-1].split(":")[0] for row in rows)


@pytest.mark.parametrize(
    ("name", "kept", "dirt"),
    [
        (
            "helpful",
            2308,
            {"prompts differ": 9, "empty response": 4, "identical responses": 2, TWO: 6, LABEL: 25},
        ),
        ("harmless", 2261, {"prompts differ": 5, "empty response": 4, TWO: 4, LABEL: 38}),
    ],
)
def test_the_known_dirt_of_hh_rlhf_is_quarantined_and_nothing_else(tmp_path, validate, name, kept, dirt):
    metrics = validate(tmp_path, real(f"hh-rlhf/{name}-base-test.jsonl.gz"))
    assert reasons(tmp_path) == dirt
    assert metrics["data/pairs"] == kept and metrics["data/contract"] == 1 and metrics["data/leaked_prompts"] == 0


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("harmless", {"prompts_agree": [1255, 1689, 1951, 1953, 2037], "texts_filled": [87, 517, 926, 1104],
                      "roles_alternate": [668, 764, 1320, 1850], "no_markers": 38}),
        ("helpful", {"prompts_agree": 9, "texts_filled": 4, "responses_differ": 2, "roles_alternate": 6,
                     "no_markers": 25}),
    ],
)  # fmt: skip
def test_a_check_without_a_run_names_the_known_dirt_by_row(tmp_path, job, name, rows):
    inputs = real(f"hh-rlhf/{name}-base-test.jsonl.gz")
    given = job(preferences=str(inputs["preferences"]))
    report = check(given, inputs, tmp_path / "scratch", None, lambda *read: None, tokenized=False)
    found = {c["name"]: c["row_numbers"] for c in report["checks"] if c["rows"] and c["severity"] != "warn"}
    assert {n: r if isinstance(rows[n], list) else len(r) for n, r in found.items()} == rows


def test_a_check_of_ukpconvarg_says_what_was_published(tmp_path, job):
    inputs = real("ukpconvarg1/pairs.jsonl.gz")
    given = job(preferences=str(inputs["preferences"]))
    report = check(given, inputs, tmp_path / "scratch", None, lambda *read: None, tokenized=False)
    assert report["kappa"] == pytest.approx(0.267, abs=0.0005) and report["longer_wins"] == pytest.approx(
        0.745, abs=0.002
    )
    assert report["majority"] == {"a": 6086, "b": 5983, "tie": 2137, "none": 2721} and report["rows"] == 16927
    annotators = report["annotators"]
    assert sum(row["votes"] for row in annotators) == 5 * 16737 + 4 * 190
    assert all(row["interval"][0] <= row["agreement"] <= row["interval"][1] for row in annotators if row["interval"])
    json.dumps(report, allow_nan=False)


@pytest.mark.whole
def test_ukpconvargs_agreement_and_taste_for_length_are_the_published_ones(tmp_path, validate):
    metrics = validate(tmp_path, real("ukpconvarg1/pairs.jsonl.gz"))
    assert metrics["data/annotator_agreement"] == pytest.approx(0.267, abs=0.0005)
    assert metrics["data/length_preference"] == pytest.approx(0.745, abs=0.005)  # repeated pairs are kept out here
    assert reasons(tmp_path)["tie"] == 4858
