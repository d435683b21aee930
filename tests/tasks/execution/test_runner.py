"""The life of a stage: computed once, judged always, and nothing half-written left behind."""

import errno
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from components.base.errors import GateFailed, UserError
from components.gates.judging import Waiver
from components.keys.fingerprint import ROOT
from components.store.store import ArtifactStore, Record
from tasks.execution import computing
from tasks.execution.context import Reuse, RunContext
from tasks.execution.runner import peek, run_stage
from tasks.result import Input
from tasks.runs.journal import read_done, recorded_inputs
from tasks.runs.points import points_file, read_points
from tasks.runs.status import load_status
from tests.forks import Forked
from tests.waiting import until


@pytest.fixture
def ppo(kit):
    return kit.toy("ppo")


def entry(home, name, run=None):
    return {stage.name: stage for stage in load_status(home, run).stages}[name]


def work_folders(home):
    return [path for path in (home / "work").iterdir() if path.suffix != ".lock"]


def test_a_stage_is_computed_once_and_then_taken_from_the_store(start, kit, calls, home, said):
    with start() as ctx:
        first = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    with start() as again:
        second = run_stage(kit.toy("sft"), kit.ToyJob(), {}, again)
    assert calls() == ["toy"]
    assert (first.state, first.cached, second.state, second.cached) == ("passed", False, "cached", True)
    assert second.digest == first.digest
    assert second.record.metrics == {"toy/loss": 0.5}
    assert (second.path / "value.txt").read_text() == "1"
    assert "computing (no earlier record)" in said(ctx)
    assert f"computed by {ctx.run}" in said(again)
    assert entry(home, "sft", again.run).cached is True
    assert work_folders(home) == []


def test_an_upstream_change_recomputes_downstream_only_if_its_bytes_changed(start, kit, calls):
    with start() as ctx:
        for name, steps in (("first", 3), ("second", 2)):
            sft = run_stage(kit.toy("sft"), kit.ToyJob(name=name, steps=steps), {}, ctx)
            run_stage(kit.toy("ppo"), kit.ToyJob(name="down"), {"sft": sft}, ctx)
        sft = run_stage(kit.toy("sft"), kit.ToyJob(name="third", value=5), {}, ctx)
        result = run_stage(kit.toy("ppo"), kit.ToyJob(name="down"), {"sft": sft}, ctx)
    assert calls() == ["first", "down", "second", "third", "down"]
    assert (result.path / "value.txt").read_text() == "6"


def test_a_comment_in_the_source_is_a_hit_and_a_change_of_code_is_not(start, kit, calls, toy_source):
    stage = kit.toy("sft")
    with start() as ctx:
        run_stage(stage, kit.ToyJob(), {}, ctx)
        toy_source.write_text("# a word more\n" + toy_source.read_text())
        assert run_stage(stage, kit.ToyJob(), {}, ctx).cached
        toy_source.write_text(toy_source.read_text().replace("step / 10", "step / 11"))
        assert not run_stage(stage, kit.ToyJob(), {}, ctx).cached
    assert calls() == ["toy", "toy"]


def test_what_a_stage_does_after_its_steps_is_shown_and_is_no_point_and_no_sample(start, kit, said, toy_source):
    phase = '    for done in (0, 4):\n        observe(done, {}, total=8, doing="evaluating on 8 prompts")\n'
    toy_source.write_text(toy_source.read_text().replace("    total = job.value", phase + "    total = job.value"))
    with start() as ctx:
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert said(ctx).count("  sft: evaluating on 8 prompts\n") == 1
    for path in (ctx.store.attachment(result.record, "points.jsonl"), ctx.folder / "metrics" / "sft.jsonl"):
        assert "evaluating" not in path.read_text()
        assert [point["step"] for point in read_points(path)] == [1, 2, 3]
    assert not (ctx.folder / "samples").exists()


def test_a_damaged_result_is_computed_again_with_the_reason(start, kit, calls, said):
    stage = kit.toy("sft")
    with start() as ctx:
        result = run_stage(stage, kit.ToyJob(), {}, ctx)
        damaged = ctx.store.objects / result.record.files["value.txt"]
        damaged.chmod(0o644)
        damaged.write_bytes(b"2")
        again = run_stage(stage, kit.ToyJob(), {}, ctx)
    assert calls() == ["toy", "toy"]
    assert not again.cached
    assert "the record is damaged: attempt 1: object damaged: value.txt" in said(ctx)
    assert (again.path / "value.txt").read_text() == "1"


