"""Sweeps with stages that a test plays: what is checked before, computed once, missing and summed up."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from inspect import unwrap
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.base.errors import CheckFailed, GateFailed, UserError
from components.base.jsonl import write_json, write_rows
from components.base.nested import group
from components.base.settings import Settings, keyed_values
from components.gates.judging import GatesConfig
from components.keys import fingerprint
from components.store.leases import leased
from flows.cli.sweep_command import sweep as sweep_of
from flows.config.run_config import load_config, to_values
from flows.data import run_plugins
from flows.launch.begin import Launch
from flows.rlhf import pipeline
from flows.studies import sub_runs, sweep_page
from flows.studies import sweep as studies
from flows.studies.level_kl import Trial
from flows.studies.sub_runs import Study
from flows.studies.sweep import MEASURES, Cell, CellGroup, Sweep, combinations, run_sweep
from flows.studies.sweep_page import draw, failures, measures_of, notes, print_sweep, ranged, write_page
from tasks.execution.context import Reporting, RunContext
from tasks.execution.runner import _key, peek
from tasks.result import Given, StageResult
from tasks.runs.run_label import Label
from tasks.runs.status import list_runs, load_status
from tasks.stages import STAGES, Stage
from tests.conftest import Tether
from tests.stored_run import HOSTILE, METRICS, publish

Play = Callable[[Launch], dict[str, float]]


def played(monkeypatch: pytest.MonkeyPatch, play: Play) -> list[str]:
    """Have `play` return PPO's metrics in place of computing a run; the names of the runs that were computed."""
    names = []

    def compute(launch: Launch, server: object) -> None:
        ctx = replace(launch.ctx, reporting=Reporting(track=False))

        def run_stage(stage: Stage, job: Settings, inputs: Given) -> StageResult:
            if peek(stage, job, inputs, ctx) is None:
                metrics = METRICS[stage.name] | (played_metrics if stage.name == "ppo" else {})
                _publish(ctx, stage, job, inputs, metrics)
            result = peek(stage, job, inputs, ctx)
            assert result is not None
            record, state = result.record, result.state.replace("cached", "passed")
            entry = {"state": state, "key": record.key, "digest": record.digest, "metrics": record.metrics}
            ctx.status.update(stage.group, **entry, gates=result.verdicts)
            if result.state == "gate_failed":
                raise GateFailed("a gate failed")
            return result

        with ctx:
            names.append(ctx.status.document.name)
            played_metrics = {"policy/gold": 1.0, "policy/sft_gold": 0.25} | play(launch)
            pipeline(launch.config, launch.sources, run_stage, ctx.status.document.until)

    monkeypatch.setattr(sub_runs, "compute", compute)
    monkeypatch.setattr(fingerprint, "code_parts", cache(fingerprint.code_parts))  # the files stay the same
    return names


def _publish(ctx: RunContext, stage: Stage, job: Settings, inputs: Given, metrics: dict[str, float]) -> None:
    """Store what the page reads of a policy, and a file that is the run's own."""
    key, parts, _ = _key(stage, job, inputs, ctx)
    out = ctx.home / "out"
    out.mkdir()
    (out / "run").write_text(ctx.run)
    if stage.name == "ppo":
        write_json(out / "metadata.json", {
            "published_update": 2,
            "evaluations": [{"update": 1, "kl": 99.0}, {"update": 2, "kl": metrics["policy/kl"] + 0.5}],
        })  # fmt: skip
        reply = {"response": HOSTILE + ctx.run, "score": 1.0, "kl": 2.0, "gold": 0.5}
        write_rows(out / "evaluation.jsonl", ({"prompt": f"prompt {n}", "policy": reply, "sft": reply}
                                              for n in range(12)))  # fmt: skip
    about = {"stage": stage.name, "run": ctx.run, "metrics": metrics, "seconds": 10.0, "job": keyed_values(job),
             "parts": parts, "inputs": parts["inputs"], "environment": {}}  # fmt: skip
    ctx.store.publish(key, out, None, about)
    out.rmdir()


