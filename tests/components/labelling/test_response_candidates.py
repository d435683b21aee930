"""Candidates with two small random models: the same bytes whatever happens, balance, whole or not at all."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.formats.prompts import Prompts
from components.data.rows import Message, Problem, RawRow, Row
from components.labelling import response_candidates
from components.labelling.config import CandidatesConfig, CandidatesJob
from components.labelling.response_candidates import Arm, CandidateModel, allot, arms_of, finished, in_drawn_order, run
from components.models import sampling
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.store.store import digest_folder
from components.training.chunks import in_chunks

KEY = "k" * 64
WORDS = "Order A 12 is late . What can you do ? My drum is broken".split()


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


PROMPTS = Prompts(
    7,
    [user(" ".join(WORDS[: 3 + 2 * i])) for i in range(5)],
    [Row("prompts", RawRow(3, {}), problems=[Problem("texts_filled", "empty prompt turn")])],
)


def job(seed: int = 0, **options: Any) -> CandidatesJob:
    return CandidatesJob(
        seed=seed,
        runtime=Runtime(device="cpu", dtype="float32", threads=1).resolve(),
        generation=GenerationConfig(max_new_tokens=6),
        candidates=CandidatesConfig(**{"batch_size": 4} | options),
    )


@pytest.fixture(scope="module")
def models(language: Any, tmp_path_factory: pytest.TempPathFactory) -> list[CandidateModel]:
    from components.models.config import ScratchModel
    from components.models.folders import build_causal_lm, save_model

    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("alpha", "beta")):
        shape = ScratchModel(hidden_size=16, layers=1, heads=2)
        save_model(build_causal_lm(shape, language.tokenizer, 256, seed), language.tokenizer, root / name)
    return [CandidateModel(name, digest_folder(root / name), root / name) for name in ("alpha", "beta")]


class Case:
    """Calls of `run` in one folder."""

    def __init__(self, root: Path, models: Sequence[CandidateModel]) -> None:
        self.root, self.models = root, models

    def run(self, name: str, prompts: Prompts = PROMPTS, observe: Any = None, of: Any = None, **options: Any) -> Any:
        told = observe or (lambda done, total: None)
        return run(job(**options), prompts, of or self.models, KEY, self.root / "work" / name, self.root / name, told)

    def candidates(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.root / name / "candidates.jsonl")


@pytest.fixture
def case(tmp_path: Path, models: list[CandidateModel]) -> Case:
    return Case(tmp_path, models)


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, models: list[CandidateModel]
) -> Callable[[Callable[[Arm, str, int], str]], None]:
    """`said(speak)`: responses are what `speak(arm, prompt's text, place in the chunk)` says, without any model."""

    def make(speak: Callable[[Arm, str, int], str]) -> None:
        by_digest = {model.digest: model for model in models}

        def sample_in_chunks(
            load: Any, prompts: Any, generation: Any, runtime: Any, seed: Any, size: Any, checkpoint: Any, done: Any
        ) -> list[dict[str, Any]]:
            def generate(chunk: Any, start: int) -> list[dict[str, Any]]:
                arm = Arm(by_digest[seed[2]], seed[3])
                return [{"text": speak(arm, prompt[0]["content"], n), "ended": True} for n, prompt in enumerate(chunk)]

            return in_chunks(prompts, size, checkpoint, generate, done)

        monkeypatch.setattr(response_candidates, "sample_in_chunks", sample_in_chunks)

    return make


def test_an_interrupted_call_goes_on_where_it_stopped_and_ends_with_the_same_bytes(
    case: Case, digests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[tuple[int, int]] = []
    summary = case.run("whole", observe=lambda done, total: whole.append((done, total)))
    seeds: list[int] = []
    real = sampling.generate_responses

    def counted(model: Any, tokenizer: Any, prompts: Any, generation: Any, seed: int, *rest: Any) -> Any:
        seeds.append(seed)
        return real(model, tokenizer, prompts, generation, seed, *rest)

    monkeypatch.setattr(sampling, "generate_responses", counted)

    def interrupt(done: int, total: int) -> None:
        if done == whole[3][0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.run("cut", observe=interrupt)
    assert not (case.root / "cut").exists() and len(seeds) == 4
    assert case.run("cut") == summary
    assert len(seeds) == len(set(seeds)) == len(whole) and whole[-1] == (20, 20)
    assert digests(case.root / "cut") == digests(case.root / "whole")
    assert sorted(p.name for p in case.root.iterdir()) == ["cut", "whole", "work"]


def test_neither_the_order_of_prompts_nor_that_of_models_changes_a_byte_and_the_seed_does(
    case: Case, digests: Any
) -> None:
    case.run("one", pairs=2)
    turned = PROMPTS._replace(distinct=PROMPTS.distinct[::-1])
    case.run("two", turned, of=case.models[::-1], temperatures=(1.0, 0.7), pairs=2)
    case.run("three", seed=1, pairs=2)
    one, two, three = (digests(case.root / name) for name in ("one", "two", "three"))
    assert one == two
    assert one["candidates.jsonl"] != three["candidates.jsonl"] and one["pairs.csv"] != three["pairs.csv"]


def test_a_model_of_equal_weights_has_random_numbers_of_its_own(case: Case, models: list[CandidateModel]) -> None:
    case.run("twin", of=[models[0], models[0]._replace(name="twin", digest="0" * 64)], temperatures=(1.0,))
    by_model = {name: [r["text"] for row in case.candidates("twin") for r in row["responses"] if r["model"] == name]
                for name in ("alpha", "twin")}  # fmt: skip
    assert by_model["alpha"] and by_model["twin"] and not set(by_model["alpha"]) & set(by_model["twin"])


def test_every_row_says_who_wrote_it_and_the_summary_counts(case: Case, models: list[CandidateModel]) -> None:
    summary = case.run("out", per_prompt=4)
    assert summary["rows"] == 7 and summary["prompts"] == 5 and summary["quarantined"] == 1
    assert [(s["model"], s["temperature"], s["responses"]) for s in summary["sampled"]] == [
        ("alpha", 0.7, 5), ("alpha", 1.0, 5), ("beta", 0.7, 5), ("beta", 1.0, 5),
    ]  # fmt: skip
    rows = case.candidates("out")
    assert sorted(row["prompt"][0]["content"] for row in rows) == sorted(p[0]["content"] for p in PROMPTS.distinct)
    responses = [r for row in rows for r in row["responses"]]
    assert summary["candidates"] == len(responses) == len({r["id"] for r in responses})
    assert {(r["model"], r["model_digest"]) for r in responses} == {(m.name, m.digest) for m in models}
    assert read_rows(case.root / "out" / "quarantine.jsonl") == [{"row": 3, "reasons": ["empty prompt turn"]}]
    assert json.loads((case.root / "out" / "candidates.json").read_text()) == summary


def test_a_low_temperature_is_sampled_at_a_low_temperature(case: Case) -> None:
    """At 0.01 a model says the same every time, at 5 nearly anything."""
    case.run("out", temperatures=(0.01, 5.0), per_prompt=16, of=case.models[:1])
    for row in case.candidates("out"):
        by_temperature = Counter(r["temperature"] for r in row["responses"])
        assert by_temperature[0.01] <= 2 and by_temperature[5.0] >= 7


def test_identical_responses_of_a_prompt_are_kept_once_and_counted(case: Case, said: Any) -> None:
    said(lambda arm, prompt, n: f"{arm.model.name} says yes" + " " * n)
    summary = case.run("out", per_prompt=8, pairs=5)
    assert summary["candidates"] == 2 * 5 and summary["duplicates"] == 6 * 5 and summary["pairs"] == 5
    for row in case.candidates("out"):
        assert sorted(r["text"].strip() for r in row["responses"]) == ["alpha says yes", "beta says yes"]
        assert [r["drawn"] for r in row["responses"]] == [4, 4]


def test_max_prompts_takes_the_same_ones_from_any_order(case: Case, said: Any) -> None:
    said(lambda arm, prompt, n: f"{arm} {n}")
    case.run("few", max_prompts=2)
    case.run("turned", PROMPTS._replace(distinct=PROMPTS.distinct[::-1]), max_prompts=2)
    few, turned = case.candidates("few"), case.candidates("turned")
    assert few == turned and len(few) == 2


def test_a_write_that_fails_leaves_no_folder_and_the_responses_are_kept(
    case: Case, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(lambda arm, prompt, n: f"{arm} {n}")

    def full(*args: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(response_candidates, "write_pairs", full)
        with pytest.raises(OSError, match="disk full"):
            case.run("out")
    assert [p.name for p in case.root.iterdir()] == ["work"]
    said(lambda arm, prompt, n: pytest.fail("everything was generated before"))
    assert case.run("out")["pairs"] == 5


def test_what_is_there_is_known_by_its_key_and_nothing_else_is_written_over(case: Case, said: Any) -> None:
    said(lambda arm, prompt, n: f"{arm} {n}")
    summary, out = case.run("out"), case.root / "out"
    assert finished(out, KEY) == summary
    with pytest.raises(UserError, match="candidates of other prompts, models or options"):
        finished(out, "0" * 64)
    (case.root / "empty").mkdir()
    assert finished(case.root / "empty", KEY) is None and finished(case.root / "absent", KEY) is None
    with pytest.raises(UserError, match=r"--out .*work holds something else already"):
        finished(case.root / "work", KEY)


def test_a_chat_template_that_refuses_a_prompt_is_the_users_mistake(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = response_candidates._load

    def strict(model: CandidateModel, job: CandidatesJob) -> Any:
        language_model, tokenizer = loaded(model, job)
        tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
        return language_model, tokenizer

    monkeypatch.setattr(response_candidates, "_load", strict)
    with pytest.raises(UserError, match=r"--model (alpha|beta): its chat template refuses.*roles must alternate"):
        case.run("out")


def test_weights_that_can_not_be_read_are_the_users_mistake(
    case: Case, models: list[CandidateModel], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(models[0].folder, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(UserError, match=r"--model damaged: .*damaged holds no model that transformers can load"):
        case.run("out", of=[CandidateModel("damaged", "0" * 64, damaged)])


def fakes(count: int) -> list[CandidateModel]:
    return [CandidateModel(f"m{i}", f"{i:064x}", Path()) for i in range(count)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_arms_are_every_model_at_every_temperature_and_any_stretch_is_balanced_over_models(
    models: int, temperatures: int, seed: int
) -> None:
    arms = arms_of(fakes(models), [0.5 + i for i in range(temperatures)], seed)
    assert len(arms) == len(set(arms)) == models * temperatures
    for start in range(len(arms)):
        for length in range(1, len(arms) + 1):
            stretch = (arms * 2)[start : start + length]
            counts = Counter(arm.model for arm in stretch)
            assert max(counts.values()) - min(counts[m] for m in {arm.model for arm in arms}) <= 1
            of_temperatures = Counter(arm.temperature for arm in stretch)
            assert max(of_temperatures.values()) <= -(-length // temperatures) + 1


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30))
def test_each_arm_gets_the_same_of_each_prompt_and_of_all_to_within_one(
    prompts: int, arms: int, per_prompt: int
) -> None:
    shares = allot(prompts, arms, per_prompt)
    for share in shares:
        counts = [share[arm] for arm in range(arms)]
        assert sum(counts) == per_prompt and max(counts) - min(counts) <= 1
    total = [sum(share[arm] for share in shares) for arm in range(arms)]
    assert max(total) - min(total) <= 1


@given(st.permutations(PROMPTS.distinct), st.integers(0, 3))
def test_the_drawn_order_is_one_of_the_set_of_prompts(shuffled: list[list[Message]], seed: int) -> None:
    assert in_drawn_order(shuffled, seed) == in_drawn_order(PROMPTS.distinct, seed)


def test_a_models_digest_is_of_its_files_also_behind_links(models: list[CandidateModel], tmp_path: Path) -> None:
    for file in models[0].folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert digest_folder(tmp_path) == models[0].digest != models[1].digest
