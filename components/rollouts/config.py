"""Options of where PPO's responses are sampled. Importable without torch."""

from typing import Literal

from components.base.settings import Settings, unkeyed

COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples at as asked: it raises a lower one to the first and refuses one above the second."""


class RolloutConfig(Settings):
    """The engine that samples PPO's rollouts. The final evaluation is always sampled in this process."""

    engine: Literal["local", "vllm"] = "local"
    """`local` samples in the process that trains; `vllm` asks a vLLM server (0.29 or later) at `url`."""
    url: str | None = unkeyed(None, pattern=r"^https?://[^\s/?#]+(/[^\s?#]*)?$")
    """Where the server listens, as `http://127.0.0.1:8000`; null: what the environment variable TETHER_VLLM_URL says on
    the machine that asks. VLLM_API_KEY, where set there, is sent as its bearer token."""
    version: str = "auto"
    """vLLM's version. `auto` asks the server before the first key; name it where the server can't be reached then."""
    dtype: str = "auto"
    """Format of the server's weights (`bfloat16`, `float32`), asked for like `version`."""
    batch_invariant: bool | None = None
    """Whether the server runs with VLLM_BATCH_INVARIANT=1, so that the same seeds give the same tokens whatever else is
    in its batch. Where it is false the stage is not bit-exact: computed again, it gives other bytes. Null asks."""
    transfer: Literal["folder", "ipc", "nccl"] = unkeyed("folder")
    """How weights reach the server before each update. `folder`: as safetensors in `folder`, which it reads. `ipc` (one
    GPU for both) and `nccl` (separate GPUs) use vLLM's own trainer side, which must be installed here."""
    folder: str | None = unkeyed(None)
    """Folder that both machines see at this path (`/dev/shm/tether` on one host: memory); null: the stage's own."""
    address: str = unkeyed("127.0.0.1", min_length=1)
    """Address of this machine as the server reaches it (`nccl` only)."""
    sleep: bool = unkeyed(False)
    """The server shares this GPU: it frees its weights and cache while the policy trains (--enable-sleep-mode)."""
    concurrency: int = unkeyed(256, ge=1, le=4096)
    """Requests that are open at a time; one a response."""
    timeout: float = unkeyed(600.0, gt=0)
    """Seconds that one answer may take: a response, or loading the weights."""
    retries: int = unkeyed(4, ge=0, le=20)
    """How often a request goes again after a connection failed or the server said 5xx, after 1 s and then twice as long
    each time. After the last one the stage ends, and the run's own `retries` continue from its checkpoint."""

    @property
    def by_server(self) -> bool:
        """Whether another process samples."""
        return self.engine != "local"

    @property
    def bit_exact(self) -> bool:
        """Whether computing again gives the same bytes, as far as sampling goes."""
        return not self.by_server or self.batch_invariant is True

    @property
    def is_resolved(self) -> bool:
        """Whether nothing has to be asked of a server any more."""
        named = self.version != "auto" and self.dtype != "auto" and self.batch_invariant is not None
        return named or not self.by_server
