# %% [markdown]
# # A bandit whose tether is swept: cut, right, tight
#
# There is one prompt with eight possible responses of one token each: a bandit with eight arms. Everything can be
# enumerated, so we can compare what PPO's parts learn with the exact optimum. The tether is β, the price of a nat of
# KL. The policy that maximises score - β KL to SFT's distribution π_ref is
#
#     π*(y) = π_ref(y) exp(score(y) / β) / Z,    Z = Σ_y π_ref(y) exp(score(y) / β)
#
# `flatter` has the best score but the worst truth (`gold`): the reward model is wrong about it. SFT seldom writes it.

# %%
import torch

from components.ppo.maths import leave_one_out, policy_loss, token_rewards

names = ["refund", "replace", "apologise", "explain", "ask", "wait", "refuse", "flatter"]
reference = torch.tensor([0.20, 0.20, 0.15, 0.15, 0.12, 0.11, 0.065, 0.005])
score = torch.tensor([1.0, 0.8, 0.2, 0.3, 0.0, -0.8, -1.0, 2.0])  # what the reward model says
gold = torch.tensor([1.0, 0.8, 0.2, 0.3, 0.0, -0.8, -1.0, -2.0])  # the truth, which nothing trains on


def optimum(beta: float) -> torch.Tensor:
    """π* by enumeration; without a tether all of it is on the highest score."""
    if beta == 0:
        return torch.nn.functional.one_hot(score.argmax(), len(score)).float()
    return torch.softmax(reference.log() + score / beta, 0)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return torch.special.xlogy(p, p / q).sum().item()


# %% [markdown]
# ## Train
#
# The rewards, advantages and loss are Tether's own functions. A reward is the score minus β (log π_old - log π_ref).
# An advantage is a response's reward minus the mean of the others' in its batch (RLOO). The loss is PPO's clipped
# surrogate.


# %%
def train(beta: float, updates: int = 150, batch: int = 512, rate: float = 0.05) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = reference.log().clone().requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=rate)
    mask = torch.ones(batch, 1, dtype=torch.bool)
    for _ in range(updates):
        old = torch.log_softmax(logits, 0).detach()
        drawn = torch.multinomial(old.exp(), batch, replacement=True, generator=generator)
        rewards = token_rewards(old[drawn, None], reference.log()[drawn, None], score[drawn], mask, beta)
        advantages = leave_one_out(rewards.sum(1), group_size=batch)[:, None]
        for _ in range(2):
            loss = policy_loss(torch.log_softmax(logits, 0)[drawn, None], old[drawn, None], advantages, mask, 0.2)
            optimiser.zero_grad()
            loss.loss.mean().backward()
            optimiser.step()
    return torch.softmax(logits, 0).detach()


found = {name: (beta, train(beta)) for name, beta in (("cut", 0.0), ("right", 0.6), ("tight", 8.0))}

# %% [markdown]
# ## Compare with the optimum
#
# `off` is the total variation distance between the learned policy and π*: half the sum of the absolute differences.

# %%
print(f"{'tether':<7}{'β':>5}{'KL':>8}{'score':>8}{'gold':>8}{'off':>8}{'KL of π*':>10}{'gold of π*':>12}")
for name, (beta, policy) in found.items():
    best = optimum(beta)
    off = (policy - best).abs().sum().item() / 2
    assert off < 0.03, "the learned policy is far from the enumerated optimum"
    print(
        f"{name:<7}{beta:5.1f}{kl(policy, reference):8.2f}{policy @ score:8.2f}{policy @ gold:8.2f}{off:8.2f}"
        f"{kl(best, reference):10.2f}{best @ gold:12.2f}"
    )
print(f"{'SFT':<7}{'':5}{0:8.2f}{reference @ score:8.2f}{reference @ gold:8.2f}")

# %% [markdown]
# With the tether cut (β = 0) the policy flatters: the score is the highest and the truth the lowest. With a
# tight one it hardly leaves SFT. In between, score and truth both rise well above SFT's.
#
# The middle row by hand: at β = 0.6 the eight terms π_ref exp(score / β) add up to Z = 2.58. `refund` has
# 0.20 exp(1 / 0.6) = 1.06 of it and `flatter` 0.005 exp(2 / 0.6) = 0.14. So π* flatters in 0.14 / 2.58 = 5 % of its
# responses; SFT does in 0.5 %. And since log(π* / π_ref) = score / β - log Z, its KL is 0.787 / 0.6 - log 2.576 = 0.37.
#
# Which β is right depends on how wrong the reward model is. Nobody knows that in advance, so people judge the result.
# Below, the exact optima for nine values of β.

# %%
betas = [0.3, 0.4, 0.5, 0.6, 0.8, 1.2, 2.0, 4.0, 8.0]
print(f"{'β':>5}{'KL':>8}{'score':>8}{'gold':>8}   (exact optima)")
for beta in betas:
    best = optimum(beta)
    print(f"{beta:5.1f}{kl(best, reference):8.2f}{best @ score:8.2f}{best @ gold:8.2f}")
print("the truth is highest at β =", max(betas, key=lambda beta: (optimum(beta) @ gold).item()))
