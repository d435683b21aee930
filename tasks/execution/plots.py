"""Draw what MLflow's curves of logged metrics cannot show as SVG, once, when a stage is computed. MLflow and the run's
report show the same files.

A chart shows what the stage measured and the levels in its own config, but no gate's threshold, because a new threshold
judges a stored stage again without drawing. Colours are mid-tones without a background, readable on white and black.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.base.settings import Settings
from components.ppo.config import KLConfig, PpoJob
from tasks.execution.drawing import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Curve,
    legend,
    line,
    new_figure,
    panel,
    plain,
    reliability_panel,
    steps_axis,
    svg,
    thin,
)
from tasks.runs.points import curves, read_points


@dataclass(frozen=True)
class Computed:
    """The results of a stage that its charts show."""

    job: Settings
    metrics: Mapping[str, float]
    """Final metrics."""
    curves: Mapping[str, Curve]
    """Maps a metric's name to its (step, value) pairs."""
    artifact: Path

    def curve(self, name: str) -> Curve:
        """Return the finite points of a curve, thinned; empty if the stage has no such curve."""
        return thin([point for point in self.curves.get(name, ()) if math.isfinite(point[1])])

    def document(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file of the artifact; empty if there is none."""
        path = self.artifact / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def load() -> None:
    """Import what drawing needs, so that the first chart does not have to wait."""
    new_figure(1.0).canvas.draw()


def render(stage: str, job: Settings, metrics: Mapping[str, float], points: Path, out: Path) -> list[Path]:
    """Draw a stage's charts from its config, final metrics, the file of its points, and `out`/artifact, into
    `out`/attachments. Return the files; many stages have none."""
    computed = Computed(job, metrics, curves(read_points(points)), out / "artifact")
    return [
        _save(figure, title, out / "attachments" / f"{name}.svg")
        for name, (title, draw) in CHARTS.get(stage, {}).items()
        if (figure := draw(computed)) is not None
    ]


def _interval(axis: Any, computed: Computed, curve: Curve, name: str, colour: str) -> None:
    """Fill the area between the two ends of a curve's interval, which are curves too."""
    ends = [dict(computed.curve(f"{name}_{end}")) for end in ("low", "high")]
    steps = [step for step, _ in curve if all(step in values for values in ends)]
    low, high = ([values[step] for step in steps] for values in ends)
    axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)


def reward_and_kl(computed: Computed) -> Any:
    """Draw reward (and gold score, if known), KL to SFT with its target and ceiling, and β by PPO update."""
    config = computed.job.ppo.kl if isinstance(computed.job, PpoJob) else KLConfig(control="fixed")
    name = config.measure
    rewards, kl, beta = (computed.curve(f"ppo/{curve}") for curve in ("proxy_reward", name, "beta"))
    if not rewards or not kl:
        return None
    figure = new_figure(6.0)
    reward_axis, kl_axis, beta_axis = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.5))
    line(panel(reward_axis, "reward, score units"), rewards, BLUE, "proxy reward")
    line(reward_axis, computed.curve("ppo/gold"), ORANGE, "gold (simulated)", style="--")
    if judge_gain := computed.curve("ppo/watched_judge_gain"):
        line(reward_axis, judge_gain, PURPLE, "gain by the independent judge", marker="o", markersize=3)
        _interval(reward_axis, computed, judge_gain, "ppo/watched_judge_gain", PURPLE)
    line(panel(kl_axis, f"KL to SFT, nats per {config.unit}", zero=True), kl, RED, "KL of the batch")
    if math.isfinite(end := computed.metrics.get(f"policy/{name}", math.nan)):
        above = max(0.0, computed.metrics.get(f"policy/{name}_high", end) - end)
        label = "held-out, upper end" if above else "held-out prompts"
        kl_axis.errorbar(
            [computed.metrics.get("ppo/published_update", kl[-1][0])],
            [end],
            yerr=[[0.0], [above]],
            color=GREY,
            fmt="D",
            markersize=4,
            capsize=3,
            label=label,
        )
    if config.control == "adaptive":  # inside this band β hardly changes
        kl_axis.axhspan(0.8 * config.target, 1.2 * config.target, color=PURPLE, alpha=0.25, linewidth=0,
                        label=f"target {config.target:g} ± 20 %")  # fmt: skip
    if watched := computed.curve(f"ppo/watched_{name}"):
        line(kl_axis, watched, GREY, "watched prompts", style=":")
    if config.ceiling is not None:
        label = f"hard ceiling {config.ceiling:g}"
        kl_axis.axhline(config.ceiling, color=ORANGE, linestyle="-.", linewidth=1.2, label=label)
    line(panel(beta_axis, "β", zero=True), beta, PURPLE, "β")
    steps_axis(beta_axis, "PPO update")
    legend(reward_axis)
    legend(kl_axis)
    figure.align_ylabels()
    return figure


