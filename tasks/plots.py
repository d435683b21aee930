"""Plots that people look at in MLflow. Files, never windows; imported late, since matplotlib takes a second."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.spool import curves, read_points

Curve = Sequence[tuple[int, float]]

REWARD_COLOUR, KL_COLOUR, GOLD_COLOUR = "#1f77b4", "#d62728", "#b8860b"


def load() -> None:
    """Import what drawing needs, so that the first plot needn't."""
    _empty_figure(1.0, 1.0).canvas.draw()


def render(stage: str, points: Path, artifact: Path, attachments: Path) -> list[Path]:
    """Draw what a stage has to show from its points and its artifact. Returns the files written (often none)."""
    written = []
    if stage == "ppo":
        by_name = curves(read_points(points))
        if "ppo/proxy_reward" in by_name and "ppo/kl" in by_name:
            written.append(reward_and_kl(by_name, attachments / "reward_and_kl.png"))
    if stage == "reward" and (artifact / "calibration.json").is_file():
        document = json.loads((artifact / "calibration.json").read_text())
        written.append(reliability(document, attachments / "reliability.png"))
        if any("bins" in each for each in document.get("slices", ())):
            written.append(reliability_by_slice(document, attachments / "reliability_by_slice.png"))
    if stage == "reward" and (artifact / "robustness.json").is_file():
        document = json.loads((artifact / "robustness.json").read_text())
        if any(each["rise"] is not None for each in document["probes"].values()):
            written.append(probes(document, attachments / "probes.png"))
    return written


def reward_and_kl(by_name: Mapping[str, Curve], target: Path) -> Path:
    """Proxy reward (and gold, where it is known) and KL to SFT by PPO step, on one step axis.

    Args:
        by_name: metric name to (step, value) pairs; needs `ppo/proxy_reward` and `ppo/kl`, may have `ppo/gold`.
        target: a PNG, its folder created.
    """
    figure, reward_axis = _figure()
    kl_axis = reward_axis.twinx()
    lines = _line(reward_axis, by_name["ppo/proxy_reward"], REWARD_COLOUR, "proxy reward")
    if "ppo/gold" in by_name:
        lines += _line(reward_axis, by_name["ppo/gold"], GOLD_COLOUR, "gold (simulated truth)", style="--")
    lines += _line(kl_axis, by_name["ppo/kl"], KL_COLOUR, "KL(policy ‖ SFT)")
    reward_axis.set_xlabel("PPO step")
    reward_axis.set_ylabel("reward, score units", color=REWARD_COLOUR)
    kl_axis.set_ylabel("KL, nats per response", color=KL_COLOUR)
    kl_axis.set_ylim(bottom=min(0.0, *(value for _, value in by_name["ppo/kl"])))
    reward_axis.legend(lines, [line.get_label() for line in lines], loc="upper left", frameon=False)
    return _save(figure, target)


def reliability(document: Mapping[str, Any], target: Path) -> Path:
    """Confidence against accuracy in equal-mass bins of the test pairs, after temperature.

    Args:
        document: `calibration.json` of the reward artifact: `bins` of `{confidence, accuracy, low, high}`.
        target: a PNG, its folder created.
    """
    figure, axis = _figure(width=5.0)
    _reliability(axis, document["bins"], REWARD_COLOUR)
    axis.set_xlabel("confidence, max(p, 1 - p)")
    axis.set_ylabel("share of pairs ranked right")
    axis.set_xlim(0.48, 1.02)
    axis.legend(loc="upper left", frameon=False)
    return _save(figure, target)


def reliability_by_slice(document: Mapping[str, Any], target: Path) -> Path:
    """`reliability`, a panel a slice; red where the calibration error is above what chance gives any slice.

    Args:
        document: `calibration.json` of the reward artifact, its `slices`; those too small to have bins are left out.
        target: a PNG, its folder created.
    """
    shown = [each for each in document["slices"] if "bins" in each]
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = _empty_figure(2.6 * columns, 2.3 * rows + 0.3)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis, each in zip(axes, shown, strict=False):
        off = each["judged"] and each["ece"] > each["ece_null_joint"]
        _reliability(axis, each["bins"], KL_COLOUR if off else REWARD_COLOUR if each["judged"] else "grey")
        axis.set_title(f"{each['kind']}: {each['slice']}\n{each['pairs']} pairs, ECE {each['ece']:.3f}", fontsize=8)
        axis.set_xlim(0.48, 1.02)
        axis.tick_params(labelsize=8)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    figure.supxlabel("confidence, max(p, 1 - p)", fontsize=9)
    figure.supylabel("share of pairs ranked right", fontsize=9)
    figure.suptitle("after temperature, with intervals; grey: known only with the label, not judged", fontsize=9)
    return _save(figure, target)


def probes(document: Mapping[str, Any], target: Path) -> Path:
    """How far each tail raises the score, with the upper bound that gates judge.

    Args:
        document: `robustness.json` of the reward artifact: `probes` of `{rise, high, texts}`.
        target: a PNG, its folder created.
    """
    figure, axis = _figure()
    shown = {name: each for name, each in document["probes"].items() if each["rise"] is not None}
    rises = [each["rise"] for each in shown.values()]
    above = [(each["high"] or each["rise"]) - each["rise"] for each in shown.values()]
    labels = [f"{name} ({each['texts']} texts)" for name, each in shown.items()]
    axis.barh(labels, rises, xerr=[[0.0] * len(above), above], color=REWARD_COLOUR, capsize=4)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("mean rise in score and its 95 % upper bound, SFT standard deviations")
    return _save(figure, target)


def _reliability(axis: Any, bins: Sequence[Mapping[str, float]], colour: str) -> None:
    axis.plot([0.5, 1.0], [0.5, 1.0], color="grey", linestyle=":", label="perfect")
    below = [max(0.0, each["accuracy"] - each["low"]) for each in bins]
    above = [max(0.0, each["high"] - each["accuracy"]) for each in bins]
    axis.errorbar(
        [each["confidence"] for each in bins],
        [each["accuracy"] for each in bins],
        yerr=[below, above],
        marker="o",
        capsize=2,
        color=colour,
        label="after temperature, with interval",
    )


def _empty_figure(width: float, height: float) -> Any:
    # The object interface: no global state, so no backend to choose and nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _figure(width: float = 7.0) -> tuple[Any, Any]:
    figure = _empty_figure(width, 4.0)
    return figure, figure.add_subplot()


def _line(axis: Any, curve: Curve, colour: str, label: str, style: str = "-") -> list[Any]:
    steps, values = zip(*curve, strict=True)
    return axis.plot(steps, values, color=colour, linestyle=style, label=label)


def _save(figure: Any, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Without a time stamp: it would differ at every drawing.
    figure.savefig(target, dpi=120, metadata={"Software": None})
    return target
