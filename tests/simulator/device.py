"""A GPU that is pretended on a CPU-only torch: a lint for mixed devices, waits and kernels that are not deterministic.

`OnGpu` tensors say that they are on cuda:0 and hold CPU data. `Gpu`, a dispatch mode, computes each operation on the
data and notes what CUDA would refuse or what would make the host wait, with the project's line that asked for it:

- mixed devices: an operation on tensors of both kinds (one of no dimensions may be on the CPU), which CUDA refuses;
- waits: numbers that are read, copies to the host, copies to the device from memory that isn't pinned, indices and
  masks whose size the device has to tell;
- alerts: operations that torch refuses where it must be deterministic (`torch.use_deterministic_algorithms`), and masks
  of attention that CUDA's kernel can't read (`misaligned`).

It cannot see kernels, their rounding, memory, streams, cuBLAS, or which attention kernel is chosen. It has to be
imported before torch.
"""

import collections
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # where it is installed peft imports it, and it looks for CUDA

NEEDS = "the simulator compiles a device guard with g++, which is not installed (apt-get install g++)"
PROJECT = Path(__file__).resolve().parents[2]

GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuardImpl<DeviceType::CUDA>)
}
namespace at {
struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""
"""What the autograd engine asks of a device and a CPU build of torch lacks: a guard, and hooks."""


def install() -> None:
    """Compile the guard, once for each version of torch, and load it."""
    assert "torch" not in sys.modules, "torch keeps what it finds when it is imported"
    assert shutil.which("g++"), NEEDS
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    home, version = Path(spec.origin).parent, importlib.metadata.version("torch")
    library = Path(tempfile.gettempdir()) / f"tether-simulator-{os.getuid()}-{version}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(GUARD)
            headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
            options = ["-shared", "-fPIC", "-std=c++20"]
            subprocess.run(["g++", *options, *headers, str(source), *libraries, "-o", str(made)], check=True)
            shutil.move(made, library)
    for each in (home / "lib/libc10.so", home / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)


install()

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
ATTENTION = torch.nn.functional.scaled_dot_product_attention

READS = {
    aten._local_scalar_dense.default: "a number is read",
    aten.is_nonzero.default: "a number is read",
    aten.equal.default: "tensors are compared on the host",
    aten.nonzero.default: "the size of nonzero",
    aten.masked_select.default: "the size of a mask's selection",
    aten.bincount.default: "the size of bincount",
    aten._unique2.default: "the size of unique",
    aten.unique_dim.default: "the size of unique",
    aten.unique_consecutive.default: "the size of unique",
    aten.repeat_interleave.Tensor: "the size of repeat_interleave",
}
"""Operations whose result the host has to wait for, and what for."""

NOT_DETERMINISTIC: dict[Any, Callable[..., bool]] = {
    aten.cumsum.default: lambda x, *_, dtype=None: (dtype or x.dtype).is_floating_point,  # it casts to dtype first
    aten.cumsum_.default: lambda x, *_: x.is_floating_point(),
    aten.bincount.default: lambda x, weights=None, *_: weights is not None,
    aten.put_.default: lambda *_: True,
    aten.histc.default: lambda *_: True,
    aten.kthvalue.default: lambda *_: True,
    aten.median.dim: lambda *_, **__: True,
    aten.nll_loss2d_forward.default: lambda *_: True,
}
"""Those of torch's list (`torch.use_deterministic_algorithms`) that a language model may meet, and when they refuse."""

INDEXING = {
    aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default, aten._unsafe_index_put.default,
}  # fmt: skip
TRAINING = ("fit", "update", "gather_experience")
"""Functions that an optimiser step, or an update with what precedes it, is computed in."""
PUTS = INDEXING - {aten.index.Tensor, aten._unsafe_index.Tensor}


class MixedDevices(RuntimeError):
    """What CUDA refuses."""


class OnGpu(torch.Tensor):
    """A tensor that says it is on cuda:0; its numbers are in `held`, on the CPU."""

