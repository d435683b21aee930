"""What people look at: plots, progress, and the list of stages."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tasks import plots
from tasks.gate_report import markdown, outcome
from tasks.progress import StageProgress
from tasks.spool import Spool
from tasks.stages import PIPELINE, STAGES


@pytest.fixture
def points(tmp_path):
    spool = Spool(tmp_path / "points.jsonl")
    for step in range(20):
        spool.append(step, {"ppo/proxy_reward": step / 10, "ppo/kl": step / 4, "ppo/gold": step / 20})
    spool.close()
    return spool.path


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_ppo_draws_reward_gold_and_kl_on_one_step_axis(points, tmp_path, monkeypatch):
    drawn = {}
    real = plots._save

    def keep(figure, target):
        drawn["axes"] = figure.axes
        return real(figure, target)

    monkeypatch.setattr(plots, "_save", keep)
    written = plots.render("ppo", points, tmp_path, tmp_path / "attachments")
    assert png_size(written[0]) == (840, 480)
    reward_axis, kl_axis = drawn["axes"]
    assert reward_axis.get_shared_x_axes().joined(reward_axis, kl_axis)
    assert [len(line.get_xdata()) for axis in drawn["axes"] for line in axis.get_lines()] == [20, 20, 20]
    assert list(kl_axis.get_lines()[0].get_ydata()) == [step / 4 for step in range(20)]


def test_reward_draws_its_bins_with_intervals(tmp_path):
    bins = [{"confidence": 0.5 + i / 20, "accuracy": 0.5 + i / 22, "low": 0.45, "high": 1.0} for i in range(10)]
    (tmp_path / "calibration.json").write_text(json.dumps({"bins": bins}))
    written = plots.render("reward", tmp_path / "none.jsonl", tmp_path, tmp_path / "attachments")
    assert [path.name for path in written] == ["reliability.png"]
    assert png_size(written[0])[1] == 480


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, by file name."""
    found = {}
    real = plots._save

    def keep(figure, target):
        found[target.name] = figure
        return real(figure, target)

    monkeypatch.setattr(plots, "_save", keep)
    return found


def test_reward_draws_a_panel_a_slice_that_has_bins_and_red_where_it_is_off(tmp_path, figures):
    bins = [{"confidence": 0.6 + i / 10, "accuracy": 0.6 + i / 10, "low": 0.5, "high": 1.0} for i in range(4)]
    each = {"kind": "length", "pairs": 500, "judged": True, "ece": 0.03, "ece_null_joint": 0.05, "bins": bins}
    slices = [
        {**each, "slice": "short"},
        {**each, "slice": "long", "ece": 0.2},
        {**each, "kind": "vote", "slice": "narrow", "judged": False},
        {"kind": "category", "slice": "rare", "pairs": 3, "judged": False},
        {**each, "slice": "middle"},
        {**each, "slice": "longer"},
    ]
    (tmp_path / "calibration.json").write_text(json.dumps({"bins": bins, "slices": slices}))
    written = plots.render("reward", tmp_path / "none.jsonl", tmp_path, tmp_path / "attachments")
    assert [path.name for path in written] == ["reliability.png", "reliability_by_slice.png"]
    shown = [axis for axis in figures["reliability_by_slice.png"].axes if axis.get_visible()]
    titles = [axis.get_title().splitlines()[0] for axis in shown]
    assert titles == ["length: short", "length: long", "vote: narrow", "length: middle", "length: longer"]
    colours = [axis.get_lines()[1].get_color() for axis in shown]
    assert colours[:3] == [plots.REWARD_COLOUR, plots.KL_COLOUR, "grey"]


def test_reward_draws_the_probes_that_have_evidence(tmp_path, figures):
    probes = {
        "filler": {"rise": 0.3, "high": 0.35, "texts": 512},
        "dots": {"rise": -0.1, "high": None, "texts": 1},
        "whitespace": {"rise": None, "high": None, "texts": 0},
    }
    (tmp_path / "robustness.json").write_text(json.dumps({"probes": probes}))
    written = plots.render("reward", tmp_path / "none.jsonl", tmp_path, tmp_path / "attachments")
    assert [path.name for path in written] == ["probes.png"]
    axis = figures["probes.png"].axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["filler (512 texts)", "dots (1 texts)"]
    assert [bar.get_width() for bar in axis.patches] == [0.3, -0.1]


def test_a_stage_without_curves_draws_nothing(tmp_path):
    assert plots.render("ppo", tmp_path / "none.jsonl", tmp_path, tmp_path / "attachments") == []
    assert not (tmp_path / "attachments").exists()


def test_progress_without_a_terminal_is_a_few_plain_lines_ending_with_the_last_step():
    console = Console(file=io.StringIO(), width=60)
    with StageProgress(console, "ppo") as progress:
        for step in range(1, 101):
            progress.show({"step": step, "time": 0, "metrics": {"ppo/kl": step / 3, "[b]": 1.0}, "total": 100})
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0] == "  ppo 1/100  ppo/kl 0.33333  [b] 1"
    assert lines[1].startswith("  ppo 100/100")


def test_progress_on_a_terminal_is_a_bar_that_takes_any_metric_name():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with StageProgress(console, "ppo") as progress:
        progress.show({"step": 1, "time": 0, "metrics": {"[b]x": 1.0}, "total": 2})
        progress.show({"step": 2, "time": 0, "metrics": {"ppo/kl": 1.0}})
    assert "2/2" in console.file.getvalue()


def test_the_pipeline_is_its_stages_in_order_and_one_sub_stage():
    assert tuple(dict.fromkeys(stage.shown for stage in STAGES.values())) == PIPELINE
    assert [name for name, stage in STAGES.items() if not stage.final] == ["human_eval.sample"]


@pytest.mark.parametrize("name", sorted(STAGES))
def test_every_stage_loads_with_a_config_class(name):
    stage = STAGES[name]
    assert callable(stage.load_run())
    assert {"seed"} <= set(stage.load_job().model_fields)
    assert Path(stage.module.replace(".", "/") + ".py").is_file()


def test_the_gate_table_names_each_outcome(kit):
    from components.gates import Waiver, judge

    gates = {**kit.thresholds().stage("ppo"), "kl": 8.0, "kl_floor": 1.0, "ended": 0.9, "repetition": 0.2}
    metrics = {"ppo/kl_high": 9.0, "ppo/kl": 0.5, "ppo/ended": 0.95}
    verdicts = judge("ppo", metrics, gates, [Waiver(gate="ppo.kl", user="ada", reason="why")])
    found = {verdict.name: outcome(verdict) for verdict in verdicts}
    assert (found["ppo.kl"], found["ppo.kl_floor"], found["ppo.ended"]) == ("WAIVED", "WARN", "PASS")
    assert (found["ppo.repetition"], found["ppo.echo"]) == ("FAIL", "OFF")
    table = markdown(verdicts)
    assert "Waived by ada: why" in table
    assert len(table.splitlines()) == 2 + len(verdicts)
