"""How much worse the policy is, at most: exact intervals of small samples, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from components.base.errors import CheckFailed
from components.base.jsonl import write_json, write_rows
from components.base.observe import unobserved
from components.evaluation.comparison import Measured, beyond, compare, compare_all, level_of, margin_of, worsening
from components.evaluation.config import COMPARISONS, EvaluationConfig, EvaluationJob
from components.evaluation.stage import run

T3, T3_BONFERRONI, T1 = 3.182446, 4.176535, 12.706205
"""Student's t: 0.975 and 0.9875 (two tasks) with three degrees of freedom, 0.975 with one (any printed table)."""


def measured(values: list[float], name: str = "sums", kind: str = "task", higher: bool = True, **more) -> Measured:
    documents = more.get("documents", [str(number) for number in range(len(values))])
    array = np.array(values, dtype=np.float64)
    return Measured(kind, name, more.get("metric", "acc"), higher, documents, array, float(array.mean()))  # type: ignore[arg-type]


def test_one_fall_in_four_has_the_interval_of_a_table() -> None:
    """Differences 1, 0, 0, 0: mean 1/4, variance 4/3 (9/16 + 3/16) / 16 = 1/16. A score of 2 is no share."""
    interval = worsening(np.array([2.0, 1, 1, 0]), np.array([1.0, 1, 1, 0]), list("abcd"))
    assert interval == pytest.approx((0.25, 0.25 - T3 / 4, 0.25 + T3 / 4), abs=1e-6)


def test_questions_about_one_text_count_as_one_cluster() -> None:
    """Differences 1, 1 of text a and 0, 0 of b: sums of residuals 1 and -1, variance 2 (1 + 1) / 16 = 1/4."""
    interval = worsening(np.array([2.0, 2, 1, 1]), np.array([1.0, 1, 1, 1]), list("aabb"))
    assert interval == pytest.approx((0.5, 0.5 - T1 / 2, 0.5 + T1 / 2), abs=1e-5)


def test_equal_answers_on_four_documents_prove_little() -> None:
    """Wilson's upper end of 0 of 4 is t² / (4 + t²), of both the share that fell and the share that rose."""
    same = np.array([1.0, 0, 1, 0])
    end = T3**2 / (4 + T3**2)
    assert worsening(same, same, list("abcd")) == pytest.approx((0, -end, end), abs=1e-6)


@pytest.mark.parametrize(("tasks", "fewest"), [(1, 76), (2, 99)])
def test_the_guide_says_how_many_documents_the_margin_needs(tasks: int, fewest: int) -> None:
    """With n equal pairs the upper end is t^2 / (n + t^2)."""
    ends = [
        worsening(np.zeros(n), np.zeros(n), [str(i) for i in range(n)], level_of("task", tasks)).high
        for n in (fewest - 1, fewest)
    ]
    assert ends[0] > EvaluationConfig().margin >= ends[1]
    guide = (Path(__file__).parents[3] / "docs/guide/evaluation.md").read_text()
    assert "needs at least 76 of them (99 each with two tasks" in guide


def test_two_tasks_have_wider_intervals_than_one_and_a_probe_its_own() -> None:
    sft, policy = measured([2, 1, 1, 0]), measured([1, 1, 1, 0])
    others = sft._replace(name="other"), policy._replace(name="other")
    probe = [one._replace(kind="probe", name="p") for one in (sft, policy)]
    [alone] = compare_all([sft], [policy], EvaluationConfig())
    several = compare_all([sft, others[0], probe[0]], [policy, others[1], probe[1]], EvaluationConfig())
    assert alone["high"] == pytest.approx(0.25 + T3 / 4, abs=1e-6)
    highs = {row["name"]: row["high"] for row in several}
    assert highs["sums"] == highs["other"] == pytest.approx(0.25 + T3_BONFERRONI / 4, abs=1e-6)
    assert highs["p"] == alone["high"]


def test_worse_is_lower_on_a_task_and_higher_on_a_probe() -> None:
    few, many = [0.0, 0, 0, 1], [0.0, 1, 1, 1]
    task = compare(measured(many), measured(few), 0.1, 0.95)
    probe = compare(measured(few, higher=False), measured(many, higher=False), 0.1, 0.95)
    assert task["difference"] == probe["difference"] == 0.5 and not task["passed"]
    better = compare(measured(few), measured(many), 2, 0.95)
    assert better["difference"] == -0.5 and better["passed"]


@pytest.mark.parametrize(
    ("margins", "margin"), [({}, 0.15), ({"false_premises": 0.02}, 0.02)]
)  # as docs/guide/evaluation.md says
def test_a_shipped_probe_has_its_own_margin_unless_one_is_set(margins: dict[str, float], margin: float) -> None:
    assert margin_of(EvaluationConfig(margins=margins), "false_premises") == margin
    assert margin_of(EvaluationConfig(margins=margins, margin=0.3), "codes") == 0.3


