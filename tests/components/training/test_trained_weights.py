"""Copies of trained weights: where they are held, and what they are put into."""

from pathlib import Path

import pytest
import torch

from components.distributed import ranks
from components.training.heldout import BestCheckpoint
from components.training.loop import restore_state, save_state
from components.training.trained_weights import as_parts, kept_parameters, put_weights, whole_tensors


def best(model: torch.nn.Module) -> BestCheckpoint:
    found = BestCheckpoint("step", lambda row, best: row["loss"] < best["loss"])
    found.add({"step": 1, "loss": 1.0}, {}, model)
    return found


def test_only_the_first_rank_holds_the_best_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(3, 2)
    first = best(model)
    assert first.weights.keys() == {"weight", "bias"}
    save_state(tmp_path, 1, {}, {}, first.state())
    monkeypatch.setattr(ranks, "is_first", lambda: False)
    other = best(model)
    assert other.weights == {} and other.number == 1
    monkeypatch.undo()
    _, state = restore_state(tmp_path, {}, {}) or (0, None)
    monkeypatch.setattr(ranks, "is_first", lambda: False)
    other.restore(state)
    assert other.weights == {} and other.evaluations == first.evaluations
    monkeypatch.undo()
    first.restore(state)
    assert torch.equal(first.weights["weight"], model.weight)


def test_copies_do_not_change_with_the_model_and_tied_weights_have_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    copies = whole_tensors(model.state_dict(keep_vars=True).items())
    assert copies["0.weight"] is copies["1.weight"] and copies.keys() == model.state_dict().keys()
    before = copies["0.bias"].clone()
    torch.nn.init.zeros_(model[0].bias)
    assert torch.equal(copies["0.bias"], before)
    put_weights(model, as_parts(copies, model))
    assert all(torch.equal(parameter, copies[name]) for name, parameter in kept_parameters(model))
