import json

import pyarrow.parquet
import pytest

from components.base.errors import CheckFailed, UserError
from components.data.config import DataConfig
from components.data.splits import prompt_key, split_of
from components.data.support_desk import desk
from components.data.tables import published
from components.data.tables.published import SplitWriter
from tests.splits import contents, lines, pairs, write


def small(**changes):
    return {"generator": desk.SupportDeskConfig(demonstrations=50, pairs=120, **changes)}


def test_the_support_desk_is_split_by_prompt_into_the_files_that_later_stages_read(tmp_path, validate):
    metrics = validate(tmp_path, **small())
    shares = DataConfig().split
    for name in ("train", "calibration", "test"):
        found = lines(tmp_path, f"pairs.{name}")
        assert len(found) == metrics[f"data/pairs_{name}"] > 0
        assert all(split_of(prompt_key(row["prompt"]), shares) == name for row in found)
        prompts = lines(tmp_path, f"prompts.{name}")
        assert {prompt_key(p["prompt"]) for p in prompts} == {prompt_key(p["prompt"]) for p in found}
        assert len(prompts) == metrics[f"data/prompts_{name}"]
        assert set(found[0]) == {
            "prompt", "chosen", "rejected", "margin", "votes_chosen", "votes", "soft_label", "objectives", "weight",
                "category", "source", "row",
        }  # fmt: skip
    assert all(split_of(prompt_key(d["prompt"]), shares) == "train" for d in lines(tmp_path, "demonstrations.train"))
    assert all(split_of(prompt_key(d["prompt"]), shares) != "train" for d in lines(tmp_path, "demonstrations.heldout"))
    assert json.loads((tmp_path / "artifact/task.json").read_text()) == {"name": "support-desk"}
    assert metrics["data/pairs"] == 120 and metrics["data/demonstrations"] == 50
    assert metrics["data/contract"] == 1 and metrics["data/leaked_prompts"] == 0 and metrics["data/quarantined"] == 0
    assert 0.3 < metrics["data/annotator_agreement"] < 1


def test_a_held_out_pair_written_to_the_training_split_stops_validation(tmp_path, validate, monkeypatch):
    write, left = SplitWriter.write, []

    def misplaced(split, row):
        if split.folder.name == "pairs.test" and not left:
            left.append(row)
        write(split, left[0] if split.folder.name == "pairs.train" and left else row)

    monkeypatch.setattr(SplitWriter, "write", misplaced)
    with pytest.raises(CheckFailed, match=r"validate\.splits failed.* rows of pairs.train have a prompt"):
        validate(tmp_path, **small())


def test_a_row_lost_on_the_way_to_disk_stops_validation(tmp_path, validate, monkeypatch):
    write, left = SplitWriter.write, iter(range(100))
    monkeypatch.setattr(SplitWriter, "write", lambda split, row: write(split, row) if next(left, None) != 7 else None)
    with pytest.raises(CheckFailed, match=r"validate\.splits failed.* rows on disk and .* in the metrics"):
        validate(tmp_path, **small())


def test_the_checks_of_the_splits_are_listed_with_their_numbers(tmp_path, validate):
    validate(tmp_path, **small())
    splits, shares, _ = json.loads((tmp_path / "attachments/self_checks.json").read_text())
    assert (splits["name"], splits["verdict"]) == ("validate.splits", "held") and "none in the" in splits["numbers"]
    assert (shares["name"], shares["verdict"]) == ("validate.shares", "held") and "in train (0.7)" in shares["numbers"]


def test_the_same_job_gives_the_same_bytes_and_another_seed_others(tmp_path, validate):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        validate(tmp_path / name, seed=seed, **small())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a")["pairs.train/00000.arrow"] != contents(tmp_path / "c")["pairs.train/00000.arrow"]


def test_a_stage_that_ends_between_shards_gives_the_same_bytes_when_it_is_run_again(tmp_path, validate, monkeypatch):
    monkeypatch.setattr(published, "BATCH", 5)
    monkeypatch.setattr(published, "SHARD", 10)
    validate(tmp_path / "whole", **small())
    write, left = SplitWriter.write, iter(range(70))

    def ends(split, row):
        if next(left, None) is None:
            raise KeyboardInterrupt
        write(split, row)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(SplitWriter, "write", ends)
        validate(tmp_path / "again", **small())
    begun = tmp_path / "again" / "artifact" / "pairs.train"
    assert (begun / "00000.arrow").exists()
    (begun / "00077.arrow").write_bytes(b"what a kill leaves")
    validate(tmp_path / "again", **small())
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert sum("pairs.train/" in name for name in contents(tmp_path / "whole")) > 3


