"""Going on from an earlier run's artifacts: taken though our code has changed, but not for other inputs."""

from components.artifacts import Record
from tasks.runner import peek, run_stage


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
    assert (result.key, result.digest) == (record.key, record.digest)
    assert ctx.status.stage("sft")["explained"]["sft"] == {"outcome": "hit", "run": record.run, "pinned": True}


def test_a_pinned_record_of_other_inputs_is_not_taken(start, kit, calls):
    with start() as ctx:
        sft = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
        ppo = run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": sft}, ctx)
    with start(pinned={"ppo": ppo.record}) as ctx:
        other = run_stage(kit.toy("sft"), kit.ToyJob(value=5), {}, ctx)
        result = run_stage(kit.toy("ppo"), kit.ToyJob(), {"sft": other}, ctx)
    assert result.record.inputs == {"sft": other.digest}
    assert (result.path / "value.txt").read_text() == "6"
