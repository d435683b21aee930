"""Single labels (KTO): read from every form that carries them, judged, split by prompt and published beside pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import UserError
from components.data.config import DataConfig, ScoreDifferenceConfig
from components.data.formats.demonstrations import detect, parse_demonstration
from components.data.rows import RawRow
from components.data.splits import SPLITS, prompt_key, split_of
from data_contracts.check import check
from data_contracts.rows.gather import look_at
from data_contracts.rows.schemas import schema_problems
from tests.splits import contents, lines, pairs, write

WORDS = st.text("abcde fgh", min_size=1).filter(str.strip)


def carried(form: str, prompt: str, response: str, label: bool) -> dict[str, Any]:
    """A row of KTO data in one of the forms in which data sets have it."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return {
        "TRL": {"prompt": prompt, "completion": response, "label": label},
        "TRL's conversations": {"prompt": turns[:1], "completion": turns[1:], "label": label},
        "LLaMA-Factory": {"messages": turns, "kto_tag": label},
        "Alpaca": {"instruction": prompt, "input": "", "output": response, "label": label},
        "flag": {"prompt": prompt, "response": response, "is_safe": label},
        "words": {"prompt": prompt, "response": response, "label": "good" if label else "bad"},
        "transcript": {"text": f"\n\nHuman: {prompt}\n\nAssistant: {response}", "label": label},
    }[form]


FORMS = ("TRL", "TRL's conversations", "LLaMA-Factory", "Alpaca", "flag", "words", "transcript")
MEANINGS = {"good": "desirable", "bad": "undesirable"}


@pytest.mark.parametrize("form", FORMS)
@given(rows=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=5))
def test_every_form_of_a_single_label_is_read(form: str, rows: list[tuple[str, str, bool]]) -> None:
    raws = [RawRow(number, carried(form, *row)) for number, row in enumerate(rows, 1)]
    name = detect(raws, "FILE")
    assert name == "KTO"
    for raw, (prompt, response, label) in zip(raws, rows, strict=True):
        item = parse_demonstration(raw, name, "here", 1000, MEANINGS).item
        assert item is not None and not schema_problems(item)
        assert item["desirable"] is label and item["response"].strip() == response.strip()
        assert item["prompt"][0]["content"].strip() == prompt.strip()


