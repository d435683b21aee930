"""Golden numbers of TRL 1.16.0's DPOTrainer and KTOTrainer: loss and gradient of one batch, in float64.

    pip install --no-deps --target /tmp/trl trl==1.16.0 accelerate psutil
    PYTHONPATH=/tmp/trl python tests/golden/trl_direct.py

writes `trl_direct.json` beside itself. TRL's own `_compute_loss` runs on log-probabilities of tokens that stand below,
with padding and responses of different lengths; the gradient is that of these log-probabilities. The tests that read
the file need no TRL.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

LENGTHS = [3, 1, 6, 4, 2, 7, 6, 5]
"""Response tokens of each sequence, the last of which is EOS: four chosen, then four rejected."""
PROMPTS = [2, 4, 1, 3, 2, 4, 1, 3]
WIDTH = 9
LABELS = [True, False, True, True, False, True, False, False]
"""Which of the eight responses are desirable, for KTO."""


class Gathered:
    """Stands for one process's accelerator."""

    device = torch.device("cpu")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather


class Metrics(dict[str, dict[str, list[float]]]):
    def __missing__(self, key: str) -> Any:
        return self.setdefault(key, _Lists())


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens under the policy and the reference (8, WIDTH), a mask, and those of mismatched ones
    under the policy, whose reference is a constant lower."""
    generator = torch.Generator().manual_seed(3)
    policy, reference, mismatched = (-3 * torch.rand(8, WIDTH, generator=generator, dtype=torch.float64) for _ in "abc")
    mask = torch.zeros(8, WIDTH + 1)
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        mask[row, prompt : prompt + length] = 1
    return policy, reference, mask, mismatched


def of_tokens(logprobs: torch.Tensor) -> Any:
    """A model whose fused head returns `logprobs` where the labels count, as TRL's does."""

    def model(labels: torch.Tensor, **_: Any) -> Any:
        counts = labels[:, 1:] != -100
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=torch.where(counts, logprobs, zeros), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )

    return model


def trainer(**options: Any) -> Any:
    return SimpleNamespace(
        model=torch.nn.Linear(1, 1), accelerator=Gathered(), aux_loss_enabled=False, ld_alpha=None, loss_weights=[1.0],
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, _metrics=Metrics(),
        _total_train_tokens=0, _tp_size=1, **options,
    )  # fmt: skip


def main() -> None:
    """Run TRL's losses and write them."""
    from trl import DPOTrainer, KTOTrainer

    policy, reference, mask, mismatched = batch()
    ids, counts = torch.ones(8, WIDTH + 1, dtype=torch.long), mask[:, 1:]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    of_reference = (reference * counts).sum(1)
    golden: dict[str, Any] = {
        "policy": policy.tolist(), "reference": reference.tolist(), "mask": counts.tolist(), "beta": 0.3, "noise": 0.2,
        "labels": LABELS, "weights": [1.5, 0.7],
    }  # fmt: skip
    pairs = inputs | {"ref_chosen_logps": of_reference[:4], "ref_rejected_logps": of_reference[4:]}
    for name in ("sigmoid", "robust", "ipo"):
        tokens = policy.clone().requires_grad_()
        stub = trainer(beta=0.3, label_smoothing=0.2, loss_types=[name])
        loss = DPOTrainer._compute_loss(stub, of_tokens(tokens), dict(pairs), False)
        loss.backward()
        golden[name] = {"loss": loss.item(), "gradient": tokens.grad.tolist()}
    golden["mismatched"] = (mismatched * counts).sum(1).tolist()
    for name, shift in (("kto", -0.4), ("kto_clamped", 4.0)):
        tokens = policy.clone().requires_grad_()
        stub = trainer(
            beta=0.3, calculate_KL=True, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.7,
            _compute_kl_logps=lambda model, batch: (mismatched * counts).sum(1),
        )  # fmt: skip
        ref_kl = (mismatched * counts).sum(1) + shift
        singles = inputs | {"label": torch.tensor(LABELS), "ref_logps": of_reference, "ref_KL_logps": ref_kl}
        loss = KTOTrainer._compute_loss(stub, of_tokens(tokens), singles, False)
        loss.backward()
        golden[name] = {"loss": loss.item(), "gradient": tokens.grad.tolist(), "shift": shift}
    Path(__file__).with_name("trl_direct.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
