"""The curves of several trainings on one axis of updates: what the policy gained, what it paid, and β."""

from collections.abc import Mapping, Sequence
from pathlib import Path

History = Sequence[Mapping[str, float]]
COLOURS = ("C0", "C3", "C2", "C4")


def draw(histories: Mapping[str, History], title: str, path: Path, target: float | None = None) -> None:
    """Three panels over one axis of updates: proxy reward (and gold score, where it is known), KL, β.

    Args:
        histories: rows of `history.jsonl` by the name of the run.
        target: nats a response that β is to hold KL at; drawn as a line.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (reward, kl, beta) = plt.subplots(
        3, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2, 1.4), layout="constrained"
    )
    for (name, history), colour in zip(histories.items(), COLOURS, strict=False):
        updates = range(1, len(history) + 1)
        reward.plot(updates, [row["ppo/proxy_reward"] for row in history], color=colour, label=f"proxy, {name}")
        if "ppo/gold" in history[0]:
            gold = [row["ppo/gold"] for row in history]
            reward.plot(updates, gold, "--", color=colour, label=f"gold (simulated), {name}")
        kl.plot(updates, [max(row["ppo/kl"], 1e-3) for row in history], color=colour, label=name)
        if any(row["ppo/beta"] for row in history):
            beta.plot(updates, [row["ppo/beta"] for row in history], color=colour, label=name)
    if target is not None:
        kl.axhline(target, color="0.4", linestyle=":", label=f"target, {target:g} nats")
    reward.set(ylabel="reward, SFT deviations", title=title)
    kl.set(ylabel="KL, nats a response", yscale="log", ylim=(0.05, None))
    beta.set(ylabel="β", yscale="log", xlabel="PPO update")
    beta.xaxis.get_major_locator().set_params(integer=True)
    for axes in (reward, kl):
        axes.legend(fontsize=8, ncols=2 if axes is reward else 4)
    for axes in (kl, beta):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axes in (reward, kl, beta):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)
