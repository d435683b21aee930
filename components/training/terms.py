"""A loss as a sum of terms. Legend: B sequences, T tokens; a mask is True where a token counts."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

Aggregation = Literal["token", "sequence", "cap"]


def masked_mean(x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Return the mean of `x` over all tokens that count. (This is not the mean of the rows' means.)"""
    return x.masked_fill(~mask, 0).sum() / mask.sum()


def aggregated(
    x: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"], how: Aggregation, cap: int
) -> Float[Tensor, ""]:
    """Reduce the losses `x` to one number; every row holds at least one token that counts.

    With N responses of lengths |y_i|:

        token     Σ_i Σ_t x_it / Σ_i |y_i|          (Yu et al. 2025, arXiv 2503.14476, equation 12)
        sequence  1/N Σ_i 1/|y_i| Σ_t x_it          (Shao et al. 2024, arXiv 2402.03300, equation 3)
        cap       1/N Σ_i 1/cap   Σ_t x_it          (Liu et al. 2025, arXiv 2503.20783, section 3.2)
    """
    if how == "token":
        return masked_mean(x, mask)
    sums = x.masked_fill(~mask, 0).sum(1)
    return (sums / (mask.sum(1) if how == "sequence" else cap)).mean()


class Measure(NamedTuple):
    """A metric of one micro-batch, and how those of several become one."""

    value: Tensor
    """A scalar without a gradient."""
    over: Literal["loss", "tokens", "largest"] = "tokens"
    """`loss`: their mean, weighted like the loss; `tokens`: their mean by tokens; `largest`: the maximum."""


class Term(NamedTuple):
    """One term of a loss: `coefficient` times the aggregate of `losses`."""

    name: str
    """The name of its metric."""
    losses: Tensor
    """(B, T) loss of each token."""
    mask: Tensor
    """(B, T)"""
    coefficient: float = 1.0
    aggregation: Aggregation = "token"
    cap: int = 1
    """Tokens of a response, for the aggregation `cap`."""
    measures: Mapping[str, Measure] = MappingProxyType({})
    """Further metrics."""
    is_metric: bool = True
    """Whether the aggregate, without the coefficient, is a metric."""


Loss = tuple[Tensor, dict[str, Measure]]
"""The loss to backpropagate, and metrics of it."""


def total(terms: Sequence[Term]) -> Loss:
    """Return Σ coefficient · aggregate, and the metrics of the terms."""
    losses, measures = list[Tensor](), dict[str, Measure]()
    for term in terms:
        value = aggregated(term.losses, term.mask, term.aggregation, term.cap)
        losses.append(term.coefficient * value)
        measures |= term.measures
        if term.is_metric:
            measures[term.name] = Measure(value.detach(), "loss")
    return sum(losses[1:], losses[0]), measures

