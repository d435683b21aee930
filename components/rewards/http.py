"""A scorer behind HTTP: requests, answers, and retries while it does not answer.

`shape: tether`: POST {"prompts": [[{role, content}, ...], ...], "responses": [...], "rows": [{...}, ...]} answers
{"scores": [...]}, each a number or [[offset, number], ...].
`shape: openrlhf`: POST {"query": [...], "prompts": [...], "labels": [...]} answers
{"rewards": [...]}; a query is the prompt in the policy's chat template, followed by the response.
GET at the same address answers {"version": "..."}; an answer to POST may name its `version` too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from components.base.errors import Unreachable, UserError
from components.base.jsonl import Message
from components.base.text import counted
from components.rewards.config import HttpReward
from components.rewards.source import Replies, Score, checked_scores
from components.rollouts.asking import HttpAnswer, HttpClient, ask_patiently, said

NO_VERSION = "none"
"""The version of a scorer that reports none."""
Render = Callable[[Sequence[Message]], str]


class HttpSource:
    """Sends responses to the scorer and returns its scores."""

    def __init__(self, config: HttpReward, render: Render | None = None) -> None:
        """`render` formats a prompt in the policy's chat template; the shape `openrlhf` needs it."""
        self._config, self._render = config, render
        self._left = config.patience
        self._http = HttpClient(config.timeout, self._error, "TETHER_REWARD_TOKEN")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def version(self) -> str:
        """Return the scorer's version; `NO_VERSION` if it reports none.

        Raises:
            Unreachable: it does not answer.
        """
        self._left = self._config.patience
        response = self._ask("GET", None)
        answer = response.parsed()[0] if response.status_code < 300 else None
        version = answer.get("version") if isinstance(answer, dict) else None
        return str(version) if isinstance(version, str | int | float) and str(version) else NO_VERSION

    def score(self, replies: Replies) -> list[Score]:
        """Return the scorer's scores. All requests together wait at most `patience` for it.

        Raises:
            Unreachable: it does not answer for `patience` seconds in all. UserError: it refuses, its answer is not
                valid, or its version changed after the run began.
        """
        out: list[Score] = []
        self._left = self._config.patience
        for start in range(0, len(replies.responses), self._config.batch_size):
            here = slice(start, start + self._config.batch_size)
            out += self._some(Replies(replies.prompts[here], replies.responses[here], replies.rows[here]))
        return out

    def _some(self, replies: Replies) -> list[Score]:
        response = self._ask("POST", self._body(replies))
        if response.status_code >= 300:
            raise self._error(
                f"it refuses ({response.status_code}): {said(response.text)}. Check its log, and the option shape."
            )
        answer, problem = response.parsed()
        field = "scores" if self._config.shape == "tether" else "rewards"
        scores = answer.get(field) if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(scores, list):
            raise self._error(
                f"it answers {said(response.text)!r}{problem}; with shape {self._config.shape} it must answer "
                f'{{"{field}": [...]}}. Check the address, and the option shape.'
            )
        reported = answer.get("version")
        expected = self._config.version_known
        if reported is not None and expected not in ("", NO_VERSION) and str(reported) != expected:
            raise self._error(
                f"its version is {reported} now, and was {expected} when the run began. Run again: PPO is computed "
                "again with the new version."
            )
        if len(scores) != len(replies.responses):
            raise self._error(
                f"it gives {counted(len(scores), 'score')} for {counted(len(replies.responses), 'response')}. It must "
                "give one for each."
            )
        return checked_scores(scores, replies, "scorer", self._error)

    def _body(self, replies: Replies) -> dict[str, Any]:
        if self._config.shape == "tether":
            rows = [dict(row) for row in replies.rows]
            return {"prompts": list(replies.prompts), "responses": list(replies.responses), "rows": rows}
        assert self._render is not None
        prompts = [self._render(prompt) for prompt in replies.prompts]
        queries = [prompt + response for prompt, response in zip(prompts, replies.responses, strict=True)]
        return {"query": queries, "prompts": prompts, "labels": [row.get("label") for row in replies.rows]}

    def _ask(self, method: str, body: object) -> HttpAnswer:
        """Return the answer to a request. Retries while the scorer is unreachable; raises Unreachable after what is
        left of `patience`."""
        began = sent = time.monotonic()

        def send() -> HttpAnswer:
            nonlocal sent
            sent = time.monotonic()
            return self._http.request(method, self._config.url, json=body)

        final = (501,) if method == "GET" else ()  # the answer of Python's http.server without do_GET
        response = ask_patiently(send, self._left, self._unreachable, final)
        self._left = max(0.0, self._left - (sent - began))  # waited until the request that was answered
        return response

    def _unreachable(self, problem: str) -> Unreachable:
        return Unreachable(
            f"ppo.rewards: {self._config.source}: the scorer could not be reached for {self._config.patience:g} s "
            f"({problem}). Check that it is running, then run the same command again: it continues from the checkpoint."
        )

    def _error(self, text: str) -> UserError:
        return UserError(f"ppo.rewards: {self._config.source}: {text}")
