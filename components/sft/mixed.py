"""Demonstrations that another training mixes in, one minibatch per optimiser step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.base.errors import UserError
from components.data.tables.published import read_split
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.sft.tokenized_demonstrations import Examples, choose_demonstrations, token_losses
from components.training.loop import shuffled_passes
from components.training.terms import Term


@dataclass(frozen=True)
class MixedDemonstrations:
    """Demonstrations as tokens, used in shuffled passes whose order depends on the seed."""

    examples: Examples
    batch_size: int
    seed: int
    pad_id: int

    @classmethod
    def read(
        cls, data: Path, tokenizer: Any, generation: GenerationConfig, batch_size: int, seed: int,
        folder: Path | None = None,
    ) -> "MixedDemonstrations":  # fmt: skip
        """Read the training demonstrations of the artifact `data` whose responses, with EOS, fit the cap.

        Args:
            folder: where to write a file of their tokens; None keeps them in memory.

        Raises:
            UserError: none fits.
        """
        rows = read_split(data / "demonstrations.train")
        chosen = choose_demonstrations(tokenizer, rows, generation, "drop", None, folder)
        if not chosen.examples:
            raise UserError(
                f"ppo.ptx: none of the {chosen.seen} training demonstrations has a response of at most "
                f"{generation.max_new_tokens} tokens, EOS included. Raise generation.max_new_tokens, or set "
                "ppo.ptx.coefficient=0."
            )
        return cls(chosen.examples, batch_size, seed, tokenizer.pad_token_id)

    def minibatch(self, step: int) -> dict[int, int]:
        """Return the demonstrations of optimiser step `step` (from 0): index to length in tokens.

        A demonstration that occurs twice in a step, across the end of a pass, counts once.
        """
        chosen = shuffled_passes(len(self.examples), self.batch_size, step, self.seed, "ppo", "ptx")
        return {i: int(self.examples.lengths[i]) for i in chosen}

    def response_tokens(self, chosen: Sequence[int]) -> int:
        """Return the number of response tokens of the demonstrations at these indices."""
        return sum(int(self.examples.responses.lengths[i]) for i in chosen)

    def term(self, model: Any, chosen: Sequence[int], runtime: Runtime, coefficient: float) -> Term:
        """Return the term of the demonstrations at these indices: the negative log-probability of each response token,
        nats."""
        losses = token_losses(model, self.pad_id, [self.examples[i] for i in chosen], runtime).unsqueeze(0)
        return Term("ppo/ptx_loss", losses, torch.ones_like(losses, dtype=torch.bool), coefficient)
