"""What a row says beside its texts is refused where it belongs to them, and named with its rows where it does not."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import write_rows
from components.data.config import DataConfig
from components.data.formats.prompts import read_prompts
from data_contracts.rows.gather import RowSource, judged_rows

ASKED = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "set_timer"}}
CHAT = [ASKED, {"role": "assistant", "content": "x"}]
PAIR = {"prompt": [ASKED], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "y"}]}
DEMONSTRATION = {"messages": CHAT}


def source(folder: Path, *rows: dict[str, Any], kind: str = "preferences", **options: Any) -> RowSource:
    write_rows(folder / "rows.jsonl", rows)
    return RowSource.named(kind, folder / "rows.jsonl", DataConfig.model_validate(options))


@pytest.mark.parametrize("field", ["tools", "functions", "documents", "images"])
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("preferences", PAIR),
        ("preferences", {"prompt": "q", "chosen": "x", "rejected": "y"}),
        ("preferences", {"question": "q", "chosen": "x", "rejected": "y"}),
        ("preferences", {"conversation_a": CHAT, "conversation_b": CHAT, "winner": "model_a"}),
        ("preferences", {"info": {"post": "q"}, "summaries": [{"text": "x"}, {"text": "y"}], "choice": 0}),
        ("preferences", {"prompt": "q", "response": "x", "helpfulness": 4}),
        ("preferences", {"prompt": "q", "a": "x", "b": "y", "annotator": "ann", "label": "a"}),
        ("demonstrations", DEMONSTRATION),
        ("demonstrations", {"text": "\n\nHuman: q\n\nAssistant: x"}),
        ("prompts", {"prompt": "q"}),
    ],
)
def test_what_changes_the_prompt_is_refused_in_every_format(tmp_path: Path, kind: str, row: Any, field: str) -> None:
    for value in ([TOOL], json.dumps([TOOL])):
        (found,) = judged_rows(source(tmp_path, row | {field: value}, kind=kind), 1000)
        assert [(p.check, f"`{field}` belongs to the prompt" in p.text) for p in found.problems] == [
            ("turns_valid", True)
        ]
    for nothing in (None, [], "", "[]", "null"):
        assert "turns_valid" not in [
            p.check for found in judged_rows(source(tmp_path, row | {field: nothing}, kind=kind), 1000)
            for p in found.problems
        ]  # fmt: skip


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "refusal"])
def test_what_an_answer_says_beside_its_content_is_refused(tmp_path: Path, field: str) -> None:
    told = {"role": "assistant", "content": "x", field: "Well."}
    rows: list[dict[str, Any]] = [
        PAIR | {"chosen": [told]},
        PAIR | {"chosen": told},
        {"input": {"messages": [ASKED]}, "preferred_output": [told], "non_preferred_output": PAIR["rejected"]},
    ]
    for row in rows:
        (found,) = judged_rows(source(tmp_path, row), 1000)
        assert [p.check for p in found.problems] == ["turns_valid"]
        assert f".{field}` is part of the answer" in found.problems[0].text or f"[0].{field}`" in found.problems[0].text
    (found,) = judged_rows(source(tmp_path, PAIR | {"chosen": [told | {field: None}]}), 1000)
    assert not found.problems


def test_the_tools_of_openais_preferences_are_refused_at_their_depth(tmp_path: Path) -> None:
    row = {"input": {"messages": [ASKED], "tools": [TOOL]}, "preferred_output": CHAT[1:],
           "non_preferred_output": PAIR["rejected"]}  # fmt: skip
    (found,) = judged_rows(source(tmp_path, row), 1000)
    assert "`input.tools` belongs to the prompt" in found.problems[0].text


def test_a_prompt_with_tools_is_not_sampled_without_them(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "tools": [TOOL]}, {"prompt": "r"}])
    found = read_prompts(tmp_path / "rows.jsonl", 1000)
    assert [row.number for row in found.quarantined] == [1] and len(found.distinct) == 1


def test_fields_that_are_not_read_are_counted_at_every_depth(tmp_path: Path) -> None:
    named = [{"role": "user", "name": "ann", "content": [{"type": "text", "text": "q", "cache_control": {"ttl": 5}}]}]
    rows = [PAIR | {"prompt": named, "split": "test", "seed": 0}] * 2 + [PAIR | {"split": None, "note": "n"}]
    given = source(tmp_path, *rows, reward_columns=["seed"])
    assert [p.problems for p in judged_rows(given, 1000)] == [[]] * 3
    assert given.unread == {"prompt[].name": 2, "prompt[].content[].cache_control": 2, "split": 2, "note": 1}


@pytest.mark.parametrize(
    ("row", "options", "names"),
    [
        ({"prompt": "q", "completions": [{"response": "x", "overall_score": 2, "custom_system_prompt": "s"},
                                         {"response": "y", "overall_score": 1, "model": None}]}, {},
         ["completions[].custom_system_prompt"]),
        ({"prompt": "q", "a": "x", "b": "y", "votes": [{"annotator": "ann", "label": "a", "comment": "c"}]}, {},
         ["votes[].comment"]),
        ({"prompt": "q", "a": "x", "b": "y", "votes": {"a": 2, "b": 1}}, {}, []),
        ({"info": {"post": "q", "id": "i"}, "summaries": [{"text": "x"}, {"text": "y"}], "choice": 0}, {},
         ["info.id"]),
        ({"prompt": "q", "completions": [
            {"response": "x", "annotations": {"honesty": {"Rating": 5, "Rationale": "r"}}},
            {"response": "y", "annotations": {"honesty": {"Rating": 4}}}]}, {"score": {"name": "honesty"}},
         ["completions[].annotations.honesty.Rationale"]),
    ],
)  # fmt: skip
def test_the_fields_inside_public_sets_are_named_unless_read(tmp_path: Path, row: Any, options: Any, names: Any):
    given = source(tmp_path, row, **options)
    assert not [p for found in judged_rows(given, 1000) for p in found.problems]
    assert sorted(given.unread or {}) == names
