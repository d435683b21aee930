"""What people look at: plots, progress, and the list of stages."""

import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tasks.execution import drawing, plots
from tasks.execution.stage_progress import StageProgress
from tasks.runs.points import Spool
from tasks.stages import ALWAYS, COMPARISON, OPTIONAL, PIPELINE, STAGES, ends_group, group_of

HOSTILE = "\ud83d\x00 $x^{$</text><script>alert(1)</script>"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, by file name."""
    found = {}
    real = plots._save

    def keep(figure, title, target):
        found[target.name] = figure
        return real(figure, title, target)

    monkeypatch.setattr(plots, "_save", keep)
    return found


@pytest.fixture
def render(tmp_path):
    """`render(stage, curves={}, changes=[], metrics={}, **documents)` draws a stage of the tiny profile."""

    def render(stage, curves=None, changes=(), metrics=None, folder="out", **documents):
        spool = Spool(tmp_path / f"{folder}.points.jsonl")
        for step, values in enumerate(zip(*(curves or {"none": []}).values(), strict=True), 1):
            spool.append(step, dict(zip(curves, values, strict=True)))
        spool.close()
        (tmp_path / folder / "artifact").mkdir(parents=True)
        for name, document in documents.items():
            (tmp_path / folder / "artifact" / f"{name}.json").write_text(json.dumps(document))
        job = load_config("tiny", [parse_override(text) for text in changes]).resolved().stage_job(STAGES[stage])
        return plots.render(stage, job, metrics or {}, spool.path, tmp_path / folder)

    return render


PAIRS = {
    "direct/chosen_log_ratio": [0.0, 0.5, -0.25], "direct/rejected_log_ratio": [0.0, -1.0, -3.5],
    "direct/watched_score": [0.0, 0.4, 0.6], "direct/watched_kl": [0.0, 0.9, 1.7],
}  # fmt: skip
PPO = {
    "ppo/proxy_reward": [0.0, 1.0, 1.5], "ppo/gold": [0.0, 0.75, 0.5], "ppo/kl": [0.0, 1.44, 2.25],
    "ppo/kl_per_token": [0.0, 0.04, 0.05], "ppo/beta": [0.2, 0.19, 0.17], "ppo/entropy": [0.5, 0.4, 0.3],
    "ppo/response_tokens": [10, 11, 12.5],
}  # fmt: skip
END = {"policy/kl": 2.5, "policy/kl_high": 3.0, "policy/proxy_reward": 1.25, "policy/kl_per_token": 0.06}
BINS = [{"confidence": 0.5 + i / 10, "accuracy": 0.5 + i / 12, "low": 0.45, "high": 1.0} for i in range(4)]
SLICE = {
    "kind": "length",
    "slice": "short",
    "pairs": 500,
    "judged": True,
    "ece": 0.03,
    "ece_null_joint": 0.05,
    "bins": BINS,
}
PROBES = {
    "filler": {"rise": 0.3, "high": 0.35, "texts": 512},
    "dots": {"rise": -0.1, "high": None, "texts": 1},
    "whitespace": {"rise": None, "high": None, "texts": 0},
}

RESULT = {
    "win_rate": {"value": 0.6, "low": 0.55, "high": 0.7},
    "equal_length": {"win_rate": 0.55, "low": 0.4, "high": 0.7},
    "strata": [{"stratum": HOSTILE, "n": 5, "win_rate": 0.6, "low": 0.3, "high": 0.9}],
    "reward_model": {"bins": BINS},
}


@pytest.fixture
def everything(render):
    """Every chart of every stage."""
    kl = ["ppo.kl.control=adaptive", "ppo.kl.target=2", "ppo.kl.band=3", "ppo.kl.ceiling=4", "ppo.updates=90"]

    def everything(folder):
        return [
            *render("reward.judge", None, folder=f"{folder}/reward.judge", calibration={"bins": BINS, "slices": []}),
            *render("reward", folder=f"{folder}/reward",
                    calibration={"bins": BINS, "slices": [SLICE, {**SLICE, "slice": HOSTILE, "ece": 0.2}]},
                    robustness={"probes": {**PROBES, HOSTILE: PROBES["filler"]}}),
            *render("ppo", PPO | PAIRS, kl, END, f"{folder}/ppo"),
            *render("human_eval", folder=f"{folder}/human_eval", result=RESULT),
        ]  # fmt: skip

    return everything


def lines(axis):
    """What an axis draws, by label."""
    return {line.get_label(): [*zip(*map(list, line.get_data()), strict=True)] for line in axis.get_lines()}


def test_every_chart_is_drawn_the_same_each_time(everything):
    one, two = everything("one"), everything("two")
    assert {path.parts[-3]: None for path in one} == dict.fromkeys(plots.CHARTS)
    names = [f"{name}.svg" for charts in plots.CHARTS.values() for name in charts]
    assert [path.name for path in one] == [path.name for path in two] == names
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_colour_reads_on_white_and_on_the_dark_page_and_nothing_is_painted_behind(everything):
    for path in everything("out"):
        found = set(re.findall("#[0-9a-f]{6}\\b", re.sub('"#[^"]*"', "", path.read_text())))
        assert found, path
        for colour in found:
            at = luminance(colour) + 0.05
            assert 1.05 / at >= 3 and at / (luminance("#0d1117") + 0.05) >= 3, (path.name, colour)


def test_a_chart_is_xml_without_script_whatever_a_slice_is_called_and_says_what_it_shows(everything):
    for path in everything("out"):
        root = ElementTree.fromstring(path.read_bytes())
        tags = {each.tag.rpartition("}")[2] for each in root.iter()}
        assert not tags & {"script", "image", "foreignObject", "a"}, path
        assert root.findtext("{*}title") == plots.CHARTS[path.parts[-3]][path.stem][0]
        if path.stem in ("reliability_by_slice", "probes"):
            told = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
            assert any("</t" in text and len(text) < 50 for text in told if text), path


def test_a_direct_method_draws_chosen_and_rejected(render, figures):
    (drawn,) = render("ppo", PAIRS, ["policy.method=dpo"])
    assert drawn.name == "log_ratios.svg"
    ratios, score, kl = figures["log_ratios.svg"].axes
    expected = {f"{side} responses": PAIRS[f"direct/{side}_log_ratio"] for side in ("chosen", "rejected")}
    assert lines(ratios) == {name: list(enumerate(curve, 1)) for name, curve in expected.items()}
    assert lines(score)["score"][-1] == (3, 0.6) and lines(kl)["KL"][-1] == (3, 1.7)


def test_ppo_draws_reward_kl_and_beta_on_one_axis_with_what_holds_kl(render, figures):
    changes = ["ppo.kl.control=adaptive", "ppo.kl.target=2", "ppo.kl.band=3", "ppo.kl.ceiling=4", "ppo.updates=90"]
    render("ppo", PPO, changes, END)
    reward, kl, beta = figures["reward_and_kl.svg"].axes
    assert reward.get_shared_x_axes().joined(reward, beta) and reward.get_shared_x_axes().joined(reward, kl)
    assert lines(reward) == {
        "proxy reward": [(1, 0.0), (2, 1.0), (3, 1.5)],
        "gold (simulated)": [(1, 0.0), (2, 0.75), (3, 0.5)],
    }
    assert lines(kl)["KL of the batch"] == [(1, 0.0), (2, 1.44), (3, 2.25)]
    assert [y for _, y in lines(kl)["hard ceiling 4"]] == [4, 4]
    (band,) = (each for each in kl.patches if each.get_label() == "target 2 ± 20 %")
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((1.6, 2.4))
    (held_out,) = kl.containers
    assert held_out.get_label() == "held-out, upper end"
    assert held_out.lines[0].get_data()[1] == [2.5]
    assert held_out.lines[2][0].get_segments()[0].tolist() == [[3, 2.5], [3, 3]]
    assert lines(beta)["β"] == [(1, 0.2), (2, 0.19), (3, 0.17)]


def test_a_judges_gain_stands_beside_the_reward_with_its_interval(render, figures):
    gain = {f"ppo/watched_judge_gain{end}": [math.nan, 0.5 + by, 1.0 + by]
            for end, by in (("", 0.0), ("_low", -0.25), ("_high", 0.5))}  # fmt: skip
    render("ppo", PPO | gain, (), END)
    reward, _, _ = figures["reward_and_kl.svg"].axes
    assert lines(reward)["gain by the independent judge"] == [(2, 0.5), (3, 1.0)]
    (between,) = reward.collections
    corners = {(x, y) for x, y in between.get_paths()[0].vertices.tolist()}
    assert corners == {(2, 0.25), (3, 0.75), (2, 1.0), (3, 1.5)}


@pytest.mark.parametrize("high", [None, 0.08])
def test_a_tether_in_nats_a_token_is_drawn_in_them(render, figures, high):
    end = END if high is None else END | {"policy/kl_per_token_high": high}
    render("ppo", PPO, ["ppo.kl.unit=token", "gates.policy.kl_per_token=0.2"], end)
    _, kl, _ = figures["reward_and_kl.svg"].axes
    assert kl.get_ylabel() == "KL to SFT, nats per token"
    assert lines(kl)["KL of the batch"] == [(1, 0.0), (2, 0.04), (3, 0.05)]
    assert [label for label in kl.get_legend_handles_labels()[1] if "target" in label] == [], "β is fixed"
    (held_out,) = kl.containers
    assert held_out.get_label() == ("held-out prompts" if high is None else "held-out, upper end")
    assert held_out.lines[2][0].get_segments()[0].tolist() == [[3, 0.06], [3, high or 0.06]], "not that of a response"


def test_the_frontier_is_reward_against_the_root_of_kl(render, figures):
    render("ppo", PPO, (), END)
    (axis,) = figures["frontier.svg"].axes
    assert lines(axis)["proxy reward"] == [(0.0, 0.0), (1.2, 1.0), (1.5, 1.5)]
    assert lines(axis)["proxy, held-out"] == [(pytest.approx(2.5**0.5), 1.25)]


def test_points_that_are_not_finite_are_left_out_and_long_curves_are_thinned(render, figures):
    reward, kl = "ppo/proxy_reward", {"ppo/kl": [0.0] * 4}
    render("ppo", {reward: [math.nan, 1.0, math.inf, 2.0]} | kl)
    assert lines(figures["reward_and_kl.svg"].axes[0]) == {"proxy reward": [(2, 1.0), (4, 2.0)]}
    render("ppo", {reward: [float(i) for i in range(3000)], "ppo/kl": [0.0] * 3000}, folder="long")
    (drawn,) = lines(figures["reward_and_kl.svg"].axes[0]).values()
    assert len(drawn) == drawing.MOST and (drawn[0], drawn[-1]) == ((1, 0.0), (3000, 2999.0))


def test_reward_draws_a_panel_a_slice_that_has_bins_and_red_where_it_is_off(render, figures):
    slices = [
        SLICE,
        {**SLICE, "slice": "long", "ece": 0.2},
        {**SLICE, "kind": "vote", "slice": "narrow", "judged": False},
        {"kind": "category", "slice": "rare", "pairs": 3, "judged": False},
        {**SLICE, "slice": "middle"},
        {**SLICE, "slice": "longer"},
    ]
    written = render("reward", calibration={"bins": BINS, "slices": slices})
    assert [path.name for path in written] == ["reliability.svg", "reliability_by_slice.svg"]
    shown = [axis for axis in figures["reliability_by_slice.svg"].axes if axis.get_visible()]
    titles = [axis.get_title().splitlines()[0] for axis in shown]
    assert titles == ["length: short", "length: long", "vote: narrow", "length: middle", "length: longer"]
    colours = [axis.get_lines()[1].get_color() for axis in shown]
    assert colours[:3] == [drawing.BLUE, drawing.RED, drawing.GREY]


def test_reward_draws_the_probes_that_have_evidence(render, figures):
    assert [path.name for path in render("reward", robustness={"probes": PROBES})] == ["probes.svg"]
    axis = figures["probes.svg"].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["filler (512 texts)", "dots (1 texts)"]
    assert [bar.get_width() for bar in axis.patches] == [0.3, -0.1]


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_that_left_nothing_to_draw_draws_nothing(render, tmp_path, stage):
    assert render(stage) == []
    assert not (tmp_path / "out" / "attachments").exists()


@given(st.lists(st.integers(), min_size=1, max_size=2000))
def test_a_thinned_curve_keeps_its_ends_and_its_order(points):
    indexed = list(enumerate(points))
    found = drawing.thin(indexed)
    assert len(found) == min(len(points), drawing.MOST) and found[0] == indexed[0] and found[-1] == indexed[-1]
    assert [index for index, _ in found] == sorted({index for index, _ in found})


def test_progress_without_a_terminal_is_a_few_plain_lines_ending_with_the_last_step():
    console = Console(file=io.StringIO(), width=60)
    with StageProgress(console, "ppo") as progress:
        for step in range(1, 101):
            progress.show({"step": step, "time": 0, "metrics": {"ppo/kl": step / 3, "[b]": 1.0}, "total": 100})
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "  ppo 1/100  ppo/kl 0.33333  [b] 1"
    assert lines[1].startswith("  ppo 100/100")


def test_a_sub_stage_runs_before_the_stage_that_ends_its_group():
    assert PIPELINE == ("validate", "sft", "reward", "ppo", "evaluation", "human_eval")
    assert ALWAYS == ("validate", "sft", "reward", "ppo", "human_eval")
    sub_stages = [name for name in STAGES if not ends_group(name)]
    evaluated = [f"evaluation.{side}_{kind}" for kind in ("tasks", "probes") for side in ("sft", "policy")]
    assert sub_stages == ["validate.judge", "reward.judge", *evaluated, "human_eval.sample", "human_eval.reward"]
    assert {*OPTIONAL} == {*sub_stages[:-2], "evaluation"}
    names = list(STAGES)
    assert all(names.index(name) < names.index(group_of(name)) for name in sub_stages)
    assert [name for name in COMPARISON if ends_group(name)] == ["human_eval.compared"]


@pytest.mark.parametrize("name", sorted(STAGES))
def test_every_stage_loads_with_a_config_class(name):
    stage = STAGES[name]
    assert callable(stage.load_run())
    assert {"seed"} <= set(stage.load_job().model_fields)
    assert Path(stage.module.replace(".", "/") + ".py").is_file()
