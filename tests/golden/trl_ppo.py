"""Golden numbers of TRL 1.12.0's PPOTrainer: two optimiser steps on one batch, caught inside its own `train()`.

    pip install --no-deps --target /tmp/trl trl==1.12.0 accelerate psutil
    PYTHONPATH=/tmp/trl python tests/golden/trl_ppo.py

writes `trl_full.safetensors` (every response meets the cap) and `trl_ended.safetensors` (some end early) beside itself:
TRL's own tensors by their names; of the first also the weights before each step and the gradients before clipping.
Float32, no dropout, one minibatch, one micro-batch. The tests that read them need no TRL.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

VOCABULARY, PAD, EOS, CAP, BATCH = 24, 0, 1, 6, 8
KEPT = (
    "query_responses", "scores", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns",
    "padding_mask", "padding_mask_p1", "new_logprobs", "vpred", "pg_loss", "vf_loss", "loss",
)  # fmt: skip
SHUFFLED = ("new_logprobs", "vpred")


def llama(seed: int, kind: Any, **options: Any) -> Any:
    """A Llama with random weights, large enough that log-probabilities and values differ."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=64, initializer_range=0.3, **sizes, **ids, **options
    )
    return kind(config)


def never_pad(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
    """TRL may sample the pad token; here, as in Tether, it has probability 0."""
    return logits.index_fill(-1, torch.tensor([PAD]), -1e9)


def often_end(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
    """EOS at about a tenth of the positions."""
    return logits.index_add(-1, torch.tensor([EOS]), torch.full((*logits.shape[:-1], 1), 2.0))


def catch(ends: bool) -> dict[str, torch.Tensor]:
    """Run TRL for one batch of two epochs, and keep what stands in `train()` at each backward pass."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    policy = llama(1, LlamaForCausalLM)
    reference = llama(1, LlamaForCausalLM)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    reward, value = (llama(seed, LlamaForSequenceClassification, num_labels=1) for seed in (3, 4))
    for model in (policy, reference):
        model.lm_head.register_forward_hook(never_pad)
        if ends:
            model.lm_head.register_forward_hook(often_end)
    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "2")), pad_token="0", eos_token="1", padding_side="left"
    )
    torch.manual_seed(5)
    prompts = [torch.randint(2, VOCABULARY, (3 + i % 4,)).tolist() for i in range(BATCH)]
    out: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = PPOConfig(
            output_dir=folder, report_to="none", use_cpu=True, bf16=False, seed=7, disable_tqdm=True,
            per_device_train_batch_size=BATCH, gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=2,
            total_episodes=BATCH, local_rollout_forward_batch_size=BATCH, response_length=CAP, temperature=0.7,
            stop_token="eos" if ends else None, missing_eos_penalty=None, kl_coef=0.1, kl_estimator="k1",
            cliprange=0.2, cliprange_value=1e9, vf_coef=1.0, gamma=1.0, lam=0.95, whiten_rewards=False,
            learning_rate=1e-2, num_sample_generations=0, save_strategy="no", gradient_checkpointing=False,
        )  # fmt: skip
        trainer = PPOTrainer(
            args=options, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
            value_model=value, train_dataset=Dataset.from_dict({"input_ids": prompts}),
            eval_dataset=Dataset.from_dict({"input_ids": prompts}),
        )  # fmt: skip
        backward, step = trainer.accelerator.backward, iter(range(2))

        def caught(loss: torch.Tensor) -> None:
            index, there = next(step), sys._getframe(1).f_locals
            for name in KEPT:
                kept = there[name].detach().clone()
                # What was computed from the minibatch stands in its order.
                out[f"{index}.{name}"] = kept[there["mini_batch_inds"].argsort()] if name in SHUFFLED else kept
            trained = {} if ends else {"policy": policy, "value": value}
            for which, model in trained.items():
                out.update({f"{index}.{which}|{k}": p.detach().clone() for k, p in model.named_parameters()})
            backward(loss)
            for which, model in trained.items():
                found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
                out.update({f"{index}.{which}.grad|{k}": g.detach().clone() for k, g in found.items()})

        trainer.accelerator.backward = caught
        trainer.train()
    for which, model in ({} if ends else {"reference": reference, "reward": reward}).items():
        out.update({f"{which}|{k}": p.detach() for k, p in model.named_parameters()})
    return {name: tensor.contiguous() for name, tensor in out.items()}


def main() -> None:
    """Write both files."""
    import transformers
    import trl

    torch.set_num_threads(1)
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    for name, ends in (("trl_full", False), ("trl_ended", True)):
        found = catch(ends)
        made_by = {"made_by": "tests/golden/trl_ppo.py", **versions}
        save_file(found, Path(__file__).with_name(f"{name}.safetensors"), metadata=made_by)
        print(name, found["0.query_responses"].tolist(), [round(found[f"{i}.loss"].item(), 6) for i in (0, 1)])


if __name__ == "__main__":
    main()