def test_a_refresh_computes_equal_bytes_again_without_a_warning(start, kit, calls, said):
    with start() as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    with start(refresh=frozenset({"sft"})) as again:
        assert not run_stage(kit.toy("sft"), kit.ToyJob(), {}, again).cached
    assert calls() == ["toy", "toy"]
    assert "computing (asked for" in said(again) and "different bytes" not in said(again)


def test_other_bytes_under_the_same_key_are_said(start, kit, said, home):
    with start() as ctx:
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    (home / "other").mkdir()
    (home / "other" / "value.txt").write_text("7")
    ctx.store.publish(result.record.key, home / "other", None, {"stage": "sft"})
    with start(refresh=frozenset({"sft"})) as again:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, again)
    assert "different bytes before" in said(again)


def test_peek_finds_what_a_run_would_find_and_touches_nothing(start, kit, calls, home):
    stage = kit.toy("ppo")
    job = kit.ToyJob(metrics={"policy/kl_high": "9"})
    with start() as ctx:
        assert peek(stage, job, {}, ctx) is None
        run_stage(stage, job, {}, ctx)
    with start(kit.thresholds(policy={"kl": 8.0})) as again:
        before = (home / "runs" / again.run / "run.json").read_text()
        found = peek(stage, job, {}, again)
        assert (home / "runs" / again.run / "run.json").read_text() == before
    assert found.cached
    assert found.state == "gate_failed"
    assert calls() == ["toy"]


@pytest.mark.parametrize("metrics", [{"policy/kl_high": "nan"}, {"policy/kl": "3"}, {"policy/kl_high": "9"}])
def test_a_gate_fails_for_nan_missing_and_too_large_keeps_the_artifact_and_fails_again(
    start, kit, ppo, calls, home, metrics
):
    job = kit.ToyJob(metrics=metrics)
    gates = kit.thresholds(policy={"kl": 8.0})
    for _ in range(2):
        with start(gates) as ctx, pytest.raises(GateFailed, match=r"policy\.kl: policy/kl_h.* must be <= 8") as error:
            run_stage(ppo, job, {}, ctx)
        assert f"artifact is kept ({entry(home, 'ppo').digest[:12]});" in str(error.value)
        status = load_status(home)
        assert status.state == "gate_failed"
        kl = next(gate for gate in entry(home, "ppo").gates if gate.name == "policy.kl")
        assert (kl.passed, kl.waived, kl.threshold) == (False, False, 8.0)
        assert isinstance(ctx.store.lookup(entry(home, "ppo").key), Record)
    assert calls() == ["toy"]


def test_a_new_threshold_judges_again_without_computing(start, kit, ppo, calls, home):
    job = kit.ToyJob(metrics={"policy/kl_high": "6"})
    with start(kit.thresholds(policy={"kl": 8.0})) as ctx:
        assert run_stage(ppo, job, {}, ctx).state == "passed"
    with start(kit.thresholds(policy={"kl": 5.0})) as ctx, pytest.raises(GateFailed):
        run_stage(ppo, job, {}, ctx)
    with start(kit.thresholds(policy={"kl": 7.0})) as ctx:
        assert run_stage(ppo, job, {}, ctx).state == "cached"
    assert calls() == ["toy"]


def test_a_waived_gate_lets_the_run_go_on_and_stands_in_the_status(start, kit, ppo, home, said):
    job = kit.ToyJob(metrics={"policy/kl_high": "9"})
    waivers = [Waiver(gate="policy.kl", user="ada", reason="known data shift")]
    with start(kit.thresholds(policy={"kl": 8.0}), waivers=waivers) as ctx:
        assert run_stage(ppo, job, {}, ctx).state == "waived"
    kl = next(gate for gate in entry(home, "ppo").gates if gate.name == "policy.kl")
    assert (kl.passed, kl.waived) == (False, True)
    assert entry(home, "ppo").state == "waived"
    assert "WAIVED policy.kl" in said(ctx)
    assert "ada: known data shift" in said(ctx)


def test_a_waiver_of_an_unknown_gate_is_refused_before_anything_runs(start, home):
    with pytest.raises(UserError, match=r"policy\.kl"):
        start(waivers=[Waiver(gate="ppo.kll", user="ada", reason="x")])
    assert not (home / "runs").exists()


