"""The Python way in gives what the commands give."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from components.base.errors import UserError
from flows.api import lineage, load_run, rerun, run
from flows.cli.__main__ import app
from tests.stored_run import CURVES, METRICS, stored_run


def test_a_loaded_run_has_the_metrics_gates_curves_and_artifacts_that_the_commands_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    name = stored_run(tmp_path)
    found = load_run()
    assert (found.id, found.state, found.passed) == (name, "passed", True)
    shown = json.loads(CliRunner().invoke(app, ["status", name, "--json"]).stdout)
    metrics = found.metrics().set_index("metric")["value"]
    assert metrics["policy/kl"] == METRICS["ppo"]["policy/kl"] and len(metrics) == sum(map(len, METRICS.values()))
    gates = found.gates()
    assert list(gates["gate"]) == [gate["name"] for stage in shown["stages"] for gate in stage["gates"]]
    assert gates.set_index("gate").loc["policy.kl", "value"] == METRICS["ppo"]["policy/kl_high"]
    curves = found.curves("ppo")
    assert curves.index.name == "step" and list(curves.index) == [1, 2, 3]
    np.testing.assert_array_equal(curves["ppo/beta"], CURVES["ppo"]["ppo/beta"])
    assert found.curves("reward").empty and found.artifact("sft").is_dir() and name in repr(found)
    graph = json.loads(json.dumps(lineage(found).as_json()))
    assert graph == json.loads(CliRunner().invoke(app, ["lineage", name, "--json"]).stdout)


def test_a_failed_gate_is_a_state_and_what_can_not_be_done_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    failed = load_run(stored_run(tmp_path, changes=["gates.policy.kl=0.001"]), home=tmp_path)
    assert failed.state == "gate_failed" and not failed.passed
    assert not failed.gates().set_index("gate").loc["policy.kl", "passed"]
    for ask, match in [
        (lambda: load_run("20990101-000000-0000"), "there is no run 20990101-000000-0000"),
        (lambda: failed.artifact("human_eval"), "has published nothing: it is not_run"),
        (lambda: failed.curves("dpo"), "has no stage 'dpo'; its stages are validate, sft"),
        (lambda: run("tiny", {"ppo.kl.targt": 1}), r"did you mean ppo\.kl\.target"),
        (lambda: run("tiny", waive=["policy.kl"]), "waive policy.kl: give the reason with because TEXT"),
        (lambda: run("tiny", because="seen"), "because: name the waived gate with waive GATE"),
        (lambda: rerun("reward", "20990101-000000-0000"), "there is no run"),
    ]:
        with pytest.raises(UserError, match=match):
            ask()


@pytest.mark.whole
def test_a_run_and_a_rerun_from_python_are_those_of_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    first = run("tiny", until="reward")
    assert first.passed and first.status.stage("ppo").state == "not_run" and len(first.curves("sft"))
    again = rerun("reward", first, {"gates.reward.accuracy_low": 1.0}, until="reward")
    assert again.state == "gate_failed" and again.status.stage("sft").cached
    made_of = lineage(again.artifact("reward").name).nodes
    assert {node.as_json()["stage"] for node in made_of} >= {"validate", "sft", "reward"}
