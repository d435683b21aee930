"""A stage's machine: what `activate` leaves behind."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.models.runtime import VECTOR_MATHS, Runtime, activate


class Calls(TorchDispatchMode):
    """Names, widths and sizes of what torch was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype, int]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if args and isinstance(args[0], torch.Tensor):
            self.seen.add((func.overloadpacket.__name__, args[0].dtype, args[0].numel()))
        return func(*args, **(kwargs or {}))


def test_no_vector_function_is_first_called_by_several_threads_at_once() -> None:
    """By chance, one such call in some processes is wrong in the fourth digit, and no digest is the same again."""
    with Calls() as calls:
        activate(Runtime(device="cpu", dtype="float32", threads=torch.get_num_threads()).resolve())
    wanted = {(name, dtype, 1) for name in (*VECTOR_MATHS, "cos", "sin", "exp", "log", "sqrt", "tanh")
              for dtype in (torch.float32, torch.float64)}  # fmt: skip
    assert wanted <= calls.seen
