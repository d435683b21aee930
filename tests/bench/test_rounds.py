"""Two real rounds at the size of tests: which prompts train and which judge, what is kept, and that again is a hit."""

from pathlib import Path

import pytest

from components.base.jsonl import read_rows
from components.data.splits import loose_key
from components.data.tables.published import read_split
from components.human_eval.batch.halves import JUDGED, PREFERENCES
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from flows.launch.begin import new_run
from flows.launch.computing import first_to_compute
from flows.launch.rounds import next_round
from tasks.runs.status import load_status
from tests.bench.rounds import run, voted

pytestmark = pytest.mark.whole


def keys(*files: Path) -> set[str]:
    return {loose_key(row["prompt"]) for file in files for row in (read_rows if file.is_file() else read_split)(file)}


def test_judged_prompts_never_train_trained_ones_are_held_out_nowhere_and_sft_stays(tmp_path: Path) -> None:
    home, store = tmp_path, ArtifactStore(tmp_path)
    runs = [run(new_run(home, "tiny", load_config("tiny").resolved()))]
    for _ in range(2):
        runs.append(run(next_round(home, runs[-1])))
    statuses = [load_status(home, name) for name in runs]
    data, scored = (
        [store.path(each.stage(name).digest or "") for each in statuses] for name in ("validate", "human_eval")
    )
    assert len({each.stage("sft").digest for each in statuses}) == 1
    assert len({each.stage("reward").digest for each in statuses}) == 3
    for number in (1, 2):
        judges = keys(*(batch / JUDGED for batch in scored[:number]))
        asked = [data[number] / f"{kind}.train" for kind in ("pairs", "prompts", "demonstrations")]
        assert judges and not judges & keys(*asked)
        trains = {loose_key(row["prompt"]) for row in voted(data[number])}
        held_out = [
            data[number] / f"{kind}.{split}" for kind in ("pairs", "prompts") for split in ("calibration", "test")
        ]
        assert trains <= keys(*(batch / PREFERENCES for batch in scored[:number]))
        assert trains and not trains & keys(*held_out)
        assert not trains & keys(scored[number] / PREFERENCES, scored[number] / JUDGED), (
            "nor does a later sample have them"
        )
        metrics = statuses[number].stage("reward").metrics
        assert metrics["reward/judged_pairs"] > 0 and "reward/judged_gain" in metrics
    again = next_round(home, runs[1])
    with again.ctx as ctx:
        assert first_to_compute(again.config, again.sources, ctx) is None, "done twice it is a hit"
