"""Score whole conversations with the pipeline's own reward model or any Hugging Face sequence classifier."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from components.base.errors import UserError, about
from components.base.paths import files_read
from components.data.rows import Message
from components.models.batching import encode_prompt, encode_response, length_buckets, pad
from components.models.chat.rendering import rendered_conversation
from components.models.runtime import Runtime, autocast
from components.models.tokenizers import try_template
from components.models.weights import load_from, load_whole
from components.reward.scoring import RewardEnsemble, ScoreScale, load_scorer, score_sequences

UNLIMITED = 1 << 30


class Scored(NamedTuple):
    """Scores of n conversations."""

    scores: torch.Tensor
    """(n,) raw scores, float32, on the CPU."""
    tokens: list[int]
    """Number of tokens of each last response, as it is scored."""
    cut: list[bool]
    """Whether a conversation was too long for the model and lost its oldest tokens."""


class RewardScorer:
    """A reward model in a folder: an artifact of the reward stage (it has `reward.json`) or a sequence classifier."""

    def __init__(
        self, model: Any, tokenizer: Any, runtime: Runtime, temperature: float = 1.0, ours: bool = True
    ) -> None:
        """Wrap a loaded model: the pipeline's own (`ours`), with its fitted temperature, or another classifier."""
        self._model, self._tokenizer, self._runtime = model, tokenizer, runtime
        self.temperature, self.ours = temperature, ours
        one = model.members[0] if isinstance(model, RewardEnsemble) else model
        self.longest = getattr(one.config, "max_position_embeddings", None) or UNLIMITED
        """Most tokens that the model reads."""

    @classmethod
    def load(cls, folder: Path, runtime: Runtime, named_by: str) -> Self:
        """Load the reward model of a folder.

        Raises:
            UserError: the folder holds neither, or a classifier with several labels or without a chat template.
        """
        if (folder / "reward.json").is_file():
            with about(named_by):
                files_read(folder)
            return cls(*load_scorer(folder, runtime), runtime, ScoreScale.read(folder).temperature)
        return cls(*_classifier(folder, runtime, named_by), runtime, ours=False)

    @torch.no_grad()
    def score(self, conversations: Sequence[Sequence[Message]], ended: Sequence[bool] = ()) -> Scored:
        """Score conversations that end with a response. The order of the conversations does not affect the scores.

        Args:
            ended: whether each response is complete; else it is read without what ends one. Empty if all are.
        """
        complete = ended or [True] * len(conversations)
        ids, tokens = zip(*map(self._encoded, conversations, complete), strict=True)
        sequences = [sequence[-self.longest :] for sequence in ids]
        cut = [len(sequence) > self.longest for sequence in ids]
        if self.ours:
            scores = score_sequences(self._model, self._tokenizer.pad_token_id, sequences, self._runtime)
        else:
            scores = self._logits(sequences)
        return Scored(scores, list(tokens), cut)

    def _encoded(self, messages: Sequence[Message], ended: bool) -> tuple[list[int], int]:
        """Return the token ids of a conversation, and how many belong to the last response."""
        tokenizer = self._tokenizer
        if self.ours:  # as the stage encodes its pairs
            response = encode_response(tokenizer, messages[-1]["content"], UNLIMITED)[: None if ended else -1]
            return encode_prompt(tokenizer, messages[:-1], UNLIMITED) + response, len(response)
        text = rendered_conversation(tokenizer, messages)
        answer = messages[-1]["content"]
        if not ended and answer.strip():  # drop what the template writes after a turn; a template may strip the turn
            rest = text.rpartition(answer)[2] if answer in text else text.rpartition(answer.strip())[2]
            text = text.removesuffix(rest)
        response = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return tokenizer(text, add_special_tokens=False)["input_ids"], len(response)

    def _logits(self, sequences: Sequence[Sequence[int]], batch_size: int = 16) -> torch.Tensor:
        """Return the classifier's single logit (n,); one sequence at a time if it has no pad token."""
        out, pad_id = torch.zeros(len(sequences)), self._model.config.pad_token_id
        size = 1 if pad_id is None else batch_size
        for batch in length_buckets([len(sequence) for sequence in sequences], size):
            ids, mask = (x.to(self._runtime.device) for x in pad([sequences[i] for i in batch], pad_id or 0))
            with autocast(self._runtime):
                logits = self._model(input_ids=ids, attention_mask=mask.long()).logits
            out[torch.tensor(batch)] = logits.squeeze(-1).float().cpu()
        return out


def _classifier(folder: Path, runtime: Runtime, named_by: str) -> tuple[Any, Any]:
    labels = load_from(AutoConfig, folder, named_by).num_labels
    if labels != 1:
        raise UserError(
            f"{named_by}: {folder} holds a classifier with {labels} labels, and a reward model has one score. Give one "
            f"with num_labels 1."
        )
    tokenizer = load_from(AutoTokenizer, folder, named_by)
    if tokenizer.chat_template is None:
        raise UserError(
            f"{named_by}: the tokenizer in {folder} has no chat template, so it is not known how the model reads a "
            f"conversation. Add the template that it was trained with."
        )
    try_template(tokenizer, folder, named_by)
    return load_whole(AutoModelForSequenceClassification, folder, named_by).to(runtime.device), tokenizer
