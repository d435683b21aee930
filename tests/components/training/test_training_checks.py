"""Each fault in texts, passes, gradients and losses is named by its self-check, and healthy training passes all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from components.base.errors import CheckFailed
from components.base.jsonl import write_json
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from components.models import batching, logprobs
from components.models.chat.endings import set_endings
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.reward.training_pairs import Pairs
from components.sft.tokenized_demonstrations import Example, Examples, choose_demonstrations, response_losses
from components.training import loop
from components.training.loop import TrainingExamples, fit
from components.training.optim import FitConfig
from components.training.training_checks import check_encoding, check_heldout, check_losses, check_passes

LONG = GenerationConfig(max_prompt_tokens=64, max_new_tokens=64)
LEARNED = {"sft/perplexity": 0.05, "sft/unigram_perplexity": 1.0}


def verdicts(out: Path) -> dict[str, str]:
    """The verdicts that a stage has written."""
    return {row["name"]: row["verdict"] for row in json.loads((out / "attachments" / "self_checks.json").read_text())}


@pytest.fixture(scope="module")
def rows(stages: Any) -> list[Any]:
    return list(read_split(stages.inputs["data"] / "demonstrations.train"))


@pytest.fixture
def encode(language: Any, rows: list[Any], tmp_path: Path) -> Callable[..., SelfChecks]:
    """Encode demonstrations and judge them; `change` is made to the tokens, and `given` are rows in their place."""

    def encode(
        change: Callable[[Example], Example] = lambda example: example, given: Any = None, most: int | None = None,
        limits: GenerationConfig = LONG, overlong: Any = "drop",
    ) -> SelfChecks:  # fmt: skip
        chosen = choose_demonstrations(language.tokenizer, given or rows, limits, overlong, most)
        examples = [*map(change, chosen.examples)]
        return check_encoding("sft.encoding", language.tokenizer, rows, examples, limits, tmp_path)

    return encode


def test_healthy_demonstrations_pass_whole_cut_or_dropped(encode: Callable[..., SelfChecks]) -> None:
    assert encode().results["sft.encoding"].numbers.startswith("0 of 8 first texts")
    encode(most=3)
    cut = encode(limits=GenerationConfig(max_prompt_tokens=64, max_new_tokens=4), overlong="cut")
    assert cut.results["sft.encoding"].verdict == "not judged"
    for overlong in ("cut", "drop"):
        for limit in (
            GenerationConfig(max_prompt_tokens=64, max_new_tokens=25),
            GenerationConfig(max_prompt_tokens=20),
        ):
            encode(limits=limit, overlong=overlong)


@pytest.mark.parametrize(
    "fault",
    [
        lambda example: (example[0], example[1][:-1]), lambda example: (example[0][-1:], example[1]),
        lambda example: (example[0][:-1], example[1]), lambda example: (example[0] + example[1][:1], example[1][1:]),
    ],
    ids=["no EOS", "no prompt", "no generation prompt", "a token is not learned"],
)  # fmt: skip
def test_demonstrations_encoded_in_part_are_named(encode: Callable[..., SelfChecks], fault: Any) -> None:
    with pytest.raises(CheckFailed, match=r"sft\.encoding failed.*EOS.*8 of 8 first texts"):
        encode(fault)


def test_demonstrations_that_lost_their_system_message_are_named(
    encode: Callable[..., SelfChecks], rows: list[Any]
) -> None:
    with pytest.raises(CheckFailed, match=r"sft\.encoding failed"):
        encode(given=[row | {"prompt": row["prompt"][1:]} for row in rows])


def test_turns_stop_strings_and_a_template_that_strips_are_encoded_whole(rows: list[Any], tmp_path: Path) -> None:
    tokenizer = train_tokenizer([row["response"] for row in rows], 600)
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'] | trim")
    set_endings(tokenizer, strings=["STOP"])
    turns = [{"role": "user", "content": " Hi. "}, {"role": "assistant", "content": "Yes?"}, *rows[0]["prompt"]]
    given: list[Any] = [
        {"prompt": turns, "response": "A reply.STOP and more"},
        {"prompt": turns[:1], "response": " Good. "},
    ]
    chosen = choose_demonstrations(tokenizer, given, LONG, "drop", None)
    assert check_encoding("sft.encoding", tokenizer, given, chosen.examples, LONG, tmp_path).results


@pytest.mark.parametrize("fault", ["none", "no EOS", "no prompt", "no system message"])
def test_pairs_encoded_in_part_are_named(
    stages: Any, language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pairs = Pairs(
        language.tokenizer,
        read_split(stages.inputs["data"] / "pairs.train"),
        LONG,
        stages.job("reward").reward,
        tmp_path,
    )
    encoded, prompts = batching.encode_responses, batching.encode_prompts
    module = "components.reward.training_pairs"
    if fault == "no EOS":
        monkeypatch.setattr(f"{module}.encode_responses", lambda *a: [ids[:-1] for ids in encoded(*a)])
    elif fault == "no prompt":
        monkeypatch.setattr(f"{module}.encode_prompts", lambda *a: [ids[-1:] for ids in prompts(*a)])
    elif fault == "no system message":
        monkeypatch.setattr(f"{module}.encode_prompts", lambda t, some, most: prompts(t, [p[-1:] for p in some], most))
    if fault == "none":
        numbers = check_encoding("reward.encoding", language.tokenizer, pairs.rows, pairs, LONG, tmp_path).results
        assert numbers["reward.encoding"].numbers.startswith("0 of 15 first texts")
        return
    with pytest.raises(CheckFailed, match=r"reward\.encoding failed.*EOS.*system message.*15 of 15 first texts"):
        check_encoding("reward.encoding", language.tokenizer, pairs.rows, pairs, LONG, tmp_path)


def test_held_out_prompts_in_training_are_named(rows: list[Any]) -> None:
    check_heldout(SelfChecks(), rows[:50], rows[50:])
    with pytest.raises(CheckFailed, match=r"sft\.heldout failed.*held-out.*1 of 51 training demonstrations"):
        check_heldout(SelfChecks(), rows[:51], [rows[50] | {"response": "Another."}, *rows[60:]])


def train(out: Path, count: int = 80, epochs: int = 2, packed: bool = False) -> Any:
    """Train a layer on `count` examples, four a step."""
    model = torch.nn.Linear(2, 1)
    inputs = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))

    def loss(batch: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        return model(inputs[batch]).square().mean(), {}

    config = FitConfig(batch_size=4, micro_batch_size=2, epochs=epochs, learning_rate=1e-2, checkpoint_every=7)
    data = TrainingExamples(loss, [7 + i % 5 for i in range(count)], [1.0] * count)
    fit(model, data, config, seed=0, group="sft", out=out, observe=lambda *_, **__: None)


@pytest.mark.parametrize(("count", "epochs"), [(80, 2), (81, 3), (8, 2), (2, 5)])
def test_a_healthy_training_passes_whatever_its_batches(tmp_path: Path, count: int, epochs: int) -> None:
    train(tmp_path, count, epochs)
    assert verdicts(tmp_path) == {"training.passes": "held", "training.gradients": "held"}


def test_a_training_that_was_resumed_is_not_judged_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SelfChecks.write(checks := SelfChecks(), tmp_path)
    checks.skip("sft.loss", "a test")
    checks.write(tmp_path)
    step, steps = loop.step_and_clear, iter([True] * 16 + [False])
    monkeypatch.setattr(loop, "step_and_clear", lambda optimizer: step(optimizer) if next(steps) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path)
    monkeypatch.undo()
    train(tmp_path)
    assert verdicts(tmp_path) == {"training.gradients": "held", "sft.loss": "not judged"}


def test_batches_that_repeat_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = loop.LengthBuckets.__getitem__
    monkeypatch.setattr(loop.LengthBuckets, "__getitem__", lambda self, which: buckets(self, which % 8))
    message = r"training\.passes failed.*of 80 examples 48 were never in a batch of the first pass, and 32 repeat"
    with pytest.raises(CheckFailed, match=message):
        train(tmp_path)


def test_passes_in_one_order_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = loop.seeded
    monkeypatch.setattr(loop, "seeded", lambda seed, *what: seeded(seed, *what[:2]))
    with pytest.raises(CheckFailed, match=r"training\.passes failed.*shuffled.*two passes have the same order"):
        train(tmp_path)
    train(tmp_path / "short", count=36)  # so few batches may be in one order by chance


def test_only_the_batches_that_are_compared_are_held_in_memory() -> None:
    taken = list[Any]()
    for number in range(1, 400):
        check_passes(SelfChecks(), taken, [number * (7 if number <= 20 else 3) % 20], number, 20, 20)
    assert len(taken) == 30


def test_gradients_that_are_kept_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "step_and_clear", lambda optimizer: optimizer.step())
    with pytest.raises(CheckFailed, match=r"training\.gradients failed.*not cleared.*2 parameters have a gradient"):
        train(tmp_path)


@pytest.fixture
def losses(language: Any, rows: list[Any], runtime: Runtime, tmp_path: Path) -> Callable[..., SelfChecks]:
    """Judge the losses of a random model on `count` demonstrations; `under` computes those under other prompts."""
    examples = Examples.of(choose_demonstrations(language.tokenizer, rows, LONG, "cut", None).examples)
    pad_id = language.tokenizer.pad_token_id

    def judge(
        under: Callable[[list[float]], Any] = lambda own: np.array(own) + 1 + np.arange(len(own)) % 3, count: int = 200,
        metrics: dict[str, float] = LEARNED, task: str = "support-desk",
    ) -> SelfChecks:  # fmt: skip
        own = response_losses(language.model, pad_id, examples[:count], runtime)
        checks, prompts = SelfChecks(), list[Any]()

        def losses_of(model: Any, pad_id: int, others: Examples, runtime: Runtime) -> Any:
            prompts.extend(prompt for prompt, _ in others)
            assert [response for _, response in others] == [*examples.responses[:count]]
            return under(own)

        (tmp_path / task).mkdir(exist_ok=True)
        write_json(tmp_path / task / "task.json", {"name": task})
        check_losses(checks, language.model, examples[:count], own, runtime, losses_of, metrics, tmp_path / task)
        assert not any(map(lambda one, other: one == other, prompts, examples.prompts))
        return checks

    return judge


def test_losses_of_a_plain_forward_pass_that_rise_under_other_prompts_pass(losses: Callable[..., SelfChecks]) -> None:
    assert {result.verdict for result in losses().results.values()} == {"held"}


@pytest.mark.parametrize("shift", [0, 2])
def test_a_loss_of_another_token_is_named(
    losses: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setattr(logprobs, "predicting", lambda hidden, at: hidden.flatten(0, 1)[at - shift])
    with pytest.raises(CheckFailed, match=r"sft\.loss failed.*reads the token that it predicts"):
        losses()


def test_losses_that_do_not_depend_on_the_prompt_are_named_in_the_built_in_task(
    losses: Callable[..., SelfChecks],
) -> None:
    def noise(own: list[float]) -> Any:
        return np.array(own) + (-1.0) ** np.arange(len(own))

    with pytest.raises(CheckFailed, match=r"sft\.prompt_use failed.*another prompt than their own.*rise by 0\.0"):
        losses(noise)
    assert losses(noise, task="none").results["sft.prompt_use"].verdict == "doubtful"
    untaught = {"sft/perplexity": 0.06, "sft/unigram_perplexity": 1.0}
    for checks in (losses(noise, count=199), losses(noise, metrics=untaught)):
        assert checks.results["sft.prompt_use"].verdict == "not judged"


def test_the_stage_of_sft_reports_all_of_its_checks(stages: Any, tmp_path: Path) -> None:
    stages.run("sft", tmp_path)
    expected = {"training.passes", "training.gradients", "sft.heldout", "sft.encoding", "sft.loss", "sft.prompt_use"}
    assert verdicts(tmp_path).keys() == expected
    stages.run("reward", tmp_path / "reward")
    assert {"training.passes", "training.gradients", "reward.encoding"} <= verdicts(tmp_path / "reward").keys()
