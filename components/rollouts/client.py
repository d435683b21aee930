"""Client of a vLLM server's HTTP routes that PPO uses, with retries and with errors that say what to do.

Routes and fields are those of vLLM 0.29.0 and 0.32.0: `vllm/entrypoints/serve/dev/` (sleep, cache, rpc, server_info; in
0.29 rlhf too), `vllm/entrypoints/rl/online/` (0.32) and `vllm/entrypoints/openai/completion/`. All but the last exist
only with VLLM_SERVER_DEV_MODE=1. Importable without torch.
"""

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from components.base.errors import Unreachable, UserError, refuse_credentials
from components.models.config import GenerationConfig
from components.rollouts.asking import FIRST_WAIT, HttpAnswer, HttpClient, ask_patiently, said
from components.rollouts.config import COLDEST, HOTTEST, RolloutConfig

OLDEST = (0, 29)
"""The first vLLM version whose server reports a version of its weights (`/weight_info`)."""
TRIED = ("0.29.0", "0.32.0")
"""The versions with which `make test-vllm` passed."""
DEV_ROUTES = "start it with VLLM_SERVER_DEV_MODE=1 (docs/guide/rollouts.md has the command)"


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports about itself."""

    version: str
    dtype: str
    batch_invariant: bool
    """Whether it was started with VLLM_BATCH_INVARIANT=1. The first update measures whether that is true."""
    model: str
    """The model's name in requests."""
    longest: int | None
    """Most tokens of prompt and response together; None if the server does not say."""
    logprobs_mode: str
    sleeps: bool
    speculates: bool

    @property
    def untried(self) -> str:
        """Return a sentence for a version with which `make test-vllm` has not passed; "" for any other."""
        if self.version in TRIED:
            return ""
        return (
            f"Tether was tried with vLLM {' and '.join(TRIED)} only, and this is {self.version}. "
            f"`VLLM={self.version} make test-vllm` tries it."
        )


def server_url(config: RolloutConfig) -> str:
    """Return the server's address.

    Raises:
        UserError: neither the config nor the environment of this process names one, or it holds a password.
    """
    url = config.url or os.environ.get("TETHER_VLLM_URL")
    if not url:
        raise UserError(
            "ppo.rollout.engine is vllm, and no server is named: set ppo.rollout.url, as in "
            "--set ppo.rollout.url=http://127.0.0.1:8000, or the environment variable TETHER_VLLM_URL."
        )
    refuse_credentials("TETHER_VLLM_URL", url)
    return url.rstrip("/")


