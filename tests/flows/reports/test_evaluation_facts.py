"""The report's section on tasks and probes: both models' numbers, and prompts on which only the policy fails."""

import json
from pathlib import Path

import pytest

from components.base.hashing import canonical_json
from components.store.store import ArtifactStore
from flows.reports import evaluation_facts as module
from flows.reports.evaluation_facts import Evaluated, evaluation_facts
from flows.reports.page import page
from flows.reports.run_facts import run_facts
from tests.evaluated_run import add_evaluation
from tests.flows.reports.test_page import Text
from tests.stored_run import HOSTILE, stored_run


def evaluated(home: Path) -> dict[str, Evaluated]:
    return {one.row["name"]: one for one in evaluation_facts(run_facts(home))}


def test_only_prompts_on_which_the_policy_alone_fails_are_shown(tmp_path: Path) -> None:
    add_evaluation(tmp_path, stored_run(tmp_path, upto="ppo"))
    found = evaluated(tmp_path)
    assert list(found) == ["codes", "harmful", "sums"], "unknown ends first, then the tightest"
    assert [(one.worse, one.better) for one in found.values()] == [(0, 0), (20, 1), (4, 1)]
    assert [policy["id"] for _, policy in found["harmful"].failures] == ["h0", "h1", "h2"]
    sft, policy = found["sums"].failures[0]
    assert (sft["response"], policy["response"], policy["target"]) == ("1", "0", "1")
    assert not found["codes"].failures


def test_the_page_compares_both_models_and_escapes_what_they_wrote(tmp_path: Path) -> None:
    add_evaluation(tmp_path, stored_run(tmp_path, upto="ppo"))
    source = page(run_facts(tmp_path))
    section = source[source.index('id="evaluation"') : source.index('id="human-eval"')]
    text = Text(section).text
    assert "FAIL probe codes violations 1 0 0 0 (unknown) 1 0 0" in text
    assert "FAIL probe harmful violations 40 0.025 0.5 0.475 (0." in text
    assert "PASS task sums acc 10 0.9 0.6 0.3 (" in text and ") 0.9 4 1" in text
    assert "Probe harmful: 3 of 20 prompts on which the policy violates and SFT does not" in text
    sft = "h0, locks user: harm 0 SFT sft says 0 does not violate, decided by complies"
    assert f"{sft} Policy policy says {HOSTILE} violates, decided by complies" in text
    assert "Document 0 What is 0 + 1? Right: 1 SFT 1 acc 1 Policy 0 acc 0" in text
    assert "script" not in Text(section).tags
    assert section.index("harmful") < section.index("sums"), "the tightest first"
    assert '<details open><summary>Probe harmful' in section and '<details><summary>Task sums' in section
    assert '<li><a href="#evaluation">' in source


def test_the_judges_agreement_with_people_is_in_the_section(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="ppo")
    add_evaluation(tmp_path, run)
    agreement = {"responses": 12, "precision": 0.75, "recall": 0.5}
    of_judge = {f"evaluation/judge_{name}_of_probe_from/harmful": value for name, value in agreement.items()}
    written = json.loads((path := tmp_path / "runs" / run / "run.json").read_text())
    next(stage for stage in written["stages"] if stage["name"] == "evaluation")["metrics"] |= of_judge
    path.write_text(json.dumps(written))
    found = evaluated(tmp_path)
    assert found["harmful"].judge == agreement | {"kappa": None} and not any(found["codes"].judge.values())
    text = Text(page(run_facts(tmp_path))).text
    assert text.count("that people labelled, the judge has") == 1
    assert "on 12 responses that people labelled, the judge has precision 0.75, recall 0.5, kappa none." in text


def test_a_run_without_an_evaluation_has_no_section(tmp_path: Path) -> None:
    stored_run(tmp_path)
    assert "Tasks and probes" not in page(run_facts(tmp_path)) and not evaluation_facts(run_facts(tmp_path))


def test_lost_items_lose_the_samples_alone(tmp_path: Path) -> None:
    records = add_evaluation(tmp_path, stored_run(tmp_path, upto="ppo"))
    store = ArtifactStore(tmp_path)
    (store.objects / records["policy_probes"].files["responses.jsonl"]).unlink()
    found = evaluated(tmp_path)
    assert (found["harmful"].worse, found["harmful"].failures, found["sums"].worse) == (None, [], 4)
    assert "harmful violations 40 0.025 0.5" in Text(page(run_facts(tmp_path))).text
    (store.objects / records["evaluation"].files["evaluation.json"]).unlink()
    assert "the artifact that holds it is no longer in the store" in page(run_facts(tmp_path))


def test_prompts_that_people_judge_now_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_evaluation(tmp_path, stored_run(tmp_path, upto="ppo"))
    judged = canonical_json([{"role": "user", "content": "harm 1"}])
    monkeypatch.setattr(module, "on_the_sheet", lambda stage: {judged})
    assert [policy["id"] for _, policy in evaluated(tmp_path)["harmful"].failures] == ["h0", "h2", "h3"]
