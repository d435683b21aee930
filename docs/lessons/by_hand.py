# %% [markdown]
# # PPO's clip, GAE and Bradley-Terry by hand
#
# Each formula is worked out with plain arithmetic. Then Tether's function computes the same, and the cell fails if the
# two differ by more than 0.000001.

# %%
import math

import torch

from components.ppo.maths import gae, policy_loss
from components.reward.losses import bradley_terry_loss


def same(by_hand: list[float], found: torch.Tensor) -> None:
    """Print both and fail where they differ."""
    torch.testing.assert_close(found.double().flatten(), torch.tensor(by_hand).double(), rtol=0, atol=1e-6)
    print(
        "by hand:",
        [round(each, 4) for each in by_hand],
        " the function:",
        [round(x, 4) for x in found.flatten().tolist()],
    )


# %% [markdown]
# ## PPO's clip
#
#     loss = -min(r A, clip(r, 1 - ε, 1 + ε) A),   r = π / π_old,   ε = 0.2
#
# π is the policy that is trained, π_old the one that sampled the tokens, A the advantage. Four tokens: two with a
# positive advantage, two with a negative one.
#
# | r | A | r A | clip(r) A | min | loss | |
# |---|---|---|---|---|---|---|
# | 1.5 | 1 | 1.5 | 1.2 | 1.2 | -1.2 | already likely enough: no gradient |
# | 0.5 | 1 | 0.5 | 0.8 | 0.5 | -0.5 | a good token became unlikely: not clipped, so it can recover |
# | 1.5 | -1 | -1.5 | -1.2 | -1.5 | 1.5 | a bad token became likely: not clipped, so it is pushed down |
# | 0.5 | -1 | -0.5 | -0.8 | -0.8 | 0.8 | already unlikely enough: no gradient |

# %%
ratios, advantages = [1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0]
by_hand = [-min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, advantages, strict=True)]
old = torch.zeros(1, 4)
new = torch.tensor([ratios]).log().requires_grad_()
found = policy_loss(new, old, torch.tensor([advantages]), torch.ones(1, 4, dtype=torch.bool), 0.2)
same(by_hand, found.loss.detach())
found.loss.sum().backward()
print("clipped:", found.clipped.tolist()[0], " gradient:", [round(x, 4) for x in new.grad.tolist()[0]])

# %% [markdown]
# The gradient of the loss with respect to log π is -A r for a token that is not clipped, since dr / d log π = r:
# -0.5 for the second token and 1.5 for the third.
#
# ## Generalised advantage estimation
#
#     δ_t = reward_t + γ V_{t+1} - V_t,    A_t = δ_t + γ λ A_{t+1},    γ = 1, λ = 0.95
#
# Three tokens. Each reward holds the token's KL penalty, and the last one also the score. The state after the last
# token is terminal, so its value is 0.

# %%
rewards, values = [-0.1, -0.2, 1.0], [0.5, 0.4, 0.6]
d2 = 1.0 + 0 - 0.6  # 0.4
d1 = -0.2 + 0.6 - 0.4  # 0.0
d0 = -0.1 + 0.4 - 0.5  # -0.2
a2 = d2  # 0.4
a1 = d1 + 0.95 * a2  # 0.38
a0 = d0 + 0.95 * a1  # 0.161
# a padded fourth token, with nonsense in it, changes nothing
mask = torch.tensor([[True, True, True, False]])
found_a, found_r = gae(torch.tensor([[*rewards, 9.0]]), torch.tensor([[*values, 9.0]]), mask, 1.0, 0.95)
same([a0, a1, a2, 0], found_a)
same([a0 + 0.5, a1 + 0.4, a2 + 0.6, 0], found_r)
same([sum(rewards[t:]) - values[t] for t in range(3)] + [0], gae(
    torch.tensor([[*rewards, 9.0]]), torch.tensor([[*values, 9.0]]), mask, 1.0, 1.0
)[0])  # fmt: skip

# %% [markdown]
# The lines show the advantages, the returns (advantage plus value), and the advantages at λ = 1. There an advantage is
# the sum of the rewards from its token on, minus the value: for the first token -0.1 - 0.2 + 1.0 - 0.5 = 0.2.
#
# ## Bradley-Terry
#
#     P(chosen wins) = σ(d) = 1 / (1 + exp(-d)),    loss = -[p log σ(d) + (1 - p) log σ(-d)]
#
# d is the chosen response's score minus the rejected one's, p the share of votes for the chosen one. At d = 0 the loss
# is log 2, that of a coin. With p = 1 the loss falls towards 0 as d grows, and never reaches it. With three votes of
# four it is smallest at the log-odds of p, log(0.75 / 0.25) = log 3: there its gradient, σ(d) - p, is 0.

# %%
differences = [0.0, 1.0, -1.0, math.log(3)]
same([math.log(1 + math.exp(-d)) for d in differences], bradley_terry_loss(torch.tensor(differences)))
sigmoid = [1 / (1 + math.exp(-d)) for d in differences]
same(
    [-(0.75 * math.log(s) + 0.25 * math.log(1 - s)) for s in sigmoid],
    bradley_terry_loss(torch.tensor(differences), 0.75),
)
d = torch.tensor(math.log(3), requires_grad=True)
bradley_terry_loss(d, 0.75).backward()
assert abs(d.grad.item()) < 1e-6
print("gradient at log 3:", round(abs(d.grad.item()), 6))
