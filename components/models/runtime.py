"""The machine that a stage runs on. It is resolved before the first key and must not change afterwards.

Importable without torch.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from components.base.errors import MachineMismatch
from components.base.settings import Settings, unkeyed
from components.base.text import counted
from components.distributed.hosts import these_hosts

_INSTRUCTION_SETS = (("amx_bf16", "amx_bf16"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))

VECTOR_MATHS = (
    "acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "erfinv", "exp", "expm1", "floor", "lgamma", "log", "log10",
    "log1p", "log2", "round", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Functions that torch computes with MKL's vector maths on a contiguous tensor (aten/src/ATen/cpu/vml.h)."""


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt in glibc's malloc.h: free memory above which it is returned, and the largest number of
mmaps."""
WORKSPACE = ":4096:8"
"""Value of CUBLAS_WORKSPACE_CONFIG that makes cuBLAS deterministic (NVIDIA's cuBLAS manual, "Results
reproducibility")."""
NONE = "none"
"""`gpu` and `cuda` of a runtime without a GPU."""


class Runtime(Settings):
    """Device, number format, threads and processes. They change a result's bytes, so they are part of every key.

    On a CPU its instruction set is part of the key; on a GPU its name, the CUDA version, TF32 and CUDA graphs.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the tensors; `auto` is CUDA if torch can use a GPU here, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Format of matrix products; `auto` is bfloat16 if the hardware is fast at it (AMX, or a GPU of compute capability
    8.0 or more), else float32."""
    threads: int = Field(0, ge=0, le=256)
    """CPU threads of each rank; 0 divides the cores that this process may use among the ranks."""
    instruction_set: str = "auto"
    """CPU instruction set that results on a CPU depend on; `auto` reads it from the processor."""
    ranks: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = "auto"
    """Processes of a stage that trains (sft, reward, ppo); `auto` is one per visible GPU, of all hosts that compute
    together, and 1 on a CPU. On a CPU any number is allowed; they share its cores."""
    gpu: str = "auto"
    """Name and compute capability of the GPU that computes; `auto` asks the driver, `none` on a CPU."""
    cuda: str = "auto"
    """CUDA version that torch is built with; `auto` reads it from the installed torch, `none` on a CPU."""
    tf32: bool = False
    """Whether a GPU may round the inputs of float32 matrix products to 10 bits of mantissa (TF32)."""
    cuda_graphs: bool = False
    """Whether a GPU decodes by CUDA graphs, 2 to 7 times faster on an H200, where the model allows it: Llama, Qwen 2
    and 3, GPT-2, Gemma, Phi, Phi 3 and SmolLM3, with full attention in every layer and not in 4 bits. Log-probabilities
    differ by rounding. What the graphs need stays in memory while the policy trains."""
    sharding: Literal["auto", "none", "zero2", "zero3", "replicas"] = "auto"
    """What is sharded over several ranks when a whole model is trained: `zero2` gradients and optimiser moments,
    `zero3` also the parameters, `replicas` nothing. `auto` is `zero2`, or `none` with one rank."""
    rank_timeout: float = unkeyed(1800.0, gt=0)
    """Seconds that a rank waits for the others before the stage ends."""

    def resolve(self) -> "Runtime":
        """Return a copy with every `auto` replaced by what this machine has."""
        usable = usable_gpus()
        device = self.device if self.device != "auto" else ("cuda" if usable.gpus else "cpu")
        instruction_set = self.instruction_set if self.instruction_set != "auto" else cpu_instruction_set()
        on_gpu = device == "cuda"
        fast = usable.fast_bfloat16 if on_gpu else instruction_set == "amx_bf16"
        on_all_hosts = len(usable.gpus) * these_hosts().count if on_gpu else 0
        ranks = self.ranks if self.ranks != "auto" else max(1, on_all_hosts)
        sharding = "none" if ranks == 1 else ("zero2" if self.sharding in ("auto", "none") else self.sharding)
        return Runtime(
            device=device,
            dtype=self.dtype if self.dtype != "auto" else ("bfloat16" if fast else "float32"),
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) // these_hosts().ranks_here(ranks)),
            instruction_set=instruction_set,
            ranks=ranks,
            sharding=sharding,
            rank_timeout=self.rank_timeout,
            gpu=self.gpu if self.gpu != "auto" else (usable.name if on_gpu else NONE),
            cuda=self.cuda if self.cuda != "auto" else (usable.cuda if on_gpu else NONE),
            tf32=self.tf32 and on_gpu,
            cuda_graphs=self.cuda_graphs and on_gpu,
        )

    @property
    def setting(self) -> str:
        """Return the runtime as one line of YAML, as a config describes a worker's machine in `runners`."""
        options: tuple[str, ...] = ("instruction_set",)
        options = ("gpu", "cuda", "tf32", "cuda_graphs", "ranks", "sharding") if self.device == "cuda" else options
        options += ("ranks", "sharding") if self.device == "cpu" and self.ranks != 1 else ()
        names = ("device", "dtype", "threads", *options)
        named = self.model_dump(mode="json", include=set(names))
        as_json = {"gpu", "cuda", "tf32", "cuda_graphs"}  # else YAML reads a version as a number
        return ", ".join(f"{n}: {json.dumps(named[n]) if n in as_json else named[n]}" for n in names)

    def misfits(self) -> list[str]:
        """Return how this machine differs from a resolved runtime, as `name: wanted X, here Y`.

        A CPU runtime needs its instruction set and threads. A CUDA runtime needs its GPU, CUDA version, threads, and a
        GPU per rank.
        """
        lacking, cores = self.lacking(), len(os.sched_getaffinity(0))
        lacking |= {"threads": cores} if self.threads > cores else {}
        return [f"{name}: wanted {getattr(self, name)}, here {value}" for name, value in lacking.items()]

    def lacking(self) -> dict[str, object]:
        """Return what this machine has of the options, by name, with which a resolved runtime cannot compute here."""
        here: dict[str, object] = {"instruction_set": cpu_instruction_set()}
        if self.device == "cuda":
            usable = usable_gpus()
            here = {"device": "cuda", "gpu": usable.name, "cuda": usable.cuda} if usable.gpus else {"device": "cpu"}
            most = len(usable.gpus) * these_hosts().count
            if usable.gpus and self.ranks != "auto" and self.ranks > most:
                here["ranks"] = most
        return {name: value for name, value in here.items() if getattr(self, name) not in ("auto", value)}


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    capability: tuple[int, int]


