"""What a run was made of is what it read, whoever else made the same of something else."""

from pathlib import Path

import pytest

from flows.models.lineage import lineage
from flows.models.lineage_text import text
from tasks.runs.status import StatusFile
from tests.stored_run import publish


def validated(home: Path, run: str, file: str, started: str) -> None:
    """A run that made the same pairs of a file of its own."""
    files, inputs = {"pairs": "the same pairs"}, {"preferences": file}
    record = publish(home, "validate", run, key=file[::-1], files=files, inputs=inputs, started=started)
    status = StatusFile.start(home / "runs" / run, run, "demo", ["validate"])
    status.update("validate", state="passed", user=f"who did {run}", key=record.key, digest=record.digest)
    status.finish()


@pytest.mark.parametrize("asked", ["first", "second"])
def test_a_run_is_shown_with_the_file_that_it_read_not_with_the_one_that_gave_the_same_pairs(
    tmp_path: Path, asked: str
) -> None:
    files = {"first": f"{1:064x}", "second": f"{2:064x}"}
    for run, file in files.items():
        validated(tmp_path, run, file, started=run)
    found = lineage(tmp_path, asked).as_json()
    source, pairs = found["nodes"]
    assert (source["digest"], pairs["run"], pairs["inputs"]) == (files[asked], asked, {"preferences": files[asked]})
    assert {each["user"] for each in pairs["judged"]} == {"who did first", "who did second"}
    assert f"in run {asked} by who did {asked}: passed" in text(lineage(tmp_path, asked))
    assert [edge["from"] for edge in found["edges"]] == [files[asked]]
    both = lineage(tmp_path, pairs["digest"]).as_json()["nodes"]
    assert {node["digest"] for node in both} == {*files.values(), pairs["digest"]}
