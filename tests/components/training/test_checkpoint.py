"""A checkpoint is whole or it isn't there."""

import logging
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.training import checkpoint


def _train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()


def _model():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def _adamw(model):
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.03)


def test_a_resumed_optimizer_takes_the_same_steps_as_an_undisturbed_one(tmp_path):
    whole = _model()
    _train(whole, _adamw(whole), 5)

    first = _model()
    optimizer = _adamw(first)
    _train(first, optimizer, 2)
    tensors, groups = checkpoint.pack_optimizer(optimizer, "policy_optimizer")
    checkpoint.save(tmp_path, 2, {**first.state_dict(), **tensors}, {"optimizer": groups, "loss": 0.1})

    loaded = checkpoint.load_latest(tmp_path)
    second = torch.nn.Linear(4, 2)
    second.load_state_dict({name: loaded.tensors[name] for name in ("weight", "bias")})
    resumed = _adamw(second)
    checkpoint.unpack_optimizer(resumed, "policy_optimizer", loaded.tensors, loaded.state["optimizer"])
    _train(second, resumed, 3)

    assert loaded.step == 2
    assert loaded.state["loss"] == 0.1
    assert torch.equal(second.weight, whole.weight)
    assert torch.equal(second.bias, whole.bias)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before_with_a_warning(tmp_path, caplog):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"x": torch.full((3,), float(step))}, {})
    file = tmp_path / "step-000000002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        loaded = checkpoint.load_latest(tmp_path)
    assert loaded.step == 1
    assert torch.equal(loaded.tensors["x"], torch.ones(3))
    assert "step 2" in caplog.text


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


def _truncate(path, at):
    os.truncate(path, at % path.stat().st_size)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["json", "safetensors"]), st.sampled_from([_flip, _truncate]), st.integers(0, 10**6), st.booleans()
)
def test_whatever_is_damaged_in_whichever_file_an_older_checkpoint_or_none_is_loaded(
    tmp_path, suffix, damage, at, all_
):
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    for step in (1, 2):
        state = {"beta": 0.1 * step, "history": [{"loss": float("nan")}, step]}
        checkpoint.save(tmp_path / "c", step, {"x": torch.full((3,), float(step))}, state)
    for step in (1, 2) if all_ else (2,):
        damage(tmp_path / "c" / f"step-{step:09d}.{suffix}", at)
    loaded = checkpoint.load_latest(tmp_path / "c")
    if all_:
        assert loaded is None
    else:
        assert (loaded.step, loaded.state["beta"]) == (1, 0.1)
        assert torch.equal(loaded.tensors["x"], torch.ones(3))


def _a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", ["step-000000002.json", "step-000000002.safetensors"])
@pytest.mark.parametrize(
    "damage", [os.unlink, _a_folder, lambda path: path.write_bytes(b""), lambda path: path.write_text("[1]\n[2]\n")]
)
def test_a_file_that_is_missing_empty_or_something_else_is_a_damaged_checkpoint(tmp_path, file, damage):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"x": torch.full((3,), float(step))}, {})
    damage(tmp_path / file)
    assert checkpoint.load_latest(tmp_path).step == 1


def test_after_two_damaged_checkpoints_those_of_the_new_start_are_kept(tmp_path, caplog):
    """By their steps alone the damaged ones would be the newest two, and what is saved next would be removed."""
    for step in (100, 110):
        checkpoint.save(tmp_path, step, {"x": torch.zeros(1)}, {})
        _flip(tmp_path / f"step-{step:09d}.safetensors", -1)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.load_latest(tmp_path) is None
    assert "step 110" in caplog.text and "step 100" in caplog.text and "from the first step" in caplog.text
    for step in (10, 20):
        checkpoint.save(tmp_path, step, {"x": torch.full((1,), float(step))}, {})
    assert checkpoint.load_latest(tmp_path).step == 20
    assert len(list(tmp_path.iterdir())) == 4


def test_it_is_due_by_steps_or_by_minutes_whichever_comes_first():
    now = [1000.0]
    pace = checkpoint.Pace(every=4, minutes=10, clock=lambda: now[0])
    due = []
    for step in range(1, 13):
        now[0] += {5: 599, 6: 1, 7: 0, 9: 601}.get(step, 0)
        if pace.due(step, last=step == 11):
            due.append(step)
    # 4, 8, 12 by steps; 6 ten minutes after 4 (5 a second too early); 9 ten minutes after 8; 11 the last
    assert due == [4, 6, 8, 9, 11, 12]


def test_without_minutes_time_makes_nothing_due():
    now = [0.0]
    pace = checkpoint.Pace(every=100, minutes=None, clock=lambda: now[0])
    now[0] = 1e9
    assert not pace.due(1, last=False)


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}'])
def test_a_checkpoint_whose_json_is_broken_is_no_checkpoint(tmp_path, text):
    checkpoint.save(tmp_path, 1, {"x": torch.ones(1)}, {})
    (tmp_path / "step-000000001.json").write_text(text)
    assert checkpoint.load_latest(tmp_path) is None


def test_a_kill_before_the_json_is_renamed_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": torch.ones(1)}, {})
    real = os.replace

    def killed(source, target):
        if str(target).endswith(".json"):
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {"x": torch.zeros(1)}, {})
    assert checkpoint.load_latest(tmp_path).step == 1


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"x": torch.ones(1)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000004.json",
        "step-000000004.safetensors",
        "step-000000005.json",
        "step-000000005.safetensors",
    ]


def test_tied_and_strided_and_half_precision_tensors_come_back_as_they_were(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": base, "tied": base, "strided": base.t(), "half": base.bfloat16(), "scalar": torch.tensor(3.0)}
    checkpoint.save(tmp_path, 0, tensors, {"rng": torch.get_rng_state().tolist()[:4]})
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded.tensors[name], tensor), name
        assert loaded.tensors[name].dtype == tensor.dtype


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "missing") is None


def test_state_that_json_cannot_hold_is_refused_and_leaves_the_older_checkpoint(tmp_path):
    checkpoint.save(tmp_path, 1, {"x": torch.ones(1)}, {})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 2, {"x": torch.ones(1)}, {"bad": {1, 2}})
    assert checkpoint.load_latest(tmp_path).step == 1
