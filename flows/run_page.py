"""The report of a run as one HTML file: opens from disk, asks for nothing, runs no script.

What a model or the data wrote is text here and nothing else: the template escapes all of it, and the page's content
policy allows one style sheet, known by its sha256.
"""

import base64
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from components.code_version import code_version
from components.files import replacing
from flows.charts import Chart, Panel, Rule, Series, chart, interval_chart, thin
from flows.report import MAIN_METRICS, SIMULATED, number
from flows.run_facts import Facts, run_facts

TEMPLATES = Path(__file__).parent / "templates"
LONGEST = 1500
"""Characters of a text that are shown."""
ROWS = 100
"""Rows of a chart's table of numbers."""


def write_page(home: Path, run: str) -> Path:
    """Write `report.html` into the run's folder.

    Raises:
        UserError: there is no such run.
    """
    path = home / "runs" / run / "report.html"
    text = page(run_facts(home, run))
    with replacing(path) as temporary:
        # A quarantined row may hold what UTF-8 can't.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    return path


def page(facts: Facts) -> str:
    """The page of `run_facts`."""
    style = (TEMPLATES / "run.css").read_text(encoding="utf-8")
    policy = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return _environment().get_template("run.html").render(
        facts,
        style=style,
        policy=f"default-src 'none'; style-src 'sha256-{policy}'; base-uri 'none'; form-action 'none'",
        ending=ending(facts),
        shown_metrics=lambda stage: [(name, name.partition("/")[2].replace("_", " ")) for name in MAIN_METRICS[stage]],
        simulated_note=SIMULATED,
        charts={**sft_charts(facts["sft"]), **reward_charts(facts["reward"]), **ppo_charts(facts["ppo"]),
                **human_eval_charts(facts["human_eval"])},
        code=code_name,
        written_by=code_version(),
    )  # fmt: skip


def ending(facts: Facts) -> list[str]:
    """How the run ended, a sentence each; none where there is nothing to add to its state."""
    told = [
        f"Stopped by {gate['name']}: {gate['metric']} is {number(gate['value'])}, must be {bound(gate['rule'])}."
        for gate in facts["gates"]
        if gate["outcome"] == "FAIL"
    ]
    told += [
        f"The gate {gate['name']} failed and was waived." for gate in facts["gates"] if gate["outcome"] == "WAIVED"
    ]
    for stage in facts["stages"]:
        if stage["state"] in ("failed", "interrupted", "running"):
            told.append(f"The stage {stage['name']}: {stage['state']}.")
        if stage["state"] == "awaiting_labels":
            told.append("It waits for people's labels: sheet.csv lies beside this page.")
    return told


def sft_charts(sft: Facts) -> dict[str, Chart | None]:
    """Training loss by step, and where the held-out loss ended."""
    heldout = sft["metrics"].get("sft/loss")
    rules = [] if heldout is None else [Rule(f"held-out loss at the end, {number(heldout)}", heldout, "c")]
    panel = Panel(
        "loss, nats per response token", [Series("training loss", sft["curves"].get("sft/train_loss", []))], rules, True
    )
    return {"sft": chart("sft", "Training loss of the supervised model by optimiser step", [panel], "optimiser step")}


def reward_charts(reward: Facts) -> dict[str, Chart | None]:
    """Confidence against accuracy in equal-mass bins of held-out pairs, after temperature."""
    bins = reward["bins"]
    series = [
        Series("perfect calibration", [(0.5, 0.5), (1.0, 1.0)] if bins else [], "d"),
        Series(
            "reward model, with its interval",
            [(each["confidence"], each["accuracy"]) for each in bins],
            dots=True,
            bars=[(each["low"], each["high"]) for each in bins],
        ),
    ]
    panel = Panel("share of pairs ranked right", series)
    return {
        "reliability": chart(
            "reliability", "Reliability diagram: confidence against accuracy", [panel], "confidence, max(p, 1 − p)",
            (0.48, 1.02),
        )
    }  # fmt: skip


