from pathlib import Path

import pytest

from components.base.errors import UserError
from components.data.formats.prompts import read_prompts
from tests.splits import write


def test_prompts_are_distinct_and_bad_rows_come_out_with_their_number(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"}, {"prompt": "two"}, {"prompt": [{"role": "user", "content": "one"}]}, {"prompt": " "},
        "{broken", {"prompt": "x" * 101}, {"prompt": "bell \x07"}, {"text": "no prompt"}, {"prompt": []},
        {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"},
    ]  # fmt: skip
    found = read_prompts(write(tmp_path / "x.jsonl", rows), 100)
    assert [p[0]["content"] for p in found.distinct] == ["one", "two"] and found.rows == 10
    assert [(row.number, row.problems[0].text) for row in found.quarantined] == [
        (4, "empty prompt turn"),
        (5, "bad JSON: Expecting property name enclosed in double quotes at character 2"),
        (6, "101 characters, more than data.max_characters (100)"),
        (7, "control character '\\x07' in prompt turn 1"),
        (8, "`prompt` is missing, expected text or a list of messages"),
        (9, "`prompt` is empty"),
        (10, "prompts differ"),
    ]


def test_a_file_without_one_prompt_is_the_users_mistake(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [{"prompt": ""}, {"text": "a"}, {"text": "b"}])
    with pytest.raises(UserError, match=r"no valid prompt in 3 rows.*`prompt` is missing, .*\(2 rows.*is row 2\)"):
        read_prompts(path, 1000)
