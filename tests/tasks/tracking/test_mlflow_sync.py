"""What MLflow shows is what ran; what MLflow can't take fails nothing."""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from components.base.errors import GateFailed
from components.gates.judging import Waiver
from components.keys.code_version import code_version
from tasks.execution.runner import run_stage
from tasks.runs.journal import REPORT, Sent, current_user
from tasks.runs.points import points_file, read_points
from tasks.runs.run_label import Label
from tasks.runs.status import load_status
from tasks.tracking import mlflow_sync
from tasks.tracking.model_versions import Versions


def children(home, run):
    return {stage.name: stage.mlflow_run for stage in load_status(home, run).stages}


def outputs(client, run):
    return [each.model_id for each in client.get_run(run).outputs.model_outputs]


def inputs(client, run):
    found = client.get_run(run).inputs
    return [each.model_id for each in found.model_inputs], [each.dataset.name for each in found.dataset_inputs]


def test_mlflow_gets_a_runs_report_and_its_end_though_the_disk_is_full_then(start, kit, client):
    def write(ctx):
        assert load_status(ctx.home, ctx.run).state == "passed"
        (ctx.folder / REPORT).write_text(f"how {ctx.run} went")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), start(track=True, stages=("sft",), at_end=write) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    (stage,) = children(ctx.home, ctx.run).values()
    parent = client().get_run(client().get_run(stage).data.tags["mlflow.parentRunId"])
    assert parent.info.status == "FINISHED"
    assert Path(client().download_artifacts(parent.info.run_id, REPORT)).read_text() == f"how {ctx.run} went"


def test_what_links_to_mlflow_waits_until_the_stage_is_there(start, kit, monkeypatch):
    """A stage that is taken from the store ends before MLflow has heard of it."""
    monkeypatch.setattr(mlflow_sync, "has_pages", lambda home: True)
    monkeypatch.setattr(mlflow_sync, "SETTLE_SECONDS", 600.0)
    with start(track=True, stages=("sft",)) as ctx:
        ctx.begin_stage("sft")
        ctx.tracker().settle(["sft"])
        assert "sft" in Sent.load(ctx.folder).stages
        monkeypatch.setattr(mlflow_sync, "SETTLE_SECONDS", 0.1)
        ctx.tracker().settle(["never"])
        monkeypatch.setattr(mlflow_sync, "SETTLE_SECONDS", 600.0)
        began = time.monotonic()
        ctx.tracker().settle(["never"])
        assert time.monotonic() - began < 60, "nothing waits twice for an MLflow that does not answer"


def test_a_finished_run_waits_while_mlflow_accepts_its_data_and_not_for_one_that_stands_still(start, monkeypatch):
    """On a slow machine the last data took longer than the 20 s, and the next run had to send them."""
    with start() as ctx:
        Sent(project="slow").save(ctx.folder)
    sends = Sending(ctx.folder, times=3)
    monkeypatch.setattr(mlflow_sync, "thread_of", lambda home, send: sends)
    assert not mlflow_sync.Tracker(ctx.home, ctx.run, "slow").close()
    assert sends.waits == [mlflow_sync.CLOSE_SECONDS] * 4


class Sending:
    """A tracker's sender that sends something in each of the first waits for it, and then nothing."""

    def __init__(self, folder, times):
        self.folder, self.times, self.waits = folder, times, []

    def tell(self, text):
        pass

    def end(self):
        pass

    def is_alive(self):
        return True

    def join(self, seconds):
        self.waits.append(seconds)
        if len(self.waits) <= self.times:
            sent = Sent.load(self.folder)
            sent.points["sft"] = len(self.waits)
            sent.save(self.folder)


