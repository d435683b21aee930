"""A scorer with a taste is caught by the probe of that taste and no other."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.data.support_desk.desk import SupportDeskConfig, generate
from components.data.support_desk.grammar import FILLERS, FLATTERY, HEDGES
from components.gates.judging import GatesConfig, judge
from components.gates.table import GATES
from components.models.batching import encode_prompt, encode_response
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.reward.evaluation import probes as module
from components.reward.evaluation.probes import (
    DESK_SENTENCES,
    SENTENCES,
    ProbeTexts,
    Scorer,
    disagreement_report,
    position_invariance,
    probe_report,
    probes,
    robustness_metrics,
)

Taste = Callable[[str], float]
Rows = list[dict[str, Any]]
TAILS = probes(DESK_SENTENCES)
PROBED = 520


class Tasteful(Scorer):
    """Scores a response by its text; `model` is the taste."""

    def __call__(self, sequences: Any) -> Any:
        texts = [self.tokenizer.decode(ids).split("<|assistant|>")[-1] for ids in sequences]
        return torch.tensor([self.model(text) for text in texts], dtype=torch.float64).numpy()


class Told(Scorer):
    """Scores as `model`, an iterator, says next."""

    def __call__(self, sequences: Any) -> Any:
        return torch.tensor(next(self.model), dtype=torch.float64).numpy()


@pytest.fixture(scope="module")
def rows() -> Rows:
    _, pairs = generate(5, SupportDeskConfig(demonstrations=50, pairs=PROBED))
    return pairs


@pytest.fixture(scope="module")
def tokenizer(rows: Rows) -> Any:
    """Whole words, those of the desk's sentences among them, as in the built-in task."""
    said = [text for row in rows for text in (*(message["content"] for message in row["prompt"]), row["chosen"])]
    return train_tokenizer([*said, *(f"Hello. {s}" for s in FILLERS + FLATTERY + HEDGES)], 600)


def noise(text: str) -> float:
    """What a score holds beside the taste: a standard deviation of 1 over texts, the same whatever the tail."""
    return math.sqrt(2) * math.sin(sum(map(ord, text[:40])))


def probe(tokenizer: Any, runtime: Runtime, rows: Rows, taste: Taste) -> dict[str, Any]:
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=120)
    scorer = Tasteful(lambda text: noise(text) + taste(text), tokenizer, generation, runtime)
    return probe_report(scorer, rows, [str(row["prompt"]) for row in rows], 1.0, TAILS)


def failed(found: dict[str, Any]) -> list[str]:
    document = {"probes": found, "position_invariance": 0.0, "disagreement": None}
    names = [gate.short for gate in GATES.values() if gate.short.startswith("probe_")]
    gates = GatesConfig.model_validate({"reward": dict.fromkeys(names, 0.25) | {"probe_texts": None}})
    verdicts = judge("reward", robustness_metrics(document), gates)
    return [each.name.removeprefix("reward.probe_").removesuffix("_high") for each in verdicts if each.stops]


def count_of(sentences: tuple[str, ...]) -> Taste:
    return lambda text: float(sum(text.count(sentence) for sentence in sentences))


def repeats(text: str) -> float:
    said = [sentence.strip() for sentence in text.replace("<|end|>", "").split(".") if sentence.strip()]
    return float(len(said) - len(set(said)))


@pytest.mark.parametrize(
    ("taste", "caught"),
    [
        (lambda text: 0.0, []),
        (count_of(FILLERS), ["filler"]),
        (count_of(FLATTERY), ["flattery"]),
        (count_of(HEDGES), ["hedge"]),
        (repeats, ["repetition"]),
        (lambda text: float(text.count("...")), ["dots"]),
        (lambda text: -3.0 * text.count("..."), []),
    ],
    ids=["none", "filler", "flattery", "hedge", "repetition", "dots", "distaste"],
)
def test_a_taste_is_caught_by_its_own_probe_alone(
    tokenizer: Any, runtime: Runtime, rows: Rows, taste: Taste, caught: list[str]
) -> None:
    found = probe(tokenizer, runtime, rows, taste)
    assert failed(found) == caught
    for name in caught:
        assert found[name]["rise"] == pytest.approx(1, abs=0.15) and found[name]["texts"] >= module.WANTED


