"""What a run goes on from: the newest or a named run's config and records, never a mix of its own making."""

from pathlib import Path

import pytest

from components.errors import UserError
from flows import launch as launching
from flows.config import load_config, to_values
from flows.launch import everything_is_stored, is_simulated, new_run, pinned, rerun, scoring
from flows.profile import parse_override
from flows.sources import Sources, find_sources
from tasks.status import load_status


def begin(home: Path, *changes: str) -> launching.Launch:
    return new_run(home, "tiny", load_config("tiny", [parse_override(text) for text in changes]).resolved())


def end(launch: launching.Launch, **states: str) -> str:
    with launch.ctx as ctx:
        for name, state in states.items():
            ctx.status.update(name, state=state)
    return launch.ctx.run


def test_a_run_keeps_its_resolved_config(tmp_path: Path) -> None:
    launch = begin(tmp_path, "seed=3")
    end(launch)
    values = launching.run_values(tmp_path, launch.ctx.run)
    assert values == to_values(launch.config)
    assert values["seed"] == 3
    assert "auto" not in values["runtime"].values()
    assert is_simulated(tmp_path, launch.ctx.run)


def test_a_rerun_has_the_newest_runs_config_with_changes_on_top(tmp_path: Path) -> None:
    end(begin(tmp_path, "seed=1"))
    newest = end(begin(tmp_path, "seed=2", "sft.epochs=1"))
    again = rerun(tmp_path, None, "reward", [parse_override("reward.epochs=2")])
    assert (again.config.seed, again.config.sft.epochs, again.config.reward.epochs) == (2, 1, 2)
    assert again.ctx.refresh == frozenset({"reward"})
    assert again.ctx.run != newest
    assert again.ctx.profile == "tiny"


def test_a_rerun_of_a_named_run_has_that_runs_config(tmp_path: Path) -> None:
    first = end(begin(tmp_path, "seed=1"))
    end(begin(tmp_path, "seed=2"))
    assert rerun(tmp_path, first, "human_eval", []).config.seed == 1


def test_rerunning_human_eval_samples_again(tmp_path: Path) -> None:
    end(begin(tmp_path))
    assert rerun(tmp_path, None, "human_eval", []).ctx.refresh == {"human_eval.sample", "human_eval"}


def test_a_rerun_of_no_stage_is_refused_and_leaves_no_run(tmp_path: Path) -> None:
    run = end(begin(tmp_path))
    with pytest.raises(UserError, match="there are validate, sft"):
        rerun(tmp_path, None, "dpo", [])
    with pytest.raises(UserError, match=r"did you mean ppo\.updates"):
        rerun(tmp_path, None, "ppo", [parse_override("ppo.update=1")])
    assert load_status(tmp_path)["run"] == run


def test_only_a_run_that_waits_for_people_is_scored(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("item\n")
    end(begin(tmp_path), human_eval="passed")
    with pytest.raises(UserError, match="waits for no labels"):
        scoring(tmp_path, None, tmp_path / "sheet.csv")
    waiting = end(begin(tmp_path, "human_eval.judges=people"), human_eval="awaiting_labels")
    with pytest.raises(UserError, match="there is no such file"):
        scoring(tmp_path, None, tmp_path / "absent.csv")
    taken_up = scoring(tmp_path, None, tmp_path / "sheet.csv")
    assert taken_up.ctx.run == waiting
    assert taken_up.sources.sheet is not None


def test_a_run_that_died_before_its_sample_can_not_be_scored(tmp_path: Path) -> None:
    (tmp_path / "sheet.csv").write_text("item\n")
    end(begin(tmp_path, "human_eval.judges=people"))
    with pytest.raises(UserError, match="not_run"):
        scoring(tmp_path, None, tmp_path / "sheet.csv")


def test_nothing_is_stored_in_a_fresh_home(tmp_path: Path) -> None:
    launch = begin(tmp_path)
    assert not everything_is_stored(launch.config, launch.sources, launch.ctx)
    end(launch)


def test_keys_without_a_record_pin_nothing(tmp_path: Path) -> None:
    run = end(begin(tmp_path))
    document = load_status(tmp_path, run)
    document["stages"][0]["key"] = "0" * 64
    assert pinned(tmp_path, document, ["validate"]) == {}


def test_a_fetched_model_is_named_shortly_and_a_folder_by_its_path(tmp_path: Path) -> None:
    named = load_config("tiny", [parse_override("sft.base=smollm2")])
    with pytest.raises(UserError, match="tether fetch smollm2"):
        find_sources(named, tmp_path)
    folder = tmp_path / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "weights.gguf").write_bytes(b"GGUF")
    assert find_sources(named, tmp_path).base["base"].path == folder
    by_path = load_config("tiny", [parse_override(f"sft.base={folder}")])
    assert find_sources(by_path, tmp_path / "elsewhere") == find_sources(named, tmp_path)
    assert find_sources(load_config("tiny"), tmp_path) == Sources()
