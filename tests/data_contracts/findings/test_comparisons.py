"""Data against a benchmark's prompts, and against prompts of deployment."""

import json
import random
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.data.config import DataConfig
from data_contracts.check import check
from data_contracts.findings.comparisons import prompts_in
from tests.splits import write

WORDS = "river garden window letter market bridge winter summer forest kitchen teacher doctor village station".split()
GERMAN = "der Fluss fließt langsam durch das alte Tal und die Kinder spielen am Ufer mit ihren Freunden".split()


def sentence(rng, count=14, words=WORDS):
    return " ".join(rng.choice(words) for _ in range(count))


def pairs(n=200, **more):
    rng = random.Random(1)
    return [{"prompt": f"number {i}: {sentence(rng)}", "chosen": sentence(rng, 8), "rejected": sentence(rng, 7), **more}
            for i in range(n)]  # fmt: skip


@pytest.fixture
def examined(tmp_path, job):
    def examined(rows, beside, **options):
        inputs = {"preferences": write(tmp_path / "p.jsonl", rows)}
        inputs |= {name: write(tmp_path / f"{name.replace('/', '-')}.jsonl", found) for name, found in beside.items()}
        scratch, asked = tmp_path / "scratch", job(preferences="p.jsonl", **options)
        report = check(asked, inputs, scratch, None, lambda *read: None, tokenized=False)
        gone = [json.loads(line) for line in (scratch / "quarantine.jsonl").read_text().splitlines()]
        return {each["name"]: each for each in report["checks"]}, {row["row"]: row["reasons"] for row in gone}

    return examined


def test_rows_whose_prompt_nearly_repeats_one_of_two_benchmarks_are_left_out_by_row(examined):
    rows = pairs()
    rng = random.Random(9)
    fresh = [{"prompt": f"item {i} {sentence(rng, 20)}"} for i in range(50)]
    long = sentence(rng, 60)
    rows[11]["prompt"], one = long, {"prompt": long.upper() + "!"}
    rows[23]["prompt"], other = f"{long} river", {"prompt": sentence(rng, 30)}
    rows[40]["prompt"] = other["prompt"]
    beside = {"decontaminate/a.jsonl": [*fresh, one], "decontaminate/b.jsonl": [other]}
    checks, gone = examined(rows, beside, decontaminate=("a.jsonl", "b.jsonl"))
    assert checks["uncontaminated"]["row_numbers"] == [12, 24, 41] and set(gone) == {12, 24, 41}
    assert gone[12] == ["its prompt nearly repeats row 51 of a.jsonl (data.decontaminate)"]
    assert gone[41] == ["its prompt nearly repeats row 1 of b.jsonl (data.decontaminate)"]
    again, _ = examined(rows, beside)  # as `tether reproduce` asks, whose options lack what is no part of a key
    assert again["uncontaminated"]["row_numbers"] == [12, 24, 41]
    clean, gone = examined(pairs(), {"decontaminate": fresh}, decontaminate=("d.jsonl",))
    assert clean["uncontaminated"]["rows"] == 0 and gone == {}
    assert "uncontaminated" not in examined(pairs(), {})[0]


def test_a_benchmark_without_prompts_is_the_users_error_by_file(examined):
    with pytest.raises(UserError, match=r"data\.decontaminate: .*decontaminate\.jsonl holds no prompt"):
        examined(pairs(), {"decontaminate": [{"sentence": "what?"}]}, decontaminate=("d.jsonl",))


@pytest.mark.parametrize("field", ["decontaminate", "deployment_prompts"])
@pytest.mark.parametrize("row", ["", '{"prompt": "q', "[]"])
def test_an_error_in_a_file_beside_the_data_names_the_option_and_the_file(tmp_path, monkeypatch, field, row):
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text(row)
    with pytest.raises(UserError, match=rf"^data\.{field}: (No line of )?d\.jsonl"):
        list(prompts_in(Path("d.jsonl"), DataConfig(), f"data.{field}"))


def test_benchmarks_in_their_own_shapes_stand_beside_each_other_and_symbols_alone_are_no_repetition(examined):
    rows = pairs(40)
    rows[7]["prompt"], rows[8]["prompt"], rows[9]["prompt"] = "?", "👍", "…"
    turns = [{"role": "user", "content": rows[3]["prompt"]}, {"role": "assistant", "content": "an answer"}]
    shapes = [
        {"question": rows[0]["prompt"], "answer": "5"}, {"instruction": rows[1]["prompt"], "input": "", "output": "x"},
        {"messages": turns}, {"task": rows[4]["prompt"]}, {"prompt": "👍"}, {"prompt": ""},
    ]  # fmt: skip
    beside = {f"decontaminate/{n}.jsonl": [row] for n, row in enumerate(shapes[:-1])}
    beside["decontaminate/4.jsonl"] += shapes[-1:]
    checks, gone = examined(rows, beside, prompt_columns={"prompt": "task"})
    assert checks["uncontaminated"]["row_numbers"] == [1, 2, 4, 5, 9] and set(gone) == {1, 2, 4, 5, 9}


def test_deployment_prompts_of_the_same_kind_pass_and_each_difference_is_found_by_its_own_check(examined):
    rng = random.Random(5)
    rows = pairs(200, category="chat")
    alike = [{"prompt": f"number {i}: {sentence(rng)}", "category": "chat"} for i in range(200)]

    def failing(prompts):
        checks, _ = examined(rows, {"deployment_prompts": prompts}, deployment_prompts="d.jsonl")
        found = {name: each["passed"] for name, each in checks.items() if name.startswith("deployment_")}
        assert len(found) == 4
        return {name for name, passed in found.items() if not passed}

    assert failing(alike) == set()
    longer = [row | {"prompt": f"{row['prompt']} {sentence(rng, 10)}"} for row in alike]
    assert "deployment_length" in (found := failing(longer)) and "deployment_category" not in found
    german = [{"prompt": f"number {i}: {sentence(rng, 14, GERMAN)}", "category": "code"} for i in range(200)]
    assert failing(german) == {"deployment_category", "deployment_language", "deployment_words"}
