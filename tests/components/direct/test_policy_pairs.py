"""Log-probabilities of responses: sums with EOS, whatever the padding; pairs that are cut; the reference."""

import copy
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.direct import policy_pairs
from components.direct.config import PolicyConfig
from components.direct.pair_training import LOSSES, KtoBaseline, PairBatch, pair_counts
from components.direct.policy_pairs import PolicyPairs, reference_logprobs, response_logprobs
from components.direct.preference_losses import kto_losses
from components.gates.methods import ON_PAIRS
from components.models.config import GenerationConfig
from components.reward.losses import weighted_mean
from components.sft.tokenized_demonstrations import Examples, response_losses, token_losses
from tests.components.conftest import RUNTIME

PROMPT = [{"role": "user", "content": "My parcel is late."}]


def job(stages: Any, cap: int = 10, **options: Any) -> Any:
    return stages.job("direct", generation=GenerationConfig(max_prompt_tokens=64, max_new_tokens=cap), **options)


def row(chosen: str, rejected: str, **more: Any) -> Any:
    return {"prompt": PROMPT, "chosen": chosen, "rejected": rejected, **more}


@pytest.fixture(scope="module")
def examples(language: Any) -> Examples:
    """Prompts and responses of different lengths."""
    eos, ids = language.tokenizer.eos_token_id, language.prompts[0]
    return Examples.of((prompt, [*ids[: 1 + 2 * n], eos]) for n, prompt in enumerate(language.prompts[:5]))