def swept(home: Path, *over: str, minutes: float | None = None, **wanted: Any) -> Sweep:
    sweep = Sweep("tiny", over, **wanted)
    run_sweep(home, sweep, minutes)
    return sweep


def test_options_are_combined_in_order_and_values_are_yaml() -> None:
    texts = list(combinations(["ppo.kl.target=1,2.5", "ppo.rewards=null,[{source: pipeline}]", "sft.base=a"]))
    assert texts == [
        ["ppo.kl.target=1", "ppo.rewards=null", "sft.base=a"],
        ["ppo.kl.target=1", 'ppo.rewards=[{"source": "pipeline"}]', "sft.base=a"],
        ["ppo.kl.target=2.5", "ppo.rewards=null", "sft.base=a"],
        ["ppo.kl.target=2.5", 'ppo.rewards=[{"source": "pipeline"}]', "sft.base=a"],
    ]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["ppo.epochs"], "--over ppo.epochs: expected OPTION=V1,V2"),
        (["ppo.epochs="], "--over ppo.epochs=: expected OPTION=V1,V2"),
        (["ppo.epochs=1", "ppo.epochs=2"], "--over ppo.epochs=2: ppo.epochs is given twice"),
        (["ppo.epochs=1,nine"], "--over ppo.epochs=nine: tiny: ppo.epochs"),
        (["ppo.epochs=1", "ppo.epoch=2"], "did you mean ppo.epochs"),
        (["data.preferences=null,there/is/none.jsonl"], "--over data.preferences=there/is/none.jsonl: "),
        (["ppo.epochs=1,1"], "--over ppo.epochs=1: the options are those of ppo.epochs=1."),
        (["ppo.kl.coefficient=0.1,0.2"], "--level-kl chooses ppo.kl.coefficient, which is set too"),
        (["ppo.evaluate_every=4,null"], "--level-kl needs evaluations during training, and ppo.evaluate_every is null"),
    ],
)
def test_a_mistake_in_any_cell_is_found_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: Sequence[str], message: str
) -> None:
    names = played(monkeypatch, lambda launch: {})
    with pytest.raises(UserError, match=re.escape(message)):
        swept(tmp_path, *over, level="--level-kl" in message)
    assert names == [] and list_runs(tmp_path) == []


