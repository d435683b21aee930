"""Judges: a tiny model in a folder against transformers' own forward, and an endpoint on loopback."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import Unreachable, UserError
from components.labelling.config import EndpointConfig
from components.labelling.feedback.judges import TOKEN, EndpointJudge, FolderJudge
from components.labelling.feedback.rubric import question
from components.models.chat.rendering import rendered_prompt
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, save_model
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.rollouts import asking

ASKED = question("Be brief.", [{"role": "user", "content": "my parcel is late"}], "it comes", "we are sorry it is late")
RUNTIME = Runtime(device="cpu", dtype="float32", threads=1).resolve()


TEXTS = ("A", "B", "my parcel is late it comes")


def write_judge(folder: Path, positions: int = 256, texts: Any = TEXTS, **weights: Any) -> Any:
    tokenizer = train_tokenizer(texts, 400)
    model = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, positions, seed=3)
    with torch.no_grad():
        for name, value in weights.items():
            model.get_parameter(name.replace("__", ".")).fill_(value)
    save_model(model, tokenizer, folder)
    return model, tokenizer


def test_a_folders_preference_is_what_transformers_own_forward_gives_a_against_b(tmp_path: Path) -> None:
    model, tokenizer = write_judge(tmp_path / "judge")
    answer = FolderJudge(tmp_path / "judge", RUNTIME).answer(ASKED)
    ids = tokenizer(rendered_prompt(tokenizer, ASKED), add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].double()
    logits[tokenizer.pad_token_id] = -torch.inf
    a, b = logits.softmax(-1)[tokenizer.convert_tokens_to_ids(["A", "B"])].tolist()
    assert answer["first"] == pytest.approx(a / (a + b), abs=1e-6) and abs(answer["first"] - 0.5) > 1e-3
    assert answer["mass"] == pytest.approx(a + b, abs=1e-6)


def test_a_model_that_tells_nothing_apart_prefers_neither_and_spreads_its_mass(tmp_path: Path) -> None:
    """With a final norm of 0 every logit is 0: P(A) = P(B), each 1 of all tokens but pad."""
    _, tokenizer = write_judge(tmp_path / "judge", model__norm__weight=0.0)
    answer = FolderJudge(tmp_path / "judge", RUNTIME).answer(ASKED)
    assert answer["first"] == 0.5 and answer["mass"] == pytest.approx(2 / (len(tokenizer) - 1))


def test_a_question_beyond_the_models_positions_has_no_answer_and_says_why(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge", positions=16)
    answer = FolderJudge(tmp_path / "judge", RUNTIME).answer(ASKED)
    assert answer["first"] is None and "the model reads 16" in answer["said"]


def test_a_tokenizer_without_a_token_for_the_letters_is_refused(tmp_path: Path) -> None:
    write_judge(tmp_path / "judge", texts=("A", "my parcel"))
    with pytest.raises(UserError, match="no single token for A and for B"):
        FolderJudge(tmp_path / "judge", RUNTIME)


def said(text: object) -> tuple[int, object]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judge(endpoint: Any, **options: Any) -> EndpointJudge:
    return EndpointJudge(EndpointConfig(url=endpoint.url, model="big", **options))


def test_an_endpoint_gets_a_chat_completion_with_the_key_and_the_key_is_nowhere_else(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TOKEN, "sesame-opens")
    endpoint.answer = lambda body: said("Answer: B")
    with caplog.at_level(logging.DEBUG):
        assert judge(endpoint).answer(ASKED) == {"first": 0.0, "said": "Answer: B"}
        assert judge(endpoint).answer(ASKED)["first"] == 0.0
    assert endpoint.asked[0] == {"model": "big", "messages": ASKED, "max_tokens": 16, "temperature": 0}
    assert endpoint.tokens == ["Bearer sesame-opens"] * 2 and "sesame-opens" not in caplog.text
    endpoint.answer = lambda body: (400, {"error": "the key sesame-opens may not do that"})
    with pytest.raises(UserError, match=r"it refuses .400.*the key [*]{3} may not") as error:
        judge(endpoint).answer(ASKED)
    assert "sesame-opens" not in str(error.value)


def test_an_endpoint_that_is_busy_is_asked_again_no_sooner_than_it_says(
    endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's: 503 twice (waits of 1 and 2 s), then an answer; with no patience it is the end."""
    clock = [0.0]
    monkeypatch.setattr(asking.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asking.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    endpoint.answer = lambda body: said("A") if len(endpoint.asked) > 2 else (503, {})
    assert judge(endpoint).answer(ASKED)["first"] == 1.0 and clock[0] == 3.0
    endpoint.answer = lambda body: (429, {"error": "slow down"})
    with pytest.raises(Unreachable, match=r"it answers 429.*slow down.*run the same command again to continue"):
        judge(endpoint, patience=0).answer(ASKED)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((401, {}), "it refuses the key .401.. Set the environment variable TETHER_JUDGE_TOKEN"),
        ((404, {"error": "no model big"}), "it refuses .404.*no model big.*the model's name"),
        ((200, {"text": "A"}), "not a /v1/chat/completions answer"),
        (said(None), "not a /v1/chat/completions answer"),
    ],
)
def test_a_wrong_answer_is_named(endpoint: Any, answer: tuple[int, object], problem: str) -> None:
    endpoint.answer = lambda body: answer
    with pytest.raises(UserError, match=problem):
        judge(endpoint).answer(ASKED)


def test_a_question_too_long_for_the_endpoint_has_no_answer_and_does_not_end_the_call(endpoint: Any) -> None:
    endpoint.answer = lambda body: (400, {"error": "This model's maximum context length is 8 tokens"})
    answer = judge(endpoint).answer(ASKED)
    assert answer["first"] is None and "refused as too long" in answer["said"]
