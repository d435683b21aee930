"""Models as judges: one in a folder, whose probabilities are read, or one behind an OpenAI-compatible endpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from components.base.errors import Unreachable, UserError, refuse_credentials
from components.base.jsonl import Message
from components.labelling.config import EndpointConfig
from components.labelling.feedback.rubric import SIDES, verdict
from components.models.runtime import Runtime, activate, autocast
from components.rollouts.asking import HttpAnswer, HttpClient, ask_patiently, said

TOKEN = "TETHER_JUDGE_TOKEN"
"""The environment variable with an endpoint's key."""
ROUTE = "/chat/completions"
_TOO_LONG = ("context length", "context_length", "maximum context", "too long", "max_model_len", "context window")
"""Phrases in endpoints' errors for a request that is too long for the model."""


class JudgeAnswer(TypedDict):
    """A model's answer to one question."""

    first: float | None
    """Preference for the response that is shown first, 0 to 1; None if the answer cannot be read."""
    mass: NotRequired[float]
    """For a model in a folder: the probability that it answers A or B at all."""
    said: NotRequired[str]
    """For an endpoint: the answer, shortened. For either: why there is no answer."""


class FolderJudge:
    """A language model in a Hugging Face folder (or a GGUF file).

    Its preference for the response shown first is P(A) / (P(A) + P(B)), of the next token after the question in its
    chat template, at temperature 1 (Lee et al. 2023, arXiv:2309.00267, section 2.1).
    """

    def __init__(self, folder: Path, runtime: Runtime, option: str = "--judge") -> None:
        """Load the model. `option` names the folder, for errors.

        Raises:
            UserError: the folder has no language model with a chat template, or its tokenizer lacks the tokens A and B.
        """
        from components.models.folders import load_base
        from components.models.matrices.kernels import by_onednn

        activate(runtime)
        model, self._tokenizer = load_base(folder, option, trained=False)
        self._model, self._runtime = by_onednn(model.to(runtime.device)), runtime
        self._most = getattr(model.config, "max_position_embeddings", None) or 1 << 30
        self._option, self._sides = option, letter_tokens(self._tokenizer, f"{option} {folder}")

    def answer(self, messages: Sequence[Message]) -> JudgeAnswer:
        """Return its preference from a forward pass over this question alone: in a batch, rounding depends on the rest.

        Raises:
            UserError: its chat template refuses the question.
        """
        import torch
        from jinja2 import TemplateError

        from components.models.chat.rendering import rendered_prompt
        from components.models.logprobs import last_hidden, vocabulary_logits

        try:
            text = rendered_prompt(self._tokenizer, messages)
        except TemplateError as error:
            raise UserError(f"{self._option}: the model's chat template refuses a question: {error}.") from error
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > self._most:
            return {"first": None, "said": f"the question has {len(ids)} tokens, and the model reads {self._most}"}
        tokens = torch.tensor([ids], device=self._runtime.device)
        with torch.no_grad(), autocast(self._runtime):
            hidden = last_hidden(self._model, tokens, torch.ones_like(tokens, dtype=torch.bool), "right")
            logits = vocabulary_logits(self._model, hidden[0, -1])
        logprobs = logits.double().log_softmax(-1)[self._sides]
        first, mass = logprobs.softmax(-1)[0], logprobs.exp().sum()
        if not bool(logprobs.isfinite().all()):
            raise UserError(f"{self._option}: the model gives NaN or infinite log-probabilities. Use an undamaged one.")
        return {"first": float(first), "mass": float(mass)}

    def close(self) -> None:
        """Nothing is open."""


class EndpointJudge:
    """A model behind an OpenAI-compatible endpoint, whose text is parsed (`verdict`).

    POST URL/chat/completions: {"model", "messages", "max_tokens", "temperature": 0} answers
    {"choices": [{"message": {"content": "..."}}]}. The key in `TETHER_JUDGE_TOKEN` is sent as a bearer token.
    """

    def __init__(self, config: EndpointConfig, option: str = "--judge") -> None:
        """Open the client. `option` names the endpoint, for errors."""
        refuse_credentials(option, config.url)
        self._config, self._option = config, option
        self._http = HttpClient(config.timeout, self._error, TOKEN)

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def answer(self, messages: Sequence[Message]) -> JudgeAnswer:
        """Return its answer.

        Raises:
            Unreachable: it does not answer for `patience` seconds. UserError: it refuses, or its answer is not valid.
        """
        url = self._config.url.rstrip("/")
        url += "" if url.endswith(ROUTE) else ROUTE
        body: Mapping[str, Any] = {
            "model": self._config.model, "messages": list(messages), "max_tokens": self._config.max_tokens,
            "temperature": 0,
        }  # fmt: skip
        response = ask_patiently(
            lambda: self._http.request("POST", url, json=body), self._config.patience, self._unreachable
        )
        if response.status_code in (400, 413, 422) and any(words in response.text.lower() for words in _TOO_LONG):
            return {"first": None, "said": f"refused as too long: {said(response.text)}"}
        if response.status_code in (401, 403):
            raise self._error(f"it refuses the key ({response.status_code}). Set the environment variable {TOKEN}.")
        if response.status_code >= 300:
            problem = f"it refuses ({response.status_code}): {said(response.text)}"
            raise self._error(f"{problem}. Check the address and the model's name.")
        text = _content(response)
        if text is None:
            raise self._error(
                f"it answers {said(response.text)!r}, which is not a /v1{ROUTE} answer. Give the address up to /v1, as "
                "http://127.0.0.1:8000/v1."
            )
        return {"first": verdict(text), "said": said(text)}

    def _unreachable(self, problem: str) -> Unreachable:
        return Unreachable(
            f"{self._option} {self._config.url}: the endpoint could not be reached for {self._config.patience:g} s "
            f"({problem}). Check that it is running. Its answers so far are kept: run the same command again to "
            "continue."
        )

    def _error(self, text: str) -> UserError:
        return UserError(f"{self._option} {self._config.url}: {text}")


Judge = FolderJudge | EndpointJudge
"""Answers questions. Equal questions get equal answers."""


def letter_tokens(tokenizer: Any, named: str) -> list[int]:
    """Return the tokens A and B of a tokenizer; `named` begins the error.

    Raises:
        UserError: it has no such tokens.
    """
    tokens = [tokenizer(side, add_special_tokens=False)["input_ids"] for side in SIDES]
    if any(len(ids) != 1 or ids[0] == tokenizer.unk_token_id for ids in tokens) or tokens[0] == tokens[1]:
        raise UserError(
            f"{named}: its tokenizer has no single token for A and for B, so its answer can't be read from its "
            "probabilities. Use another model."
        )
    return [ids[0] for ids in tokens]


def _content(answer: HttpAnswer) -> str | None:
    """Return the text of a chat completion; None if `answer` is not one."""
    try:
        text = answer.parsed()[0]["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else None
