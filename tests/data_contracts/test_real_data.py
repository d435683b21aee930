import json
import os
from collections import Counter
from pathlib import Path

import pytest

DATA = Path(os.environ.get("TETHER_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
pytestmark = pytest.mark.real_data
TWO = "two assistant turns in a row"


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
            2333,
            {"prompts differ": 9, "empty response": 4, "identical responses": 2, "two assistant turns in a row": 6},
        ),
        ("harmless", 2299, {"prompts differ": 5, "empty response": 4, TWO: 4}),
    ],
)
def test_the_known_dirt_of_hh_rlhf_is_quarantined_and_nothing_else(tmp_path, validate, name, kept, dirt):
    metrics = validate(tmp_path, real(f"hh-rlhf/{name}-base-test.jsonl.gz"))
    assert reasons(tmp_path) == dirt
    assert metrics["data/pairs"] == kept and metrics["data/contract"] == 1 and metrics["data/leaked_prompts"] == 0


def test_ukpconvargs_agreement_and_taste_for_length_are_the_published_ones(tmp_path, validate):
    metrics = validate(tmp_path, real("ukpconvarg1/pairs.jsonl.gz"))
    assert metrics["data/annotator_agreement"] == pytest.approx(0.267, abs=0.0005)
    assert metrics["data/length_preference"] == pytest.approx(0.745, abs=0.005)  # repeated pairs are kept out here
    assert reasons(tmp_path)["tie"] == 4858
