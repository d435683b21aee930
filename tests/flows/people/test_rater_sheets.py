"""What raters get, and what becomes of what they return, before a run is taken up."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Mistakes, UserError
from components.base.jsonl import read_rows, write_rows
from components.base.settings import keyed_values
from components.data.formats.pairs import parse_pair
from components.data.rows import RawRow
from components.human_eval.returned_labels import Sample
from flows.config.profiles import Override
from flows.config.run_config import load_config
from flows.people.rater_sheets import LABELS, give_out, joined, with_guidelines
from flows.people.tools import read_votes, write_tasks
from flows.review.review_batches import find_batch, sample_batch
from tests.sheets import write_sample


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_sample(tmp_path / "sample", 6)


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
    run = tmp_path / "run"
    give_out(sample, run)
    files = [filled(run / "raters" / f"rater_{n}.csv", rating) for n, rating in ((1, "a"), (2, "both bad"))]
    (run / "raters" / ".~lock.rater_1.csv#").write_text("LibreOffice's")
    one = joined(run, sample, run / "raters").read_bytes()
    assert joined(run, sample, list(reversed(files))) == run / LABELS
    assert (run / LABELS).read_bytes() == one and one.count(b'"a","both_bad"') == 6
    assert joined(run, sample, run / LABELS).read_bytes() == one, "and so are the joined ones"


def test_the_seconds_that_a_tool_measured_come_into_the_joined_labels(tmp_path: Path, sample: Path) -> None:
    run = tmp_path / "run"
    give_out(sample, run)
    path = filled(run / "raters" / "rater_2.csv", "a")
    lines = path.read_bytes().decode("utf-8-sig").split("\r\n")
    at = next(n for n, line in enumerate(lines) if line.startswith('"item"'))
    timed = [*lines[:at], lines[at] + ',"seconds"', *(f'{line},"{n}.2"' for n, line in enumerate(lines[at + 1 : -1]))]
    path.write_bytes("\r\n".join(timed).encode())
    labels = joined(run, sample, path)
    answers = Sample.open(sample).answers(labels)
    assert answers.seconds == {(f"q000{n}", 1): pytest.approx(n - 0.8) for n in range(1, 7)}
    assert answers.ratings["q0001"] == ("", "a"), "which read back all the same"


def test_a_refused_sheet_leaves_the_run_as_it_was(tmp_path: Path, sample: Path) -> None:
    run = tmp_path / "run"
    give_out(sample, run)
    files = [filled(run / "raters" / f"rater_{n}.csv", "left") for n in (1, 2)]
    with pytest.raises(Mistakes, match="12 mistakes"):
        joined(run, sample, files)
    assert not (run / LABELS).exists()


def test_without_its_sample_one_sheet_is_taken_as_it_is_and_several_can_not_be_joined(
    tmp_path: Path, sample: Path
) -> None:
    give_out(sample, tmp_path)
    lost = tmp_path / "nothing"
    assert joined(tmp_path, lost, tmp_path / "sheet.csv") == tmp_path / "sheet.csv"
    assert joined(tmp_path, None, tmp_path / "sheet.csv") == tmp_path / "sheet.csv"
    with pytest.raises(UserError, match="can't be joined"):
        joined(tmp_path, lost, tmp_path / "raters")
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "empty", "has no sheet"), (tmp_path / "gone.csv", "there is no such file")):
        with pytest.raises(UserError, match=said):
            joined(tmp_path, lost, path)


def test_the_instructions_name_the_ratings_that_the_scale_has(sample: Path) -> None:
    about = json.loads((sample / "sheet.json").read_text())
    assert about["instructions"].endswith("both_bad = both are bad, and neither should be sent.")


def test_guidelines_are_part_of_the_batch_and_named_by_their_digest(tmp_path: Path, sample: Path) -> None:
    about = json.loads((sample / "sheet.json").read_text())
    give_out(sample, tmp_path)
    given = (tmp_path / "guidelines.md").read_bytes()
    assert about["guidelines"] == given.decode() and about["guidelines_sha256"] == hashlib.sha256(given).hexdigest()
    assert [line[3:] for line in about["guidelines"].splitlines() if line.startswith("## ")] == [
        "Helpful", "Honest", "Harmless", "Coherent", "When they are close"
    ]  # fmt: skip
    assert about["guidelines"].count("\n> ") == 4, "an example each"
    assert not {"column", "row", "csv"} & set(re.findall(r"\w+", about["guidelines"].casefold())), (
        "of spreadsheets only"
    )
    assert "do not sort or move single columns" in about["instructions"]


def test_guidelines_of_a_file_are_read_once_and_stay_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "ours.md"
    file.write_bytes(b"\xef\xbb\xbf# Ours\r\n\r\nBe kind.\n")
    config = load_config("tiny", [Override(("human_eval", "guidelines"), str(file))])
    read = with_guidelines(config)
    file.unlink()
    assert read.human_eval.instructions == "# Ours\r\n\r\nBe kind.\n" and with_guidelines(read) == read
    assert "guidelines" not in keyed_values(read.human_eval), "where they were read changes no key"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read: No such file"),
        (b"\xff\xfe#", "not text in UTF-8"),
        (b" \n", "is empty"),
        (b"bell \x07", "without control characters"),
        (b"x" * 32_001, "at most 32000 characters"),
    ],
)
def test_guidelines_that_nobody_can_read_are_refused_by_name(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "ours.md"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"human_eval\.guidelines = .*ours\.md: .*{said}"):
        with_guidelines(load_config("tiny", [Override(("human_eval", "guidelines"), str(file))]))


# Other tools ----------------------------------------------------------------------------------------------------------


def labelled(tasks: list[dict[str, Any]], answers: Callable[[int, int], str], people: int) -> list[dict[str, Any]]:
    """Tasks as Label Studio exports them (JSON) when each of `people` has answered; `answers` sees task and person."""
    return [
        {
            "id": n,
            "data": task["data"],
            "annotations": [
                {"completed_by": 10 + k, "result": [{"from_name": "rating", "value": {"choices": [answers(n, k)]}}]}
                for k in range(people)
            ],
        }
        for n, task in enumerate(tasks)
    ]


def test_a_batch_goes_out_for_label_studio_with_config_and_guidelines_and_comes_back(
    tmp_path: Path, sample: Path
) -> None:
    batch = sample_batch(sample, tmp_path / "run")
    files = write_tasks(batch, tmp_path / "out" / "tasks.json")
    assert [file.name for file in files] == ["tasks.json", "tasks.xml", "tasks.html"]
    assert "<h2>Honest</h2>" in files[2].read_text() and 'name="rating"' in files[1].read_text()
    tasks = json.loads(files[0].read_text())
    (tmp_path / "back.json").write_text(json.dumps(labelled(tasks, lambda n, k: ("a", "tie")[k], 2)))
    run = tmp_path / "run"
    run.mkdir()
    assert joined(run, sample, tmp_path / "back.json").read_bytes().count(b'"a","tie"') == 6
    with pytest.raises(UserError, match=r"tether people score .*back\.json --run run"):
        read_votes(batch, tmp_path / "back.json")


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    folder = tmp_path / "candidates"
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "=1+1?"}]
    rows = [
        {"id": f"tether-{n:05d}-abcdef01", "prompt": prompt, "a": f"'two' {n}", "b": f"<b>{n}</b>\r\n", "label": None}
        for n in range(3)
    ]
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def test_candidates_go_out_and_their_votes_come_back_as_preferences(
    tmp_path: Path, candidates: Path, tether_here: Any
) -> None:
    tether_here("people", "tasks", str(candidates), str(tmp_path / "tasks.json"), home=tmp_path / "home")
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert tasks[0]["data"]["prompt"] == "[system]\nBe brief.\n\n[user]\n=1+1?"
    back = tmp_path / "back.json"
    back.write_text(json.dumps(labelled(tasks[:2], lambda n, k: "ab"[n], 3)))
    tether_here("people", "answers", str(candidates), "--from", str(back), home=tmp_path / "home")
    rows = read_rows(candidates / "votes.jsonl")
    assert [[vote["label"] for vote in row["votes"]] for row in rows] == [["a"] * 3, ["b"] * 3]
    judged = parse_pair(RawRow(1, rows[1]), "votes", "x", 20_000)
    assert judged.problems == [] and judged.item is not None and judged.item["chosen"] == "<b>1</b>\r\n"
    tasks[0]["data"]["response_a"] = "edited"
    tasks[1]["data"]["item"] = "tether-00009-abcdef01"
    back.write_text(json.dumps(labelled(tasks, lambda n, k: "left" if n == 2 else "a", 1)))
    with pytest.raises(Mistakes) as error:
        read_votes(find_batch(tmp_path / "home", str(candidates)), back)
    said = r"row (\d).*(not a rating|differ from the exported|not a pair)"
    assert [re.findall(said, line)[0] for line in error.value.args] == [
        ("3", "not a rating"), ("1", "differ from the exported"), ("2", "not a pair")
    ]  # fmt: skip