def test_the_users_mistake_leaves_no_work_no_record_and_no_artifact(start, kit, home):
    job = kit.ToyJob(stop="user", stop_at=1)
    with start() as ctx, pytest.raises(UserError, match="the data is empty"):
        run_stage(kit.toy("sft"), job, {}, ctx)
    assert work_folders(home) == []
    assert not (home / "store" / "records").exists()
    assert not (home / "store" / "objects").exists()
    assert load_status(home).state == "failed"


def test_an_import_of_another_form_is_one_paragraph_and_our_own_error_is_none(start, kit, home, tmp_path):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "value.txt").write_text("no number")
    given = Input.of(tmp_path / "sft")
    imported = given.model_copy(update={"imported": True})
    with (
        start() as ctx,
        pytest.raises(UserError, match=f"ppo can't use sft {given.digest[:12]}, which was computed else"),
    ):
        run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": imported}, ctx)
    with start() as ctx, pytest.raises(ValueError, match="invalid literal"):
        run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": given}, ctx)


def test_what_a_run_hands_to_mlflow_has_files_only_where_it_computed_them(start, kit):
    before = time.time()
    with start() as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    with start() as again:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, again)
        run_stage(kit.toy("ppo"), kit.ToyJob(steps=0), {}, again)
    (done,), (hit, without_curve) = read_done(ctx.folder), read_done(again.folder)
    assert before - 1 <= done.time / 1000 <= time.time(), "in milliseconds"
    assert not any("resumed" in point for point in read_points(points_file(ctx.folder, "sft")))
    assert "timings.json" in done.attachments and all(path.is_file() for path in done.attachments.values())
    assert not done.hit and hit.hit and hit.attachments == {}
    assert (hit.run, hit.record.run) == (again.run, ctx.run)
    assert (done.step, without_curve.step) == (4, 0), "metrics stand after the curve's last step, 3"


def test_what_a_run_read_from_outside_is_found_by_its_digest_and_what_a_stage_made_is_not(start, kit, home, tmp_path):
    (tmp_path / "pairs.jsonl").write_text("one pair")
    source = Input.of(tmp_path / "pairs.jsonl")
    with start() as ctx:
        sft = run_stage(kit.toy("sft"), kit.ToyJob(), {"preferences": source}, ctx)
        run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": sft}, ctx)
    read = recorded_inputs(home, [ctx.run])
    assert {digest: each.path for digest, each in read.items()} == {source.digest: tmp_path / "pairs.jsonl"}


def test_a_result_stands_though_its_work_folder_can_not_be_removed(start, kit, monkeypatch):
    def stuck(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with start() as ctx, monkeypatch.context() as patch:
        patch.setattr(computing.shutil, "rmtree", stuck)
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert result.state == "passed" and ctx.store.lookup(result.record.key) == result.record


def test_a_missing_source_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        Input.of(tmp_path / "nowhere.jsonl")


def test_the_content_of_a_source_is_in_the_key_and_its_path_is_not(start, kit, tmp_path, calls):
    keys = []
    with start() as ctx:
        for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
            path = tmp_path / name
            path.write_text(text)
            keys.append(run_stage(kit.toy("sft"), kit.ToyJob(), {"preferences": Input.of(path)}, ctx).record.key)
    assert keys[0] == keys[1] != keys[2]
    assert len(calls()) == 2


def test_an_interrupted_stage_is_resumable_and_a_resume_ends_with_the_same_bytes(start, kit, home, calls):
    undisturbed = kit.ToyJob(steps=4)
    stopping = kit.ToyJob(steps=4, stop_at=2, checkpoint=True, stop="")
    interrupted = stopping.model_copy(update={"stop": "interrupt"})
    with pytest.raises(KeyboardInterrupt), start() as ctx:
        run_stage(kit.toy("sft"), interrupted, {}, ctx)
    assert load_status(home).state == "interrupted"
    assert entry(home, "sft").state == "interrupted"
    assert len(work_folders(home)) == 1
    with start() as again:
        result = run_stage(kit.toy("sft"), interrupted, {}, again)
        whole = run_stage(kit.toy("ppo"), undisturbed, {}, again)
    assert result.digest == whole.digest
    assert work_folders(home) == []
    points = read_points(points_file(again.folder, "sft"))
    # The curve is whole in the run that resumed, and no step is there twice.
    assert [point["step"] for point in points] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b"{}\n", b"[]\n", b'{"step": 1, "metrics": null}\n', b'{"step": 1, "me']
)
def test_damaged_points_beside_a_checkpoint_cost_a_gap_in_the_curve_and_no_more(start, kit, home, damage, caplog):
    job = kit.ToyJob(steps=4, stop="interrupt", stop_at=2, checkpoint=True)
    with pytest.raises(KeyboardInterrupt), start() as ctx:
        run_stage(kit.toy("sft"), job, {}, ctx)
    (file,) = home.glob("work/*/points.jsonl")
    file.write_bytes(damage + file.read_bytes().splitlines(keepends=True)[1])
    with start() as again:
        run_stage(kit.toy("sft"), job, {}, again)
    assert [point["step"] for point in read_points(points_file(again.folder, "sft"))] in ([2, 3, 4], [3, 4])
    assert "damaged lines" in caplog.text


