"""AdamW with 8-bit moments, by bitsandbytes, with its state as flat tensors for checkpoints."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.optim import AdamW

from components.base.errors import UserError
from components.distributed.sharding import is_spread
from components.models.matrices.quantized import bitsandbytes

OPTION = "optimizer=adamw_8bit"


@cache
def _adamw_class() -> type[Any]:
    library = bitsandbytes(OPTION)

    class AdamW8Bit(library.optim.AdamW8bit):  # type: ignore[name-defined]
        """bitsandbytes' AdamW (Dettmers et al. 2022, arXiv 2110.02861): each block of 256 values has a scale.

        The library's own `state_dict` nests the moments in another dict, and has the step as a number.
        """

        def state_dict(self) -> dict[str, Any]:
            whole = super().state_dict()
            for index, named in whole["state"].items():
                moments = named.pop(self._FSDP_WRAPPED_QUANT_STATE_KEY, {})
                whole["state"][index] = {**named, **moments, "step": torch.tensor(float(named["step"]))}
            return whole

        def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
            state = {i: {**named, "step": int(named["step"])} for i, named in state_dict["state"].items()}
            super().load_state_dict({**state_dict, "state": state}, **options)

        def step(self, closure: Any = None) -> Any:
            try:
                return super().step(closure)
            except (RuntimeError, NotImplementedError) as error:
                if "bitsandbytes" not in str(error):
                    raise
                kind = self.param_groups[0]["params"][0].device.type
                raise UserError(
                    f"{OPTION}: bitsandbytes {library.__version__} has no such optimiser on {kind} here ({error}). Use "
                    "optimizer=adamw, or a device that it supports."
                ) from error

    return AdamW8Bit


def adamw_8bit(groups: Iterable[dict[str, Any]], rate: float, betas: tuple[float, float], epsilon: float) -> AdamW:
    """Return the optimiser over parameter groups; tensors of fewer than 4,096 elements have float32 moments.

    Raises:
        UserError: bitsandbytes is not installed, or cannot be loaded here; or the parameters are sharded over ranks.
    """
    groups = list(groups)
    if any(is_spread(parameter) for group in groups for parameter in group["params"]):
        raise UserError(
            f"{OPTION}: bitsandbytes cannot step parameters that are sharded over ranks. Set "
            "runtime.sharding=replicas, or use optimizer=adamw: over N ranks its moments take 8 / N bytes a parameter."
        )
    return _adamw_class()(groups, lr=rate, betas=betas, eps=epsilon)
