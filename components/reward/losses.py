"""The reward model's loss, as pure functions. N pairs, K heads; scores in logits, losses in nats per pair."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(difference: Tensor, share: Tensor | float = 1.0) -> Tensor:
    """Return -[p log sigmoid(d) + (1 - p) log sigmoid(-d)] with d = score(chosen) - score(rejected), p the vote share.

    This is the cross-entropy of Christiano et al. 2017, section 2.2.3, with the predictor of equation 1 and labels that
    are a distribution over the two responses. At p = 1 it is equation 1 of Ouyang et al. 2022. Its gradient is
    sigmoid(d) - p, so scores come to differ by the log-odds of p. (Label smoothing would use the same p for all pairs.)

    Args:
        difference: d, of any shape.
        share: p in [0, 1], of a shape that broadcasts.
    """
    # log sigmoid(-d) = log sigmoid(d) - d, so that p = 1 gives exactly -log sigmoid(d).
    return (1 - share) * difference - logsigmoid(difference)


def pair_losses(chosen: Tensor, rejected: Tensor, shares: Tensor) -> Tensor:
    """Return the loss (N,) of each pair, summed over the heads for which the pair has a label.

    Args:
        chosen, rejected: (N, K) scores.
        shares: (N, K) share of votes for the chosen response, NaN where nobody voted on the head's objective.
    """
    labelled = ~shares.isnan()
    losses = bradley_terry_loss(chosen - rejected, shares.nan_to_num(0.0)) * labelled
    return losses.sum(1)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of `values` (N,) weighted by `weights` (N,)."""
    return (values * weights).sum() / weights.sum()
