"""The engines that sample PPO's rollouts, and the requests to a vLLM server with the checks of its answers.

Legend: B responses, T response tokens (padded on the right).
"""

import contextlib
import logging
import math
import random
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from components.base.errors import Unreachable, UserError
from components.distributed import ranks
from components.models.batching import pad
from components.models.chat.endings import endings_of
from components.models.config import GenerationConfig
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.models.sampling import LocalEngine, Samples, rollout_engine, with_endings
from components.models.tokenizers import StopFinder
from components.rollouts.client import VllmClient, server_url
from components.rollouts.config import RolloutConfig
from components.rollouts.transfer import FolderTransfer, weights_on_first

logger = logging.getLogger(__name__)

BANNED = -100.0
"""The largest negative bias of a logit that vLLM applies (it clamps it). The pad token keeps e^-100 of its odds; a
response that contains it is refused."""
NEVER = -9999.0
"""The value that the server returns for a log-probability of minus infinity."""
PROOF_TOKENS = 16
"""Tokens of the response that proves a server's weights. In bfloat16 rounding moves one token by 0.06 nats and more."""
INVARIANCE_REQUESTS = 16
"""Requests among which a response must be the one that it is alone."""
FLOAT32_KL, OTHER_KL, OTHER_KL_GROWTH = 1e-5, 0.01, 0.002
"""Largest mean KL (k3, nats a token) of a server from the training path at temperature 1: where both compute in
float32; in other formats in the first update; and there in later updates, above three times the first one's.

In float32 5e-14 was measured (vLLM 0.32 on a CPU), and 0.002 with the output layer of the update before. In bfloat16
rounding alone gives about 0.003, so that only a comparison with weights that the server certainly had shows stale ones.
"""


def largest_kl(config: RolloutConfig, runtime: Runtime, temperature: float, first: float | None = None) -> float:
    """Return the largest mean KL in nats a token by which the server may differ from the training path.

    Below T = 1 rounding grows as 1 / T in a log-probability, and as 1 / T² in a KL.

    Args:
        first: the mean KL of the first update; None in that update.
    """
    growth = max(1.0, 1 / temperature) ** 2
    if config.dtype == runtime.dtype == "float32" and not runtime.tf32:
        return FLOAT32_KL * growth
    return OTHER_KL * growth if first is None else 3 * first + OTHER_KL_GROWTH * growth


def check_server(config: RolloutConfig, generation: GenerationConfig) -> None:
    """Check that a server can sample as PPO needs, before models are loaded, and make it sleep if it shares the GPU:
    one that was just started is awake, and so is one that a killed run left.

    Raises:
        UserError: it differs from what the config was resolved for, or cannot sample so. Unreachable: no answer.
    """
    with VllmClient(config) as client:
        if untried := client.check(generation).untried:
            logger.warning("%s: %s", client.url, untried)
        if config.sleep and not client.is_asleep():
            client.sleep()


@contextlib.contextmanager
def open_rollouts(config: RolloutConfig, tokenizer: Any, runtime: Runtime, folder: Path) -> "Iterator[Rollouts]":
    """Open the rollouts that the resolved `config` names, for as long as a policy trains.

    Every rank opens them. Rank 0 makes the requests, and sends the others the answers.

    Args:
        folder: the stage's own, for weights on their way to a server.

    Raises:
        UserError: no server is named. Unreachable: it does not answer.
    """
    if not config.by_server:
        yield LocalRollouts(tokenizer, runtime)
        return
    url = ranks.result_of_first(lambda: server_url(config))  # which another host's environment need not name
    with VllmClient(config.model_copy(update={"url": url})) as client:
        model = ranks.result_of_first(lambda: client.facts().model)
        if config.folder is None and ranks.is_first():
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed attempt
        with contextlib.closing(FolderTransfer(client, Path(config.folder or folder))) as transfer:
            yield VllmRollouts(client, model, tokenizer, runtime, transfer)


