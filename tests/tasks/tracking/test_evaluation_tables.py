"""The tables of the evaluation in MLflow: the comparison, and each model's items under names of their own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.runs.journal import Sent
from tasks.tracking import recorder
from tasks.tracking.recorder import Recorder
from tests.evaluated_run import add_evaluation
from tests.stored_run import stored_run


def test_each_models_items_and_the_comparison_are_tables_of_one_stage(
    home: Path, client: Callable[[], Any], empty_mlflow: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(recorder, "ITEM_ROWS", 40)
    home.mkdir()
    shutil.copy(empty_mlflow, home)
    run = stored_run(home, upto="ppo")
    add_evaluation(home, run)
    Recorder(home).synchronize(home / "runs" / run, over=True)
    stage = Sent.load(home / "runs" / run).stages["evaluation"]
    listed = json.loads(client().get_run(stage).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in listed] == [
        "sft_tasks_items.json", "policy_tasks_items.json", "sft_probes_responses.json", "policy_probes_responses.json",
        "evaluation.json",
    ]  # fmt: skip

    def table(name: str) -> list[dict[str, Any]]:
        content = json.loads(Path(client().download_artifacts(stage, name)).read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    rows = {row["name"]: row for row in table("evaluation.json")}
    assert (rows["sums"]["sft"], rows["sums"]["policy"], rows["sums"]["passed"]) == (0.9, 0.6, True)
    sides = [table(f"{side}_tasks_items.json")[0] for side in ("sft", "policy")]
    assert [(side["prompt"], side["value"], side["response"]) for side in sides] == [
        ("What is 0 + 1?", 1.0, "1"), ("What is 0 + 1?", 0.0, "0")
    ]  # fmt: skip
    probes = table("policy_probes_responses.json")
    assert len(probes) == 40, "the first ITEM_ROWS"
    assert (probes[1]["prompt"], probes[1]["violation"], probes[39]["violation"]) == ("user: harm 1", True, False)


def test_responses_that_people_judge_are_no_table() -> None:
    assert not set(recorder.TABLES) & set(recorder.EVALUATION_TABLES), "human_eval.sample has a responses.jsonl"