def log_ratios(computed: Computed) -> Any:
    """Draw how a direct method moves chosen and rejected responses against SFT (best of n, which has no pairs: its
    loss), and the held-out score and KL."""
    chosen, rejected = (computed.curve(f"direct/{side}_log_ratio") for side in ("chosen", "rejected"))
    if not (curve := chosen or computed.curve("direct/loss")):
        return None
    figure = new_figure(5.0)
    ratio_axis, score_axis, kl_axis = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    if chosen:
        line(panel(ratio_axis, "log-ratio to SFT, nats", zero=True), chosen, BLUE, "chosen responses")
        line(ratio_axis, rejected, ORANGE, "rejected responses")
    else:
        line(panel(ratio_axis, "loss, nats a token"), curve, BLUE, "loss of the chosen responses")
    line(panel(score_axis, "held-out score"), computed.curve("direct/watched_score"), BLUE, "score", marker="o")
    line(panel(kl_axis, "held-out KL, nats", zero=True), computed.curve("direct/watched_kl"), RED, "KL", marker="o")
    steps_axis(kl_axis, "optimiser step")
    legend(ratio_axis)
    figure.align_ylabels()
    return figure


def frontier(computed: Computed) -> Any:
    """Draw reward against √KL, as in Gao et al. 2023 (arXiv 2210.10760, overoptimisation)."""
    root = {step: math.sqrt(max(kl, 0.0)) for step, kl in computed.curve("ppo/kl")}
    proxy, gold = (
        [(root[step], value) for step, value in computed.curve(name) if step in root]
        for name in ("ppo/proxy_reward", "ppo/gold")
    )
    if not proxy:
        return None
    figure = new_figure(3.2)
    axis = panel(figure.add_subplot(), "reward, score units")
    line(axis, proxy, BLUE, "proxy reward", linewidth=0.6, marker="o", markersize=3.5)
    line(axis, gold, ORANGE, "gold (simulated)", linewidth=0.6, marker="^", markersize=3.5)
    kl, reward = (computed.metrics.get(name, math.nan) for name in ("policy/kl", "policy/proxy_reward"))
    if math.isfinite(kl) and math.isfinite(reward):
        line(axis, [(math.sqrt(max(kl, 0.0)), reward)], GREY, "proxy, held-out", style="", marker="D")
    axis.set_xlabel("√KL, √nats")
    legend(axis)
    return figure


def reliability(computed: Computed) -> Any:
    """Draw confidence against accuracy in equal-mass bins of held-out pairs, after temperature scaling."""
    bins = computed.document("calibration.json").get("bins")
    return _reliability(bins, "share of pairs ranked right", "confidence, max(p, 1 - p)")


def _reliability(bins: Sequence[Mapping[str, float]] | None, what: str, confidence: str) -> Any:
    if not bins:
        return None
    figure = new_figure(3.4)
    axis = panel(figure.add_subplot(), what)
    reliability_panel(axis, bins, BLUE)
    axis.set_xlabel(confidence)
    legend(axis)
    return figure


