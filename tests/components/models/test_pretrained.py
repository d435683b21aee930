"""The pretrained model as it is fetched: a GGUF file becomes a folder that anyone's transformers loads and scores."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.models.runtime import Runtime

MESSAGES = [{"role": "user", "content": "How do I boil an egg?"}]
RESPONSE = "Put it in boiling water for eight minutes."
FLOAT32 = Runtime(device="cpu", dtype="float32", threads=1)

pytestmark = [pytest.mark.real_data, pytest.mark.slow]


@pytest.fixture(scope="module")
def language_model(smollm2: Path) -> tuple[Any, Any]:
    from components.models.folders import load_causal_lm

    return load_causal_lm(smollm2, FLOAT32)


def example(tokenizer: Any) -> tuple[list[int], list[int]]:
    from components.models.batching import encode_prompt, encode_response

    return encode_prompt(tokenizer, MESSAGES, 64), encode_response(tokenizer, RESPONSE, 32)


def sequence(tokenizer: Any) -> list[int]:
    prompt, response = example(tokenizer)
    return prompt + response


def test_the_dequantised_model_has_a_pad_of_its_own_and_a_chat_template(language_model: tuple[Any, Any]) -> None:
    model, tokenizer = language_model
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 2)
    assert tokenizer.decode(sequence(tokenizer)[-1:]) == "<|im_end|>"
    assert "How do I boil an egg?<|im_end|>\n<|im_start|>assistant\n" in tokenizer.decode(sequence(tokenizer))
    assert {str(p.dtype) for p in model.parameters()} == {"torch.float32"}


def test_the_model_knows_english_and_our_log_probabilities_are_its_own(language_model: tuple[Any, Any]) -> None:
    import torch

    from components.sft.tokenized_demonstrations import token_losses

    model, tokenizer = language_model
    prompt, response = example(tokenizer)
    ids, size = prompt + response, len(response)
    with torch.no_grad():
        ours = token_losses(model, 0, [(prompt, response)], FLOAT32)
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    theirs = -torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)[-size:]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert ours.mean() < 4, "a broken dequantisation gives about log(49152) = 10.8"


def test_the_scalar_head_scores_as_the_models_own_forward_and_reads_eos(smollm2: Path) -> None:
    import torch

    from components.models.folders import load_reward_model
    from components.reward.scoring import score_sequences

    model, tokenizer = load_reward_model(smollm2, FLOAT32, seed=1)
    ids = sequence(tokenizer)
    assert ids[-1] == tokenizer.eos_token_id
    ours = score_sequences(model, tokenizer.pad_token_id, [ids, ids[:-1]], FLOAT32)
    with torch.no_grad():
        padded = torch.tensor([ids, [*ids[:-1], tokenizer.pad_token_id]])
        mask = torch.ones_like(padded)
        mask[1, -1] = 0
        theirs = model(padded, attention_mask=mask).logits.squeeze(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert abs(ours[0] - ours[1]) > 1e-2, "the score doesn't see EOS"


def test_sampler_and_training_path_agree_and_kl_starts_at_nothing(language_model: tuple[Any, Any]) -> None:
    import torch

    from components.models.config import GenerationConfig
    from components.models.logprobs import token_stats
    from components.models.sampling import sample, sampling_copy
    from components.ppo.experience import check_drift, sampler_drift
    from components.ppo.models import scatter

    model, tokenizer = language_model
    prompt, _ = example(tokenizer)
    for dtype in ("float32", "bfloat16"):
        runtime = FLOAT32.model_copy(update={"dtype": dtype})
        with torch.no_grad(), sampling_copy(model, runtime) as sampler:
            drawn = sample(
                sampler, tokenizer, [prompt, prompt[-20:]], GenerationConfig(max_new_tokens=12), 0
            )  # fmt: skip
            found = token_stats(model, drawn.ids, drawn.mask, drawn.counts, runtime)
        mask, job = (
            drawn.response_mask,
            SimpleNamespace(
                runtime=runtime,
                generation=GenerationConfig(),
                ppo=SimpleNamespace(rollout=SimpleNamespace(by_server=False)),
            ),
        )
        check_drift(sampler_drift(drawn.logprobs, scatter(found.logprobs, mask), mask, job).item(), job)