def test_a_run_and_its_cached_rerun_are_recorded_with_their_lineage(pipeline, client, home, caplog):
    began = time.monotonic()
    ctx, results = pipeline()
    first_seconds, began = time.monotonic() - began, time.monotonic()
    again, _ = pipeline()
    rerun_seconds = time.monotonic() - began
    mlflow = client()
    first, second = children(home, ctx.run), children(home, again.run)
    # MLflow took everything at once
    assert not [each for each in caplog.records if each.name == "tasks.tracking.mlflow_sync"]

    # A parent a pipeline run, a child a stage.
    for run, own in ((ctx.run, first), (again.run, second)):
        for name, child in own.items():
            found = mlflow.get_run(child)
            assert found.info.status == "FINISHED"
            assert found.data.tags["tether.run"] == run
            assert found.data.tags["tether.stage"] == name
            parent = mlflow.get_run(found.data.tags["mlflow.parentRunId"])
            assert parent.data.tags["tether.run"] == run
            assert parent.data.params["ppo.x"] == "2"
            assert parent.info.status == "FINISHED"

    # Curves in order, no doubles, the final value after the last step; on the hit the final value alone.
    kl = [(each.step, each.value) for each in mlflow.get_metric_history(first["ppo"], "ppo/kl")]
    assert kl == [(1, 2.0), (2, 4.0), (3, 6.0), (4, 8.0), (5, 10.0), (6, 5.5)]
    assert mlflow.get_run(first["ppo"]).data.metrics["ppo/kl"] == 5.5
    assert [each.value for each in mlflow.get_metric_history(second["ppo"], "ppo/kl")] == [5.5]
    assert mlflow.get_metric_history(second["ppo"], "ppo/proxy_reward") == []

    # The hit says where it came from and gives the very same model.
    tags = mlflow.get_run(second["ppo"]).data.tags
    assert (tags["cache_hit"], tags["cached_from"], tags["cached_from_run"]) == ("true", ctx.run, first["ppo"])
    assert mlflow.get_run(first["ppo"]).data.tags["cache_hit"] == "false"
    assert outputs(mlflow, second["ppo"]) == outputs(mlflow, first["ppo"])
    assert first["ppo"] in tags["mlflow.note.content"]

    # Edges: sft's output is ppo's input, data is a dataset with the artifact's digest.
    models, datasets = inputs(mlflow, first["ppo"])
    assert models == outputs(mlflow, first["sft"])
    assert datasets == ["data"]
    dataset = mlflow.get_run(first["ppo"]).inputs.dataset_inputs[0].dataset
    assert dataset.digest == results["validate"].digest[:32]
    assert inputs(mlflow, first["validate"])[1] == ["preferences", "data"]
    assert models[0] in mlflow.get_run(first["ppo"]).data.tags["mlflow.note.content"]

    # Downstream of a data digest is one query.
    policy = mlflow.get_logged_model(outputs(mlflow, first["ppo"])[0])
    query = f"tags.`lineage.data_digest`='{results['validate'].digest}'"
    found = mlflow.search_logged_models([policy.experiment_id], query)
    assert {each.name for each in found} == {"tether-sft", "tether-policy"}
    assert policy.tags["lineage.preferences_digest"] == results["validate"].record.inputs["preferences"]
    assert policy.params["artifact_digest"] == results["ppo"].digest

    # A hit adds nothing to a model's values: MLflow reads all of them whenever it looks for the model.
    measured = [(each.key, each.run_id) for each in mlflow.get_logged_model(policy.model_id).metrics]
    assert {run for _, run in measured} == {first["ppo"], first["human_eval"]}
    assert len(measured) == len(set(measured))

    # One version a model, however many hits; the policy is champion after human_eval's gates.
    assert len(mlflow.search_model_versions("name='tether-policy'")) == 1
    assert len(mlflow.search_model_versions("name='tether-sft'")) == 1
    for alias in ("candidate", "champion"):
        version = mlflow.get_model_version_by_alias("tether-policy", alias)
        assert version.tags["lineage.digest"] == results["ppo"].digest
        assert version.run_id == first["ppo"]

    # Lineage as a picture: on the run's page, and, with the human evaluation, on those of the model and its version.
    picture = "](get-artifact?path=lineage.svg&run_uuid={})"
    assert picture.format(first["ppo"]) in mlflow.get_run(first["ppo"]).data.tags["mlflow.note.content"]
    judged = picture.format(second["human_eval"])
    assert judged in version.description and judged in mlflow.get_registered_model("tether-policy").description
    assert "lineage.svg" in [each.path for each in mlflow.list_artifacts(second["human_eval"])]
    mlflow.update_registered_model("tether-policy", "Policies of desk 4")
    Versions(mlflow).describe("tether-policy", "1")
    assert mlflow.get_registered_model("tether-policy").description == "Policies of desk 4", "a person's stays"

    # Artifacts: gates, the table of samples, plots and what else is attached.
    names = {each.path for each in mlflow.list_artifacts(first["ppo"])}
    assert {"gates.json", "gates.md", "samples.json", "attachments"} <= names
    attached = {each.path for each in mlflow.list_artifacts(first["ppo"], "attachments")}
    assert attached == {
        f"attachments/{name}" for name in ("points.jsonl", "reward_and_kl.svg", "frontier.svg", "timings.json")
    }
    assert {each.path for each in mlflow.list_artifacts(second["ppo"])} == {"gates.json", "gates.md", "lineage.svg"}
    table = mlflow.load_table(mlflow.get_run(first["ppo"]).info.experiment_id, "samples.json", [first["ppo"]])
    assert table["prompt"][0] == "user: where is it"
    assert rerun_seconds < first_seconds + mlflow_sync.CLOSE_SECONDS / 2, "the end of hits waits for nothing"


