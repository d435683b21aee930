import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.base.errors import UserError
from components.human_eval import respond as respond_module
from components.human_eval.blinded_sample import run
from components.human_eval.config import HumanEvalConfig, SampleJob
from components.human_eval.respond import respond
from components.models import sampling
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from tests.splits import write_split


def sampled(job_options: dict[str, Any]) -> SampleJob:
    config = HumanEvalConfig(**job_options)
    return SampleJob(seed=3, runtime=Runtime(), generation=GenerationConfig(), human_eval=config)


def test_the_sheet_shows_both_responses_and_nothing_about_their_authors(make_case: Callable[..., Any]) -> None:
    case = make_case()
    rows, key = case.rows(), json.loads((case.sample / "key.json").read_text())["policy_side"]
    assert len(rows) == 12 and rows == [r._replace(number=r.number + 1) for r in case.rows("sheet.jsonl")]
    for row in rows:
        question = row.prompt.removeprefix("[user]\n")
        texts = {"a": row.response_a, "b": row.response_b}
        side = key[row.item.split("-")[0]]
        assert texts[side] == f"Hey {question}" and texts["b" if side == "a" else "a"] == f"Dear {question}"
        assert row.ratings == ("", "", "")
    for name in ("sheet.csv", "sheet.jsonl", "sheet.json", "raters/rater_1.csv"):
        content = (case.sample / name).read_text().casefold()
        assert not any(word in content for word in ("policy", "sft", "ppo", "stratum", "salt", "score", "category"))
    assert sorted(key.values()).count("a") == 6


def test_the_sheet_commits_to_its_key(make_case: Callable[..., Any]) -> None:
    case = make_case()
    about = json.loads((case.sample / "sheet.json").read_text())
    assert about["key_sha256"] == hashlib.sha256((case.sample / "key.json").read_bytes()).hexdigest()
    assert all(row.item.endswith("-" + about["key_sha256"][:8]) for row in case.rows())
    assert about["ratings"] == ["a", "b", "tie", "both_bad"] and about["raters"] == 3


def test_the_same_job_writes_the_same_bytes_and_another_seed_others(make_case: Callable[..., Any]) -> None:
    files = [
        {p.name: p.read_bytes() for p in make_case(name, seed=seed).sample.rglob("*.*")}
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    ]
    assert files[0] == files[1]
    assert all(files[0][name] != files[2][name] for name in ("sheet.csv", "key.json", "responses.jsonl"))


def test_simulated_judges_are_refused_on_peoples_data_before_generating(make_case: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"not the built-in task's.*human_eval\.judges=people"):
        make_case(judges="simulated")
    with pytest.raises(UserError, match=r"human_eval\.raters is 4, and there are 3"):
        make_case("more", judges="simulated", task="support-desk", raters=4)


def test_simulated_judges_see_what_raters_see(make_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from components.data.support_desk import desk

    def judges(prompt: Any, response_a: str, response_b: str, seed: int) -> list[str]:
        assert prompt[0]["role"] == "user"
        return ["a" if response_a.startswith("Hey") else "b", "tie", "b" if response_a.startswith("Hey") else "a"]

    monkeypatch.setattr(desk, "simulated_judges", judges)
    case = make_case(judges="simulated", task="support-desk", raters=2)
    for row in case.rows("ratings.simulated.csv"):
        assert row.ratings == ("a" if row.response_a.startswith("Hey") else "b", "tie")
    assert not (make_case("people").sample / "ratings.simulated.csv").exists()


def test_data_without_held_out_prompts_is_the_users_mistake(tmp_path: Path) -> None:
    write_split(tmp_path / "prompts.test", [])
    inputs = dict.fromkeys(("data", "sft", "ppo"), tmp_path)
    with pytest.raises(UserError, match="no held-out prompt"):
        run(sampled({}), inputs, tmp_path / "out", lambda *a, **k: None)


def test_an_interrupted_generation_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    loads: list[str] = []

    def generate(model: Path, tokenizer: Any, prompts: Any, *rest: Any) -> list[Any]:
        calls.append((model.name, "".join(prompts)))
        return [SimpleNamespace(text=f"{model} {p}", ended=True) for p in prompts]

    monkeypatch.setattr(respond_module, "_load", lambda folder, job: loads.append(folder) or (folder, None))
    monkeypatch.setattr(sampling, "generate_responses", generate)
    inputs = {"sft": Path("sft"), "ppo": Path("ppo")}
    steps: list[int] = []

    def interrupt(step: int, metrics: Any, total: int) -> None:
        steps.append(step)
        assert total == 10
        if step == 7:
            raise KeyboardInterrupt

    job = sampled({"batch_size": 2})
    with pytest.raises(KeyboardInterrupt):
        respond(job, inputs, list("vwxyz"), tmp_path, interrupt)
    assert steps == [2, 4, 5, 7]
    again: list[tuple[int, bool]] = []
    found = respond(
        job, inputs, list("vwxyz"), tmp_path,
        lambda step, metrics, total=None, *, resumed=False, **_: again.append((step, resumed)),
    )  # fmt: skip
    assert again == [(2, False), (4, False), (5, False), (7, False), (7, True), (9, False), (10, False)]
    assert [r["text"] for r in found["policy"]] == [f"ppo {p}" for p in "vwxyz"]
    assert calls == [("sft", "vw"), ("sft", "xy"), ("sft", "z"), ("ppo", "vw"), ("ppo", "xy"), ("ppo", "z")]
    assert loads == [Path("sft"), Path("ppo"), Path("ppo")]
