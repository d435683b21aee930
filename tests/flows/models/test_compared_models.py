"""What the user may name as a model to compare, and what a run remembers of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from flows.models.compared_models import as_origin, find_compared, of_origin
from tasks.runs.comparison_names import COMPARED, compared_names
from tasks.tracking import registry


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], str]:
    """A folder that looks like a language model's."""

    def make(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "name": name}))
        return str(folder)

    return make


def test_folders_are_models_in_the_order_in_which_they_are_named(tmp_path: Path, model: Any) -> None:
    one, other = model("one"), model("other")
    found = find_compared(tmp_path / "home", [one, other])
    assert [(name, str(given.path)) for name, given in found.items()] == [("model_1", one), ("model_2", other)]
    assert found["model_1"].digest != found["model_2"].digest


def test_a_run_that_is_taken_up_again_compares_the_models_that_it_began_with(tmp_path: Path, model: Any) -> None:
    found = find_compared(tmp_path / "home", names := [model("one"), model("other")])
    origin = {COMPARED: as_origin(names, found)}
    again = of_origin(tmp_path / "home", origin)
    assert {n: (i.digest, i.path) for n, i in again.items()} == {n: (i.digest, i.path) for n, i in found.items()}
    assert compared_names(origin) == dict(zip(("model_1", "model_2"), names, strict=True))
    assert of_origin(tmp_path / "home", {"stage": "human_eval"}) == {} == compared_names({})


def test_one_model_or_one_twice_or_what_is_none_is_refused(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, home = model("one"), tmp_path / "home"
    with pytest.raises(UserError, match="two or more models"):
        find_compared(home, [one])
    with pytest.raises(UserError, match=r"is the same model as .*one. Give each model once"):
        find_compared(home, [one, one])
    monkeypatch.setattr(registry, "versions", lambda home: [])
    with pytest.raises(UserError, match="tether-policy@champion is not a language model here"):
        find_compared(home, [one, "tether-policy@champion"])
    version = registry.Version("tether-policy", "3", (), {"lineage.digest": "ab" * 32})
    monkeypatch.setattr(registry, "versions", lambda home: [version])
    with pytest.raises(UserError, match="tether-policy/3 is not a language model here"):
        find_compared(home, [one, "tether-policy/3"])
