"""MLflow shows how far people are with a run's labels."""

from tasks.execution.runner import run_stage
from tasks.runs.awaited_labels import LabelProgress
from tasks.runs.journal import Sent
from tasks.tracking.mlflow_labels import log_progress


def test_mlflow_shows_the_labels_answered_so_far_and_where_the_review_page_is(start, kit, client):
    with start(track=True, stages=("human_eval",)) as ctx:
        run_stage(kit.toy("human_eval.sample"), kit.ToyJob(), {}, ctx)
        ctx.end_stage("human_eval", "awaiting_labels")
    for answered in (0, 3, 12):
        assert log_progress(ctx.home, ctx.run, LabelProgress(answered, 12, "http://127.0.0.1:8800" if answered else ""))
    sent, mlflow = Sent.load(ctx.folder), client()
    for run in (sent.parent, sent.stages["human_eval"]):
        data = mlflow.get_run(run).data
        assert data.tags["tether.labels"] == "12 of 12 labels (100 %)"
        assert data.tags["tether.review"] == "http://127.0.0.1:8800"
        assert data.metrics["human_eval/labels_share"] == 1
        curve = mlflow.get_metric_history(run, "human_eval/labels_answered")
        assert [point.value for point in curve] == [0, 3, 12]


def test_a_run_that_mlflow_never_heard_of_is_told_nothing(start):
    with start(track=False, stages=("human_eval",)) as ctx:
        pass
    assert log_progress(ctx.home, ctx.run, LabelProgress(1, 2)) is False
    assert not (ctx.home / "mlflow.db").exists()
