"""A stage that loads models as the stages do, makes a training step, and measures what each rank then holds."""

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.base.settings import Settings
from components.models.runtime import M_MMAP_MAX, Runtime, release_memory
from components.training.optim import FitConfig

M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt: bytes from which an allocation has pages of its own."""


class MemoryJob(Settings):
    """How to load and train."""

    runtime: Runtime
    fit: FitConfig


def run(job: MemoryJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Return bytes of the rank with most: `held_…` of parameters and gradients, `peak_…` of memory without a file.

    Also whether digests are those of the whole model and of a changed one, and how many ranks have a turn at once.
    """
    import torch

    from components.distributed import ranks, sharding
    from components.models.folders import frozen, load_causal_lm, on_host
    from components.models.logprobs import token_stats
    from components.models.sampling import sampling_copy
    from components.ppo.models import weights_digest
    from components.training.loop import recomputed

    runtime, measured = job.runtime, dict[str, float]()
    whole = runtime.model_copy(update={"sharding": "replicas"})
    for option, value in ((M_MMAP_MAX, 1 << 16), (M_MMAP_THRESHOLD, 1 << 16)):
        ctypes.CDLL(None).mallopt(option, value)  # a tensor's memory goes back to the system when it is freed

    def load() -> Any:
        return load_causal_lm(inputs["model"], on_host(runtime))[0]

    def bytes_of(tensors: Any) -> float:
        return float(sum(map(sharding.own_bytes, tensors)))

    def backward(last: bool) -> None:
        sharding.reduce_at(policy, last)
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:, 0] = False
        with recomputed(policy, job.fit):
            token_stats(policy, ids, torch.ones_like(counts), counts, runtime, side="right").logprobs.sum().backward()

    ids = torch.arange(4).unsqueeze(0)
    frozen(load(), whole)  # what libraries allocate once
    with peak("frozen", measured):
        reference = frozen(load(), runtime)
    measured["held_frozen"] = bytes_of(reference.parameters())
    before = weights_digest(reference)
    measured["other_digest"] = float(before != weights_digest(frozen(load(), whole)))
    if ranks.rank() == 1:
        next(reference.parameters()).to_local().view(-1)[0] += 1
    measured["changed_digest"] = float(before != weights_digest(reference))
    with peak("trained", measured):
        policy = sharding.spread(load().requires_grad_(True), runtime.sharding, runtime.device, runtime.dtype)
    measured["held_trained"] = bytes_of(policy.parameters())
    with peak("copy", measured), sampling_copy(policy, runtime) as copied:
        measured["held_copy"] = bytes_of(copied.parameters())
    del copied
    with peak("first", measured):
        backward(last=False)
    measured["held_gradients"] = bytes_of(p.grad for p in policy.parameters() if p.grad is not None)
    with peak("last", measured):
        backward(last=True)
    measured["held_reduced"] = bytes_of(p.grad for p in policy.parameters() if p.grad is not None)
    with ranks.in_turn():
        (out / f"turn-{ranks.rank()}").touch()
        time.sleep(0.1)
        measured["at_once"] = float(len(list(out.glob("turn-*"))))
        (out / f"turn-{ranks.rank()}").unlink()
    return dict(zip(measured, ranks.largest(list(measured.values())), strict=True))


@contextmanager
def peak(name: str, measured: dict[str, float]) -> Iterator[None]:
    """Measure how far this process's anonymous memory rises in the block."""
    release_memory("cpu")
    before, ended = anonymous(), threading.Event()
    seen = [before]

    def follow() -> None:
        while not ended.is_set():
            seen.append(anonymous())
            time.sleep(0.0005)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()
    measured[f"peak_{name}"] = float(max(*seen, anonymous()) - before)


def anonymous() -> int:
    """Return the bytes of this process's memory that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