@dataclass(frozen=True)
class LocalRollouts:
    """Rollouts in this process."""

    tokenizer: Any
    runtime: Runtime

    def engine(
        self, policy: Any, value_head: Callable[[Tensor], Tensor] | None
    ) -> contextlib.AbstractContextManager[LocalEngine]:
        """Open an engine that samples from the current weights of `policy`, which must not be trained meanwhile."""
        return rollout_engine(policy, self.tokenizer, self.runtime, value_head)


class VllmRollouts:
    """Rollouts by a vLLM server."""

    def __init__(
        self, client: VllmClient, model: str, tokenizer: Any, runtime: Runtime, transfer: FolderTransfer
    ) -> None:
        self.client, self.model, self.tokenizer, self.runtime = client, model, tokenizer, runtime
        self.transfer, self.name, self.sent = transfer, f"tether-{secrets.token_hex(8)}", 0

    @contextlib.contextmanager
    def engine(self, policy: Any, value_head: Callable[[Tensor], Tensor] | None) -> "Iterator[VllmEngine]":
        """As `LocalRollouts`: send the weights, empty the prefix cache, sample. The samples have no values. Collective.

        Raises:
            UserError: the server's weights are not those that were sent. Unreachable: it does not answer.
        """
        client, version = self.client, f"{self.name}-{self.sent}"
        size, is_first = int(policy.config.vocab_size), self.sent == 0
        self.sent += 1
        try:
            self._send(policy, version)
            yield VllmEngine(client, self.model, self.tokenizer, self.runtime, size, version, policy, is_first)
        except Unreachable:
            raise
        except BaseException:
            if ranks.is_first():  # not together: another rank's error may be its own
                self._free()
            raise
        ranks.result_of_first(self._free)

    def _send(self, policy: Any, version: str) -> None:
        weights = weights_on_first(policy, self.transfer.dtype)
        if self.client.config.sleep and self.runtime.device == "cuda":
            torch.cuda.empty_cache()
        ranks.result_of_first(lambda: self._replace_weights(weights, policy.config, version))

    def _replace_weights(self, weights: Mapping[str, Tensor], config: Any, version: str) -> None:
        client = self.client
        if client.config.sleep and client.is_asleep():
            client.wake("weights")
        self.transfer.send(weights, config, version)
        if client.config.sleep:
            client.wake("kv_cache")
        client.forget_prefixes()
        current = client.weights_version()
        if current != version:
            raise UserError(
                f"{client.url} says that it samples from the weights {current!r}, and {version!r} were sent: its "
                "routes are not those of vLLM 0.29 to 0.32, or another run sends it weights."
            )

    def _free(self) -> None:
        """Make the server free its memory if it shares the GPU; also after an error, for the next attempt."""
        if self.client.config.sleep:
            self.client.sleep()


Rollouts = LocalRollouts | VllmRollouts
"""Samples responses of a policy during its training."""


class ServedResponse(NamedTuple):
    """A response from a server."""

    ids: list[int]
    logprobs: list[float]
    """Log-probabilities in nats under the server's distribution: after temperature and the bias."""
    ended: bool