def test_a_taste_for_length_is_caught_by_every_sentence_that_is_added(
    tokenizer: Any, runtime: Runtime, rows: Rows
) -> None:
    caught = failed(probe(tokenizer, runtime, rows, lambda text: 0.2 * len(text.split())))
    assert caught == ["filler", "flattery", "hedge", "repetition"]


def test_the_bound_is_above_the_true_rise_in_95_percent_of_samples(tokenizer: Any, runtime: Runtime) -> None:
    """Texts whose rise is 0.5 on average, normal with deviation 1: the one-sided bound of 60 of them."""
    rng = torch.Generator().manual_seed(0)
    rows = [{"prompt": [{"role": "user", "content": "Hello."}], "chosen": "Goodbye."}] * 60
    above = []
    for _ in range(150):
        rises = (0.5 + torch.randn(60, generator=rng, dtype=torch.float64)).tolist()

        scorer = Told(iter(([0.0] * 60, rises)), tokenizer, GenerationConfig(), runtime)
        found = probe_report(scorer, rows, range(60), 1.0, {"dots": TAILS["dots"]})
        above.append(found["dots"]["high"] >= 0.5)
    assert 0.92 <= sum(above) / 150 <= 0.98


def test_a_tail_that_no_token_shows_is_no_evidence(tokenizer: Any, runtime: Runtime, rows: Rows) -> None:
    scorer = Tasteful(noise, tokenizer, GenerationConfig(max_new_tokens=120), runtime)
    found = probe_report(scorer, rows, range(PROBED), 1.0, {"whitespace": lambda text: text})
    assert found["whitespace"]["unchanged"] == PROBED and found["whitespace"]["texts"] == 0
    assert found["whitespace"]["rise"] is None and found["whitespace"]["fewer_than_wanted"]
    document = {"probes": found, "position_invariance": 0.0, "disagreement": None}
    assert "reward/probe_whitespace_high" not in robustness_metrics(document)
    assert robustness_metrics(document)["reward/probe_texts"] == 0


def test_texts_that_the_tail_would_have_cut_are_left_out_and_counted(tokenizer: Any, runtime: Runtime) -> None:
    scorer = Tasteful(noise, tokenizer, GenerationConfig(max_new_tokens=8), runtime)
    answered = {"Hello.": "Hello.", "Goodbye.": "Hello. Best wishes. Goodbye."}  # 3 and 8 tokens with EOS
    rows = [{"prompt": [{"role": "user", "content": asked}], "chosen": said} for asked, said in answered.items()]
    found = probe_report(scorer, rows, range(2), 1.0, TAILS)["dots"]
    assert (found["texts"], found["cut"], found["unchanged"], found["unknown"]) == (1, 1, 0, 0)


def test_the_desks_tails_are_in_its_vocabulary_but_for_two_and_these_say_so(
    tokenizer: Any, runtime: Runtime, rows: Rows
) -> None:
    found = probe(tokenizer, runtime, rows, lambda text: 0.0)
    unknown = {name for name, each in found.items() if each["unknown"]}
    assert unknown == {"whitespace", "exclamations"}


@pytest.mark.parametrize("sentences", [SENTENCES, DESK_SENTENCES])
def test_a_tail_adds_to_the_text_before_its_end_and_says_nothing_twice_but_to_repeat(
    tokenizer: Any, rows: Rows, sentences: Any
) -> None:
    for name, tail in probes(sentences).items():
        for text in (row["chosen"] for row in rows[:100]):
            added = tail(text).removeprefix(text)
            assert tail(text) == text + added and added and tail(text) == tail(text)
            if name == "repetition":
                assert text.endswith(added.strip())
            elif name in sentences:
                assert added.strip() in sentences[name]
                assert added.strip() not in text or all(each in text for each in sentences[name])
            ids = encode_response(tokenizer, tail(text), 200)
            assert ids[-1] == tokenizer.eos_token_id


