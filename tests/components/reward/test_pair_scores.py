"""A pair's two scores are the same whether the prompt is computed once for both or twice."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, MistralForSequenceClassification

from components.base.errors import CheckFailed
from components.models.batching import pad
from components.models.runtime import Runtime
from components.reward import pair_scores
from components.reward import train as train_module
from components.reward.pair_scores import check_packed, pack, packed_scores, separate_scores
from components.reward.train import fit_model, start_model
from components.reward.training_pairs import Pair, Pairs, longer, packed_length, shared_tokens

TOKENS = st.lists(st.integers(3, 6), max_size=6)
PAIRS = st.builds(
    lambda prompt, chosen, rejected: Pair([*prompt, *chosen, 1], [*prompt, *rejected, 1]), TOKENS, TOKENS, TOKENS
)


@pytest.fixture(scope="module")
def model(stages: Any) -> Any:
    """Two heads on the small SFT model."""
    job = stages.job("reward", objectives={"shorter": 0.5, "longer": 2.0})
    return start_model(job, stages.inputs["sft"], 0)


def test_a_row_holds_what_is_shared_then_each_rest_and_each_token_sees_its_own_past_alone() -> None:
    rows = pack([Pair([5, 6, 7, 1], [5, 6, 8, 9, 1]), Pair([3, 1], [4, 1])], pad_id=0)
    assert rows.ids.tolist() == [[5, 6, 7, 1, 8, 9, 1], [3, 1, 4, 1, 0, 0, 0]]
    assert rows.positions[0].tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert rows.positions[1, :4].tolist() == [0, 1, 0, 1]
    assert rows.ends.tolist() == [[3, 6], [1, 3]]
    seen = [[int(at) for at in row.nonzero().flatten()] for row in rows.sees[0, 0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 1, 4, 5, 6]]
    assert rows.sees.any(-1).all(), "a row of attention without a token is not a number"


@given(PAIRS)
def test_every_sequence_can_be_read_off_its_row(pair: Pair) -> None:
    rows = pack([pair], pad_id=0)
    assert rows.ids.shape[1] == packed_length(pair) == len(pair.chosen) + len(pair.rejected) - shared_tokens(pair)
    for end, sequence in zip(rows.ends[0], (pair.chosen, pair.rejected), strict=True):
        seen = rows.sees[0, 0, end].nonzero().flatten()
        assert rows.ids[0, seen].tolist() == sequence
        assert rows.positions[0, seen].tolist() == list(range(len(sequence)))


def some_pairs(language: Any) -> list[Pair]:
    """Of prompts and responses of many lengths; in one a sequence begins the other, in one they are equal."""
    texts = [language.prompts[i % len(language.prompts)] for i in range(25)]
    prompts = [text[: 3 + 4 * (i % 5)] for i, text in enumerate(texts[:12])]
    tails = [text[: 2 + 3 * (i % 4)] for i, text in enumerate(texts[12:])]
    pairs = [Pair(p + tails[i], p + tails[i + 1]) for i, p in enumerate(prompts)]
    return [*pairs, Pair(prompts[4], prompts[4] + tails[2]), Pair(prompts[3], prompts[3])]


def test_packed_and_separate_scores_and_their_gradients_are_those_of_one_padded_batch(
    model: Any, language: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, weights = some_pairs(language), [p.requires_grad_(True) for p in model.parameters()]
    sequences = [p.chosen for p in pairs] + [p.rejected for p in pairs]
    runs: list[int] = []
    monkeypatch.setattr(pair_scores, "pad", lambda rows, pad_id: runs.append(len(rows)) or pad(rows, pad_id))
    padded = pair_scores.head_scores(model, *pad(sequences, 0), runtime)
    upstream = torch.randn(padded.shape, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(padded, weights, upstream)
    for scores, rows in ((packed_scores, len(pairs)), (separate_scores, 2 * len(pairs))):
        runs.clear()
        found = torch.cat(scores(model, pairs, 0, runtime))
        assert len(runs) > 1 and sum(runs) == rows, "runs of like length"
        assert torch.allclose(found, padded, atol=1e-5)
        for one, other in zip(torch.autograd.grad(found, weights, upstream), expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5 * other.abs().max().item() + 1e-6)


def test_a_model_that_takes_no_such_mask_is_refused_and_the_error_names_the_option(
    model: Any, language: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = some_pairs(language)[:4]
    check_packed(model, pairs, 0, runtime)
    blind, body = pack, model.base_model.forward
    monkeypatch.setattr(pair_scores, "pack", lambda *args: (rows := blind(*args))._replace(sees=rows.sees | True))
    with pytest.raises(CheckFailed, match=r"reward\.shared_prompts"):
        check_packed(model, pairs, 0, runtime)
    monkeypatch.setattr(pair_scores, "pack", blind)
    monkeypatch.setattr(  # as one whose state runs from token to token
        model.base_model, "forward", lambda input_ids, use_cache, **_: body(input_ids=input_ids, use_cache=use_cache)
    )
    with pytest.raises(CheckFailed, match=r"reward\.shared_prompts"):
        check_packed(model, pairs, 0, runtime)


def test_a_window_that_only_the_longest_sequences_exceed_is_seen_before_training(
    stages: Any, runtime: Runtime, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "check_encoding", lambda *of: None)  # these pairs have no text
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=60, sliding_window=12, initializer_range=0.3, **size, **heads)
    windowed = MistralForSequenceClassification(config).eval()
    within = [Pair([i, *range(3, 13)], [i + 1, *range(13, 23)]) for i in range(30, 36)]  # 11 + 11 tokens in a row
    beyond = Pair([*range(3, 20), 1], [*range(3, 20), 2])  # 17 + 1 + 1

    class Given(Pairs):
        def _encoded(self, rows: Any) -> list[Pair]:
            return list(rows)

        def longest(self, count: int) -> list[Pair]:
            return sorted(self, key=longer)[-count:]

    def train(rows: Any, name: str, **options: Any) -> None:
        job = stages.job("reward", **options)
        pairs = Given(None, rows, job.generation, job.reward, tmp_path)
        fit_model(job, windowed, pairs, 0, tmp_path / name, lambda *args, **rest: None)

    train(within, "within")
    windowed.eval()
    with pytest.raises(CheckFailed, match=r"Set reward\.shared_prompts=false"):
        train([*within, beyond], "beyond")
    train([*within, beyond], "separate", shared_prompts=False)


@pytest.mark.parametrize("shared", [True, False])
def test_the_option_decides_how_pairs_are_trained_on(
    stages: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    asked: list[str] = []
    for name in ("packed_scores", "separate_scores"):
        real = getattr(pair_scores, name)
        monkeypatch.setattr(
            f"components.reward.train.{name}",
            lambda *args, real=real, name=name: asked.append(name) or real(*args),
        )
    stages.run("reward", tmp_path / "reward", shared_prompts=shared)
    assert set(asked) == {"packed_scores" if shared else "separate_scores"}


@pytest.mark.parametrize(("chosen", "rejected"), [([3, 4], [3, 4, 5, 1]), ([3, 4, 5], [3, 4, 5, 6, 1])])
def test_a_cut_response_that_the_other_begins_with_keeps_a_token_of_its_own(
    chosen: list[int], rejected: list[int]
) -> None:
    for pair in (Pair(chosen, rejected), Pair(rejected, chosen)):
        assert shared_tokens(pair) == len(chosen) - 1
        assert pack([pair], pad_id=0).ids.shape[1] == len(rejected) + 1
