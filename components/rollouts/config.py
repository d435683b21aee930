"""Options of the engine that samples PPO's rollouts. Importable without torch."""

import math
from typing import Literal

from components.base.settings import Settings, unkeyed

COLDEST, HOTTEST = 0.01, 2.0
"""The range of temperatures at which vLLM samples: it raises a lower one to the first and refuses a higher one."""


class RolloutConfig(Settings):
    """The engine that samples PPO's rollouts. The final evaluation is always sampled in this process."""

    engine: Literal["auto", "local", "vllm"] = "local"
    """`local` samples in the process that trains; `vllm` asks a vLLM server (0.29 or later) at `url`. `auto` is `vllm`
    where `url` or TETHER_VLLM_URL names a server to the machine that starts the run, else `local`."""
    url: str | None = unkeyed(None, pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")
    """The server's address, as `http://127.0.0.1:8000`; null: the environment variable TETHER_VLLM_URL on the machine
    that runs the stage. VLLM_API_KEY, if set there, is sent as bearer token."""
    version: str = "auto"
    """vLLM's version. `auto` asks the server before the first key; set it if the server cannot be reached then."""
    dtype: str = "auto"
    """Format of the server's weights (`bfloat16`, `float32`); `auto` as for `version`."""
    batch_invariant: bool | None = None
    """Whether the server runs with VLLM_BATCH_INVARIANT=1, so that the same seeds give the same tokens whatever else is
    in its batch. If false, the stage is not bit-exact: computing it again gives different bytes. Null asks the
    server."""
    folder: str | None = unkeyed(None)
    """The folder through which weights are sent to the server before each update, as safetensors. Both machines see it
    at this path (`/dev/shm/tether` on one host is in memory); null: the stage's own folder."""
    sleep: bool = unkeyed(False)
    """Set if the server shares this GPU: it then frees its weights and cache while the policy trains
    (--enable-sleep-mode)."""
    concurrency: int = unkeyed(256, ge=1, le=4096)
    """Number of requests that are open at a time; one request per response."""
    timeout: float = unkeyed(600.0, gt=0)
    """Time limit in seconds of one answer: a response, or loading the weights."""
    retries: int = unkeyed(4, ge=0, le=20)
    """How often a request is retried after a failed connection or a 5xx answer; the first wait is 1 s, and it doubles
    each time. After the last one the stage ends, and the run's own `retries` continue from its checkpoint."""

    @property
    def by_server(self) -> bool:
        """Return whether a server samples."""
        return self.engine == "vllm"

    @property
    def bit_exact(self) -> bool:
        """Return whether sampling again gives the same bytes."""
        return not self.by_server or self.batch_invariant is True

    def longest_wait(self, responses: int) -> float:
        """Return the seconds that a server may take for so many responses; 0 if this process samples them."""
        return math.ceil(responses / self.concurrency) * self.timeout if self.by_server else 0.0

    @property
    def is_resolved(self) -> bool:
        """Return whether every `auto` is resolved, so that no server has to be asked."""
        named = self.version != "auto" and self.dtype != "auto" and self.batch_invariant is not None
        return self.engine == "local" or (self.by_server and named)