def ppo_charts(ppo: Facts) -> dict[str, Chart | None]:
    """Reward and KL on one step axis with the tether's levels; reward against √KL; β, entropy, length."""
    found, metrics, unit = ppo["curves"], ppo["metrics"], ppo["kl"]["unit"]
    gold = Series("gold score (simulated truth)", found.get("ppo/gold", []), "b")
    rewards = [Series("proxy reward", found.get("ppo/proxy_reward", [])), *([gold] if gold.points else [])]
    # The bound is that of a response's KL, and so is the interval.
    name, high, bound = ("ppo/kl_per_token", None, None) if unit == "token" else ("ppo/kl", "ppo/kl_high", ppo["bound"])
    kl = Series("KL to SFT", found.get(name, []), "c")
    if kl.points and metrics.get(name) is not None:
        end = metrics[name]
        bars = [(end, metrics[high])] if metrics.get(high) is not None else []
        told = f"on held-out prompts, at the end{', to its upper end' if bars else ''}"
        held_out = [Series(told, [(kl.points[-1][0], end)], "d", line=False, bars=bars)]
    else:
        held_out = []
    panels = [
        Panel("reward, score units", rewards),
        Panel(f"KL to SFT, nats per {unit}", [kl, *held_out], list(_levels(ppo["kl"], bound)), zero=True),
    ]
    return {
        "course": chart("course", "Reward and KL by PPO update", panels, "PPO update"),
        "frontier": _frontier(found, rewards, metrics),
        **{
            name: chart(name, f"{what} by PPO update", [Panel(unit, [Series(what, found.get(metric, []))], zero=True)],
                        "PPO update")
            for name, metric, what, unit in (
                ("beta", "ppo/beta", "β", "SFT deviations of score per nat"),
                ("entropy", "ppo/entropy", "Entropy", "nats per token"),
                ("length", "ppo/response_tokens", "Response length", "tokens per response"),
            )
        },
    }  # fmt: skip


def _levels(kl: Mapping[str, Any], bound: float | None) -> Iterator[Rule]:
    """What holds KL, and what judges it: the target's band, the hard ceiling, the gate's bound."""
    target, ceiling = kl["target"], kl["stop_above"]
    if kl["control"] == "adaptive":
        yield Rule(f"target {target:g} ± 20 %: β moves with the error", target, "d", (0.8 * target, 1.2 * target))
    if ceiling is not None:
        yield Rule(f"hard ceiling {ceiling:g}", ceiling, "b")
    if bound is not None:
        yield Rule(f"bound of the gate ppo.kl, {bound:g}", bound, "e")


def _frontier(found: Mapping[str, Any], rewards: Sequence[Series], metrics: Mapping[str, Any]) -> Chart | None:
    """Reward against √KL, as Gao et al. 2023 (arXiv 2210.10760) draw overoptimisation."""
    root = {step: math.sqrt(max(kl, 0.0)) for step, kl in found.get("ppo/kl", [])}
    series = [
        each._replace(
            points=[(root[step], y) for step, y in each.points if step in root], dots=True, style=f"{each.style} faint"
        )
        for each in rewards
    ]
    kl, reward = metrics.get("ppo/kl"), metrics.get("ppo/proxy_reward")
    if root and kl is not None and reward is not None:
        series.append(Series("on held-out prompts, at the end", [(math.sqrt(max(kl, 0.0)), reward)], "d", line=False))
    return chart("frontier", "Reward against the root of KL", [Panel("reward, score units", series)], "√KL, √nats")


def human_eval_charts(human_eval: Facts) -> dict[str, Chart | None]:
    """The win rate with its interval, against a half and the gate's bound."""
    names = ("human_eval/win_rate", "human_eval/win_rate_low", "human_eval/win_rate_high")
    rate, low, high = (human_eval["metrics"].get(name) for name in names)
    if rate is None or low is None or high is None:
        return {"win_rate": None}
    levels = [Rule("a half: no better than SFT", 0.5, "d")]
    if human_eval["bound"] is not None:
        levels.append(Rule(f"bound for the lower end, {number(human_eval['bound'])}", human_eval["bound"], "e"))
    series = Series("win rate with its interval", [(rate, 0.0)], bars=[(low, high)])
    return {"win_rate": interval_chart("win_rate", "Win rate of the policy against SFT", series, levels)}


def code_name(code: Mapping[str, Any]) -> str:
    """Version and commit, as `components.code_version` has them."""
    commit = str(code.get("commit") or "")[:12]
    changes = ", with changes of its own" if code.get("dirty") else ""
    return f"{code.get('version') or 'version not recorded'}{f', commit {commit}' if commit else ''}{changes}"


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "number": number, "duration": duration, "moment": moment, "value": shown, "cut": cut, "rows": rows,
        "bound": bound, "breakable": breakable,
    }  # fmt: skip
    return found


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def moment(text: str) -> str:
    """An ISO time to the second, in UTC."""
    try:
        return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def bound(rule: str) -> str:
    """A gate's rule with the signs that people write."""
    return rule.replace("<=", "≤").replace(">=", "≥")


def breakable(name: str) -> Markup:
    """A dotted name that may go on in the next line after each part."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(name))))


def shown(value: Any) -> str:
    """An option's value."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: Any) -> str:
    """The beginning of a text, and how much more there is."""
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    more = len(text) - LONGEST
    return text if more <= 0 else f"{text[:LONGEST]} … ({more:,} more characters)"


def rows(found: Chart) -> list[list[float | None]]:
    """At most `ROWS` of a chart's numbers, evenly spaced."""
    return thin(found.rows, ROWS)
