"""Preference pairs as a direct method trains on them: tokens, labels, and log-probabilities of their responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.base.errors import UserError
from components.base.files import make_folder, read_with_digest, replacing, with_digest
from components.data.rows import CanonicalRow
from components.direct.config import DirectJob
from components.distributed import ranks
from components.models.batching import encode_prompts, encode_responses, length_buckets
from components.models.runtime import Runtime
from components.sft.tokenized_demonstrations import Example, Examples, token_losses
from components.training.loop import seeded
from components.training.tokens import TokenWriter, chunks

AT_ONCE = 4_096
"""Number of responses whose log-probabilities are computed between two writes."""


@dataclass(frozen=True)
class PolicyPairs:
    """n pairs as tokens, with their labels."""

    examples: Examples
    """(2n) prompt and response with EOS: pair i has the chosen one at 2i and the rejected one at 2i + 1."""
    labels: NDArray[np.float64]
    """(n, 4): weight, its source's weight, share of the votes for the chosen response, margin."""
    cut: int
    """How many of the pairs have a response that exceeds `generation.max_new_tokens`: it is cut, and has no EOS."""
    alike: int
    """How many further pairs were left out because both responses are the same where they are not cut."""

    @classmethod
    def encode(
        cls, tokenizer: Any, rows: Sequence[CanonicalRow], job: DirectJob, folder: Path | None = None
    ) -> "PolicyPairs":
        """Tokenise pairs, cut to the lengths of `generation`.

        Args:
            folder: where to write a file of the tokens; None keeps them in memory.
        """
        prompts, responses, labels = TokenWriter(folder), TokenWriter(folder), list[tuple[float, ...]]()
        cut = alike = 0
        cap = job.generation.max_new_tokens
        for chunk in chunks(rows, len(rows)):
            encoded = encode_prompts(tokenizer, [row["prompt"] for row in chunk], job.generation.max_prompt_tokens)
            sides = ([row["chosen"] for row in chunk], [row["rejected"] for row in chunk])
            chosen, rejected = (encode_responses(tokenizer, texts, cap + 1) for texts in sides)
            for row, prompt, *both in zip(chunk, encoded, chosen, rejected, strict=True):
                if both[0][:cap] == both[1][:cap]:
                    alike += 1
                    continue
                cut += max(map(len, both)) > cap
                for response in both:
                    prompts.append(prompt)
                    responses.append(response[:cap])
                votes = row.get("soft_label") if job.policy.soft_labels else None
                weights = row.get("weight", 1.0), row.get("source_weight", 1.0)
                labels.append((*weights, 1.0 if votes is None else votes, row.get("margin") or 0.0))
        return cls(Examples(prompts.written(), responses.written()), np.array(labels).reshape(-1, 4), cut, alike)

    @classmethod
    def to_train_on(
        cls, tokenizer: Any, rows: Sequence[CanonicalRow], job: DirectJob, folder: Path
    ) -> "PolicyPairs":
        """As `encode`, for training.

        Raises:
            UserError: no pair is left, or none has the votes or margins that `policy` asks for.
        """
        for wanted, name, option in (
            (job.policy.soft_labels, "soft_label", "soft_labels"), (job.policy.margin, "margin", "margin"),
        ):  # fmt: skip
            if wanted and all(row.get(name) is None for row in rows):
                raise UserError(f"policy.{option}: no training pair has a {name}. Leave the option out.")
        pairs = cls.encode(tokenizer, rows, job, folder)
        if not len(pairs):
            raise UserError(
                f"policy.method={job.policy.method}: none of {len(rows)} training pairs is left, because the two "
                f"responses of {pairs.alike} are the same up to generation.max_new_tokens "
                f"({job.generation.max_new_tokens}). Raise it, or give more pairs."
            )
        return pairs

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens (n,) of both sequences of each pair."""
        return self.examples.lengths.reshape(-1, 2).sum(1)

    def rows(self, pairs: Sequence[int]) -> list[int]:
        """Return the places in `examples` of m pairs: those of the m chosen responses, then of the m rejected ones."""
        return [2 * i for i in pairs] + [2 * i + 1 for i in pairs]

    def mismatched(self, seed: int) -> "list[Example]":
        """Return (2n) examples: each prompt with both responses of another pair, drawn once, with another prompt.

        A pair whose prompt all others share keeps the next one's responses.
        """
        order = list(range(len(self)))
        seeded(seed, "direct", "mismatched").shuffle(order)
        examples = list[Example]([([], [])] * (2 * len(self)))
        for place, pair in enumerate(order):
            prompt = self.examples[2 * pair][0]
            further = (order[(place + step) % len(order)] for step in range(1, len(order) + 1))
            partner = next((i for i in further if self.examples[2 * i][0] != prompt), order[(place + 1) % len(order)])
            for side in (0, 1):
                examples[2 * pair + side] = prompt, self.examples[2 * partner + side][1]
        return examples


def response_logprobs(model: Any, pad_id: int, batch: Sequence[Example], runtime: Runtime) -> Tensor:
    """Return log π(y|x) (N,) at temperature 1: the sum over all tokens of the response, EOS included, in nats."""
    of_tokens = -token_losses(model, pad_id, batch, runtime)
    return torch.stack([part.sum() for part in of_tokens.split([len(response) for _, response in batch])])


@torch.no_grad()
def all_logprobs(model: Any, pad_id: int, examples: Sequence[Example], runtime: Runtime, batch_size: int) -> Tensor:
    """Return log π(y|x) (N,) of all examples, on the CPU. The ranks share the work, and `model` is whole on each."""
    values = torch.zeros(len(examples), device=runtime.device)
    for batch in ranks.share(length_buckets([len(p) + len(r) for p, r in examples], batch_size)):
        values[batch] = response_logprobs(model, pad_id, [examples[i] for i in batch], runtime)
    return ranks.joined(values).cpu()


def reference_logprobs(
    model: Any, pad_id: int, examples: Sequence[Example], runtime: Runtime, batch_size: int, checkpoint: Path
) -> Tensor:
    """Return `all_logprobs` of the reference, in eval mode. They are computed once: an interrupted stage finds those
    that it had in the files `<checkpoint>-<start>.json`."""
    assert not model.training, "the reference has no dropout"
    parts = []
    for start in range(0, len(examples), AT_ONCE):
        file = checkpoint.with_name(f"{checkpoint.name}-{start:09d}.json")
        chunk = [examples[i] for i in range(start, min(start + AT_ONCE, len(examples)))]
        stored = _stored(file, len(chunk)) if ranks.is_first() else []
        if max(ranks.largest([float(len(stored))])):
            parts.append(torch.tensor(ranks.values_of_first(stored or [0.0] * len(chunk)), dtype=torch.float32))
            continue
        parts.append(all_logprobs(model, pad_id, chunk, runtime, batch_size))
        if ranks.is_first():
            make_folder(file.parent)
            with replacing(file) as temporary:
                temporary.write_text(with_digest(parts[-1].tolist()), encoding="utf-8")
    return torch.cat(parts)


def _stored(file: Path, count: int) -> list[float]:
    """Return the numbers of a file; none if it is missing or damaged, or has another number of them."""
    try:
        values: list[float] = read_with_digest(file)
    except (OSError, ValueError):
        return []
    return values if len(values) == count else []