def reliability_by_slice(computed: Computed) -> Any:
    """Draw `reliability` for each slice; red if its calibration error exceeds what chance gives any slice."""
    if not (slices := [row for row in computed.document("calibration.json").get("slices", ()) if "bins" in row]):
        return None
    columns = min(2, len(slices))
    rows = -(-len(slices) // columns)
    figure = new_figure(1.9 * rows + 0.4)
    axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axis, row in zip(axes, slices, strict=False):
        off = row["judged"] and row["ece"] > row["ece_null_joint"]
        reliability_panel(axis, row["bins"], RED if off else BLUE if row["judged"] else GREY)
        name = plain(f"{row['kind']}: {row['slice']}", 22)
        axis.set_title(f"{name}\n{row['pairs']} pairs, ECE {row['ece']:.3f}", fontsize=9)
    for axis in axes[len(slices) :]:
        axis.set_visible(False)
    figure.supxlabel("confidence, max(p, 1 - p)\ngrey: known only with the label, not judged", fontsize=9)
    figure.supylabel("share of pairs ranked right", fontsize=9)
    return figure


def probes(computed: Computed) -> Any:
    """Draw the rise in score by each suffix, with the upper end that gates judge."""
    all_probes = computed.document("robustness.json").get("probes", {})
    if not (measured := {name: probe for name, probe in all_probes.items() if probe["rise"] is not None}):
        return None
    rises = [probe["rise"] for probe in measured.values()]
    above = [max(0.0, (probe["high"] or probe["rise"]) - probe["rise"]) for probe in measured.values()]
    labels = [plain(f"{name} ({probe['texts']} texts)") for name, probe in measured.items()]
    figure = new_figure(0.9 + 0.32 * len(measured))
    axis = panel(figure.add_subplot(), "")
    axis.barh(labels, rises, xerr=[[0.0] * len(above), above], color=BLUE, ecolor=GREY, capsize=3)
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.grid(visible=False, axis="y")
    axis.invert_yaxis()
    axis.set_xlabel("mean rise in score to its upper end, SFT deviations")
    return figure


def by_stratum(computed: Computed) -> Any:
    """Draw the win rate of all items, at equal length, and in each stratum, with intervals."""
    result = computed.document("result.json")
    strata, even, whole = result.get("strata", []), result.get("equal_length"), result.get("win_rate")
    if not whole or not strata or "low" not in strata[0]:
        return None
    bars = [("all items", whole["value"], whole["low"], whole["high"], BLUE)]
    if even:
        bars += [("at equal length", even["win_rate"], even["low"], even["high"], PURPLE)]
    bars += [(f"{plain(row['stratum'])} ({row['n']})", row["win_rate"], row["low"], row["high"], ORANGE)
             for row in strata]  # fmt: skip
    figure = new_figure(0.8 + 0.28 * len(bars))
    axis = figure.add_subplot()
    for row, (_, value, low, high, colour) in enumerate(bars):
        errors = [[max(0.0, value - low)], [max(0.0, high - value)]]
        axis.errorbar([value], [row], xerr=errors, color=colour, fmt="o", markersize=5, linewidth=2, capsize=3)
    axis.axvline(0.5, color=GREY, linestyle="--")
    axis.set(xlim=(0, 1), ylim=(len(bars) - 0.5, -0.5), xlabel="win rate against SFT, with its interval")
    axis.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axis.grid(visible=False, axis="y")
    return figure


def reward_on_judged(computed: Computed) -> Any:
    """Draw `reliability` on the pairs that judges decided: the policy's own replies against SFT's."""
    bins = computed.document("result.json").get("reward_model", {}).get("bins")
    return _reliability(bins, "share that the judges agree with", "confidence of the reward model, max(p, 1 - p)")


CHARTS: dict[str, dict[str, tuple[str, Callable[[Computed], Any]]]] = {
    "reward.judge": {"judge_reliability": ("Reliability diagram of the judge", reliability)},
    "reward": {
        "reliability": ("Reliability diagram: confidence against accuracy", reliability),
        "reliability_by_slice": ("Reliability diagrams of slices of the held-out pairs", reliability_by_slice),
        "probes": ("Rise in score by texts without an answer", probes),
    },
    "ppo": {
        "reward_and_kl": ("Reward, KL to SFT and β by PPO update", reward_and_kl),
        "frontier": ("Reward against the root of KL", frontier),
        "log_ratios": ("Chosen and rejected responses against SFT", log_ratios),
    },
    "human_eval": {
        "by_stratum": ("Win rate by stratum and at equal length", by_stratum),
        "reward_on_judged": ("Reliability of the reward model on the judged pairs", reward_on_judged),
    },
}
"""Maps a stage to its charts: file name, title and drawing function (which returns None without data)."""


def _save(figure: Any, title: str, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(svg(figure, title))
    return target