@dataclass(frozen=True)
class VllmEngine:
    """Samples responses by asking a vLLM server for each."""

    client: VllmClient
    model: str
    tokenizer: Any
    runtime: Runtime
    vocabulary: int
    version: str
    """The version of the weights from which it samples."""
    policy: Any
    """The model whose weights were sent, on the training path."""
    is_first: bool
    """Whether these are the first weights that this process sends."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        generation: GenerationConfig,
        seed: int,
        numbers: Sequence[int] | None = None,
    ) -> Samples:
        """As `LocalEngine`, after a proof of the server's weights. Of its statistics only `logprobs` are kept.

        Raises:
            UserError: an answer does not fit the request's sampling, or the proof fails. Unreachable: there is no
                answer, or the server's weights were replaced meanwhile.
        """
        requests = [
            self.request(prompt, generation, response_seed(seed, number))
            for prompt, number in zip(prompts, range(len(prompts)) if numbers is None else numbers, strict=True)
        ]
        self.prove_weights(requests[0])
        answers = ranks.result_of_first(lambda: self._responses(requests))
        return self._samples(prompts, [ServedResponse(*answer) for answer in answers])

    def _responses(self, requests: Sequence[Mapping[str, Any]]) -> list[ServedResponse]:
        if self.is_first and self.client.config.batch_invariant and not self.is_batch_invariant(requests):
            raise UserError(
                f"{self.client.url} runs with VLLM_BATCH_INVARIANT=1, and a response alone differs from the same one "
                f"among {INVARIANCE_REQUESTS}: on this hardware the variable has no effect. Start it without, and run "
                "the same command again."
            )
        answers = self._ask(requests)
        self._check_version()
        return answers

    def _check_version(self) -> None:
        current = self.client.weights_version()
        if current != self.version:
            raise Unreachable(
                f"{self.client.url}: the weights {current!r} replaced {self.version!r} while it sampled: the "
                "server was restarted, or another run sends it weights. Give each run a server of its own."
            )

    @torch.no_grad()
    def prove_weights(self, request: Mapping[str, Any]) -> None:
        """Check one short response against the training path: `/weight_info` only repeats the name that was sent.
        Collective.

        Raises:
            UserError: its log-probabilities are not those of the policy.
        """
        (response,) = ranks.result_of_first(lambda: self._ask([_shortened(request)]))
        answer = ServedResponse(*response)
        ids = torch.tensor([[*request["prompt"], *answer.ids]], device=self.runtime.device)
        counts = torch.arange(ids.shape[1], device=ids.device)[None] >= len(request["prompt"])
        temperature, mask = request["temperature"], torch.ones_like(counts)
        path = token_stats(self.policy, ids, mask, counts, self.runtime, temperature, side="right").logprobs
        k1 = torch.tensor(answer.logprobs, device=ids.device) - path
        # By `PROOF_TOKENS` for shorter responses too: in bfloat16 one token alone can differ by more than is allowed.
        kl = (torch.expm1(-k1) + k1).sum().item() / PROOF_TOKENS
        ranks.result_of_first(lambda: self._check_proof(kl, largest_kl(self.client.config, self.runtime, temperature)))

    def _check_proof(self, kl: float, allowed: float) -> None:
        if not kl <= allowed:
            self._check_version()
            raise UserError(
                f"{self.client.url} does not sample from the weights that were sent ({self.version}): its "
                f"log-probabilities differ from the training path by {kl:.2g} nats a token (mean KL; {allowed:.2g} is "
                f"allowed for {self.client.config.dtype}). vLLM for CPUs keeps a tied output layer when it reloads: "
                "use vLLM for GPUs, a model with tie_word_embeddings false, or ppo.rollout.engine=local. Else check "
                "that it was started with the run's own SFT model and does not quantise."
            )

    def is_batch_invariant(self, requests: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the first response is the same to the bit alone and among `INVARIANCE_REQUESTS`."""
        several = [_shortened(requests[number % len(requests)]) for number in range(INVARIANCE_REQUESTS)]
        return self._ask(several[:1])[0] == self._ask(several)[0]

    def request(self, prompt: Sequence[int], generation: GenerationConfig, seed: int) -> dict[str, Any]:
        """Return the request for a response to `prompt`: the full softmax at the temperature, without pad.

        Every option is set, because a model's generation config changes the server's defaults.
        """
        ends, strings = endings_of(self.tokenizer)
        return {
            "model": self.model, "prompt": list(prompt), "n": 1, "seed": seed, "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False,
            "stop": list(strings), "stop_token_ids": list(ends),
            "logit_bias": {str(self.tokenizer.pad_token_id): BANNED}, "logprobs": 0, "return_token_ids": True,
            "skip_special_tokens": False, "stream": False,
        }  # fmt: skip

    def _ask(self, requests: Sequence[Mapping[str, Any]]) -> list[ServedResponse]:
        """Return the answers in the requests' order; the first error cancels waiting requests."""
        with ThreadPoolExecutor(min(self.client.config.concurrency, max(1, len(requests)))) as pool:
            futures = [pool.submit(self.client.post, "/v1/completions", body) for body in requests]
            try:
                return [self.read(body, future.result()) for body, future in zip(requests, futures, strict=True)]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def read(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> ServedResponse:
        """Check an answer against its request, and return its response.

        Raises:
            UserError: the answer cannot come from sampling as requested.
        """
        choices = answer.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        statistics = choice.get("logprobs") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(statistics, dict):
            raise self.client.something_else("/v1/completions", answer)
        ids, logprobs, reason = choice.get("token_ids"), statistics.get("token_logprobs"), choice.get("finish_reason")
        ends, banned, cap = set(request["stop_token_ids"]), self.tokenizer.pad_token_id, request["max_tokens"]
        if not _whole(ids) or not _numbers(logprobs) or len(ids) != len(logprobs) or not ids:
            raise self.client.something_else("/v1/completions", choice)
        stopped = StopFinder(self.tokenizer).first(ids) if request["stop"] else None
        over = ids[-1] in ends or stopped == len(ids)
        if choice.get("prompt_token_ids") != request["prompt"]:
            problem = "it read another prompt than was sent: start it with the policy's own tokenizer"
        elif any(not 0 <= value < self.vocabulary for value in ids):
            problem = f"a token id is not one of the policy's {self.vocabulary}"
        elif banned in ids:
            problem = "it sampled the pad token, which was banned by logit_bias"
        elif not ends.isdisjoint(ids[:-1]) or (stopped is not None and stopped < len(ids)):
            problem = "it went on after the end of the response: start it without --ignore-eos or a stop of its own"
        elif reason == "length" and (len(ids) != cap or over):
            problem = f"it cut a response after {len(ids)} tokens, and {cap} were asked for: raise --max-model-len"
        elif reason == "stop" and (not over or len(ids) > cap):
            may = " or ".join(map(str, [*sorted(ends), *map(repr, request["stop"])]))
            problem = f"token {ids[-1]} ended a response, and only {may} may: start it with --generation-config vllm"
        elif reason not in ("length", "stop"):
            problem = f"a response ended by {reason!r}"
        elif not all(NEVER < value <= 1e-3 for value in logprobs):
            problem = "a log-probability is not below 0, or is minus infinity"
        else:
            return ServedResponse(ids, [float(value) for value in logprobs], reason == "stop")
        raise UserError(f"{self.client.url}/v1/completions does not sample as it was asked to: {problem}.")

    def _samples(self, prompts: Sequence[Sequence[int]], answers: Sequence[ServedResponse]) -> Samples:
        device, width = self.runtime.device, max(len(answer.ids) for answer in answers)
        prompt_ids, prompt_mask = (x.to(device) for x in pad(prompts, self.tokenizer.pad_token_id, side="left"))
        ids, mask = pad([answer.ids for answer in answers], self.tokenizer.pad_token_id, side="right")
        logprobs = torch.tensor([answer.logprobs + [0.0] * (width - len(answer.logprobs)) for answer in answers])
        ended = torch.tensor([answer.ended for answer in answers])
        ids, mask, logprobs, ended = (x.to(device) for x in (ids, mask, logprobs, ended))
        return with_endings(Samples(prompt_ids, prompt_mask, ids, mask, logprobs, ended), self.tokenizer)


def _shortened(request: Mapping[str, Any]) -> dict[str, Any]:
    return {**request, "max_tokens": min(PROOF_TOKENS, request["max_tokens"])}


def response_seed(seed: int, number: int) -> int:
    """Return the seed, from 0 to 2^62 - 1, of response `number` among the responses of `seed`."""
    return random.Random(f"{seed} response {number}").getrandbits(62)


def _whole(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _numbers(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)
