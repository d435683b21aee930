"""The machine a stage runs on, resolved before the first key and held to afterwards. Importable without torch."""

import ctypes
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.base.errors import MachineMismatch
from components.base.settings import Settings

_INSTRUCTION_SETS = (("amx_bf16", "amx_bf16"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))

VECTOR_MATHS = (
    "acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "lgamma", "log", "log10",
    "log1p", "log2", "round", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""What torch computes with MKL's vector maths on a contiguous tensor (aten/src/ATen/cpu/vml.h)."""


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of glibc's malloc.h: how much free memory goes back to the system, how many blocks may be mapped on their own."""


class Runtime(Settings):
    """Device, number format and threads. They change the bytes of a result, so they are part of every key."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; `auto` takes CUDA where the NVIDIA driver is loaded."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of matrix products; `auto` is bfloat16 where the hardware is fast at it (AMX, CUDA), else float32."""
    threads: int = Field(0, ge=0, le=256)
    """CPU threads; 0 takes every core this process may use."""
    instruction_set: str = "auto"
    """CPU instruction set that results depend on; `auto` reads it from the processor."""

    def resolve(self) -> "Runtime":
        """The same with every `auto` replaced by what this machine has."""
        instruction_set = self.instruction_set if self.instruction_set != "auto" else cpu_instruction_set()
        device = self.device if self.device != "auto" else ("cuda" if has_cuda() else "cpu")
        fast = device == "cuda" or instruction_set == "amx_bf16"
        dtype = self.dtype if self.dtype != "auto" else ("bfloat16" if fast else "float32")
        threads = self.threads or len(os.sched_getaffinity(0))
        return Runtime(device=device, dtype=dtype, threads=threads, instruction_set=instruction_set)

    def misfits(self) -> list[str]:
        """What this machine lacks for a runtime that is resolved: `name: wanted X, here Y` each."""
        here = Runtime().resolve()
        lacking = [name for name in ("device", "instruction_set") if getattr(self, name) != getattr(here, name)]
        lacking += ["threads"] if self.threads > here.threads else []
        return [f"{name}: wanted {getattr(self, name)}, here {getattr(here, name)}" for name in lacking]


def has_cuda() -> bool:
    """Whether the NVIDIA driver is loaded (read from /proc, without importing torch)."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return Path("/proc/driver/nvidia/version").exists() and not hidden


def cpu_instruction_set() -> str:
    """The widest instruction set that torch's kernels choose between on this processor."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "default"
    return next((name for flag, name in _INSTRUCTION_SETS if flag in flags), "default")


def activate(runtime: Runtime) -> None:
    """Set torch up as `runtime` (already resolved) says: threads, deterministic kernels.

    Raises:
        MachineMismatch: this machine has another instruction set, or no CUDA where it was asked for.
    """
    import torch

    here = cpu_instruction_set()
    if runtime.device == "cpu" and runtime.instruction_set != here:
        raise MachineMismatch(
            f"runtime.instruction_set is {runtime.instruction_set}, this machine has {here}: its results would carry "
            f"another machine's key. Resolve the run here (leave it `auto`) or use a machine like the first."
        )
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise MachineMismatch("runtime.device is cuda, and torch sees no CUDA device here. Set runtime.device=cpu.")
    torch.set_num_threads(runtime.threads)
    torch.use_deterministic_algorithms(True, warn_only=runtime.device == "cuda")
    # Every kernel here writes what it allocates; filling it first takes 4 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _keep_freed_memory()
    _settle_vector_maths()


def _keep_freed_memory() -> None:
    """Have glibc keep what is freed for the next tensor, large ones too, until the process ends.

    By default each tensor of some MB is new pages, which the kernel fills with zeros one by one: a fifth of a training
    step in bfloat16 at 135 M parameters. Elsewhere than with glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def _settle_vector_maths() -> None:
    """Call each function of MKL's vector maths once on one thread, in both widths.

    MKL chooses a function's kernel at its first call. Where several threads make that call at once, one of them may
    compute its part with the least accurate kernel: a cosine off by 1.5e-4 in half of a tensor, in one process of
    eight here, and in no later call (pytorch/pytorch#188792; torch wheels carry such an MKL up to 2.13).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_MATHS:
            getattr(one, name)()