def test_a_bound_on_the_margin_passes_and_one_above_does_not() -> None:
    sft, policy = measured([2, 1, 1, 0]), measured([1, 1, 1, 0])
    high = compare(sft, policy, 0, 0.95)["high"]
    assert high is not None
    assert compare(sft, policy, high, 0.95)["passed"]
    assert not compare(sft, policy, np.nextafter(high, 0), 0.95)["passed"]


def test_one_document_has_no_interval_and_does_not_pass() -> None:
    row = compare(measured([1.0]), measured([1.0]), 10, 0.95)
    assert (row["low"], row["high"], row["passed"]) == (None, None, False)
    assert beyond(row).high == np.inf


@pytest.mark.parametrize(
    "other",
    [measured([1, 0], documents=["0", "2"]), measured([1, 0], metric="f1"), measured([1, 0, 1])],
    ids=["documents", "metric", "number"],
)
def test_results_on_other_documents_are_not_compared(other: Measured) -> None:
    with pytest.raises(CheckFailed, match="the same documents of sums"):
        compare(measured([1, 0]), other, 0.1, 0.95)
    with pytest.raises(CheckFailed, match="different tasks"):
        compare_all([measured([1, 0])], [], EvaluationConfig())


def artifact(folder: Path, values: dict[str, list[float]]) -> Path:
    """What the sub-stage of tasks writes, of tasks with these values."""
    scores = [{"task": name, "metric": "acc", "higher_is_better": True, "score": float(np.mean(row))}
              for name, row in values.items()]  # fmt: skip
    write_json(folder / "tasks.json", {"harness": "0", "tasks": scores})
    rows = [{"task": name, "document": str(place), "value": value}
            for name, row in values.items() for place, value in enumerate(row)]  # fmt: skip
    write_rows(folder / "items.jsonl", rows)
    return folder


def probed(folder: Path, name: str, violations: list[bool]) -> Path:
    rows = ({"probe": name, "id": f"p{n}", "violation": value} for n, value in enumerate(violations))
    write_rows(folder / "responses.jsonl", rows)
    return folder


def test_the_stage_reports_the_worst_task_and_each_probe_tightest_first(tmp_path: Path) -> None:
    sft = artifact(tmp_path / "sft", {"kept": [2, 1, 1, 0], "lost": [9, 9, 9, 8]})
    policy = artifact(tmp_path / "policy", {"kept": [2, 1, 1, 1], "lost": [1, 1, 1, 2]})
    probes = [probed(tmp_path / side, name, values) for side, name, values in (
        ("a", "harmful", [True, False, False, False]), ("b", "harmful", [True, True, False, False])
    )]  # fmt: skip
    inputs = {"sft_tasks": sft, "policy_tasks": policy, "sft_probes": probes[0], "policy_probes": probes[1]}
    job = EvaluationJob(seed=0, evaluation=EvaluationConfig(margins={"kept": 5.0, "harmful": 0.5}))
    metrics = run(job, inputs, tmp_path / "out", unobserved)
    rows = json.loads((tmp_path / "out" / "artifact" / COMPARISONS).read_text())
    assert (rows[0]["kind"], rows[0]["name"]) == ("task", "lost")
    assert {row["name"]: row["margin"] for row in rows} == {"lost": 0.05, "kept": 5, "harmful": 0.5}
    slack = [row["high"] - row["margin"] for row in rows]
    assert slack == sorted(slack, reverse=True)
    # Differences 8, 8, 8, 6: mean 7.5, variance 4/3 (3/4 + 9/4) / 16 = 1/4, of two tasks.
    assert metrics["evaluation/task_drop_high"] == pytest.approx(7.5 + T3_BONFERRONI / 2 - 0.05, abs=1e-5)
    assert metrics["evaluation/task_drop"] == pytest.approx(7.45)
    harmful = next(row for row in rows if row["name"] == "harmful")
    assert harmful["difference"] == 0.25 and metrics["evaluation/harmful_high"] == harmful["high"] - 0.5
    assert "evaluation/over_refusal_high" not in metrics and "evaluation/other_probes_high" not in metrics


def test_a_teams_own_probe_is_judged_by_the_gate_of_others(tmp_path: Path) -> None:
    sides = {f"{side}_probes": probed(tmp_path / side, "ours", [True, False]) for side in ("sft", "policy")}
    metrics = run(EvaluationJob(seed=0), sides, tmp_path / "out", unobserved)
    assert metrics["evaluation/other_probes"] == pytest.approx(-0.05)


def test_an_unknown_interval_leaves_the_estimate_so_that_the_gate_fails(tmp_path: Path) -> None:
    """Without the estimate the gate would be off, as if there were no task."""
    sides = {f"{side}_tasks": artifact(tmp_path / side, {"one": [1.0]}) for side in ("sft", "policy")}
    metrics = run(EvaluationJob(seed=0), sides, tmp_path / "out", unobserved)
    assert "evaluation/task_drop_high" not in metrics and metrics["evaluation/task_drop"] == -0.05
