"""`tether data label` whole: any file in, votes out, nothing asked twice, and a model's votes marked to the card."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows, write_rows
from components.data.config import DataConfig
from flows.data.model_labels import LabelOptions, label_file, read_pairs
from tests.components.rewards.scorer import Scorer
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]


def rows(n: int = 6) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {i}?", "a": f"first answer {i}", "b": f"second, better answer {i}"} for i in range(n)]


def answer(body: Any) -> tuple[int, object]:
    """Of question 0 and 1 always A; of the others the better answer, wherever it stands."""
    text = body["messages"][0]["content"]
    biased = any(f"Question {i}?" in text for i in (0, 1))
    better_first = "better" in text.partition("</response_a>")[0].rpartition("<response_a>")[2]
    return 200, {"choices": [{"message": {"content": "A" if biased or better_first else "B"}}]}


@pytest.fixture
def endpoint() -> Iterator[Scorer]:
    with Scorer() as made:
        made.url, made.answer = made.url.replace("/score", "/v1"), answer
        yield made


@pytest.fixture
def label(tmp_path: Path, endpoint: Scorer) -> Callable[..., dict[str, Any]]:
    def make(file: Path, out: str = "out", report: Any = None, **options: Any) -> dict[str, Any]:
        asked = LabelOptions(model="big", endpoint={"patience": 0}, **options)
        told = report or (lambda done, total: None)
        return label_file(tmp_path / "home", str(file), endpoint.url, tmp_path / out, [], asked, told)

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_planted_bias_is_reported_and_votes_are_read_as_a_models(
    tmp_path: Path, endpoint: Scorer, label: Any
) -> None:
    """Four of six consistent for b, of which `first` has a half, and two biased: (2 + 4 / 2) / 6 = 2 / 3."""
    write_rows(tmp_path / "pairs.jsonl", rows())
    found = label(tmp_path / "pairs.jsonl")
    assert (found["first"], found["consistent"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found["votes"] == {"a": 0, "b": 4, "tie": 2} and len(endpoint.asked) == 12
    voted = read_rows(tmp_path / "out" / "votes.jsonl")
    assert voted[5]["votes"] == [{"annotator": "model:big", "label": "b", "preference": 0.0}]
    pairs = read_pairs(tmp_path / "out" / "votes.jsonl", DataConfig()).pairs
    assert [pair.votes for pair in pairs] == [(("model:big", 2),)] * 2 + [(("model:big", 1),)] * 4


@pytest.mark.parametrize(
    "damage", ["[" * 100_000, '{"given": [], "swapped": 2}', '{"given": {"first": 7}, "swapped": {}}']
)
def test_a_damaged_answer_is_asked_again_and_a_damaged_description_of_the_judge_is_the_users_error(
    tmp_path: Path, endpoint: Scorer, label: Any, damage: str
) -> None:
    write_rows(tmp_path / "pairs.jsonl", rows(1))
    label(tmp_path / "pairs.jsonl")
    whole, kept = contents(tmp_path / "out"), tmp_path / "out" / "answers.jsonl"
    kept.write_text(damage.replace("{", f'{{"pair": "{read_rows(kept)[0]["pair"]}", ', 1) + "\n")
    label(tmp_path / "pairs.jsonl")
    assert contents(tmp_path / "out") == whole and len(endpoint.asked) == 4
    (tmp_path / "out" / "judge.json").write_text(damage)
    with pytest.raises(UserError, match=r"judge\.json can't be read|another judge"):
        label(tmp_path / "pairs.jsonl")


def test_an_interrupted_call_asks_nothing_twice_and_ends_with_the_same_bytes(
    tmp_path: Path, endpoint: Scorer, label: Any
) -> None:
    write_rows(tmp_path / "pairs.jsonl", rows())
    label(tmp_path / "pairs.jsonl", "whole", max_pairs=5)
    before = len(endpoint.asked)

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label(tmp_path / "pairs.jsonl", "cut", interrupt, max_pairs=5)
    with (tmp_path / "cut" / "answers.jsonl").open("ab") as file:
        file.write(b'{"pair": "cut o')
    label(tmp_path / "pairs.jsonl", "cut", max_pairs=5)
    asked = [json.dumps(body) for body in endpoint.asked[before:]]
    assert len(asked) == len(set(asked)) == 10 and contents(tmp_path / "cut") == contents(tmp_path / "whole")
    label(tmp_path / "pairs.jsonl", "cut")
    assert len(endpoint.asked) == before + 12, "the larger choice asks about the sixth pair only"


def test_pairs_of_another_file_that_leave_the_votes_are_counted_and_come_back_without_asking(
    tmp_path: Path, endpoint: Scorer, label: Any, tether_here: Any
) -> None:
    write_rows(tmp_path / "one.jsonl", rows(3))
    write_rows(tmp_path / "two.jsonl", [*rows(1), {"prompt": "Other?", "a": "worse", "b": "better"}])
    assert label(tmp_path / "one.jsonl")["other_pairs"] == 0
    before = contents(tmp_path / "out")
    assert label(tmp_path / "two.jsonl")["other_pairs"] == 2
    assert len(read_rows(tmp_path / "out" / "votes.jsonl")) == 2
    asked = len(endpoint.asked)
    assert label(tmp_path / "one.jsonl")["other_pairs"] == 1 and len(endpoint.asked) == asked
    kept = {name: text for name, text in contents(tmp_path / "out").items() if name != "answers.jsonl"}
    assert kept == {name: text for name, text in before.items() if name != "answers.jsonl"}
    args = ["data", "label", str(tmp_path / "two.jsonl"), "--judge", endpoint.url, "--model", "big"]
    done = tether_here(*args, "--out", str(tmp_path / "out"), "--patience", "0", home=tmp_path / "home")
    assert "2 pairs of earlier calls are not among the pairs of this one" in done.stdout, done.stderr


@pytest.mark.faults
def test_a_call_that_is_killed_loses_the_pair_in_progress_only(tmp_path: Path, endpoint: Scorer, label: Any) -> None:
    """The endpoint kills the caller at its 8th question, the second of the 4th pair."""
    write_rows(tmp_path / "pairs.jsonl", rows())
    command = [sys.executable, "-m", "flows.cli", "data", "label", "pairs.jsonl", "--judge", endpoint.url, "--model"]
    environment = {**os.environ, "TETHER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "big", "--out", "cut"], cwd=tmp_path, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def kill(body: Any) -> tuple[int, object]:
        if len(endpoint.asked) == 8:
            process.kill()
            process.wait()
        return answer(body)

    endpoint.answer = kill
    assert process.wait(PATIENCE * 120) == -signal.SIGKILL
    assert len(read_rows(tmp_path / "cut" / "answers.jsonl")) == 3
    label(tmp_path / "pairs.jsonl", "cut")
    assert len(endpoint.asked) == 8 + 6
    label(tmp_path / "pairs.jsonl", "whole")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_another_judge_or_rubric_or_a_full_folder_is_refused(tmp_path: Path, label: Any) -> None:
    write_rows(tmp_path / "pairs.jsonl", rows(2))
    label(tmp_path / "pairs.jsonl")
    (tmp_path / "rubric.md").write_text("Prefer the shorter one.\n")
    with pytest.raises(UserError, match="answers of another judge: rubric differs"):
        label(tmp_path / "pairs.jsonl", rubric=tmp_path / "rubric.md")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        label(tmp_path / "pairs.jsonl", "full")
    with pytest.raises(UserError, match=r"--out \S+notes\.txt is a file\. Name a new folder"):
        label(tmp_path / "pairs.jsonl", "full/notes.txt")
    (tmp_path / "empty.md").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        label(tmp_path / "pairs.jsonl", "other", rubric=tmp_path / "empty.md")
    with pytest.raises(UserError, match="--model NAME"):
        label_file(tmp_path, str(tmp_path / "pairs.jsonl"), "http://h/v1", tmp_path / "o", [], LabelOptions(), print)
    with pytest.raises(UserError, match="--judge nowhere: there is no such folder"):
        label_file(tmp_path, str(tmp_path / "pairs.jsonl"), "nowhere", tmp_path / "o", [], LabelOptions(), print)


@pytest.mark.parametrize(
    ("row", "sides", "votes"),
    [
        ({"prompt": "q", "a": "x", "b": "y", "label": None}, ("x", "y"), ()),
        ({"prompt": "q", "a": "x", "b": "y", "votes": []}, ("x", "y"), ()),
        ({"prompt": "q", "a": "x", "b": "y", "label": "tie"}, ("x", "y"), ((None, 2),)),
        ({"prompt": "q", "a": "x", "b": "y", "label": "b"}, ("x", "y"), ((None, 1),)),
        ({"prompt": "q", "chosen": "x", "rejected": "y"}, ("x", "y"), ((None, 0),)),
        ({"prompt": "q", "a": "x", "b": "y", "votes": {"a": 1, "b": 2}}, ("x", "y"), ((None, 0), (None, 1), (None, 1))),
        ({"prompt": "q", "a": "x", "b": "y", "annotator": "ann", "label": "b"}, ("x", "y"), (("ann", 1),)),
        ({"prompt": "q", "a": "x", "b": "y", "votes": [{"annotator": "model:m", "label": "b"}, "a"]}, ("x", "y"),
         (("model:m", 1), (None, 0))),
        ({"instruction": "q", "output_1": "x", "output_2": "y", "label": "b"}, ("x", "y"), ((None, 1),)),
    ],
)  # fmt: skip
def test_labelled_and_unlabelled_pairs_of_every_format_keep_their_sides_and_votes(
    tmp_path: Path, row: dict[str, Any], sides: tuple[str, str], votes: Any
) -> None:
    write_rows(tmp_path / "pairs.jsonl", [row] if "annotator" in row else [row, row])
    read = read_pairs(tmp_path / "pairs.jsonl", DataConfig())
    (pair,) = read.pairs
    assert (pair.a, pair.b) == sides and pair.votes == votes and read.repeated == ("annotator" not in row)


def test_card_lineage_terminal_and_page_say_that_models_voted(make_home: Any) -> None:
    from flows.models.card import card
    from flows.models.lineage import lineage
    from flows.models.lineage_text import text
    from flows.models.model_facts import model_facts
    from flows.reports.page import page
    from flows.reports.run_facts import run_facts
    from flows.reports.terminal import markdown
    from tasks.runs.status import load_status

    shares = {"data/model_votes": 0.25, "data/model_pairs": 0.1, "data/model_votes_from/big": 0.25}
    said = "Models (big) cast 25% of the votes on the preference pairs; on 10% of the pairs no person voted."
    home = make_home("data.preferences=votes.jsonl", metrics={"validate": shares})
    for model in ("reward", "ppo"):
        told = card(model_facts(home.path, f"{home.run}/{model}"))
        assert f"> {said}" in told.replace("\\", "") and "- rlaif" in told
    assert said in text(lineage(home.path, home.run))
    assert said in markdown(load_status(home.path, home.run)).replace("\\", "")
    assert said in page(run_facts(home.path, home.run))


def test_nothing_is_said_of_models_where_people_cast_all_votes(make_home: Any) -> None:
    from flows.models.card import card
    from flows.models.model_facts import model_facts

    home = make_home("data.preferences=votes.jsonl")
    told = card(model_facts(home.path, f"{home.run}/ppo"))
    assert "rlaif" not in told and "Models (" not in told