def test_the_name_of_a_file_changes_no_byte(tmp_path, validate):
    for name in ("a", "b"):
        source = write(tmp_path / f"{name}.jsonl", [*pairs(0, 60), "not json"])
        validate(tmp_path / name, {"preferences": source})
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_one_bad_row_among_good_ones_is_quarantined_with_its_number(tmp_path, validate):
    rows = [*pairs(0, 60)[:3], {"prompt": "q", "chosen": "x"}, *pairs(0, 60)[3:]]
    metrics = validate(tmp_path / "out", {"preferences": write(tmp_path / "p.jsonl", rows)})
    assert lines(tmp_path / "out", "quarantine") == [
        {"file": "preferences", "row": 4, "reasons": ["`rejected` is missing, expected text"],
         "data": {"prompt": "q", "chosen": "x"}}
    ]  # fmt: skip
    assert (metrics["data/pairs"], metrics["data/quarantined"], metrics["data/contract"]) == (60, 1, 1)
    assert "data/annotator_agreement" not in metrics
    report = json.loads((tmp_path / "out/artifact/report.json").read_text())
    found = next(check for check in report if check["name"] == "fields_present")
    assert (found["rows"], found["row_numbers"], found["passed"]) == (1, [4], True)
    assert (tmp_path / "out/attachments/data_docs/index.html").exists()
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"artifact", "attachments"}


def test_what_utf8_cannot_hold_is_quarantined_and_written_down(tmp_path, validate):
    source = write(tmp_path / "p.jsonl", [*pairs(0, 60), '{"prompt": "q", "chosen": "\\ud800", "rejected": "x"}'])
    validate(tmp_path / "out", {"preferences": source})
    assert lines(tmp_path / "out", "quarantine")[0]["data"]["chosen"] == "\ud800"


def test_a_number_that_json_does_not_know_is_quarantined_as_text(tmp_path, validate):
    rows = [*pairs(0, 60), {"prompt": "q", "chosen": "good", "rejected": "x", "votes": [float("nan")]}]
    columns = {name: [row.get(name) for row in rows] for name in rows[-1]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    validate(tmp_path / "out", {"preferences": tmp_path / "p.parquet"})
    (line,) = (tmp_path / "out/artifact/quarantine.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["data"]["votes"] == ["NaN"]


def test_without_demonstrations_the_chosen_responses_are_taught_in_their_own_split(tmp_path, validate):
    validate(tmp_path / "out", {"preferences": write(tmp_path / "p.jsonl", pairs(0, 60))})
    train = [(prompt_key(d["prompt"]), d["response"]) for d in lines(tmp_path / "out", "demonstrations.train")]
    assert train == [(prompt_key(p["prompt"]), p["chosen"]) for p in lines(tmp_path / "out", "pairs.train")]
    heldout = {d["response"] for d in lines(tmp_path / "out", "demonstrations.heldout")}
    assert heldout == {
        p["chosen"] for name in ("calibration", "test") for p in lines(tmp_path / "out", f"pairs.{name}")
    }
    assert json.loads((tmp_path / "out/artifact/task.json").read_text()) == {"name": "none"}


def test_given_demonstrations_are_judged_and_taught(tmp_path, validate):
    taught = [{"instruction": f"do {i}", "output": f"done {i}"} for i in range(40)] + [
        {"instruction": "x", "output": ""}
    ]
    inputs = {
        "preferences": write(tmp_path / "p.jsonl", pairs(0, 60)),
        "demonstrations": write(tmp_path / "d.jsonl", taught),
    }
    metrics = validate(tmp_path / "out", inputs)
    assert metrics["data/demonstrations"] == 40 and metrics["data/quarantined"] == 1
    assert lines(tmp_path / "out", "quarantine")[0]["file"] == "demonstrations"
    assert all(d["source"] == "demonstrations" for d in lines(tmp_path / "out", "demonstrations.train"))


def test_max_pairs_keeps_that_many_by_seed(tmp_path, validate):
    inputs = {"preferences": write(tmp_path / "p.jsonl", pairs(0, 200))}
    kept = {}
    for seed in (0, 1):
        metrics = validate(tmp_path / str(seed), inputs, seed=seed, max_pairs=100)
        assert metrics["data/pairs"] == 100
        kept[seed] = {
            p["row"] for name in ("train", "calibration", "test") for p in lines(tmp_path / str(seed), f"pairs.{name}")
        }
    assert kept[0] != kept[1]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "p.jsonl: there is no such file"),
        ([{"prompt": "a", "chosen": "b", "rejected": None}] * 5, "has no valid"),
    ],
)
def test_a_source_that_gives_nothing_is_the_users_error_in_one_paragraph_and_leaves_nothing(
    tmp_path, rows, said, validate
):
    with pytest.raises(UserError, match=said) as error:
        path = tmp_path / "p.jsonl"
        validate(tmp_path / "out", {"preferences": path if rows is None else write(path, rows)})
    assert "\n" not in str(error.value) and error.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_a_split_without_training_pairs_is_the_users_error(tmp_path, validate):
    rows = in_splits(pairs(0, 60), "test", "calibration")
    with pytest.raises(UserError, match="no pair is left to train on"):
        validate(tmp_path / "out", {"preferences": write(tmp_path / "p.jsonl", rows)})


