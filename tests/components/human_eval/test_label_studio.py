"""What a running Label Studio exported (tests/golden/label_studio) is read back as the votes that were given in it."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Mistakes
from components.base.jsonl import read_rows
from components.human_eval.batch.label_studio import instruction, labelling_config, tasks
from components.human_eval.returned_labels import Sample

GOLDEN = Path(__file__).parents[2] / "golden" / "label_studio"
RATINGS = ("a", "b", "tie", "both_bad")


@pytest.fixture
def sample() -> Sample:
    return Sample.open(GOLDEN / "sample")


def test_its_export_comes_back_as_the_votes_that_were_given(sample: Sample, tmp_path: Path) -> None:
    found = sample.answers(GOLDEN / "export.json")
    given = {f"q{t + 1:04d}": tuple(RATINGS[(3 * t + u * (t + 1)) % 4] for u in range(3)) for t in range(5)}
    assert found.ratings | found.attention == given and list(found.attention) == ["q0005"]
    criteria = ("a", "b", "tie")
    for t, item in enumerate(found.ratings):
        assert found.criteria["helpful"][item] == tuple(criteria[(t + u) % 3] if (t + u) % 3 else "" for u in range(3))
        assert found.criteria["coherent"][item] == ("", "b", "")
    assert found.seconds["q0003", 1] == 13.5, "10.5 + t + u"
    sample.write(tmp_path / "sheet.csv", found)
    assert sample.answers(tmp_path / "sheet.csv") == found


Change = Callable[[list[dict[str, Any]]], None]


def _without_rating(tasks: list[dict[str, Any]]) -> None:
    flags = {"from_name": "flags", "type": "choices", "value": {"choices": ["false"]}}
    tasks[1]["annotations"][2]["result"] = [flags]


def _twice(tasks: list[dict[str, Any]]) -> None:
    tasks[3]["annotations"][0]["completed_by"] = 2


def _foreign(tasks: list[dict[str, Any]]) -> None:
    tasks[2]["data"]["item"] = "q0003-00000000"


def _edited(tasks: list[dict[str, Any]]) -> None:
    tasks[4]["data"]["response_b"] = "another text"


def _unknown(tasks: list[dict[str, Any]]) -> None:
    tasks[0]["annotations"][1]["result"][0]["value"]["choices"] = ["left"]


def _several(tasks: list[dict[str, Any]]) -> None:
    tasks[0]["annotations"][1]["result"][0]["value"]["choices"] = ["a", "b"]


def _nobodys(tasks: list[dict[str, Any]]) -> None:
    del tasks[0]["annotations"][0]["completed_by"]


def _no_item(tasks: list[dict[str, Any]]) -> None:
    del tasks[1]["data"]["item"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_rating, r"row 2, annotator 3: the annotation of q0002-\w+ has no `rating`"),
        (_twice, r"row 4, annotator 2: they rated q0004-\w+ in row 4 already"),
        (_foreign, r"row 3: item q0003-00000000 belongs to the sheet of another sample"),
        (_edited, r"row 5, column `response_b`: the text is not the one given out"),
        (_unknown, r"row 1, column `rating_2`: 'left' is not a rating"),
        (_several, r"row 1, annotator 2: 2 answers to `rating`"),
        (_nobodys, r"row 1: an annotation without `completed_by`"),
        (_no_item, r"row 2, annotator 1: the task has no text `item`"),
    ],
)
def test_wrong_partial_foreign_and_doubled_annotations_are_refused_by_row(
    sample: Sample, tmp_path: Path, change: Change, said: str
) -> None:
    found = json.loads((GOLDEN / "export.json").read_text())
    for task in found:
        task["annotations"].sort(key=lambda each: each["completed_by"])
    change(found)
    file = tmp_path / "export.json"
    file.write_text(json.dumps(found))
    with pytest.raises(Mistakes, match=said):
        sample.answers(file)


@pytest.mark.parametrize("name", ["export.csv", "export_min.json"])
def test_a_flat_export_is_refused_and_told_apart(sample: Sample, tmp_path: Path, name: str) -> None:
    row = {"id": 1, **tasks(read_rows(GOLDEN / "sample" / "sheet.jsonl"))[0]["data"], "rating": "a"}
    row |= {"annotator": 3, "annotation_id": 3}
    text = ",".join(row) + "\n" + ",".join(["x"] * len(row)) if name.endswith("csv") else json.dumps([row])
    (tmp_path / name).write_text(text)
    with pytest.raises(Mistakes, match=rf"{name} is a flat export .*Export the project as JSON"):
        sample.answers(tmp_path / name)


def test_a_skipped_task_and_one_without_annotations_add_no_vote(sample: Sample, tmp_path: Path) -> None:
    found = json.loads((GOLDEN / "export.json").read_text())
    found[0]["annotations"][0] |= {"was_cancelled": True, "result": []}
    found[1]["annotations"] = []
    (tmp_path / "export.json").write_text(json.dumps(found))
    ratings = sample.answers(tmp_path / "export.json").ratings
    assert ratings["q0001"].count("") == 1 and ratings["q0002"] == ("", "", "")


def test_the_config_asks_what_the_batch_asks_and_shows_texts_as_text() -> None:
    criteria: Any = [{"name": "helpful", "question": 'Is it "more" <helpful>?'}]
    config = ET.fromstring(labelling_config(RATINGS, criteria))
    asked = {each.get("name"): [c.get("alias") for c in each.iter("Choice")] for each in config.iter("Choices")}
    assert asked["rating"] == list(RATINGS) and asked["helpful"] == ["a", "b", "tie"] and "flags" in asked
    assert [each.get("value") for each in config.iter("Text")] == ["$prompt", "$response_a", "$response_b"]
    assert not list(config.iter("Pairwise")) and not list(config.iter("HyperText")), "no tie; and HTML would be run"
    shown = instruction("# How\n\n> say <b>no</b>\n> twice\n\nText & more")
    assert shown == "<h1>How</h1>\n<blockquote>say &lt;b&gt;no&lt;/b&gt;\ntwice</blockquote>\n<p>Text &amp; more</p>\n"


def test_tasks_hold_the_texts_alone_byte_for_byte() -> None:
    rows = read_rows(GOLDEN / "sample" / "sheet.jsonl")
    made = tasks(rows)
    assert [set(each["data"]) for each in made] == [{"item", "prompt", "response_a", "response_b"}] * 5
    exported = {each["data"]["item"]: each["data"] for each in json.loads((GOLDEN / "export.json").read_text())}
    assert {each["data"]["item"]: each["data"] for each in made} == exported, "through a running Label Studio"
