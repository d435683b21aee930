"""Three models compared by people, end to end: sheets that name none, and a result that a failed gate does not take."""

import json
from typing import Any

import pytest

from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, save_model
from components.models.tokenizers import load_tokenizer
from components.store.store import ArtifactStore
from tests.faults.homes import Home, Moment
from tests.sheets import fill

pytestmark = pytest.mark.whole

ITEMS = 12


@pytest.fixture(scope="module")
def compared(whole: tuple[Home, list[Moment]], tether: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three models, one of them a folder, judged by people, on a gate that fails."""
    place = tmp_path_factory.mktemp("compared")
    home, first = whole[0].copy(place / "home").path, whole[0].status()["run"]
    tokenizer = load_tokenizer(ArtifactStore(home).path(whole[0].digests()["sft"]) / "model")
    third = build_causal_lm(ScratchModel(hidden_size=32, layers=2, heads=2), tokenizer, 256, seed=3)
    save_model(third, tokenizer, place / "zebra")
    options = ("human_eval.judges=people", f"human_eval.items={ITEMS}", "human_eval.repeats=0", "human_eval.pairs=all",
               "gates.human_eval.fleiss_kappa=0.2", "gates.human_eval.raters_alike=0.9")  # fmt: skip
    names = [f"{first}:sft", first, "zebra"]
    begun = tether("people", "compare", *names, *(p for each in options for p in ("--set", each)), home=home, cwd=place)
    assert begun.returncode == 0, begun.stdout + begun.stderr
    run = max(json.loads(path.read_text())["run"] for path in home.glob("runs/*/run.json"))
    folder = home / "runs" / run
    sample = ArtifactStore(home).path(json.loads((folder / "run.json").read_text())["stages"][4]["digest"])
    given = [path.read_text(encoding="utf-8-sig") for path in (folder / "raters").iterdir()]
    key = json.loads((sample / "key.json").read_text())["policy_side"]
    before = (folder / "comparison.md").exists()
    for path in (folder / "raters").iterdir():  # of two models the one that was named first is preferred, or neither
        fill(path, lambda number, item: "tie" if number % 3 == 0 else {"a": "b", "b": "a"}[key[item]])
    done = tether("people", "score", str(folder / "raters"), "--run", run, home=home, cwd=place)
    return {"names": names, "given": given, "before": before, "folder": folder, "done": done, "key": key}


def test_raters_are_told_no_model_and_every_two_stand_on_every_prompt(compared: dict[str, Any]) -> None:
    assert len(compared["given"]) == 3 and not compared["before"]
    for text in compared["given"]:
        assert not any(name in text for name in (*compared["names"], "model_1", "baseline"))
    assert len(compared["key"]) == 3 * ITEMS


def test_a_failed_gate_on_the_raters_takes_nothing_from_what_they_said(compared: dict[str, Any]) -> None:
    done, folder = compared["done"], compared["folder"]
    assert done.returncode == 3 and "human_eval.raters_alike" in done.stdout + done.stderr
    said = (folder / "comparison.md").read_text(encoding="utf-8")
    assert said in done.stdout
    sft, policy, other = compared["names"]
    assert f"the baseline is {sft}" in said and f"| {sft} against {policy} | {ITEMS} |" in said
    assert said.count(" against ") == 3 and f"| {policy} against {other} |" in said


def test_the_report_has_the_models_in_the_place_of_a_win_rate_against_sft(compared: dict[str, Any]) -> None:
    page = (compared["folder"] / "report.html").read_text(encoding="utf-8")
    section = page[page.index('id="human-eval"') :]
    for name in compared["names"]:
        assert section.count(name) >= 3
    assert "Win rate against SFT" not in section and "win rate of the first" in section
