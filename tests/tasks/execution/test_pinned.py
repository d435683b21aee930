"""Going on from an earlier run's artifacts: taken though our code has changed, but not for other inputs."""

import pytest

from components.base.errors import UserError
from components.store.store import ArtifactStore, Record
from tasks.execution.runner import peek, run_stage
from tasks.runs.explained import Hit


def change_code(toy_source):
    toy_source.write_text(toy_source.read_text().replace("job.value +", "1000 + job.value +"))


def first_record(start, kit) -> Record:
    with start() as ctx:
        return run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx).record


def test_a_pinned_record_is_taken_though_the_code_has_changed(start, kit, calls, toy_source):
    record = first_record(start, kit)
    change_code(toy_source)
    with start(pinned={"sft": record}) as ctx:
        assert peek(kit.toy("sft"), kit.ToyJob(), {}, ctx) is not None
        assert run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx).digest == record.digest
    assert calls() == ["toy"]
    with start() as unpinned:
        assert peek(kit.toy("sft"), kit.ToyJob(), {}, unpinned) is None


def test_a_pinned_record_is_taken_though_the_config_has_another_seed_or_machine(start, kit, calls):
    """What may differ is `flows.launch`'s to say; a new option with its default must not recompute what is taken."""
    record = first_record(start, kit)
    with start(pinned={"sft": record}) as ctx:
        result = run_stage(kit.toy("sft"), kit.ToyJob(value=7), {}, ctx)
    assert calls() == ["toy"]
    assert (result.record.key, result.digest) == (record.key, record.digest)
    assert ctx.status.stage("sft").explained["sft"] == Hit(run=record.run, pinned=True)


def test_a_pinned_record_of_other_inputs_is_not_taken(start, kit, calls):
    with start() as ctx:
        sft = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        ppo = run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": sft}, ctx)
    with start(pinned={"ppo": ppo.record}) as ctx:
        other = run_stage(kit.toy("sft"), kit.ToyJob(value=5), {}, ctx)
        result = run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": other}, ctx)
    assert result.record.inputs == {"sft": other.digest}
    assert (result.path / "value.txt").read_text() == "6"


def test_a_pinned_artifact_is_taken_though_its_key_gave_other_bytes_since(start, kit, home, tmp_path):
    record, store = first_record(start, kit), ArtifactStore(home)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "value.txt").write_text("99")
    about = {"stage": "sft", "job": record.job, "inputs": {}, "parts": record.parts, "run": "later"}
    later = store.publish(record.key, tmp_path / "other", None, about)
    assert store.lookup(record.key) == later
    with start(pinned={"sft": record}) as ctx:
        found = peek(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        assert found is not None and found.digest == record.digest
        assert run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx).digest == record.digest


def test_a_pinned_artifact_that_is_gone_is_not_computed_by_other_code_under_its_key(
    start, kit, home, calls, toy_source
):
    record = first_record(start, kit)
    change_code(toy_source)
    with pytest.raises(UserError, match=f"tether rerun sft --from {record.run}"), start(pinned={"sft": record}) as ctx:
        for path in (home / "store" / "records" / record.key).iterdir():
            path.unlink()
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert calls() == ["toy"]