def test_a_run_is_shown_under_its_name_tags_and_user_in_an_experiment_of_any_name(start, kit, client, home):
    label = Label("warmer tone", {"team": "desk", "keep": ""})
    with start(track=True, project="desk/v2: it's 100%", stages=("sft",), label=label) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        cards = ctx.folder / "cards"
        cards.mkdir()
        (cards / "desk-v2-it-s-100-sft.md").write_text("a card")
    mlflow, child = client(), children(home, ctx.run)["sft"]
    stage = mlflow.get_run(child)
    parent = mlflow.get_run(stage.data.tags["mlflow.parentRunId"])
    assert mlflow.get_experiment(parent.info.experiment_id).name == "desk/v2: it's 100%"
    assert (parent.info.run_name, stage.info.run_name) == ("warmer tone", "sft")
    assert {name: parent.data.tags[name] for name in ("team", "keep")} == {"team": "desk", "keep": ""}
    for run in (parent, stage):
        tags = run.data.tags
        assert (tags["mlflow.user"], tags["mlflow.source.name"], tags["mlflow.source.type"]) == (
            current_user(),
            "tether",
            "LOCAL",
        )
        assert tags.get("mlflow.source.git.commit") == code_version()["commit"]
        assert "tether.process" not in tags
    assert len(mlflow.search_model_versions("name='desk-v2-it-s-100-sft'")) == 1
    assert mlflow_text(mlflow, child, "model_card.md") == "a card"


def test_a_failed_gate_ends_its_run_as_failed_and_registers_nothing(pipeline, client, home):
    with pytest.raises(GateFailed):
        pipeline(metrics="9")
    mlflow = client()
    status = load_status(home)
    child = mlflow.get_run(children(home, status.run)["ppo"])
    assert (child.info.status, child.data.tags["tether.state"]) == ("FAILED", "gate_failed")
    assert len(outputs(mlflow, child.info.run_id)) == 1
    assert mlflow.search_registered_models("name='tether-policy'") == []
    verdicts = json.loads(mlflow_text(mlflow, child.info.run_id, "gates.json"))
    assert [each["name"] for each in verdicts if not each["passed"]] == ["policy.kl"]


def test_a_list_of_runs_names_the_failed_gates_and_no_longer_once_they_pass(start, kit, client, home):
    def judged(ctx):
        mlflow = client()
        stage = mlflow.get_run(children(home, ctx.run)["ppo"])
        tags = [stage.data.tags, mlflow.get_run(stage.data.tags["mlflow.parentRunId"]).data.tags]
        return [(each["tether.state"], each.get("tether.failed_gates")) for each in tags]

    metrics = {"policy/kl_high": "9", "policy/repetition_high": "0.5"}
    bounds = {"kl": 8.0, "repetition": 0.1}
    with pytest.raises(GateFailed), start(kit.thresholds(policy=bounds), track=True, stages=("ppo",)) as ctx:
        run_stage(kit.toy("ppo"), kit.ToyJob(metrics=metrics), {}, ctx)
    assert judged(ctx) == [("gate_failed", "policy.kl, policy.repetition")] * 2
    for bounds, error, named in (
        ({"kl": 10.0, "repetition": 0.1}, GateFailed, ("gate_failed", "policy.repetition")),
        ({"kl": 10.0, "repetition": 0.6}, None, ("cached", None)),
    ):
        gates = kit.thresholds(policy=bounds)
        again = type(ctx).resume(home, ctx.run, gates, execution=ctx.execution)
        with pytest.raises(error) if error else nullcontext(), again:
            run_stage(kit.toy("ppo"), kit.ToyJob(metrics=metrics), {}, again)
        assert judged(ctx) == [named] * 2


