"""Pairs that people judged in a batch: where their prompts may stand from then on."""

import json

import pytest

from components.base.jsonl import write_rows
from components.data.config import DecisionConfig
from components.data.tables.published import read_split
from components.human_eval.batch.halves import may_train
from data_contracts.examine import examine
from data_contracts.published_splits import write_splits

SPLITS = ("train", "calibration", "test")


def asked(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def placed(job, tmp_path_factory):
    """The splits that each prompt's rows are written to, given the pairs of a batch beside others."""

    def placed(batch, prompts=300):
        tmp_path = tmp_path_factory.mktemp("placed")
        others = [{"prompt": f"Question {i}?", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(prompts)]
        taught = [{"prompt": f"Question {i}?", "response": f"good {i}"} for i in range(prompts)]
        files = {"preferences/all": others, "preferences/batch": batch, "demonstrations": taught}
        given = {}
        for name, rows in files.items():
            if rows:
                given[name] = tmp_path / f"{name.replace('/', '_')}.jsonl"
                given[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = tmp_path / "artifact"
        asked = job(demonstrations="demonstrations")
        write_splits(examine(asked, given, tmp_path / "scratch", lambda *read: None), out)
        found = {}
        for kind in ("pairs", "prompts"):
            for split in SPLITS:
                for row in read_split(out / f"{kind}.{split}"):
                    found.setdefault(row["prompt"][0]["content"], set()).add(split)
        for name in ("train", "heldout"):
            for row in read_split(out / f"demonstrations.{name}"):
                split = found[row["prompt"][0]["content"]]
                split.add("train" if name == "train" else "heldout")
        return found

    return placed


def judged(i, label="a", **more):
    votes = [{"annotator": f"rating_{rater}", "label": label} for rater in (1, 2, 3)]
    # people saw the prompt in capitals: a near-duplicate of what the data hold
    replies = {"a": f"good good {i}", "b": f"good {i} {i}"}
    return {"prompt": f"QUESTION {i}", "votes": votes, "judged_in": "0a1b2c3d"} | replies | more


def test_a_judged_prompt_that_may_train_leaves_every_held_out_set_and_the_others_stay_held_out(placed):
    before = placed([])
    after = placed([judged(i) for i in range(0, 300, 2)])
    for i in range(300):
        now = after[f"Question {i}?"]
        if i % 2:
            assert now == before[f"Question {i}?"]
        else:
            trains = may_train(asked(f"QUESTION {i}"))
            assert now == ({"train"} if trains else {"test", "heldout"}), i
            assert after.get(f"QUESTION {i}", now - {"heldout"}) == now - {"heldout"}
    assert sum(name.startswith("QUESTION") for name in after) > 50
    moved = [i for i in range(0, 300, 2) if may_train(asked(f"question {i}")) and "test" in before[f"Question {i}?"]]
    assert moved, "no prompt of the test split was judged and may train"


def test_a_prompt_whose_votes_decide_nothing_judges_all_the_same(placed):
    only_judges = next(i for i in range(300) if not may_train(asked(f"question {i}")))
    assert placed([judged(only_judges, "tie"), judged(299)])[f"Question {only_judges}?"] == {"test", "heldout"}


def test_pairs_of_no_batch_stay_where_their_words_put_them(placed):
    before = placed([])
    rows = [{k: v for k, v in judged(i).items() if k != "judged_in"} for i in range(60)]
    after = placed(rows)
    assert {name: after[name] for name in before} == before


def test_what_the_config_asks_of_votes_holds_for_a_batch_and_one_that_decides_nothing_is_no_mistake(job, tmp_path):
    votes = [judged(0, votes=[{"annotator": "rating_1", "label": label}]) for label in ("a", "tie")]
    write_rows(
        tmp_path / "base.jsonl", [{"prompt": f"Why {i}?", "chosen": "good", "rejected": "bad"} for i in range(50)]
    )
    for half in ("preferences", "judged"):
        write_rows(tmp_path / "batch" / f"{half}.jsonl", votes if half == "judged" else [])
    inputs = {"preferences": tmp_path / "base.jsonl", "votes/1": tmp_path / "batch"}
    for minimum, decided in ((None, 0), (1, 1)):
        asked = job(preferences="base.jsonl", decision=DecisionConfig(minimum=minimum))
        out = tmp_path / f"artifact {minimum}"
        write_splits(examine(asked, inputs, tmp_path / f"scratch {minimum}", lambda *read: None), out)
        assert sum("judged_in" in row for split in SPLITS for row in read_split(out / f"pairs.{split}")) == decided