def test_a_contract_that_fails_names_check_and_rows_while_the_run_is_on(tmp_path, validate, caplog):
    """`data/contract is 0, must be >= 1` was all that the terminal said."""
    rows = [row | {"rejected": ""} if number in (4, 9) else row for number, row in enumerate(pairs(0, 60), 1)]
    metrics = validate(
        tmp_path / "out",
        {"preferences": write(tmp_path / "p.jsonl", rows)},
        checks={"texts_filled": {"severity": "error", "threshold": 0.01}},
    )
    assert (metrics["data/contract"], metrics["data/pairs"], metrics["data/quarantined"]) == (0, 58, 2)
    (told,) = [each.getMessage() for each in caplog.records if "the contract fails" in each.getMessage()]
    assert told.startswith("the contract fails: texts_filled: No response and no prompt turn is empty")
    assert told.endswith(": 2 rows (4, 9)")


def test_no_row_left_is_told_with_the_checks_that_kept_them_out(tmp_path, validate):
    train, others = in_splits(pairs(0, 60), "train"), in_splits(pairs(0, 60), "test", "calibration")
    rows = [row | {"rejected": ""} for row in train] + others
    said = rf"Rows kept out, by check: texts_filled {len(train)}; `tether data check FILE` names"
    with pytest.raises(UserError, match=said):
        validate(tmp_path / "out", {"preferences": write(tmp_path / "p.jsonl", rows)})


def in_splits(rows, *names):
    shares = DataConfig().split
    return [row for row in rows if split_of(prompt_key([{"role": "user", "content": row["prompt"]}]), shares) in names]


@pytest.mark.parametrize("lacking", ["train", "calibration", "test"])
@pytest.mark.parametrize("source", ["preferences", "prompts"])
def test_a_split_without_prompts_is_the_users_error_before_a_model_is_trained(tmp_path, validate, source, lacking):
    left = {"train", "calibration", "test"} - {lacking}
    inputs = {
        "preferences": write(tmp_path / "pairs.jsonl", pairs(0, 60)),
        source: write(tmp_path / "few.jsonl", in_splits(pairs(0, 60), *left)),
    }
    with pytest.raises(UserError, match=rf"(pair|prompt) is left .*Give more data, or a larger data\.split\.{lacking}"):
        validate(tmp_path / "out", inputs)
    assert not (tmp_path / "out").exists()


def test_demonstrations_none_of_which_is_held_out_are_the_users_error(tmp_path, validate):
    taught = [{"prompt": row["prompt"], "response": "done"} for row in in_splits(pairs(0, 60), "train")]
    inputs = {
        "preferences": write(tmp_path / "pairs.jsonl", pairs(0, 60)),
        "demonstrations": write(tmp_path / "taught.jsonl", taught),
    }
    said = rf"no demonstration is left to evaluate on \({len(taught)} valid demonstrations of {len(taught)} rows\)"
    with pytest.raises(UserError, match=said):
        validate(tmp_path / "out", inputs)


def test_a_source_that_the_config_names_and_nobody_passed_is_no_silent_default(tmp_path, validate):
    with pytest.raises(CheckFailed, match=r"data\.preferences is 'owner/name'"):
        validate(tmp_path, preferences="owner/name")


def test_responses_over_the_cap_are_marked_on_their_pairs_and_counted(tmp_path, validate):
    """The tokenizer takes whole words here, so a sentence of 64 words has 65 tokens with its EOS; the cap is 64."""
    rows = pairs(0, 100)
    for i, side, words in [(0, "chosen", 64), (1, "rejected", 64), (2, "chosen", 63), (3, "rejected", 80)]:
        rows[i][side] = " ".join(["word"] * (words - 1) + [str(i)])
    rows[3]["chosen"] = " ".join(["other"] * 70)
    metrics = validate(tmp_path, {"preferences": write(tmp_path / "pairs.jsonl", rows)})
    found = [row for split in ("train", "calibration", "test") for row in lines(tmp_path, f"pairs.{split}")]
    assert len(found) == 100 and all(row.get("overlong", True) is True for row in found)
    assert sorted(row["row"] for row in found if "overlong" in row) == [1, 2, 4]
    assert (metrics["data/overlong"], metrics["data/overlong_chosen"]) == (0.03, 0.02)
    assert (metrics["data/overlong_rejected"], metrics["data/overlong_demonstrations"]) == (0.02, 0.02)


def test_given_demonstrations_over_the_cap_are_counted_apart_from_the_pairs(tmp_path, validate):
    demonstrations = [{"prompt": f"ask {i}", "response": " ".join(["word"] * (80 if i < 5 else 3))} for i in range(40)]
    inputs = {
        "preferences": write(tmp_path / "pairs.jsonl", pairs(0, 100)),
        "demonstrations": write(tmp_path / "taught.jsonl", demonstrations),
    }
    metrics = validate(tmp_path, inputs)
    assert metrics["data/overlong"] == 0 and metrics["data/overlong_demonstrations"] == 5 / 40
    assert all("overlong" not in row for row in lines(tmp_path, "pairs.train"))