def test_an_error_before_the_first_checkpoint_leaves_no_work(start, kit, home):
    with start() as ctx, pytest.raises(RuntimeError):
        run_stage(kit.toy("sft"), kit.ToyJob(stop="raise", stop_at=1), {}, ctx)
    assert work_folders(home) == []
    assert entry(home, "sft").state == "failed"


def _run_and_die(start, kit, job):
    ctx = start()
    run_stage(kit.toy("sft"), job, {}, ctx)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_killed_run_reads_as_interrupted_and_the_next_one_finishes(start, kit, home, checkpoint):
    job = kit.ToyJob(steps=4, stop="kill", stop_at=2, checkpoint=checkpoint)
    process = Forked(target=_run_and_die, args=(start, kit, job))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    status = load_status(home)
    assert status.state == "interrupted"
    assert [stage.state for stage in status.stages] == ["interrupted", "not_run", "not_run"]
    with start() as ctx:
        result = run_stage(kit.toy("sft"), job, {}, ctx)
    assert (result.path / "value.txt").read_text() == "1"
    assert [point["step"] for point in read_points(points_file(ctx.folder, "sft"))] == [1, 2, 3, 4]


def test_a_half_written_artifact_of_a_killed_attempt_is_not_published(start, kit, home):
    job = kit.ToyJob()
    with start() as ctx:
        expected = run_stage(kit.toy("ppo"), job, {}, ctx).digest
        # The key of the same job under another stage name, with leftovers as a kill would leave them.
        key = run_stage(kit.toy("sft"), job, {}, ctx).record.key
        out = home / "work" / key / "000000001"
        for folder in ("artifact", "checkpoint"):
            (out / folder).mkdir(parents=True)
        (out / "artifact" / "torn.bin").write_text("half")
        (out / "checkpoint" / "step.json").write_text("3")
    with start(refresh=frozenset({"sft"})) as again:
        assert run_stage(kit.toy("sft"), job, {}, again).digest == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_compute_one_key_once(start, kit, home, calls, toy_source):
    slow = "    import time; time.sleep(0.5); artifact.mkdir()"
    toy_source.write_text(toy_source.read_text().replace("    artifact.mkdir()", slow))
    both = [Forked(target=_run_and_die, args=(start, kit, kit.ToyJob())) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert calls() == ["toy"]
    states = sorted(load_status(home, path.name).stages[0].state for path in (home / "runs").iterdir())
    assert states == ["cached", "passed"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("continued", ["while its successor computes", "when its successor is done"])
def test_a_holder_that_was_cut_off_publishes_nothing_and_disturbs_nobody(start, kit, home, toy_source, continued):
    """A file server frees the lock of a machine that is suspended for long, which is a new file here."""
    stops = "os.kill(os.getpid(), signal.SIGSTOP)\n                continue"
    slow = toy_source.read_text().replace("        observe(step", "        time.sleep(0.1)\n        observe(step")
    toy_source.write_text(slow.replace("os.kill(os.getpid(), signal.SIGKILL)", stops))
    job = kit.ToyJob(steps=8, checkpoint=True, stop="kill", stop_at=2)
    first, second = (Forked(target=_run_and_die, args=(start, kit, job)) for _ in range(2))
    first.start()
    stopped = psutil.Process(first.pid)
    until("the first stands still", lambda: stopped.status() == psutil.STATUS_STOPPED, 20, every=0.01)
    runs = set(os.listdir(home / "runs"))
    (lock,) = home.glob("work/*.lock")
    shutil.copy(lock, home / "copy")
    os.replace(home / "copy", lock)
    second.start()
    if continued == "while its successor computes":
        began = functools.partial(home.glob, "work/*/000000002/checkpoint/step.json")
        until("its successor computes", lambda: list(began()), 20, every=0.01)
    else:
        second.join()
    os.kill(first.pid, signal.SIGCONT)
    first.join()
    second.join()
    assert (first.exitcode, second.exitcode) == (1, 0)
    with start() as ctx:
        result = run_stage(kit.toy("sft"), job, {}, ctx)
    assert result.cached and ctx.store.attempts(result.record.key) == ["1.sft.json"]
    assert result.record.run not in runs, "the successor's"
    points = [point["step"] for point in read_points(ctx.store.attachment(result.record, "points.jsonl"))]
    assert points == list(range(1, 9))
    assert work_folders(home) == []
    assert lock.read_text() == "000000002\n"


def test_a_sub_stage_is_shown_under_its_stage_which_stays_running_until_the_last(start, kit, home):
    sample, score = kit.toy("human_eval.sample"), kit.toy("human_eval")
    gates = kit.thresholds(human_eval={"win_rate_low": 0.5})
    job = kit.ToyJob(metrics={"human_eval/win_rate_low": "0.6"})
    with start(gates) as ctx:
        sampled = run_stage(sample, kit.ToyJob(), {}, ctx)
        assert entry(home, "human_eval").state == "running"
        assert run_stage(score, job, {"sample": sampled}, ctx).state == "passed"
    assert entry(home, "human_eval").metrics == {"toy/loss": 0.5, "human_eval/win_rate_low": 0.6}
    assert entry(home, "human_eval").cached is False
    with start(gates) as again:
        sampled = run_stage(sample, kit.ToyJob(), {}, again)
        assert run_stage(score, job, {"sample": sampled}, again).state == "cached"
    assert entry(home, "human_eval").cached is True


def test_a_cached_sample_with_new_labels_is_not_shown_as_cached(start, kit, home, tmp_path):
    sample, score = kit.toy("human_eval.sample"), kit.toy("human_eval")
    states = []
    for text in ("a", "b"):
        sheet = tmp_path / text
        sheet.write_text(text)
        with start() as ctx:
            sampled = run_stage(sample, kit.ToyJob(), {}, ctx)
            states.append(run_stage(score, kit.ToyJob(), {"sample": sampled, "sheet": Input.of(sheet)}, ctx).state)
    assert states == ["passed", "passed"]
    assert entry(home, "human_eval").cached is False


def test_a_sample_that_was_computed_again_is_not_shown_as_cached(start, kit, home):
    sample, score = kit.toy("human_eval.sample"), kit.toy("human_eval")
    for refresh in (frozenset(), frozenset({"human_eval.sample"})):
        with start(refresh=refresh) as ctx:
            sampled = run_stage(sample, kit.ToyJob(), {}, ctx)
            result = run_stage(score, kit.ToyJob(), {"sample": sampled}, ctx)
    assert result.cached
    assert (entry(home, "human_eval").state, entry(home, "human_eval").cached) == ("passed", False)


def test_a_run_awaits_labels_and_is_finished_later_under_its_id(start, kit, home):
    sample, score = kit.toy("human_eval.sample"), kit.toy("human_eval")
    with start() as ctx:
        run_stage(sample, kit.ToyJob(), {}, ctx)
        ctx.end_stage("human_eval", "awaiting_labels")
    assert load_status(home).state == "awaiting_labels"
    later = type(ctx).resume(home, ctx.run, kit.thresholds(), execution=ctx.execution, reporting=ctx.reporting)
    with later:
        sampled = peek(sample, kit.ToyJob(), {}, later)
        run_stage(score, kit.ToyJob(value=2), {"sample": sampled}, later)
    assert load_status(home).run == ctx.run
    assert entry(home, "human_eval").state == "passed"


def test_importing_and_hitting_needs_neither_torch_nor_mlflow_nor_prefect():
    code = (
        "import sys, tasks.execution.runner, tasks.stages;"
        "print([m for m in ('torch','transformers','mlflow','prefect','matplotlib','pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_record_holds_what_explains_the_result(start, kit, tmp_path):
    data = tmp_path / "data"
    data.write_text("x")
    source = Input.of(data)
    with start() as ctx:
        result = run_stage(kit.toy("sft"), kit.ToyJob(value=4), {"preferences": source}, ctx)
    record = ArtifactStore(ctx.home).lookup(result.record.key)
    assert record.inputs == {"preferences": source.digest}
    assert record.job["value"] == 4
    assert "stop_at" not in record.job
    assert "toy_stage" in record.parts["source"]
    assert record.run == ctx.run
    assert json.loads(ctx.store.attachment(record, "timings.json").read_text()) == os.getpid()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_source_that_is_replaced_after_its_digest_leaves_nothing_under_that_digest(
    start, kit, home, tmp_path, monkeypatch, when
):
    data = tmp_path / "pairs.jsonl"
    data.write_text("monday")
    given = {"preferences": Input.of(data)}
    plot = computing._plot

    def meanwhile(*args):
        data.write_text("tuesday")
        plot(*args)

    if when == "before":
        data.write_text("tuesday")
    else:
        monkeypatch.setattr(computing, "_plot", meanwhile)
    job = kit.ToyJob(checkpoint=True)
    with pytest.raises(UserError, match=r"pairs.jsonl changed after the run began"), start() as ctx:
        run_stage(kit.toy("sft"), job, given, ctx)
    assert work_folders(home) == [], "no checkpoint of it either"
    monkeypatch.undo()
    data.write_text("monday")
    with start(stages=("sft",)) as ctx:
        assert peek(kit.toy("sft"), job, given, ctx) is None


def test_a_digest_that_is_not_of_the_content_is_named_before_anything_is_computed(start, kit, home, tmp_path):
    """Two contents of one size would have one key."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("monday")
    given = {"preferences": Input(digest=f"{data.stat().st_size:064x}", path=data)}
    with pytest.raises(UserError, match=r"the digest is not its content's sha256"), start() as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), given, ctx)
    assert work_folders(home) == []


def test_a_source_folder_may_consist_of_links_to_files_as_the_hubs_cache_does(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "config.json").symlink_to(tmp_path / "blob")
    assert Input.of(tmp_path / "linked").digest == Input.of(tmp_path / "plain").digest
    (tmp_path / "linked" / "deep").symlink_to(tmp_path / "plain")
    with pytest.raises(UserError, match=r"deep is a link to a folder. Give a copy without"):
        Input.of(tmp_path / "linked")


def test_why_a_stage_was_computed_is_told_anew_where_it_is_computed_again_in_the_same_run(start, kit, home):
    with start() as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        first = entry(home, "sft").explained["sft"]
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        assert entry(home, "sft").explained["sft"] == first, "its own result explains nothing"
        run_stage(kit.toy("sft"), kit.ToyJob(value=2), {}, ctx)
        assert entry(home, "sft").explained["sft"] != first


def test_threads_and_kernels_are_set_for_stages_that_use_torch_and_for_no_other(start, kit, monkeypatch):
    activated = []
    monkeypatch.setattr(computing, "activate", activated.append)

    class Job(kit.ToyJob):
        runtime: str = "two threads"

    with start() as ctx:
        run_stage(kit.toy("sft"), Job(), {}, ctx)
        assert activated == []
        run_stage(kit.toy("ppo")._replace(libraries=("torch",)), Job(), {}, ctx)
    assert activated == ["two threads"]


@pytest.mark.parametrize("number", [3, 2, 1])
def test_of_two_attempts_that_left_checkpoints_the_later_one_is_taken_up(tmp_path, number):
    """Numbers begin again with a new lock file, as in a home of release 0.1.0."""
    for earlier in (1, 2):
        (tmp_path / f"{earlier:09d}" / "checkpoint").mkdir(parents=True)
        (tmp_path / f"{earlier:09d}" / "checkpoint" / "step.json").write_text(str(earlier))
    out = computing._take_up(tmp_path, number)
    assert [path.name for path in tmp_path.iterdir()] == [out.name] == [f"{number:09d}"]
    assert (out / "checkpoint" / "step.json").read_text() == "2"


def test_a_stage_costs_what_its_seconds_cost_and_a_hit_nothing_more(start, kit, home):
    prices = {"prices": {"sft": 3600.0}, "currency": "EUR"}  # 1 EUR a second
    with start(**prices) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    paid, sft = load_status(home), entry(home, "sft")
    assert sft.cost == pytest.approx(sft.seconds, abs=0.001) and entry(home, "ppo").cost is None
    assert paid.cost == sft.cost > 0 and (paid.saved, paid.currency) == (0, "EUR")
    with start(**prices) as again:
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, again)
    assert load_status(home).cost == 0 and 0 < load_status(home).saved == pytest.approx(result.record.seconds)
    with start() as unpriced:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, unpriced)
    assert load_status(home).cost is None and "cost" not in json.dumps(load_status(home).as_json())


def test_who_takes_a_run_up_is_on_record_for_the_stages_that_this_computes(start, kit, home):
    """Whose run it is stays; who scores people's labels in it may be another person, and promotes by that."""
    with start(user="ada", run="one") as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    records = {"execution": ctx.execution, "reporting": ctx.reporting}
    with RunContext.resume(home, "one", kit.thresholds(), user="eve", **records) as again:
        run_stage(kit.toy("human_eval"), kit.ToyJob(value=2), {}, again)
    assert load_status(home, "one").user == "ada"
    assert (entry(home, "sft").user, entry(home, "human_eval").user) == ("ada", "eve")
    assert {each.group: each.user for each in read_done(ctx.folder)} == {"sft": "ada", "human_eval": "eve"}


def test_a_stage_that_fails_has_taken_and_cost_its_seconds(start, kit, home):
    with start(prices={"sft": 3600.0}) as ctx, pytest.raises(UserError):
        run_stage(kit.toy("sft"), kit.ToyJob(stop="user", stop_at=2, pause=0.2), {}, ctx)
    assert 0.4 <= entry(home, "sft").seconds < 60 and 0.4 <= load_status(home).cost < 60


def test_a_run_whose_process_is_killed_has_cost_what_it_computed_and_goes_on_counting(start, kit, home):
    """Up to the last point: nobody knows how long the process stood after that."""
    prices = {"prices": {"sft": 3600.0}}
    with start(**prices, run="killed") as ctx:
        ctx.begin_stage("sft")
    path = home / "runs" / "killed" / "run.json"
    document = json.loads(path.read_text())
    dead = {"pid": 2**22 - 1, "started": "1"}
    began = document["stages"][0]["began"]
    document |= {"finished": None, "process": {**document["process"], **dead}}
    document["stages"][0] |= {"state": "running"}
    path.write_text(json.dumps(document))
    points_file(home / "runs" / "killed", "sft").parent.mkdir(parents=True, exist_ok=True)
    point = {"step": 1, "time": int((began + 5) * 1000), "metrics": {"sft/loss": 1.0}}
    points_file(home / "runs" / "killed", "sft").write_text(json.dumps(point) + "\n")
    assert load_status(home, "killed").state == "interrupted"
    assert load_status(home, "killed").cost == pytest.approx(5, abs=0.01)
    records = {"execution": ctx.execution, "reporting": ctx.reporting}
    with RunContext.resume(home, "killed", kit.thresholds(), **records) as again:
        run_stage(kit.toy("sft"), kit.ToyJob(steps=1, pause=0.3), {}, again)
    assert 5.3 <= load_status(home, "killed").cost < 9 and entry(home, "sft", "killed").seconds > 5.3


def test_a_stage_on_a_pool_costs_what_its_worker_computed_and_not_what_it_waited(start, kit, home, monkeypatch):
    def on_a_pool(work, pool, store, show, say, refresh, page, computed):
        time.sleep(0.3)  # waits for a place
        computed(7.0)
        record, _ = computing.compute_once(work, store, show, say, refresh)
        return record

    monkeypatch.setattr("tasks.execution.dispatch.dispatch", on_a_pool)
    options = {"prices": {"sft": 3600.0}, "pools": {"sft": "gpu"}}
    with start(**options) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert load_status(home).cost == pytest.approx(7.0)

    def for_another(work, pool, store, show, say, refresh, page, computed):
        return store.lookup(work.key)

    with start(**options, run="waits") as ctx:
        monkeypatch.setattr("tasks.execution.dispatch.dispatch", for_another)
        ctx.reuse = Reuse(frozenset(["sft"]))
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    status = load_status(home, "waits")
    assert (status.cost, status.saved) == (0, pytest.approx(result.record.seconds)), "whoever ordered it pays"
