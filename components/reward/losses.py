"""The reward model's loss, as pure functions. N pairs, K heads; scores in logits, losses in nats a pair."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(difference: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """-[p log sigmoid(d) + (1 - p) log sigmoid(-d)], d the chosen's score less the rejected's, p the share of votes.

    The cross-entropy of Christiano et al. 2017, equation 1, whose labels are a distribution over the two responses; at
    p = 1 it is Ouyang et al. 2022, equation 1. Its gradient is sigmoid(d) - p, so scores are drawn to differ by the
    log-odds of p. (Label smoothing moves every p by one constant; here each pair has its own.)

    Args:
        difference: of any shape; where a margin is asked for, it has been taken off (Llama 2, equation 2).
        share: in [0, 1], of a shape that broadcasts.
    """
    # log sigmoid(-d) = log sigmoid(d) - d, so that a majority's label (p = 1) leaves -log sigmoid(d) to the bit.
    return (1 - share) * difference - logsigmoid(difference)


def pair_losses(
    chosen: Tensor, rejected: Tensor, shares: Tensor, margins: Tensor | float = 0.0, centring: float = 0.0
) -> Tensor:
    """Loss (N,) of each pair, summed over the heads that have a label there.

    Args:
        chosen, rejected: (N, K) scores.
        shares: (N, K) share of votes for the chosen response, NaN where nobody voted on what the head is of.
        margins: (N, 1), or one for all, in logits.
        centring: coefficient of (chosen + rejected)², which pins down the constant that a difference leaves open
            (Eisenstein et al. 2023, "Helping or Herding?", equation 2).
    """
    known = ~shares.isnan()
    losses = bradley_terry_loss(chosen - rejected - margins, shares.nan_to_num(0.0)) * known
    if centring:
        losses = losses + centring * (chosen + rejected).square()
    return losses.sum(1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Mean of `values` (N,), each counted `weights` (N,) times."""
    return (values * weights).sum() / weights.sum()
