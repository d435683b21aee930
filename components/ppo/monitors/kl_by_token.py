"""Find the tokens and prompts that contribute most to the KL of a batch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from components.base.text import line
from components.models.sampling import Samples
from components.models.tokenizers import visible_text
from components.ppo.experience import PpoUpdate
from components.training.updates import RowTable

MOST = 5
"""Number of tokens, and of prompts, that are listed."""


@dataclass
class KLShares(RowTable[PpoUpdate]):
    """Keeps which tokens and prompts contribute most to KL every `every` updates, at evaluations, and at the end."""

    every: int = field(kw_only=True)
    tokenizer: Any = field(kw_only=True)

    def on_update(self, update: PpoUpdate) -> PpoUpdate:
        """Add a row with `update` (from 1), and show it to people beside an evaluation's samples."""
        evaluated = "ppo/watched_score" in update.metrics
        if not evaluated and not update.is_sampled(self.every):
            return update
        experience = update.experience
        shares = kl_shares(
            experience.samples, experience.logprobs, experience.passes.sft, update.prompts, self.tokenizer
        )
        self.rows.append({"update": update.number} | shares)
        return update.with_examples([shares_sample(shares)]) if evaluated else update


def kl_shares(
    samples: Samples, policy: Tensor, sft: Tensor, prompts: Sequence[Any], tokenizer: Any
) -> dict[str, Any]:
    """Return the tokens and prompts that contribute most to the KL of `samples` to SFT, as a JSON object.

    KL is the log-ratio k1 summed over a response's tokens, averaged over responses. `tokens`: each token's contribution
    in nats per response, its number of occurrences, and its share of the KL. `prompts`: those whose responses have the
    highest mean KL in nats, one such response, and their share of the KL. A share is None if the KL is not above 0, as
    before the first update.

    Args:
        policy, sft: (B, T) log-probabilities, nats.
        prompts: (B,) as messages.
    """
    size = len(prompts)
    read = torch.stack([(policy - sft).double(), samples.response_ids.double()]).cpu().numpy()  # once, for a GPU's sake
    mask = np.arange(read.shape[2]) < np.array(samples.response_lengths)[:, None]
    k1, ids = np.where(mask, read[0], 0.0), np.where(mask, read[1], 0).astype(np.int64)
    sums = np.bincount(ids.ravel(), k1.ravel()).tolist()
    times = np.bincount(ids.ravel(), mask.ravel()).tolist()
    vocabulary, summed = len(sums), k1.sum(1).tolist()
    total = sum(summed) / size

    def share(part: float) -> float | None:
        return part / total if total > 0 else None

    top = sorted((i for i in range(vocabulary) if times[i]), key=lambda i: (-sums[i], i))[:MOST]
    tokens = [
        {"token": visible_text(tokenizer, [i]), "nats": sums[i] / size, "count": int(times[i]),
         "share": share(sums[i] / size)} for i in top
    ]  # fmt: skip
    rows: dict[str, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompts):
        rows[str(prompt)].append(row)
    means = {name: sum(summed[row] for row in prompt_rows) / len(prompt_rows) for name, prompt_rows in rows.items()}
    first = sorted(means, key=lambda name: (-means[name], rows[name][0]))[:MOST]
    prompt_shares = []
    for name in first:
        prompt_rows = rows[name]
        worst = max(prompt_rows, key=lambda row: (summed[row], -row))
        prompt_shares.append({
            "prompt": prompts[worst], "response": visible_text(tokenizer, samples.text_ids[worst]), "nats": means[name],
            "share": share(means[name] * len(prompt_rows) / size),
        })  # fmt: skip
    return {"kl": total, "tokens": tokens, "prompts": prompt_shares}


def shares_sample(row: dict[str, Any]) -> dict[str, object]:
    """Return what `kl_shares` found as a sample for people to read while the policy trains."""
    tokens = (f"{line(part['token'])!r} {_part(part)}, {part['count']} times" for part in row["tokens"])
    prompts = (f"{line(part['prompt'][-1]['content'])} ({_part(part)})" for part in row["prompts"])
    return {
        "prompt": "What carries KL in this batch",
        "response": "\n".join(["tokens:", *tokens, "prompts:", *prompts]),
        "kl": row["kl"],
    }


def _part(of: dict[str, Any]) -> str:
    return f"{of['nats']:.2f} nats" + ("" if of["share"] is None else f", {of['share']:.0%}")
