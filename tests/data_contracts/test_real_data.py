import json
import os
from collections import Counter
from pathlib import Path

import pytest

from components.data.config import DataConfig, ValidateJob
from data_contracts.validate import run

DATA = Path(os.environ.get("TETHER_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
pytestmark = pytest.mark.real_data


def validate(out, name, **data):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent (set TETHER_DATA to the folder of real data)")
    job = ValidateJob(seed=0, data=DataConfig(preferences=str(path), **data))
    return run(job, {"preferences": path}, out, lambda step, metrics, total=None: None)


def reasons(out):
    rows = [json.loads(line) for line in (out / "artifact/quarantine.jsonl").read_text().splitlines()]
    return Counter(row["reasons"][-1].split(":")[0] for row in rows)


@pytest.mark.parametrize(
    ("name", "kept", "dirt"),
    [
        ("helpful", 2339, {"prompts differ": 9, "empty response": 4, "identical responses": 2}),
        ("harmless", 2303, {"prompts differ": 5, "empty response": 4}),
    ],
)
def test_the_known_dirt_of_hh_rlhf_is_quarantined_and_nothing_else(tmp_path, name, kept, dirt):
    metrics = validate(tmp_path, f"hh-rlhf/{name}-base-test.jsonl.gz")
    assert reasons(tmp_path) == dirt
    assert metrics["data/pairs"] == kept and metrics["data/contract"] == 1 and metrics["data/leaked_prompts"] == 0


def test_ukpconvargs_agreement_and_taste_for_length_are_the_published_ones(tmp_path):
    metrics = validate(tmp_path, "ukpconvarg1/pairs.jsonl.gz")
    assert metrics["data/annotator_agreement"] == pytest.approx(0.267, abs=0.0005)
    assert metrics["data/length_preference"] == pytest.approx(0.745, abs=0.005)  # repeated pairs are kept out here
    assert reasons(tmp_path)["tie"] == 4858