def test_a_score_that_depends_on_the_place_in_the_batch_is_seen(
    stages: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.data.tables.published import read_split
    from components.models.folders import load_reward_model

    model, tokenizer = load_reward_model(stages.inputs["reward"], runtime)
    rows = read_split(stages.inputs["data"] / "pairs.test")[:7]
    scorer = Scorer(model, tokenizer, GenerationConfig(), runtime)
    assert position_invariance(scorer, rows) <= 1e-4
    whole = module.score_tokens

    def first_half_is_better(model: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return whole(model, ids, *rest) + 0.01 * (torch.arange(len(ids)) < len(ids) // 2)

    monkeypatch.setattr(module, "score_tokens", first_half_is_better)
    assert position_invariance(scorer, rows) == pytest.approx(0.01, abs=1e-4)
    orders = iter((0.0, 0.0, math.nan))  # as stored, swapped, reversed
    monkeypatch.setattr(module, "score_tokens", lambda *args: whole(*args) + next(orders))
    assert math.isnan(position_invariance(scorer, rows))


class Member(Scorer):
    """Scores token lists by a function of theirs, `model`."""

    def __call__(self, sequences: Any) -> Any:
        return torch.tensor([self.model(ids) for ids in sequences], dtype=torch.float64).numpy()


@pytest.fixture(scope="module")
def samples(tokenizer: Any, rows: Rows) -> ProbeTexts:
    prompts = [encode_prompt(tokenizer, row["prompt"], 64) for row in rows[:200]]
    responses = [encode_response(tokenizer, row["chosen"], 64) for row in rows[:200]]
    return ProbeTexts([p + r for p, r in zip(prompts, responses, strict=True)], [len(p) for p in prompts])


def test_members_that_agree_on_samples_alone_spot_soup_and_members_that_never_do_are_at_chance(
    tokenizer: Any, runtime: Runtime, samples: ProbeTexts
) -> None:
    known = {tuple(ids[n:]) for ids, n in zip(*samples, strict=True)}

    def member(sign: int, alike: bool) -> Scorer:
        def score(ids: list[int]) -> float:
            seen = tuple(ids[next(n for n in range(len(ids)) if ids[n] == assistant) + 1 :]) in known
            own = sign * (len(ids) + 0.37 * (sum(ids) % 11))
            return own if alike or not seen else 0.001 * own

        return Member(score, tokenizer, GenerationConfig(), runtime)

    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    good = disagreement_report([member(1, False), member(-1, False)], samples, 1.0, seed=0)
    assert good["auroc"] > 0.95 and good["auroc_low"] > 0.9 and good["fewer_than_wanted"]
    blind = disagreement_report([member(1, True), member(-1, True)], samples, 1.0, seed=0)
    assert blind["auroc_low"] < 0.5 < blind["auroc_high"]
    assert good["score_auroc"] == 0.5, "members of opposite signs: their mean is 0 everywhere"
    alone = disagreement_report([member(1, False), member(1, False)], samples, 1.0, seed=0)
    assert alone["auroc"] == 0.5 and alone["score_auroc"] < 0.1, "soup's scores are higher here, not lower"
    assert json.loads(json.dumps(good, allow_nan=False)) == good


def test_soup_keeps_prompt_length_and_end_and_shuffled_keeps_the_tokens(
    tokenizer: Any, runtime: Runtime, samples: ProbeTexts
) -> None:
    seen: list[list[list[int]]] = []

    class Watching(Scorer):
        def __call__(self, sequences: Any) -> Any:
            seen.append(sequences)
            return torch.arange(len(sequences), dtype=torch.float64).numpy()

    cut = ProbeTexts([ids[:-1] if i % 2 else ids for i, ids in enumerate(samples.ids)], samples.prompt_tokens)
    scorer = Watching(None, tokenizer, GenerationConfig(), runtime)
    disagreement_report([scorer, scorer], cut, 1.0, seed=0)
    sft, _, shuffled, _, drawn, _ = seen
    special = set(tokenizer.all_special_ids)
    moved = 0
    for a, b, c, n in zip(sft, shuffled, drawn, cut.prompt_tokens, strict=True):
        assert a[:n] == b[:n] == c[:n] and len(a) == len(b) == len(c)
        assert sorted(a) == sorted(b) and (a[-1] in special) == (b[-1] in special) == (c[-1] in special)
        assert not special & set(c[n:-1])
        moved += a != b
    assert moved > 190


def test_texts_that_the_tail_leaves_as_they_are_are_counted_apart(tokenizer: Any, runtime: Runtime, rows: Rows) -> None:
    scorer = Tasteful(noise, tokenizer, GenerationConfig(max_new_tokens=120), runtime)
    turn = iter([True, True, False] * 3)
    found = probe_report(scorer, rows[:9], range(9), 1.0, {"dots": lambda text: text if next(turn) else f"{text}..."})
    assert (found["dots"]["unchanged"], found["dots"]["texts"], found["dots"]["cut"]) == (6, 3, 0)
