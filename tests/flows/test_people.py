"""What raters get, and what becomes of what they return, before a run is taken up."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Mistakes, UserError
from components.base.jsonl import write_json, write_rows
from components.human_eval.blinding import blind, sealed_key
from components.human_eval.config import HumanEvalConfig
from components.human_eval.labels import Sample
from components.human_eval.results.seconds import read_seconds
from components.human_eval.sample import write_sheet
from components.human_eval.selection import Chosen
from flows.people import LABELS, give_out, joined


class Store:
    """A store that has one artifact, or has lost it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, record: Any) -> Path:
        return self.folder


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A sample of six items for two raters."""
    folder, config = tmp_path / "sample", HumanEvalConfig(raters=2, repeats=0)
    chosen = [Chosen([{"role": "user", "content": f"question {n}"}], None, "all") for n in range(6)]
    items, salt = blind(chosen, [f"no {n}" for n in range(6)], [f"yes {n}" for n in range(6)], 0, b"secret")
    write_json(folder / "key.json", sealed_key(items, salt))
    write_rows(folder / "responses.jsonl", ({"item": i.item, "prompt": i.chosen.prompt} for i in items))
    write_sheet(folder, items, config)
    return folder


def filled(path: Path, rating: str) -> Path:
    """A rater's file with the same answer in every row."""
    lines = path.read_bytes().decode("utf-8-sig").split("\r\n")
    done = [line[:-2] + f'"{rating}"' if line.endswith('""') else line for line in lines]
    path.write_bytes("\r\n".join(done).encode())
    return path


def test_what_a_rater_has_filled_in_is_not_overwritten_when_the_run_is_taken_up(tmp_path: Path, sample: Path) -> None:
    give_out(sample, tmp_path / "run")
    assert sorted(each.name for each in (tmp_path / "run" / "raters").iterdir()) == ["rater_1.csv", "rater_2.csv"]
    mine = filled(tmp_path / "run" / "raters" / "rater_1.csv", "a").read_bytes()
    give_out(sample, tmp_path / "run")
    assert (tmp_path / "run" / "raters" / "rater_1.csv").read_bytes() == mine


def test_a_folder_of_raters_files_and_the_files_one_by_one_are_the_same_labels(tmp_path: Path, sample: Path) -> None:
    """Defect 3: nobody merges by hand."""
    run = tmp_path / "run"
    give_out(sample, run)
    files = [filled(run / "raters" / f"rater_{n}.csv", rating) for n, rating in ((1, "a"), (2, "both bad"))]
    (run / "raters" / ".~lock.rater_1.csv#").write_text("LibreOffice's")
    store: Any = Store(sample)
    record: Any = object()
    one = joined(run, store, record, run / "raters").read_bytes()
    assert joined(run, store, record, list(reversed(files))) == run / LABELS
    assert (run / LABELS).read_bytes() == one and one.count(b'"a","both_bad"') == 6
    assert joined(run, store, record, run / LABELS).read_bytes() == one, "and so are the joined ones"


def test_the_seconds_that_a_tool_measured_come_into_the_joined_labels(tmp_path: Path, sample: Path) -> None:
    run = tmp_path / "run"
    give_out(sample, run)
    path = filled(run / "raters" / "rater_2.csv", "a")
    lines = path.read_bytes().decode("utf-8-sig").split("\r\n")
    at = next(n for n, line in enumerate(lines) if line.startswith('"item"'))
    timed = [*lines[:at], lines[at] + ',"seconds"', *(f'{line},"{n}.2"' for n, line in enumerate(lines[at + 1 : -1]))]
    path.write_bytes("\r\n".join(timed).encode())
    store: Any = Store(sample)
    record: Any = object()
    labels = joined(run, store, record, path)
    assert read_seconds([labels], 2) == {(f"q000{n}", 1): pytest.approx(n - 0.8) for n in range(1, 7)}
    assert Sample.open(sample).ratings(labels)["q0001"] == ("", "a"), "which read back all the same"


def test_a_refused_sheet_leaves_the_run_as_it_was(tmp_path: Path, sample: Path) -> None:
    """Defect 11: all that is wrong is told before anything is begun."""
    run = tmp_path / "run"
    give_out(sample, run)
    files = [filled(run / "raters" / f"rater_{n}.csv", "left") for n in (1, 2)]
    store: Any = Store(sample)
    record: Any = object()
    with pytest.raises(Mistakes, match="12 mistakes"):
        joined(run, store, record, files)
    assert not (run / LABELS).exists()


def test_without_its_sample_one_sheet_is_taken_as_it_is_and_several_can_not_be_joined(
    tmp_path: Path, sample: Path
) -> None:
    give_out(sample, tmp_path)
    lost: Any = Store(tmp_path / "nothing")
    record: Any = object()
    assert joined(tmp_path, lost, record, tmp_path / "sheet.csv") == tmp_path / "sheet.csv"
    assert joined(tmp_path, lost, None, tmp_path / "sheet.csv") == tmp_path / "sheet.csv"
    with pytest.raises(UserError, match="can't be joined"):
        joined(tmp_path, lost, record, tmp_path / "raters")
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "holds no sheet"), (tmp_path / "gone.csv", "there is no such file")):
        with pytest.raises(UserError, match=said):
            joined(tmp_path, lost, record, path)


def test_the_instructions_name_the_ratings_that_the_scale_has(sample: Path) -> None:
    """Defect 2: raters are told what each rating means."""
    about = json.loads((sample / "sheet.json").read_text())
    assert about["instructions"].endswith("both_bad = both are bad, and neither should be sent.")