    held: torch.Tensor
    __slots__ = ["held"]

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> "OnGpu":
        out = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=GPU, requires_grad=requires_grad,
        )  # fmt: skip
        out.held = held.detach()
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Gpu.running().compute(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = OnGpu(self.held.clone(), self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def tolist(self) -> Any:
        Gpu.running().wait("numbers are read")
        return self.held.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise MixedDevices(f"a tensor on cuda:0 has no numpy array, at {where()}")

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        return OnGpu(self.held)

    @data.setter
    def data(self, value: "OnGpu") -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held


def where() -> str:
    """The project's innermost line, and what called it there."""
    frames = [frame for frame in traceback.extract_stack() if _short(frame.filename)]
    return " < ".join(f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in reversed(frames[-2:]))


def _short(file: str) -> str:
    path = Path(file)
    ours = path.is_relative_to(PROJECT) and "site-packages" not in file and path.parent != Path(__file__).parent
    return path.relative_to(PROJECT).as_posix() if ours else ""


def part() -> str:
    """What the stage is at: `sampling`, `training` (an update with what precedes it, a step), or `other`."""
    for frame in reversed(traceback.extract_stack()):
        file, function = _short(frame.filename), frame.name
        evaluates = (file, function) == ("components/training/heldout.py", "on_update")
        if evaluates or file == "components/training/checkpoint.py":
            return "other"
        if (file, function) == ("components/models/sampling.py", "sample"):
            return "sampling"
        if file.startswith(("components/training/", "components/ppo/")) and function in TRAINING:
            return "training"
    return "other"


class Gpu(TorchDispatchMode):
    """The device, as a context in which tensors may be on `cuda`."""

    _running: "Gpu | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str, str]] = collections.Counter()
        """By part of the stage, kind and line."""
        self.alerts: collections.Counter[str] = collections.Counter()
        self._pinned: dict[int, Any] = {}

    @classmethod
    def running(cls) -> "Gpu":
        assert cls._running is not None, "a tensor on the device is used outside it"
        return cls._running

    def __enter__(self) -> "Gpu":
        Gpu._running, self._stack = self, contextlib.ExitStack()
        self._stack.enter_context(_with_cuda())
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def wait(self, kind: str) -> None:
        """Note that the host waits."""
        self.waits[part(), kind, where()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The operation on the data, its findings noted.

        Raises:
            MixedDevices: CUDA would refuse it.
        """
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            self._pinned[id(pinned)] = weakref.ref(pinned)
            return pinned
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        ours = [each for each in given if isinstance(each, OnGpu)]
        asked = kwargs.get("device")
        to_gpu = asked is not None and torch.device(asked).type == "cuda"
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if not ours and not to_gpu:
            return func(*args, **kwargs)
        self._judge(func, args, kwargs, given, to_gpu)
        by_held = {id(each.held): each for each in ours}
        plain_args, plain = tree_map(lambda each: each.held if isinstance(each, OnGpu) else each, (args, kwargs))
        found = func(*plain_args, **(plain | ({"device": "cpu"} if asked is not None else {})))
        if (asked is not None and not to_gpu) or (func is aten.copy_.default and not isinstance(args[0], OnGpu)):
            return args[0] if func is aten.copy_.default else found
        return tree_map(lambda each: _on_gpu(each, by_held), found)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        kept = self._pinned.get(id(tensor))
        return kept is not None and kept() is tensor

    def _judge(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor], to_gpu: bool) -> None:
        if func in READS:
            self.wait(READS[func])
        if func in NOT_DETERMINISTIC and NOT_DETERMINISTIC[func](*args, **kwargs):
            self.alerts[f"{func} at {where()}"] += 1
        if func in (aten._to_copy.default, aten.copy_.default):
            self._judge_copy(func, args, kwargs, to_gpu)
            return
        strangers = [each for each in given if not isinstance(each, OnGpu) and each.dim() > 0]
        if func in INDEXING and isinstance(args[0], OnGpu):
            indices = [each for each in args[1] if isinstance(each, torch.Tensor)]
            for index in indices:
                if not isinstance(index, OnGpu):
                    self.wait("an index is copied to the device")
                if index.dtype in (torch.bool, torch.uint8) and not (func in PUTS and args[2].numel() == 1):
                    self.wait("the size of a mask")
            strangers = [each for each in strangers if all(each is not index for index in indices)]
        if strangers and any(isinstance(each, OnGpu) for each in given):
            shapes = ", ".join(str(tuple(each.shape)) for each in strangers)
            raise MixedDevices(f"{func} has tensors on cuda:0 and, of shape {shapes}, on the CPU, at {where()}")

    def _judge_copy(self, func: Any, args: Any, kwargs: dict[str, Any], to_gpu: bool) -> None:
        leaves, waitless = isinstance(args[0], OnGpu), kwargs.get("non_blocking", False)
        arrives, source = to_gpu or (leaves and "device" not in kwargs), args[0]
        if func is aten.copy_.default:
            arrives, leaves, source = isinstance(args[0], OnGpu), isinstance(args[1], OnGpu), args[1]
            waitless = waitless or (len(args) > 2 and args[2])
        if leaves and not arrives:
            self.wait("a copy to the host")
        elif arrives and not leaves and not (waitless and self._is_pinned(source)):
            self.wait("a copy to the device from memory that is not pinned")


def _on_gpu(found: Any, by_held: dict[int, OnGpu]) -> Any:
    """What was computed as a tensor of the device: the one that was given, where an operation is in place."""
    if not isinstance(found, torch.Tensor) or isinstance(found, OnGpu):
        return found
    return by_held[id(found)] if id(found) in by_held else OnGpu(found)


def _move(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`nn.Module.to`, which would keep the old data and untie what is tied."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    moved: dict[int, torch.nn.Parameter] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, dtype if tensor.is_floating_point() else None, non_blocking)

    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = torch.nn.Parameter(move(parameter), parameter.requires_grad)
                each._parameters[name] = moved[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = move(buffer)
    return module


def misaligned(mask: torch.Tensor) -> bool:
    """Whether CUDA's memory-efficient attention fails on this mask.

    It reads 16 bytes at a time. torch copies a mask whose rows are not aligned to 8 numbers (`preprocess_mask` in
    aten/src/ATen/native/transformers) or are bool, and does not check where an aligned one begins.
    """
    rows = all(stride % 8 == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    return mask.dtype != torch.bool and rows and mask.storage_offset() * mask.element_size() % 16 != 0


def _attention(*given: Any, **options: Any) -> Any:
    """`scaled_dot_product_attention`, whose mask is looked at first."""
    mask = options.get("attn_mask")
    if isinstance(mask, OnGpu) and misaligned(mask):
        Gpu.running().alerts[f"a misaligned mask of attention at {where()}"] += 1
    return ATTENTION(*given, **options)


@contextlib.contextmanager
def _with_cuda() -> Iterator[None]:
    """Torch's Python side believes in the device."""
    import torch.amp.autocast_mode
    import torch.cuda.amp.common
    from torch.utils import _foreach_utils

    changes: list[tuple[Any, str, Any]] = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "manual_seed_all", lambda _: None),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "max_memory_allocated", lambda *_: 1),
        (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.nn.Module, "to", _move),
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
    ]
    if hasattr(torch.amp.autocast_mode, "amp_definitely_not_available"):
        changes.append((torch.amp.autocast_mode, "amp_definitely_not_available", lambda: False))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    lifted = torch._C._only_lift_cpu_tensors()
    for owner, name, value in changes:
        setattr(owner, name, value)
    _foreach_utils._foreach_supported_types.append(OnGpu)
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device="cuda") passes the mode by
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        _foreach_utils._foreach_supported_types.remove(OnGpu)
        for owner, name, value in before:
            setattr(owner, name, value)