class Gpus(NamedTuple):
    """The GPUs that torch could use in this process, and how they were found."""

    gpus: tuple[Gpu, ...]
    cuda: str
    """CUDA version of the installed torch; `none` for a build without CUDA."""
    why: str
    """What was checked and found, for people."""

    @property
    def name(self) -> str:
        """Return the distinct names with compute capability: `NVIDIA H100 80GB HBM3 (9.0)`; `none` without a GPU."""
        names = sorted({f"{gpu.name} ({gpu.capability[0]}.{gpu.capability[1]})" for gpu in self.gpus})
        return " + ".join(names) or NONE

    @property
    def fast_bfloat16(self) -> bool:
        """Return whether all GPUs multiply bfloat16 in hardware (compute capability 8.0, Ampere, or more).

        True without a GPU, since a CUDA runtime is then meant for another machine.
        """
        return all(gpu.capability >= (8, 0) for gpu in self.gpus)


def usable_gpus() -> Gpus:
    """Find the GPUs that a stage could use here, without importing torch and without starting CUDA in this process.

    If torch is built with CUDA, a child process asks the driver, so that a fork of this process can still start CUDA.
    The driver honours `CUDA_VISIBLE_DEVICES` as torch does. /proc/driver/nvidia is not read, since in a container it is
    the host's.
    """
    return _driver_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _driver_gpus(visible: str | None) -> Gpus:
    cuda = torch_cuda()
    if cuda == NONE:
        return Gpus((), cuda, "the installed torch is built without CUDA")
    gpus, why = ask_driver()
    return Gpus(gpus, cuda, why if visible is None else f"{why} with CUDA_VISIBLE_DEVICES={visible}")


_ASK = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
error = cuda.cuInit(0)
found, count, number, text = [], ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
error = error or cuda.cuDeviceGetCount(ctypes.byref(count))
for device in range(0 if error else count.value):
    cuda.cuDeviceGetName(text, len(text), device)
    capability = []
    for attribute in (75, 76):  # of cuda.h: major and minor compute capability
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(number.value)
    found.append([text.value.decode(), capability])
print(json.dumps([error, found]))
"""


def ask_driver() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that CUDA's driver shows to a new process, and its answer. No GPU if it fails or takes over 60
    s."""
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return (), "CUDA's driver gave no answer within 60 s"
    if done.returncode:
        return (), f"CUDA's driver can't be queried: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    error, devices = json.loads(done.stdout)
    if error:
        return (), f"CUDA's driver does not start (cuInit gives error {error})"
    gpus = tuple(Gpu(name, (major, minor)) for name, (major, minor) in devices)
    return gpus, f"CUDA's driver shows {counted(len(gpus), 'GPU')}"


