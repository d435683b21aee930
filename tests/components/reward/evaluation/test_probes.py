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
    ProbeTexts,
    Scorer,
    disagreement_report,
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