def mlflow_text(mlflow, run, name):
    from mlflow.artifacts import load_text

    return load_text(f"{mlflow.get_run(run).info.artifact_uri}/{name}")


def test_a_waiver_is_recorded_with_user_and_reason_and_waived_labels_promote_nobody(pipeline, kit, client, home):
    gates = kit.thresholds(policy={"kl": 8.0}, human_eval={"items": 10.0})
    waivers = [
        Waiver(gate="policy.kl", user="ada", reason="why"),
        Waiver(gate="human_eval.items", user="bo", reason="few"),
    ]
    ctx, results = pipeline(gates, metrics="9", waivers=waivers)
    mlflow = client()
    tags = mlflow.get_run(children(home, ctx.run)["ppo"]).data.tags
    assert json.loads(tags["tether.waivers"]) == {"policy.kl": {"user": "ada", "reason": "why"}}
    version = mlflow.get_model_version_by_alias("tether-policy", "candidate")
    assert json.loads(version.tags["tether.waivers"]) == {
        "policy.kl": {"user": "ada", "reason": "why", "run": ctx.run},
        "human_eval.items": {"user": "bo", "reason": "few", "run": ctx.run},
    }
    assert json.loads(version.tags["tether.human_eval"])["state"] == "waived"
    assert "champion" not in mlflow.get_registered_model("tether-policy").aliases
    assert results["human_eval"].state == "waived"


@pytest.mark.parametrize("broken", ["open", "later"])
def test_a_broken_mlflow_is_said_and_fails_no_stage_and_keeps_the_points(pipeline, home, monkeypatch, caplog, broken):
    if broken == "open":
        monkeypatch.setattr("tasks.tracking.recorder.connect", _raise)
    else:
        monkeypatch.setattr("tasks.tracking.model_links.Lineage.output_model", _raise)
    ctx, results = pipeline()
    assert results["human_eval"].state == "passed"
    assert load_status(home).state == "passed"
    assert "the tracking store is away" in caplog.text
    assert [point["step"] for point in read_points(points_file(ctx.folder, "ppo"))] == [1, 2, 3, 4, 5]


def _raise(*args, **kwargs):
    raise ConnectionError("the tracking store is away")


def test_what_a_run_that_is_taken_up_computed_itself_is_no_hit_and_its_numbers_are_there_once(
    start, kit, client, home
):
    with start(track=True) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    later = type(ctx).resume(home, ctx.run, kit.thresholds(), execution=ctx.execution)
    with later:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, later)
    child, mlflow = children(home, ctx.run)["sft"], client()
    tags = mlflow.get_run(child).data.tags
    assert (tags["cache_hit"], "cached_from" in tags) == ("false", False)
    assert "From the cache" not in tags["mlflow.note.content"] and child in tags["mlflow.note.content"]
    assert [each.step for each in mlflow.get_metric_history(child, "toy/loss")] == [4]


def test_a_scored_sheet_takes_up_the_same_mlflow_runs(start, kit, client, home):
    sample, score = kit.toy("human_eval.sample"), kit.toy("human_eval")
    with start(track=True) as ctx:
        sampled = run_stage(sample, kit.ToyJob(), {}, ctx)
        ctx.end_stage("human_eval", "awaiting_labels")
    child = children(home, ctx.run)["human_eval"]
    mlflow = client()
    assert mlflow.get_run(child).data.tags["tether.state"] == "awaiting_labels"
    later = type(ctx).resume(home, ctx.run, kit.thresholds(), execution=ctx.execution)
    with later:
        run_stage(score, kit.ToyJob(value=2), {"sample": sampled}, later)
    assert children(home, ctx.run)["human_eval"] == child
    found = mlflow.get_run(child)
    assert (found.info.status, found.data.tags["tether.state"]) == ("FINISHED", "passed")
    runs = mlflow.search_runs([found.info.experiment_id], "tags.`tether.stage`='human_eval'")
    assert len(runs) == 1