class VllmClient(ExitStack[None]):
    """A client of one server, with its connections."""

    def __init__(self, config: RolloutConfig) -> None:
        import httpx

        super().__init__()
        self.config, self.url = config, server_url(config)
        self._http = self.enter_context(HttpClient(
            config.timeout, lambda reason: UserError(f"ppo.rollout.url: {self.url}: {reason}"), "VLLM_API_KEY",
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
            trust_env=False,  # the server is asked directly, never through a proxy of the environment
        ))  # fmt: skip

    def get(self, route: str, **query: str) -> dict[str, Any]:
        """Return the JSON object that `GET route` answers; raises as `post`."""
        return self._ask("GET", route, None, query)

    def post(self, route: str, body: object = None, **query: str) -> dict[str, Any]:
        """Return the JSON object that `POST route` answers; {} for an empty answer.

        Raises:
            Unreachable: no answer after all retries, or none in time. UserError: it refuses, or its answer is not JSON.
        """
        return self._ask("POST", route, body, query)

    def _ask(self, method: str, route: str, body: object, query: Mapping[str, str]) -> dict[str, Any]:
        import httpx

        def send() -> HttpAnswer:
            try:
                return self._http.request(method, f"{self.url}{route}", json=body, params=dict(query))
            except httpx.ReadTimeout:
                raise Unreachable(
                    f"{self.url}{route}: no answer within ppo.rollout.timeout = {self.config.timeout:g} s. If the "
                    "server is busy, raise it. Run the same command again to continue from the checkpoint."
                ) from None

        def unreachable(problem: str) -> Unreachable:
            return Unreachable(
                f"{self.url}{route}: the vLLM server can't be reached ({problem}). Check that it is running and that "
                "ppo.rollout.url, or TETHER_VLLM_URL, is its address, then run the same command again: a run continues "
                "from the checkpoint."
            )

        return self._object(route, ask_patiently(send, math.inf, unreachable, retries=self.config.retries))

    def _object(self, route: str, response: HttpAnswer) -> dict[str, Any]:
        if response.status_code == 404 and not route.startswith("/v1/"):
            raise UserError(f"{self.url}{route}: no such route. If this is a vLLM server, {DEV_ROUTES}.")
        if response.status_code >= 300:
            raise UserError(f"{self.url}{route}: the server refuses ({response.status_code}): {said(response.text)}")
        answer, problem = response.parsed() if response.content else ({}, "")
        if not isinstance(answer, dict):
            raise self.something_else(route, response.text, problem)
        return answer

    def something_else(self, route: str, answer: object, problem: str = "") -> UserError:
        """Return the error for an answer that no vLLM server gives."""
        return UserError(
            f"{self.url}{route} answers {said(str(answer))!r}{problem}, which no vLLM server known to Tether does. "
            "Check ppo.rollout.url, and the server's version."
        )

    def version(self) -> str:
        """Return the server's vLLM version.

        Raises:
            UserError: it reports none, or one that is too old; and as for `post`.
        """
        answer = self.get("/version")
        number = str(answer.get("version"))
        try:
            release = Version(number).release
        except InvalidVersion:
            raise self.something_else("/version", answer) from None
        if release < OLDEST:
            raise UserError(f"{self.url} is vLLM {number}: 0.29 is the first whose server knows its weights' version.")
        return number

    def facts(self) -> ServerFacts:
        """Return what the server reports about itself; raises as `version`."""
        version, info = self.version(), self.get("/server_info", config_format="json")
        models = self.get("/v1/models").get("data")
        config, model = info.get("vllm_config"), None
        if isinstance(models, list) and models and isinstance(models[0], dict):
            model = models[0].get("id")
        if not isinstance(config, dict) or not isinstance(config.get("model_config"), dict):
            raise self.something_else("/server_info", info)
        if not isinstance(model, str):
            raise self.something_else("/v1/models", models)
        shape, environment = config["model_config"], info.get("vllm_env")
        invariant = environment.get("VLLM_BATCH_INVARIANT") if isinstance(environment, dict) else None
        longest = shape.get("max_model_len")
        return ServerFacts(
            version=version,
            dtype=str(shape.get("dtype")).removeprefix("torch."),
            batch_invariant=invariant in (True, 1, "1"),
            model=model,
            longest=longest if isinstance(longest, int) else None,
            logprobs_mode=str(shape.get("logprobs_mode")),
            sleeps=shape.get("enable_sleep_mode") is True,
            speculates=config.get("speculative_config") is not None,
        )

    def check(self, generation: GenerationConfig | None = None) -> ServerFacts:
        """Check that the server can sample responses as the run's config was resolved; return its facts.

        Args:
            generation: the run's lengths and temperature; None checks all else.

        Raises:
            UserError: something differs. The message names each difference and the flag or option to change. Also as
                for `version`.
        """
        config, facts = self.config, self.facts()
        wrong = [
            f"{name} is {here}, and the run was resolved for {wanted}: rerun, or start a server like that"
            for name, here, wanted in (
                ("vLLM's version", facts.version, config.version),
                ("the weights' dtype", facts.dtype, config.dtype),
                ("VLLM_BATCH_INVARIANT", facts.batch_invariant, config.batch_invariant),
            )
            if here != wanted
        ]
        if facts.logprobs_mode != "processed_logprobs":
            wrong.append(
                f"log-probabilities are {facts.logprobs_mode}: start it with --logprobs-mode processed_logprobs"
            )
        if facts.speculates:
            wrong.append("it decodes speculatively: start it without --speculative-config")
        if generation is not None:
            tokens = generation.max_prompt_tokens + generation.max_new_tokens
            if facts.longest is not None and facts.longest < tokens:
                wrong.append(
                    f"it takes {facts.longest} tokens, and prompt and response are {tokens}: --max-model-len {tokens}"
                )
            if not COLDEST <= generation.temperature <= HOTTEST:
                wrong.append(
                    f"generation.temperature is {generation.temperature:g}, and vLLM samples between {COLDEST} and "
                    f"{HOTTEST:g} only: change it, or sample with ppo.rollout.engine=local"
                )
        if config.sleep and not facts.sleeps:
            wrong.append("ppo.rollout.sleep is set, and it can't sleep: start it with --enable-sleep-mode")
        if wrong:
            raise UserError(f"{self.url}: " + "; ".join(wrong) + ".")
        return facts

    def weights_version(self) -> str:
        """Return the version of the weights from which the server samples."""
        answer = self.get("/weight_info")
        version = answer.get("weight_version")
        if not isinstance(version, str):
            raise self.something_else("/weight_info", answer)
        return version

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, which has keys and values of the previous weights.

        Raises:
            UserError: it cannot be emptied, because other clients' requests use its blocks; and as for `post`.
        """
        for attempt in range(self.config.retries + 1):
            if attempt:
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
            if self.post("/reset_prefix_cache").get("success") is True:
                return
        raise UserError(
            f"{self.url}/reset_prefix_cache: the server kept its prefix cache, so it would sample from old keys and "
            "values. Check that nobody else uses it, or start it with --no-enable-prefix-caching."
        )

    def sleep(self) -> None:
        """Make the server free its weights and cache."""
        self.post("/sleep", level="2")

    def wake(self, part: str) -> None:
        """Make a sleeping server allocate its `weights` or its `kv_cache` again."""
        self.post("/wake_up", tags=part)

    def is_asleep(self) -> bool:
        return self.get("/is_sleeping").get("is_sleeping") is True


def resolve_engine(config: RolloutConfig) -> RolloutConfig:
    """Return a copy whose engine is not `auto`: a server samples if the config or the environment names one."""
    if config.engine != "auto":
        return config
    named = config.url or os.environ.get("TETHER_VLLM_URL")
    return config.model_copy(update={"engine": "vllm" if named else "local"})


def resolve_rollout(config: RolloutConfig) -> RolloutConfig:
    """Return a copy with every `auto` replaced by what the server reports. Given values are not asked for.

    Raises:
        UserError: it cannot be reached, or is not a vLLM server of a supported version.
    """
    config = resolve_engine(config)
    if config.is_resolved:
        return config
    with VllmClient(config.model_copy(update={"retries": min(config.retries, 1)})) as client:  # a person is waiting
        facts = client.facts()
    unresolved = [name for name in ("version", "dtype", "batch_invariant") if getattr(config, name) in ("auto", None)]
    return config.model_copy(update={name: getattr(facts, name) for name in unresolved})