def labelled(start: int, stop: int) -> list[dict[str, Any]]:
    """Rows of KTO data; every third is undesirable, and every fourth answers the prompt of a pair."""
    return [
        {
            "prompt": f"question {i}" if i % 4 == 0 else f"matter {i}", "completion": f"reply {i} of some words",
            "label": i % 3 > 0,
        }
        for i in range(start, stop)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def published(validate: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """An artifact of pairs and single labels, some of which the contract must keep out, and its metrics."""
    folder = tmp_path_factory.mktemp("labels")
    bad = [
        {"prompt": "matter 1", "completion": "reply 1 of some words", "label": False},  # row 91 contradicts row 2
        {"prompt": "matter 2", "completion": "reply 2 of some words", "label": True},  # row 92 repeats row 3
        {"prompt": "matter x", "completion": "<|im_end|>", "label": False},
        {"prompt": "matter y", "completion": "nan", "label": False},
        {"prompt": "matter z", "completion": "", "label": False},
    ]
    inputs = {
        "preferences": write(folder / "pairs.jsonl", pairs(0, 90)),
        "demonstrations": write(folder / "kto.jsonl", [*labelled(0, 90), *bad]),
    }
    return folder, validate(folder, inputs)


def test_single_labels_are_judged_like_other_rows(published: Any) -> None:
    folder, metrics = published
    kept_out = [json.loads(line) for line in (folder / "artifact/quarantine.jsonl").read_text().splitlines()]
    reasons = {row["row"]: row["reasons"] for row in kept_out}
    assert set(reasons) == {92, 93, 94, 95}
    assert reasons[92] == ["duplicate of row 3"] and "empty response: response" in reasons[95]
    assert metrics["data/quarantined"] == 4 and metrics["data/contract"] == 1
    report = {found["name"]: found for found in json.loads((folder / "artifact/report.json").read_text())}
    assert report["desirable"]["rows"] == 30 + 4 and report["consistent"]["source"] == "demonstrations"
    assert report["consistent"]["row_numbers"] == [2, 91], "in no file of single labels, but taught"
    assert (metrics["data/desirable"], metrics["data/undesirable"]) == (59, 30)


def test_single_labels_are_split_with_their_prompts(published: Any) -> None:
    folder, metrics = published
    of_pairs = {prompt_key(row["prompt"]): name for name in SPLITS for row in lines(folder, f"pairs.{name}")}
    found = []
    for name in SPLITS:
        rows = lines(folder, f"single_labels.{name}")
        assert len(rows) == metrics[f"data/single_labels_{name}"] > 0
        for row in rows:
            key = prompt_key(row["prompt"])
            assert split_of(key, DataConfig().split) == name == of_pairs.get(key, name)
        found += rows
    assert sum(prompt_key(row["prompt"]) in of_pairs for row in found) == 23
    assert {row["row"]: row["desirable"] for row in found} == {i: (i - 1) % 3 > 0 for i in range(1, 91) if i != 2}
    assert metrics["data/leaked_prompts"] == 0


def test_sft_imitates_the_desirable_responses_alone(published: Any) -> None:
    folder, metrics = published
    taught = [row for split in ("train", "heldout") for row in lines(folder, f"demonstrations.{split}")]
    assert {row["row"] for row in taught} == {i for i in range(1, 91) if (i - 1) % 3 > 0}
    assert metrics["data/demonstrations"] == len(taught) == 60
    assert set(taught[0]) == {"prompt", "response", "row", "source"}


@pytest.mark.parametrize("undesirable_first", [False, True])
@pytest.mark.parametrize("ratings", [1, 5])
def test_raters_who_disagree_cost_sft_nothing(
    ratings: int, undesirable_first: bool, validate: Any, tmp_path: Path
) -> None:
    """90 responses, 9 of them with one label of the other kind: SFT learns all, KTO the other 81."""
    rows = [
        {"prompt": f"matter {i}", "completion": f"reply {i} of some words", "label": j > 0}
        for i in range(90)
        for j in range(ratings + 1)
        if j > 0 or i < 9
    ]
    inputs = {
        "preferences": write(tmp_path / "pairs.jsonl", pairs(0, 90)),
        "demonstrations": write(tmp_path / "kto.jsonl", rows if undesirable_first else rows[::-1]),
    }
    metrics = validate(tmp_path, inputs, checks={"near_unique": {"severity": "quarantine", "threshold": 1}})
    assert (metrics["data/demonstrations"], metrics["data/desirable"], metrics["data/undesirable"]) == (90, 81, 0)
    assert metrics["data/contract"] == 1
    report = json.loads((tmp_path / "artifact/report.json").read_text())
    (found,) = (found for found in report if (found["source"], found["name"]) == ("demonstrations", "consistent"))
    assert found["rows"] == 18


def test_data_without_labels_have_no_file_of_them(validate: Any, tmp_path: Path) -> None:
    demonstrations = [{"prompt": row["prompt"], "completion": row["completion"]} for row in labelled(0, 60)]
    unlearned = {"role": "assistant", "content": "hello", "weight": 0}
    demonstrations.append({"prompt": "hi", "completion": "hello", "messages": [unlearned]})
    inputs = {
        "preferences": write(tmp_path / "pairs.jsonl", pairs(0, 90)),
        "demonstrations": write(tmp_path / "demonstrations.jsonl", demonstrations),
    }
    metrics = validate(tmp_path, inputs)
    assert not any("single_labels" in name for name in (*metrics, *contents(tmp_path)))
    assert "data/desirable" not in metrics
    suite = json.loads((tmp_path / "artifact/suite.json").read_text())
    checks = {(entry["meta"]["source"], entry["meta"]["check"]) for entry in suite["expectations"]}
    assert ("demonstrations", "consistent") not in checks and ("demonstrations", "desirable") in checks


def test_single_labels_alone_are_read_beside_the_generators_pairs(validate: Any, tmp_path: Path) -> None:
    """SFT learns the desirable ones. A launch refuses KTO, which would train on those pairs."""
    path = write(tmp_path / "kto.jsonl", labelled(0, 60))
    assert validate(tmp_path, {"demonstrations": path})["data/desirable"] == 40
    with pytest.raises(UserError, match=r"policy.method=kto all labels.*data.score.name=label makes pairs"):
        look_at("preferences", path, DataConfig())


COLUMNS = {
    "TRL": {"response": "completion"}, "TRL's conversations": {"response": "completion"}, "words": {},
    "Alpaca": {"prompt": "instruction", "response": "output"}, "flag": {},
}  # fmt: skip


@pytest.mark.parametrize("form", COLUMNS)
def test_labels_of_one_prompt_make_pairs(form: str, validate: Any, tmp_path: Path) -> None:
    """Prompts 80 to 89 have desirable responses alone. A response that is in a pair is no single label too."""
    rows = [
        carried(form, f"question {i}", f"{word} {i} indeed", word == "good")
        for i in range(90)
        for word in (("good", "bad") if i < 80 else ("good",))
    ]
    path = write(tmp_path / "kto.jsonl", rows)
    options = {"score": {"name": "is_safe" if form == "flag" else "label"}, "columns": COLUMNS[form]}
    metrics = validate(tmp_path, {"preferences": path, "demonstrations": path}, **options, label_values=MEANINGS)
    assert (metrics["data/pairs"], metrics["data/desirable"], metrics["data/undesirable"]) == (80, 10, 0)
    assert metrics["data/demonstrations"] == 90
    row = lines(tmp_path, "pairs.train")[0]
    assert row["chosen"].startswith("good") and row["rejected"].startswith("bad") and row["margin"] == 1


def test_labels_written_as_text_make_pairs(validate: Any, tmp_path: Path) -> None:
    labels = [(i, label) for i in range(90) for label in ("True", "False")]
    rows = [{"prompt": f"question {i}", "response": f"{label} {i}", "label": label} for i, label in labels]
    path = write(tmp_path / "kto.jsonl", rows)
    metrics = validate(tmp_path, {"preferences": path, "demonstrations": path}, score={"name": "label"})
    assert metrics["data/pairs"] == 90 and lines(tmp_path, "pairs.train")[0]["chosen"].startswith("True")
    assert "data/desirable" not in metrics, "all are in pairs"


def test_no_message_recommends_what_is_set(tmp_path: Path) -> None:
    labels = [(i, word) for i in range(9) for word in ("good", "bad")]
    rows = [carried("LLaMA-Factory", f"question {i}", f"{word} {i}", word == "good") for i, word in labels]
    path = write(tmp_path / "kto.jsonl", rows)
    with pytest.raises(UserError, match=r"write each as `prompt` and `response`.*data.score.name=label makes pairs"):
        look_at("preferences", path, DataConfig())
    with pytest.raises(UserError, match=r"write each as `prompt` and `response` \(.*`completion`\)\.$"):
        look_at("preferences", path, DataConfig(score=ScoreDifferenceConfig(name="kto_tag")))


def test_undesirable_responses_alone_are_refused(validate: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "kto.jsonl", [row | {"label": False} for row in labelled(0, 20)])
    with pytest.raises(UserError, match=r"no demonstration is left to train on \(0 .* of 20 rows, 20 labelled undesir"):
        validate(tmp_path, {"demonstrations": path})
    with pytest.raises(UserError, match=r"no valid demonstration in 20 rows.*labelled undesirable"):
        look_at("demonstrations", path, DataConfig())


def test_a_message_of_weight_0_is_no_label(job: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "weight": 0}]
    path = write(tmp_path / "kto.jsonl", [*labelled(0, 20), {"messages": turns, "label": True}])
    given = job(demonstrations=str(path))
    report = check(given, {"demonstrations": path}, tmp_path / "scratch", None, lambda *read: None, tokenized=False)
    assert report["single_labels"] == {"desirable": 13, "undesirable": 7}
    (kept_out,) = report["kept_out"]
    assert (kept_out["row"], kept_out["reasons"]) == (21, ["the last message has the weight 0"])
