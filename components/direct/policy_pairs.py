"""Preference pairs, and single labels (KTO), as a direct method trains on them: tokens, labels, log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from components.data.rows import CanonicalRow
from components.direct.config import DirectJob
from components.models.batching import encode_prompts, encode_responses
from components.models.runtime import Runtime
from components.sft.tokenized_demonstrations import Example, Examples, response_losses, token_losses
from components.training.chunks import in_chunks
from components.training.tokens import TokenWriter, chunks

AT_ONCE = 4_096
"""Number of responses whose log-probabilities are computed between two writes."""


@dataclass(frozen=True)
class PolicyPairs:
    """n pairs as tokens, with their labels. A single label is a pair of which one response is empty."""

    examples: Examples
    """(2n) prompt and response with EOS: pair i has the chosen one at 2i and the rejected one at 2i + 1."""
    labels: NDArray[np.float64]
    """(n, 4): weight (1/2 for a single label: a pair has two), its source's weight, share of the votes for the chosen
    response, margin."""
    cut: int
    """How many of the pairs have a response that exceeds `generation.max_new_tokens`: it is cut, and has no EOS."""
    alike: int
    """How many further pairs were left out because both responses are the same where they are not cut."""

    @classmethod
    def encode(
        cls, tokenizer: Any, rows: Sequence[CanonicalRow], job: DirectJob, folder: Path | None = None,
        singles: Sequence[CanonicalRow] = (),
    ) -> "PolicyPairs":  # fmt: skip
        """Tokenise pairs, and after them single labels, cut to the lengths of `generation`.

        Args:
            folder: where to write a file of the tokens; None keeps them in memory.
        """
        prompts, responses, labels = TokenWriter(folder), TokenWriter(folder), list[tuple[float, ...]]()
        cut = alike = 0
        cap = job.generation.max_new_tokens
        for chunk in chain(chunks(rows, len(rows)), chunks(singles, len(singles))):
            encoded = encode_prompts(tokenizer, [row["prompt"] for row in chunk], job.generation.max_prompt_tokens)
            sides = (
                [row["chosen"] if "chosen" in row else row["response"] for row in chunk],
                [row["rejected"] if "rejected" in row else row["response"] for row in chunk],
            )
            chosen, rejected = (encode_responses(tokenizer, texts, cap + 1) for texts in sides)
            for row, prompt, *both in zip(chunk, encoded, chosen, rejected, strict=True):
                is_single = row.get("desirable") is not None
                if is_single:
                    both[row["desirable"]] = []  # 1 is the rejected side
                elif both[0][:cap] == both[1][:cap]:
                    alike += 1
                    continue
                cut += max(map(len, both)) > cap
                for response in both:
                    prompts.append(prompt)
                    responses.append(response[:cap])
                votes = row.get("soft_label") if job.policy.soft_labels else None
                weights = 0.5 if is_single else row.get("weight", 1.0), row.get("source_weight", 1.0)
                labels.append((*weights, 1.0 if votes is None else votes, row.get("margin") or 0.0))
        return cls(Examples(prompts.written(), responses.written()), np.array(labels).reshape(-1, 4), cut, alike)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Return the number of tokens (n,) of both sequences of each pair."""
        return (self.examples.lengths.reshape(-1, 2) * self.sides).sum(1)

    @property
    def sides(self) -> NDArray[np.bool_]:
        """Return which responses each pair has (n, 2), the chosen and the rejected one."""
        return self.examples.responses.lengths.reshape(-1, 2) > 0

    def rows(self, pairs: Sequence[int]) -> list[int]:
        """Return the places in `examples` of m pairs: those of the m chosen responses, then of the m rejected ones."""
        return [2 * i for i in pairs] + [2 * i + 1 for i in pairs]


def response_logprobs(model: Any, pad_id: int, batch: Sequence[Example], runtime: Runtime) -> Tensor:
    """Return log π(y|x) (N,) at temperature 1: the sum over all tokens of the response, EOS included, in nats."""
    of_tokens = -token_losses(model, pad_id, [example for example in batch if example[1]], runtime)
    return torch.stack([part.sum() for part in of_tokens.split([len(response) for _, response in batch])])


def reference_logprobs(model: Any, pad_id: int, examples: Examples, job: DirectJob, file: Path) -> list[float]:
    """Return log π(y|x) (N,) of the reference in eval mode, without dropout; the ranks share the work.

    They are computed once: an interrupted stage continues from the first rank's files whose names begin with `file`.
    """
    model.eval()

    def compute(chunk: Sequence[Example], start: int) -> list[float]:
        read = Examples.of(example for example in chunk if example[1])
        losses = iter(response_losses(model, pad_id, read, job.runtime, 2 * job.policy.micro_batch_size))
        return [-next(losses) if response else 0.0 for _, response in chunk]

    return in_chunks(examples, AT_ONCE, file, compute, lambda done: None)
