import shutil
from pathlib import Path

import pytest

from flows.models import lineage
from tasks.runs.status import list_runs
from tasks.tracking.registry import versions
from tests.bench.lineage import BAR, Times, measure, table
from tests.bench.lineage_home import write_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_mlflow: Path) -> Path:
    home = tmp_path_factory.mktemp("lineage") / "home"
    home.mkdir()
    shutil.copy(empty_mlflow, home)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        write_home(home, 6, written=2)
    return home


def test_a_copy_is_a_run_of_its_own_with_models_of_its_own_made_of_the_same_data(home: Path) -> None:
    assert len(list_runs(home)) == len(set(list_runs(home))) == 6
    nodes = lineage.lineage(home, str(home.parent / "pairs.jsonl"), downstream=True).as_json()["nodes"]
    policies = [node for node in nodes if node["stage"] == "ppo"]
    assert len({node["digest"] for node in policies}) == 6
    assert [model["name"] for node in policies for model in node["models"]] == ["tether-policy"] * 6
    assert len({(each.name, each.version) for each in versions(home)}) == len(versions(home)) == 3 * (2 + 1 + 1)
    assert {node["run"] for node in policies} == set(list_runs(home)), "each computed its own"
    assert all(node["options"]["ppo.kl.coefficient"]["default"] == 0.1 for node in policies if node["options"])


def test_every_question_has_an_answer_and_one_that_takes_too_long_is_named(home: Path) -> None:
    found = measure(home, repeats=1)
    assert len(found) == 9 and all(took.processor > 0 for took in found.values())
    assert "MISSED" not in table({"quick": Times(9, BAR, 9)}) and "MISSED" in table({"slow": Times(0, BAR + 0.01, 0)})