@functools.cache
def torch_cuda() -> str:
    """Return the CUDA version of the installed torch, read from its version.py without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        if (file := Path(folder) / "version.py").is_file():
            match = re.search(r"""^cuda\b[^=]*= *['"]([0-9.]+)['"]""", file.read_text(), re.MULTILINE)
            return match.group(1) if match else NONE
    return NONE


def cpu_instruction_set() -> str:
    """Return the widest of the instruction sets of torch's kernels that this processor supports."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return "default"
    return next((name for flag, name in _INSTRUCTION_SETS if flag in flags), "default")


def peak_memory_gb(device: str) -> float:
    """Return this process's peak memory in GB since the stage began: on CUDA what torch allocated there, on a CPU the
    resident memory, with what libraries keep of earlier stages."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def autocast(runtime: Runtime) -> contextlib.AbstractContextManager[Any]:
    """Compute matrix products in bfloat16 within the block, if that is the runtime's dtype."""
    if runtime.dtype == "float32":
        return contextlib.nullcontext()
    import torch

    return torch.autocast(runtime.device, dtype=torch.bfloat16)


def check_machine(runtime: Runtime) -> None:
    """Check, without torch, that this machine computes what the resolved `runtime` says.

    Raises:
        MachineMismatch: this machine has a different instruction set (for a CPU runtime), a different GPU, or fewer
            GPUs than ranks.
    """
    if lacking := runtime.lacking():
        why = f" ({usable_gpus().why})" if "device" in lacking else ""
        pairs = (f"runtime.{name} is {getattr(runtime, name)}, and here it is {lacking[name]}" for name in lacking)
        raise MachineMismatch(
            f"this machine{why} does not fit the run: {'; '.join(pairs)}. Results would get another machine's key. "
            "Start the run on this machine with these options `auto`, or use a machine like the first."
        )


def activate(runtime: Runtime) -> None:
    """Set up torch by the resolved `runtime`: threads, deterministic kernels, TF32.

    Raises:
        MachineMismatch: as `check_machine`; or torch sees no GPU, or CUDA was started in this process without
            deterministic matrix products.
    """
    import torch

    check_machine(runtime)
    if runtime.device == "cuda":
        _settle_cublas(torch.cuda.is_initialized())
        if not torch.cuda.is_available():
            raise MachineMismatch("runtime.device is cuda, and torch sees no CUDA device here. Set runtime.device=cpu.")
        torch.backends.cuda.matmul.fp32_precision = "tf32" if runtime.tf32 else "ieee"
        if torch.cuda.is_initialized():  # by an earlier stage of this process, whose peak is not this one's
            torch.cuda.reset_peak_memory_stats()
    torch.set_num_threads(runtime.threads)
    # Strict on CUDA too: with warn_only, torch uses a non-deterministic backward pass of attention.
    torch.use_deterministic_algorithms(True)
    # Every kernel used here writes all that it allocates; filling memory first would take 4 % of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _keep_freed_memory()
    _settle_vector_maths()


def _settle_cublas(started: bool) -> None:
    """Make cuBLAS deterministic. It reads `CUBLAS_WORKSPACE_CONFIG` when it starts."""
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if workspace == WORKSPACE:
        return
    if started:
        raise MachineMismatch(
            f"CUDA was started in this process with CUBLAS_WORKSPACE_CONFIG={workspace or '(not set)'}, so matrix "
            f"products may differ from run to run. Set CUBLAS_WORKSPACE_CONFIG={WORKSPACE} in the worker's environment."
        )
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory, also large blocks, for the next tensor until `release_memory`.

    By default each tensor of several MB gets new pages, which the kernel fills with zeros: a fifth of a training step
    in bfloat16 at 135 M parameters. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def release_memory(device: str) -> None:
    """Give freed memory back to the system, for what comes after a stage's training and needs other sizes.

    A sharded model refers to itself, so it is collected first. glibc gives back all free pages, also those between
    blocks in use; PyTorch's CUDA allocator all free blocks. Without glibc nothing changes on a CPU.
    """
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _settle_vector_maths() -> None:
    """Call each function of MKL's vector maths once on one thread, in both widths.

    MKL chooses a function's kernel at its first call. If several threads make that call at once, one of them may use
    the least accurate kernel for its part. Seen here in one process of eight: a cosine off by 1.5e-4 in half of a
    tensor, and only in the first call (pytorch/pytorch#188792; torch's wheels include such an MKL up to 2.13).
    """
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in VECTOR_MATHS:
            getattr(one, name)()
