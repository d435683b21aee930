"""The losses of direct preference methods, as pure functions. N pairs or responses; losses in nats.

log π(y|x) is the sum over the tokens of response y with its EOS. A mean over tokens would be the log-probability of
another distribution, and a sum without EOS would let the length change freely. h = log π(y|x) - log π_ref(y|x) is the
log-ratio of a response; β h is its implicit reward (Rafailov et al. 2023, equation 5, up to a term of the prompt).
"""

import torch
from torch import Tensor

from components.reward.losses import bradley_terry_loss


def dpo_losses(
    difference: Tensor, beta: float, share: Tensor | float = 1.0, margin: Tensor | float = 0.0
) -> Tensor:
    """Return -[p log σ(d) + (1 - p) log σ(-d)] with d = β (h_chosen - h_rejected) - m, of the shape of `difference`.

    At p = 1 and m = 0 this is DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7). Votes, label smoothing and the
    robust form only change p, see `label_shares`. A margin m asks for implicit rewards that differ by more (Touvron et
    al. 2023, "Llama 2", equation 2, with implicit rewards: Amini et al. 2024, arXiv 2402.10571).

    Args:
        difference: h_chosen - h_rejected, nats.
        share: p, of a shape that broadcasts.
        margin: m, of a shape that broadcasts.
    """
    return bradley_terry_loss(beta * difference - margin, share)


def label_shares(shares: Tensor, noise: float, robust: bool) -> Tensor:
    """Return p of `dpo_losses`, of the shape of `shares`, for labels of which a share ε is flipped.

    Plain: p = s (1 - ε) + (1 - s) ε, the probability of the label given the truth s; at s = 1 it is 1 - ε, which is
    label smoothing (cDPO, Mitchell 2023, "A note on DPO with noisy preferences"). Robust: p = (s - ε) / (1 - 2 ε), the
    inverse of that, so that the expected loss of flipped labels is that of true ones (rDPO, Chowdhury et al. 2024,
    arXiv 2403.00409: ((1 - ε) L(+) - ε L(-)) / (1 - 2 ε) at s = 1). It may lie outside [0, 1].

    Args:
        shares: s, the share of votes for the chosen response.
        noise: ε in [0, 1/2).
        robust: whether to return the robust form.
    """
    return (shares - noise) / (1 - 2 * noise) if robust else shares * (1 - noise) + (1 - shares) * noise


def ipo_losses(difference: Tensor, tau: float, share: Tensor | float = 1.0) -> Tensor:
    """Return p (d - 1/(2τ))² + (1 - p) (d + 1/(2τ))² with d = h_chosen - h_rejected, of the shape of `difference`.

    At p = 1 this is IPO (Azar et al. 2023, arXiv 2310.12036, equation 17); p weighs the two labels of a pair, and d
    comes to (p - 1/2) / τ. Here d is a difference of sums, as in the paper. TRL divides each h by its response's number
    of tokens, so its β is not this τ.

    Args:
        difference: d, nats.
        tau: τ, the strength of the tether, as β in DPO.
        share: p, of a shape that broadcasts.
    """
    target = 1 / (2 * tau)
    return share * (difference - target) ** 2 + (1 - share) * (difference + target) ** 2


def kto_losses(
    log_ratio: Tensor, desirable: Tensor, baseline: Tensor, beta: float, weights: tuple[float, float] = (1.0, 1.0)
) -> Tensor:
    """Return λ_y - v(x, y) (N,): λ_D σ(β (z₀ - h)) of a desirable response, λ_U σ(β (h - z₀)) of another.

    KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8).

    Args:
        log_ratio: h (N,), nats.
        desirable: (N,) bool.
        baseline: z₀, from `kto_baseline`.
        weights: λ_D and λ_U.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(log_ratio)
    weight = torch.where(desirable, *weights).to(log_ratio)
    return weight * torch.sigmoid(beta * sign * (baseline - log_ratio))


def kto_baseline(mismatched: Tensor) -> Tensor:
    """Return z₀ = max(0, mean of h), a number without gradient: KTO's estimate of KL(π || π_ref).

    Args:
        mismatched: h (N,) of responses to other prompts than their own (Ethayarajh et al. 2024, section 4.1).
    """
    return mismatched.detach().mean().clamp(min=0)
