"""What of `ppo.rewards` is looked up when a run begins, and that it stands in PPO's key."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.settings import keyed_values
from flows.config.run_config import RunConfig, check_config, load_config, to_values
from flows.data.reward_sources import has_unversioned, settled_rewards
from flows.sources import find_sources
from tasks.execution.keying import key_of
from tasks.stages import STAGES
from tests.components.rewards.scorer import Scorer


def config(*sources: dict[str, Any]) -> RunConfig:
    values = to_values(load_config("tiny"))
    values["ppo"]["rewards"] = list(sources)  # type: ignore[index, call-overload]
    return check_config(values, "test")


def ppo_key(found: RunConfig) -> str:
    return key_of(STAGES["ppo"], found.stage_job(STAGES["ppo"]), {})[0]


def test_a_function_edited_in_a_module_that_it_imports_misses(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import other\ndef score(p, r, rows):\n    return other.score(r)\n")
    (tmp_path / "other.py").write_text("def score(r):\n    return [0.0] * len(r)\n")
    asked = config({"source": "function:mine:score", "root": str(tmp_path)})
    found, _ = settled_rewards(asked, tmp_path)
    again, _ = settled_rewards(check_config(to_values(found), "a run's own config"), tmp_path)
    assert ppo_key(again) == ppo_key(found)
    (tmp_path / "other.py").write_text("def score(r):\n    return [1.0] * len(r)\n")
    edited, _ = settled_rewards(again, tmp_path)
    assert ppo_key(edited) != ppo_key(found), "what an earlier run found is looked up anew"


def test_a_scorer_of_another_version_misses_and_one_of_none_is_never_a_hit(tmp_path: Path) -> None:
    with Scorer() as scorer:
        scorer.version = "1"
        first, _ = settled_rewards(config({"source": f"http:{scorer.url}"}), tmp_path)
        assert not has_unversioned(first)
        scorer.version = "2"
        second, notes = settled_rewards(first, tmp_path)
        assert ppo_key(second) != ppo_key(first) and not notes
        scorer.version = None
        third, notes = settled_rewards(second, tmp_path)
    assert has_unversioned(third) and "reports no version" in notes[0]
    named, notes = settled_rewards(config({"source": "http:http://127.0.0.1:9/", "version": "7"}), tmp_path)
    assert not has_unversioned(named) and not notes, "a version that the user names is not asked for"


def test_a_reward_models_folder_is_an_input_of_ppo_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    asked = config({"source": f"model:{folder}", "name": "theirs"})
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        settled_rewards(asked, tmp_path)
    (folder / "model.safetensors").write_bytes(b"weights")
    found, _ = settled_rewards(asked, tmp_path)
    before = find_sources(found, tmp_path).rewards["rewards/theirs"].digest
    (folder / "config.json").write_text('{"a": 1}')
    assert find_sources(found, tmp_path).rewards["rewards/theirs"].digest != before
    assert str(folder) not in json.dumps(keyed_values(found.ppo))
    with pytest.raises(UserError, match="there is no such folder"):
        settled_rewards(config({"source": "model:./absent"}), tmp_path)


def test_a_verifiers_unread_column_is_refused_at_once(tmp_path: Path) -> None:
    asked = config({"source": "verifier:exact", "column": "answer"})
    with pytest.raises(UserError, match=r"data\.reward_columns does not name the column 'answer'"):
        settled_rewards(asked, tmp_path)
    data = asked.data.model_copy(update={"reward_columns": ("answer",)})
    assert settled_rewards(asked.model_copy(update={"data": data}), tmp_path)[1] == []