def exact(model: Any, prompt: list[int], response: list[int]) -> float:
    """log π(y|x) of one sequence without padding, from the model's own logits, float64."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, model.config.pad_token_id] = -torch.inf
    return float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())


@torch.no_grad()
def test_a_log_probability_is_the_sum_with_eos(language: Any, examples: Any) -> None:
    expected = [exact(language.model, *example) for example in examples]
    got = response_logprobs(language.model, language.tokenizer.pad_token_id, examples, RUNTIME)
    assert got.tolist() == pytest.approx(expected, abs=1e-4)
    means = [value / len(response) for value, (_, response) in zip(expected, examples, strict=True)]
    without = [exact(language.model, prompt, response[:-1]) for prompt, response in examples]
    for wrong in (means, without):
        assert all(abs(a - b) > 0.1 for a, b in zip(got.tolist(), wrong, strict=True) if b)


@torch.no_grad()
def test_padding_and_order_change_nothing(language: Any, examples: Any) -> None:
    pad_id = language.tokenizer.pad_token_id
    alone = [float(response_logprobs(language.model, pad_id, [each], RUNTIME)) for each in examples]
    together = response_logprobs(language.model, pad_id, list(examples)[::-1], RUNTIME).tolist()
    assert together[::-1] == pytest.approx(alone, abs=1e-4)
    losses = response_losses(language.model, pad_id, examples, RUNTIME, 2)
    assert [-loss for loss in losses] == pytest.approx(alone, abs=1e-4)


def test_a_pair_whose_difference_is_cut_away_is_left_out(stages: Any, language: Any) -> None:
    same = "We will trace the late parcel. "
    rows = [row(same * 3 + "Hello.", same * 3 + "Goodbye."), row("Hello.", "Goodbye. " + same * 3)]
    rows.append(row("Hello.", "Goodbye."))
    pairs = PolicyPairs.encode(language.tokenizer, rows, job(stages))
    assert (len(pairs), pairs.alike, pairs.cut) == (2, 1, 1)
    eos = language.tokenizer.eos_token_id
    ends = [pairs.examples[i][1][-1] == eos for i in range(4)]
    assert ends == [True, False, True, True], "a cut response has no EOS"
    assert pairs.examples.responses.lengths.max() == 10
    assert len(PolicyPairs.encode(language.tokenizer, rows, job(stages, cap=60))) == 3


def test_labels_are_votes_margins_and_weights(stages: Any, language: Any) -> None:
    labels = {"soft_label": 0.75, "margin": 2.0, "weight": 0.5, "source_weight": 1.5}
    rows = [row("Hello.", "Goodbye.", **labels), row("Hello.", "We are sorry.")]
    soft = PolicyPairs.encode(language.tokenizer, rows, job(stages, soft_labels=True))
    assert soft.labels.tolist() == [[0.5, 1.5, 0.75, 2.0], [1.0, 1.0, 1.0, 0.0]]
    hard = PolicyPairs.encode(language.tokenizer, rows, job(stages))
    assert hard.labels[:, 2].tolist() == [1.0, 1.0]
    assert hard.rows([1, 0]) == [2, 0, 3, 1]


def test_the_reference_is_computed_once(
    stages: Any, language: Any, examples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_pairs, "AT_ONCE", 2)
    arguments = language.model, language.tokenizer.pad_token_id, examples, job(stages), tmp_path / "reference" / "pairs"
    first = reference_logprobs(*arguments)
    kept = sorted((tmp_path / "reference").iterdir())
    assert len(kept) == 3
    kept[1].write_text("damaged")
    computed: list[int] = []

    def counted(model: Any, pad_id: int, some: Any, *rest: Any) -> Any:
        computed.append(len(some))
        return response_losses(model, pad_id, some, *rest)

    monkeypatch.setattr(policy_pairs, "response_losses", counted)
    assert reference_logprobs(*arguments) == first and computed == [2]


def test_the_reference_has_no_dropout(stages: Any, language: Any, examples: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(language.model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    arguments = language.tokenizer.pad_token_id, examples
    plain = response_losses(language.model, *arguments, RUNTIME, 16)
    assert response_losses(model.train(), *arguments, RUNTIME, 16) != plain
    found = reference_logprobs(model, *arguments, job(stages), tmp_path / "reference")
    assert found == [-loss for loss in plain]


def test_every_direct_method_has_a_loss() -> None:
    assert tuple(LOSSES) == ON_PAIRS


def test_kto_reads_a_pair_as_two_labels(stages: Any) -> None:
    config = job(stages, method="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0).policy
    chosen, rejected, ones, z0 = torch.tensor([0.3]), torch.tensor([-0.2]), torch.ones(1), torch.tensor(0.1)
    loss = LOSSES["kto"](config, PairBatch(chosen, rejected, ones, ones, z0, torch.ones(2, 1)))
    by_hand = (2 * torch.sigmoid(0.5 * (z0 - chosen)) + 3 * torch.sigmoid(0.5 * (rejected - z0))) / 2
    assert loss.tolist() == pytest.approx(by_hand.tolist())


def single(response: str, desirable: bool) -> Any:
    return {"prompt": PROMPT, "response": response, "desirable": desirable}


@pytest.fixture
def mixed(stages: Any, language: Any) -> PolicyPairs:
    """Two pairs, a desirable and an undesirable response."""
    rows = [row("Hello.", "Goodbye.", weight=0.25), row("We are sorry.", "Late.")]
    singles = [single("We will trace the late parcel.", True), single("That happens.", False)]
    return PolicyPairs.encode(language.tokenizer, rows, job(stages, method="kto"), singles=singles)


def test_a_single_label_is_a_pair_with_an_empty_response(mixed: PolicyPairs, language: Any) -> None:
    assert mixed.sides.tolist() == [[True, True], [True, True], [True, False], [False, True]]
    assert mixed.labels[:, 0].tolist() == [0.25, 1, 0.5, 0.5], "a pair has two labels, so a single one weighs half"
    tokens = [sum(map(len, mixed.examples[i])) if mixed.examples[i][1] else 0 for i in range(8)]
    assert mixed.lengths.tolist() == [tokens[i] + tokens[i + 1] for i in (0, 2, 4, 6)]
    assert mixed.examples[4][1][-1] == language.tokenizer.eos_token_id and mixed.examples[5][1] == []


@torch.no_grad()
def test_an_empty_response_is_not_read(
    mixed: PolicyPairs, stages: Any, language: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(model: Any, pad_id: int, batch: Any, *rest: Any) -> Any:
        read.append(len(batch))
        return token_losses(model, pad_id, batch, *rest)

    monkeypatch.setattr(policy_pairs, "token_losses", counted)
    pad_id = language.tokenizer.pad_token_id
    expected = [exact(language.model, *example) if example[1] else 0.0 for example in mixed.examples]
    assert response_logprobs(language.model, pad_id, list(mixed.examples), RUNTIME).tolist() == pytest.approx(
        expected, abs=1e-4
    )
    assert read == [6]
    found = reference_logprobs(language.model, pad_id, mixed.examples, job(stages), tmp_path / "reference")
    assert found == pytest.approx(expected, abs=1e-4)


def test_every_label_weighs_the_same_in_ktos_loss(stages: Any) -> None:
    """Equation 8 is a mean over single labels: here over the four of two pairs and one more of each kind."""
    config = job(stages, method="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0).policy
    sides = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 1]])
    chosen, rejected = torch.tensor([0.3, -0.7, 1.2, 0.0]), torch.tensor([-0.2, 0.9, 0.0, 0.4])
    ones, z0, weights = torch.ones(4), torch.tensor(0.1), torch.tensor([1, 1, 0.5, 0.5])
    loss = weighted_mean(LOSSES["kto"](config, PairBatch(chosen, rejected, ones, ones, z0, sides)), weights)
    ratios = torch.tensor([0.3, -0.7, 1.2, -0.2, 0.9, 0.4])
    labels = torch.tensor([True, True, True, False, False, False])
    assert float(loss) == pytest.approx(float(kto_losses(ratios, labels, z0, 0.5, (2.0, 3.0)).mean()), abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 4])
def test_mismatched_pairs_take_the_next_responses(
    size: int, mixed: PolicyPairs, stages: Any, language: Any
) -> None:
    policy = copy.deepcopy(language.model)
    for parameter in policy.parameters():
        parameter.mul_(1.5)
    models = SimpleNamespace(policy=policy, sft=language.model, tokenizer=language.tokenizer)
    kto = KtoBaseline(models, job(stages, method="kto", micro_batch_size=size), mixed, torch.zeros(()))  # type: ignore[arg-type]
    kto.measure(batch := [2, 0, 3, 1])
    ratios = []
    for place, pair in enumerate(batch):
        following = batch[(place + 1) % 4]
        for side in (0, 1):
            prompt, response = mixed.examples[2 * pair][0], mixed.examples[2 * following + side][1]
            if response:
                ratios.append(exact(policy, prompt, response) - exact(language.model, prompt, response))
    assert len(ratios) == 6
    assert float(kto.value) == pytest.approx(max(0, sum(ratios) / 6), abs=1e-4)
    kto.models = SimpleNamespace(policy=language.model, sft=policy, tokenizer=language.tokenizer)  # type: ignore[assignment]
    kto.measure(batch)
    assert float(kto.value) == pytest.approx(max(0, -sum(ratios) / 6), abs=1e-4)


@given(
    desirable=st.integers(0, 30), undesirable=st.integers(0, 30), pairs=st.integers(1, 9),
    weights=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)),
)  # fmt: skip
def test_the_weight_that_is_advised_balances_the_labels(
    desirable: int, undesirable: int, pairs: int, weights: tuple[float, float]
) -> None:
    sides = [(3, 3)] * pairs + [(3, 0)] * desirable + [(0, 3)] * undesirable
    examples = Examples.of(([1], [2] * length) for pair in sides for length in pair)
    labels = np.array([(1.0 if all(pair) else 0.5, 1, 1, 0) for pair in sides])
    of = PolicyPairs(examples, labels, 0, 0)
    options = {"desirable_weight": weights[0], "undesirable_weight": weights[1]}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        metrics = pair_counts(of, PolicyConfig(method="kto", **options))
    ratio = metrics["direct/desirable_ratio"]
    assert metrics["direct/pairs"] == pairs and metrics.get("direct/single_labels", 0) == desirable + undesirable
    assert ratio == pytest.approx(weights[0] * (pairs + desirable) / (weights[1] * (pairs + undesirable)))
    assert bool(said) == (not 1 <= ratio <= 4 / 3)
    if said:
        option, value = re.findall(r"Set policy.(\w+)=([\d.e+-]+)\.$", str(said[0].message))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pair_counts(of, PolicyConfig(method="kto", **options | {option: float(value)}))