def test_a_cell_whose_config_is_damaged_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It blocked its sweep, and each try left a run that had begun."""
    names = played(monkeypatch, lambda launch: {})
    [group] = swept(tmp_path, "ppo.epochs=1").groups
    (tmp_path / "runs" / group.cells[0].run / "config.yaml").write_text("ppo: [")
    swept(tmp_path, "ppo.epochs=1")
    assert len(names) == 2 == len(list_runs(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--over", "ppo.epochs=1,nine"], "tether: --over ppo.epochs=nine: tiny: ppo.epochs"),
        (["--over", "ppo.epochs=1", "--kl", "1,2"], "tether: --kl is the band of --level-kl. Give both."),
        (["--over", "ppo.epochs=1", "--level-kl", "--kl", "3,2"], "tether: --kl 3,2: expected LOW,HIGH"),
        (["--over", "ppo.epochs=1", "--level-kl", "--kl", "3"], "tether: --kl 3: expected LOW,HIGH"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    tether_here: Tether, tmp_path: Path, options: Sequence[str], message: str
) -> None:
    done = tether_here("sweep", "tiny", *options, home=tmp_path / "home")
    assert done.returncode == 2 and done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_text_that_yaml_reads_otherwise_stays_a_text() -> None:
    assert list(combinations(["sft.base='1','true',a b"])) == [
        ['sft.base="1"'], ['sft.base="true"'], ["sft.base=a b"],
    ]  # fmt: skip


def test_a_seed_changes_only_the_jobs_of_ppo_and_of_no_other_stage() -> None:
    sweep = Sweep("tiny", ["ppo.epochs=1"])
    first, second = (sweep.config(["ppo.epochs=1"], seed) for seed in (0, 1))
    differing = [name for name, stage in STAGES.items() if first.stage_job(stage) != second.stage_job(stage)]
    assert differing == ["ppo"] and second.stage_job(STAGES["ppo"]).seed == 1  # type: ignore[attr-defined]
    plain = load_config("tiny").model_copy(update={"ppo": first.ppo})
    assert plain.stage_job(STAGES["ppo"]) == first.stage_job(STAGES["ppo"])


METHODS = ["policy.method=ppo,dpo,online_dpo"]


def test_an_option_is_set_in_the_cells_whose_method_uses_it() -> None:
    sweep = Sweep("demo", METHODS, ["policy.beta=0.3", "ppo.updates=70", "ppo.ratio=sequence", "ppo.evaluate=100"])
    ppo, dpo, online = (sweep.config(cell) for cell in combinations(METHODS))
    default = load_config("demo")
    assert [config.policy.beta for config in (ppo, dpo, online)] == [default.policy.beta, 0.3, default.policy.beta]
    assert [config.ppo.updates for config in (ppo, dpo, online)] == [70, default.ppo.updates, 70]
    assert [config.ppo.ratio for config in (ppo, dpo, online)] == ["sequence", "token", "token"]
    assert {config.ppo.evaluate for config in (ppo, dpo, online)} == {100}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("policy.n=4", "policy.n has no effect with policy.method=ppo"),  # best_of_n alone has it
        ("policy.bta=0.3", "did you mean policy.beta"),
        ("policy=3", "policy"),
    ],
)
def test_an_option_that_no_method_uses_is_refused(option: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"^--over policy.method=.*{re.escape(message)}"):
        swept(tmp_path, *METHODS, options=[option])


def test_methods_are_swept_at_equal_kl_with_the_profile_of_hh() -> None:
    sweep = Sweep("hh-smollm2", ["policy.method=ppo,dpo"], level=True)
    starts = [sweep.search(cell).option for cell in combinations(sweep.over)]
    assert starts == ["ppo.kl.target", "policy.beta"]


def test_no_option_makes_one_run_count_as_two_seeds(tmp_path: Path) -> None:
    profile = tmp_path / "seeded.yaml"
    profile.write_text("extends: tiny\npolicy_seed: 5\n")
    cells = [Sweep(str(profile), ["ppo.epochs=1"], seeds=2).config(["ppo.epochs=1"], seed) for seed in (0, 1)]
    assert [cell.policy_seed for cell in cells] == [None, 1]
    for over, options in ((["policy_seed=5,6"], []), (["ppo.epochs=1"], ["policy_seed=5"])):
        with pytest.raises(UserError, match="--seeds chooses policy_seed, which is set too"):
            swept(tmp_path, *over, options=options, seeds=2)
        texts = next(combinations(over))
        assert Sweep("tiny", over, options).config(texts).policy_seed == 5, "of one seed it may be set"


def test_a_killed_sweep_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed_in_the_second(launch: Launch) -> dict[str, float]:
        if len(list_runs(tmp_path)) == 2:
            raise KeyboardInterrupt
        return {}

    names = played(monkeypatch, killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, "ppo.epochs=1,2", seeds=2)
    assert names == ["ppo.epochs=1, seed 0", "ppo.epochs=2, seed 0"]
    sweep = swept(tmp_path, "ppo.epochs=1,2", seeds=2)
    assert names[2:] == ["ppo.epochs=2, seed 0", "ppo.epochs=1, seed 1", "ppo.epochs=2, seed 1"]
    assert swept(tmp_path, "ppo.epochs=1,2", seeds=2) == sweep and len(names) == 5
    tags = load_status(tmp_path, sweep.groups[1].cells[1].run).tags
    assert tags["sweep"] == sweep.name and len(tags["sweep.key"]) == 16
    values = load_status(tmp_path, sweep.groups[0].cells[0].run)
    assert values.until == "ppo"


def test_a_cell_of_other_data_or_code_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = played(monkeypatch, lambda launch: {})
    data, home = tmp_path / "pairs.jsonl", tmp_path / "home"

    def runs(content: str, **wanted: Any) -> list[str]:
        data.write_text(content)
        sweep = swept(home, "ppo.epochs=1", options=[f"data.preferences={data}"], **wanted)
        return [cell.run for cell in sweep.groups[0].cells]

    row = json.dumps({"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "Seven."}) + "\n"
    (first,) = runs(row)
    assert runs(2 * row, minutes=0) == [], "the old run is not of these data"
    second, third = runs(2 * row, seeds=2)
    assert [name[-6:] for name in names] == ["seed 0", "seed 0", "seed 1"] and first not in (second, third)
    assert runs(row) == [first] and len(list_runs(home)) == 3
    monkeypatch.setattr(fingerprint, "code_parts", lambda *_: {"source": {"a": "changed"}, "task": {}})
    assert runs(row) != [first] and len(names) == 4


def test_a_changed_gate_plug_in_judges_an_ended_cell_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = played(monkeypatch, lambda launch: {})
    monkeypatch.setattr(run_plugins, "find_plugin", lambda *_: None)
    gate = 'gates.extra={ppo: {sorry: {plugin: no_apologies, op: "<=", threshold: null}}}'

    def computed(code: str) -> int:
        monkeypatch.setattr(run_plugins, "plugin_code", lambda _: code)
        swept(tmp_path, "ppo.epochs=1", options=[gate])
        return len(names)

    assert [computed(code) for code in ("1.0 a", "1.0 a", "1.0 b")] == [1, 1, 2]
    assert len([*tmp_path.glob("store/records/*/*.json")]) == 4, "its results are found in the store"


def test_the_runs_of_a_sweep_get_no_alias(tmp_path: Path) -> None:
    assert not Sweep("demo", ["ppo.epochs=1"]).config(["ppo.epochs=1"]).promote and load_config("demo").promote


def test_no_run_begins_after_the_budget_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = played(monkeypatch, lambda launch: {})
    swept(tmp_path, "ppo.epochs=1")
    sweep = swept(tmp_path, "ppo.epochs=1", seeds=2, minutes=0)
    assert len(names) == 1, "the first seed's run has ended and is taken, the second is not begun"
    assert [cell.seed for cell in sweep.groups[0].cells] == [0]
    assert "1 cell is missing: ppo.epochs=1 seed 1. The same command computes them." in notes(sweep)
    searched = swept(tmp_path, "ppo.epochs=1,2", level=True, minutes=0)
    assert "2 cells are missing: ppo.epochs=1 seed 0; ppo.epochs=2 seed 0." in notes(searched)[0]


def test_a_failed_gate_is_an_outcome_and_not_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = played(monkeypatch, lambda launch: {"policy/kl_high": 9.0 if launch.config.ppo.epochs == 1 else 3.0})
    sweep = swept(tmp_path, "ppo.epochs=1,2")
    assert [cell.state for cells in sweep.groups for cell in cells.cells] == ["gate_failed", "passed"]
    assert [failures(cells) for cells in sweep.groups] == ["policy.kl (1 of 1)", ""]
    swept(tmp_path, "ppo.epochs=1,2")
    assert len(names) == 2


def test_a_failed_check_is_an_outcome_that_the_same_command_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(launch: Launch) -> dict[str, float]:
        if launch.config.ppo.epochs == 1:
            raise CheckFailed("the loss is not finite")
        return {}

    names = played(monkeypatch, fails)
    sweep = swept(tmp_path, "ppo.epochs=1,2")
    assert ["ppo" not in cell.models for cells in sweep.groups for cell in cells.cells] == [True, False]
    assert sweep.groups[0].cells[0].state == "failed"
    assert [sample["responses"].keys() for sample in sweep.samples[:1]] == [{"SFT", "ppo.epochs=2"}]
    swept(tmp_path, "ppo.epochs=1,2")
    assert names.count("ppo.epochs=1, seed 0") == 2


def test_another_process_with_the_same_sweep_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, lambda launch: {})
    folder = Study(tmp_path, "sweep", Sweep("tiny", ["ppo.epochs=1"]).name, "tiny").folder
    with leased(folder / "lock"), pytest.raises(UserError, match="another process computes it"):
        swept(tmp_path, "ppo.epochs=1")


def test_the_search_runs_on_the_first_seed_alone_and_its_strength_serves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL on calibration prompts is 0.5 above the test split's, and falls with β: 3 nats at β = 0.05 and at 0.2."""

    def kl(launch: Launch) -> dict[str, float]:
        per_beta = 0.15 if launch.config.ppo.epochs == 1 else 0.6
        return {"policy/kl": per_beta / launch.config.ppo.kl.coefficient - 0.5, "policy/kl_high": 3.0}

    names = played(monkeypatch, kl)
    sweep = swept(tmp_path, "ppo.epochs=1,2", level=True, band=(2.9, 3.1), seeds=2)
    assert [cells.name for cells in sweep.groups] == [
        "ppo.epochs=1, ppo.kl.coefficient=0.05", "ppo.epochs=2, ppo.kl.coefficient=0.2",
    ]  # fmt: skip
    assert [[(t.strength, round(t.kl, 6)) for t in cells.trials] for cells in sweep.groups] == [
        [(0.1, 1.5), (0.05, 3.0)], [(0.1, 6.0), (0.2, 3.0)],
    ]  # fmt: skip
    assert len(names) == 6 and sum("seed 1" in name for name in names) == 2
    assert sweep.groups[0].cells[0].run == sweep.groups[0].trials[1].run
    assert "Training the policies took 60 s." in notes(sweep)
    assert swept(tmp_path, "ppo.epochs=1,2", level=True, band=(2.9, 3.1), seeds=2) == sweep and len(names) == 6


def test_a_search_ends_where_an_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The band of the profile is 5 nats, and a target must be below it."""
    played(monkeypatch, lambda launch: {"policy/kl": 0.5 * launch.config.ppo.kl.target - 0.5})
    options = ["ppo.kl.control=adaptive", "ppo.updates=100"]
    sweep = swept(tmp_path, "ppo.epochs=1", level=True, band=(2.9, 3.1), options=options)
    assert [trial.strength for trial in sweep.groups[0].trials] == [3.0]
    assert "outside the band" in sweep.groups[0].search and "it ended there, because" in sweep.groups[0].search


def test_a_group_that_is_refused_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(launch: Launch) -> dict[str, float]:
        if launch.config.ppo.epochs == 1:
            raise UserError("there is no estimate.")
        return {"policy/kl": 2.5}

    def refused_all(launch: Launch) -> dict[str, float]:
        raise UserError("there is no estimate.")

    played(monkeypatch, refuses)
    sweep = swept(tmp_path, "ppo.epochs=1,2", level=True, band=(2.9, 3.1), seeds=2)
    assert [len(cells.cells) for cells in sweep.groups] == [0, 2]
    assert notes(sweep)[0] == "ppo.epochs=1: no search, because there is no estimate."
    assert not any("missing" in note for note in notes(sweep))
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"^ppo\.epochs=1: no search, because there is no estimate\.$"):
        unwrap(sweep_of)("tiny", ["ppo.epochs=1,2"], level_kl=True, kl="2.9,3.1", seeds=2)
    assert "page: " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^there is no estimate\.$"):
        swept(tmp_path, "ppo.epochs=1", level=True)
    played(monkeypatch, refused_all)
    nothing = swept(tmp_path / "other", "ppo.epochs=1,2", level=True)
    assert [cells.search for cells in nothing.groups] == 2 * ["no search, because there is no estimate."]
    assert "no search, because" in write_page(tmp_path, nothing).read_text() and narrow(nothing).count("no search") == 2


def test_a_trial_without_kl_ends_the_search_with_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """β = 0.1 is 1 nat; β = 0.0334 diverges."""

    def diverges_below(beta: float) -> Play:
        def play(launch: Launch) -> dict[str, float]:
            if launch.config.ppo.kl.coefficient < beta:
                raise CheckFailed("the loss is not finite")
            return {"policy/kl": 0.5}

        return play

    names = played(monkeypatch, diverges_below(0.1))
    sweep = swept(tmp_path, "ppo.epochs=1", level=True, band=(2.9, 3.1), seeds=2)
    (cells,) = sweep.groups
    assert cells.name == "ppo.epochs=1, ppo.kl.coefficient=0.1"
    assert [(cell.seed, cell.state) for cell in cells.cells] == [(0, "passed"), (1, "passed")]
    assert cells.search.endswith("; it ended there, because ppo.kl.coefficient=0.0334 has no KL on calibration prompts")
    assert names[2:] == ["ppo.epochs=1, ppo.kl.coefficient=0.1, seed 1"]

    played(monkeypatch, diverges_below(1.0))
    sweep = swept(tmp_path, "ppo.epochs=2", level=True, band=(2.9, 3.1), seeds=2)
    (cells,) = sweep.groups
    assert [(cell.seed, cell.state) for cell in cells.cells] == [(0, "failed")]
    assert cells.search == (
        "no search, because ppo.kl.coefficient=0.1 has no KL on calibration prompts; other seeds are not computed"
    )
    assert not any("missing" in note for note in notes(sweep))


def test_medians_and_ranges_over_seeds_are_those_of_the_runs() -> None:
    """By hand: of 1, 4 and 2 the median is 2; three seeds enclose the median with probability 1 - 1/4."""
    cells = [
        Cell(seed, f"run {seed}", "passed", ["policy.kl"] if seed else [], {"policy/kl": kl, "seconds": 60.0})
        for seed, kl in enumerate((1.0, 4.0, 2.0))
    ]
    group_ = CellGroup(["a=1"], cells)
    expected = {"policy/kl": 2.0, "policy/kl_low": 1.0, "policy/kl_high": 4.0}
    assert {name: group_.over_seeds[name] for name in expected} == expected
    assert ranged(group_.over_seeds, "policy/kl") == "2 (1 to 4)"
    assert ranged(CellGroup(["a=1"], cells[:1]).over_seeds, "policy/kl") == "1"
    assert failures(group_) == "policy.kl (2 of 3)"
    sentences = notes(Sweep("tiny", ["a=1"], seeds=3, groups=[group_]))
    assert sentences[0].endswith("which enclose the median of all seeds with probability 0.75 (3 seeds).")
    uneven = [CellGroup(["a=1"], cells), CellGroup(["a=2"], cells[:2]), CellGroup(["a=3"], cells[:1])]
    assert notes(Sweep("tiny", ["a=1"], groups=uneven))[0].endswith("probability 0.5 (2 seeds) or 0.75 (3 seeds).")
    assert sentences[-1] == "Training the policies took 180 s."


@pytest.fixture
def outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Sweep]]:
    per_token = {"policy/kl_per_token": 0.2}
    ends = {"policy/kl_low": 1.0, "policy/kl_high": 4.5, "policy/gold_gain_low": 0.5, "policy/gold_gain_high": 1.0}
    played(monkeypatch, lambda launch: {"policy/kl": 2.0 + launch.config.ppo.epochs, **ends, **per_token})
    sweep = Sweep("tiny", ["ppo.epochs=1,2"], seeds=2)
    yield write_page(run_sweep(tmp_path, sweep), sweep), sweep


def test_the_numbers_are_those_that_the_runs_stored(outcome: tuple[Path, Sweep]) -> None:
    path, sweep = outcome
    measures = sweep.groups[0].cells[0].measures
    assert measures["policy/kl"] == 3.0 and measures["policy/kl_low"] == 1.0
    assert measures["policy/gold_gain"] == 0.75, "gold 1 less SFT's 0.25"
    assert sweep.groups[0].cells[0].calibration_kl == 3.5
    assert measures["seconds"] == 10.0 and measures["policy/gold_gain_low"] == 0.5
    stored = json.loads((path.parent / "sweep.json").read_text())
    assert stored["groups"][0]["cells"] == [asdict(cell) for cell in sweep.groups[0].cells]
    assert group(stored["groups"][1], "over_seeds")["policy/kl"] == 4.0
    assert "policy/kl_per_token" not in measures and "nats a token" not in path.read_text(), "the unit is the response"
    assert stored["sweep"] == sweep.name and len(stored["samples"]) == 8


def test_the_json_names_the_fields_of_a_trial(tmp_path: Path) -> None:
    group_ = CellGroup(["a=1"], trials=[Trial(0.1, 2.5, "run 0", 60.0)])
    write_page(tmp_path, Sweep("tiny", ["a=1"], groups=[group_]))
    (written,) = json.loads((tmp_path / "sweep.json").read_text())["groups"]
    assert written["trials"] == [{"strength": 0.1, "kl": 2.5, "run": "run 0", "seconds": 60.0}]


def narrow(sweep: Sweep) -> str:
    """The table on a terminal of 80 columns."""
    console = Console(width=80, file=StringIO())
    print_sweep(console, sweep)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_names_of_gates_are_whole_on_a_narrow_terminal() -> None:
    gates = ["policy.kl_beyond_ceiling", "policy.distinct_ratio"]
    groups = [CellGroup([f"policy.method={name}"], [Cell(0, "run", "gate_failed", gates, {"policy/kl": 2.0})])
              for name in ("ppo", "dpo", "ipo", "kto", "best_of_n")]  # fmt: skip
    text = " ".join(narrow(Sweep("tiny", ["a=1"], groups=groups)).split())
    assert "best_of_n: failed gates: policy.kl_beyond_ceiling (1 of 1), policy.distinct_ratio (1 of 1)" in text


@pytest.mark.parametrize("count", [1, 5, 8])
def test_no_word_of_the_table_is_broken_on_a_narrow_terminal(count: int) -> None:
    """The headings of five groups were `polic`, `y.met`, `hod=p`, `po`."""
    methods = ("ppo", "dpo", "ipo", "kto", "best_of_n", "online_dpo", "ppo", "dpo")[:count]
    cells = [Cell(seed, "run", "passed", [], dict.fromkeys(MEASURES, 1234.56)) for seed in (0, 1)]
    groups = [CellGroup([f"policy.method={method}", f"policy.label_smoothing=0.{place}"], cells)
              for place, method in enumerate(methods)]  # fmt: skip
    sweep = Sweep("tiny", ["a=1"], groups=groups)
    words = narrow(sweep).split()
    assert [word for word in words if word in methods] == [*methods]
    assert {"policy.method", "policy.label_smoothing", *" ".join(measures_of(sweep).values()).split()} <= {*words}
    assert words.count("1,230") == words.count("(1,230") == count * len(measures_of(sweep))


def test_a_group_without_cells_is_only_in_the_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, lambda launch: {"policy/kl": 2.0})
    sweep = swept(tmp_path, "ppo.epochs=1")
    sweep.groups.append(CellGroup(["ppo.epochs=2"]))
    for text in (write_page(tmp_path, sweep).read_text(), narrow(sweep)):
        assert text.count("ppo.epochs=2") == 1 and "1 cell is missing: ppo.epochs=2 seed 0." in text
    monkeypatch.setattr(sweep_page, "svg", lambda figure, title: figure)
    figure: Any = draw(sweep)
    assert figure.axes[0].get_legend_handles_labels()[1] == ["ppo.epochs=1"]


def test_the_page_shows_samples_as_text_and_loads_nothing(outcome: tuple[Path, Sweep]) -> None:
    text = outcome[0].read_text()
    assert HOSTILE not in text and text.count("&lt;script&gt;document.title") == 8 * 3
    assert "<script" not in text and "http://" not in re.sub(r"&lt;.*?&gt;", "", text)
    assert "Gains beside KL" in text and "data:image/svg+xml;base64," in text
    assert ">3\n(1 to 4.5)<" in text and ">0.75\n(0.5 to 1)<" in text


def test_a_sweep_without_a_sheet_hides_what_raters_judge_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier call began the sheet."""
    played(monkeypatch, lambda launch: {})
    shown = swept(tmp_path, "ppo.epochs=1,2")
    rows = "\n".join(json.dumps({"prompt": f"prompt {n}"}) for n in (0, 3))
    record = publish(tmp_path, "human_eval.compare", files={"responses.jsonl": rows})
    label = Label("a sheet", {"sweep": shown.name, "sweep.key": "0" * 16})
    with RunContext.start(tmp_path, "tiny", GatesConfig(), label=label, reporting=Reporting(track=False)) as sheet:
        sheet.status.update("human_eval", state="awaiting_labels", key=record.key, digest=record.digest)
    hidden = swept(tmp_path, "ppo.epochs=1,2")
    numbers = [[sample["prompt"] for sample in sweep.samples] for sweep in (shown, hidden)]
    assert numbers == [[f"prompt {n}" for n in range(8)], [f"prompt {n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)]]
    assert f"Run {sheet.run} compares the policies on a blind sheet." in notes(hidden)


@pytest.mark.parametrize(
    "over",
    ["sft.epochs=3,4", "seed=0,1", "data.generator.pairs=2000,2100"],
)
def test_a_sheet_of_several_sft_models_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    names = played(monkeypatch, lambda launch: {})
    option = over.partition("=")[0]
    with pytest.raises(UserError, match=f"^--sheet compares the policies with one SFT model, and --over {option}"):
        run_sweep(tmp_path, Sweep("tiny", [over]), sheet=8)
    assert names == []


def test_a_sheet_of_one_sft_model_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, lambda launch: {})
    sheets = []
    monkeypatch.setattr(studies, "_sheet", lambda study, runs, items: sheets.append((len(runs), items)))
    run_sweep(tmp_path, Sweep("tiny", ["reward.epochs=1,3"]), sheet=8)
    assert sheets == [(2, 8)]


def test_groups_of_different_models_are_not_shown_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(monkeypatch, lambda launch: {})
    sfts = swept(tmp_path, "sft.epochs=3,4")
    assert {*sfts.samples[0]["responses"]} == {"sft.epochs=3", "sft.epochs=4"} and sfts.sheet == ""
    said = [sentence.partition(":")[0].partition(",")[0] for sentence in notes(sfts)[:2]]
    assert said == ["The SFT models differ", "The reward models differ"]
    rewards = swept(tmp_path, "reward.epochs=1,3")
    assert notes(rewards)[0] == "The reward models differ, so the reward gains of different models cannot be compared."
    assert {*rewards.samples[0]["responses"]} == {"SFT", "reward.epochs=1", "reward.epochs=3"}
    assert not any("differ" in note for note in notes(swept(tmp_path, "ppo.epochs=1,2")))


def test_config_values_are_those_of_the_profile_and_the_cell(tmp_path: Path) -> None:
    values = to_values(Sweep("tiny", [], ["ppo.updates=7"]).config(["ppo.epochs=2"], 3))
    assert group(values, "ppo")["updates"] == 7 and group(values, "ppo")["epochs"] == 2
    assert values["policy_seed"] == 3 and values["seed"] == 0
