"""Pairs to label: nothing on the sheet tells who wrote what, and a filled sheet reads back as what was written."""

import csv
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.base.jsonl import read_rows, write_rows
from components.data.formats.pairs import detect, parse_pair
from components.data.formats.transcripts import as_messages
from components.data.readers import read_source
from components.labelling.pair_selection import CandidatePair, choose_pairs, make_pairs, readable, write_pairs

USER = {"role": "user", "content": "hi"}
MODELS = ("alphamodel", "betamodel")


def response(name: str, text: str, model: str = MODELS[0], temperature: float = 1.0) -> dict[str, Any]:
    return {"id": name, "text": text, "model": model, "model_digest": f"digest-{model}", "temperature": temperature}


def candidate(name: str, texts: list[str]) -> dict[str, Any]:
    """A prompt with one response a text, the models taking turns."""
    responses = [response(f"{name}-{n}", text, MODELS[n % 2]) for n, text in enumerate(texts)]
    return {"id": name, "prompt": [{"role": "user", "content": f"Question {name}?"}], "responses": responses}


CANDIDATES = [candidate(f"c{i:02d}", [f"Answer {i}.{n}" for n in range(4)]) for i in range(20)]


def fill_csv(path: Path, label: str, delimiter: str = ",") -> Path:
    """The sheet as a spreadsheet program saves it with every label filled in: quotes only where needed."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file)
    filled = path.with_name("filled.csv")
    with filled.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *([*row[:-1], label] for row in rows)])
    return filled


def read(path: Path) -> list[Any]:
    rows = list(read_source(path))
    name = detect(rows, path)
    assert name == "votes"
    return [parse_pair(row, name, "preferences", 20_000) for row in rows]


def test_no_name_digest_or_temperature_is_on_the_sheet_and_the_key_tells_the_sides(tmp_path: Path) -> None:
    pairs = make_pairs(CANDIDATES, 2, 20_000, seed=0)
    write_pairs(tmp_path, pairs)
    for name in ("pairs.csv", "pairs.jsonl"):
        content = (tmp_path / name).read_text().casefold()
        assert not any(word in content for word in (*MODELS, "digest", "temperature", "model", "c00-0"))
    texts = {r["id"]: r["text"] for c in CANDIDATES for r in c["responses"]}
    sheet, key = read_rows(tmp_path / "pairs.jsonl"), read_rows(tmp_path / "key.jsonl")
    assert len(sheet) == 40 and [row["id"] for row in sheet] == [row["id"] for row in key]
    for row, sides in zip(sheet, key, strict=True):
        assert row["a"] == texts[sides["a"]] and row["b"] == texts[sides["b"]] and row["label"] is None
        assert sides["a"].startswith(sides["prompt_id"]) and sides["b"].startswith(sides["prompt_id"])


def test_sides_are_balanced_and_neither_they_nor_the_order_follow_the_prompts(tmp_path: Path) -> None:
    pairs = make_pairs(CANDIDATES, 1, 20_000, seed=0)
    on_a = [pair.a["model"] for pair in pairs]
    assert Counter(on_a) == {MODELS[0]: 10, MODELS[1]: 10}
    assert on_a != [MODELS[n % 2] for n in range(20)] and on_a != [MODELS[1 - n % 2] for n in range(20)]
    assert [pair.prompt_id for pair in pairs] != sorted(pair.prompt_id for pair in pairs)
    assert pairs == make_pairs(CANDIDATES, 1, 20_000, seed=0) != make_pairs(CANDIDATES, 1, 20_000, seed=1)
    (mark,) = {pair.id.rpartition("-")[2] for pair in pairs}
    assert re.fullmatch("[0-9a-f]{8}", mark), "what tells this sheet's pairs from another's"
    assert [pair.id.rpartition("-")[0] for pair in pairs] == [f"tether-{n:05d}" for n in range(1, 21)]


def test_who_knows_the_seed_and_the_texts_can_not_tell_the_sides() -> None:
    """The same texts by other models of the same order: draws of seed and texts alone would be the same."""
    others = [
        c | {"responses": [r | {"model_digest": f"other-{r['model_digest']}"} for r in c["responses"]]}
        for c in CANDIDATES
    ]
    of = {pair.prompt_id: pair.a["text"] for pair in make_pairs(CANDIDATES, 1, 20_000, seed=0)}
    other = {pair.prompt_id: pair.a["text"] for pair in make_pairs(others, 1, 20_000, seed=0)}
    assert of != other


def test_pairs_are_of_different_models_and_temperatures_first() -> None:
    responses = [response(f"{m}{t}", f"{m} {t}", m, t) for m in MODELS for t in (0.7, 1.0)]
    rng = random.Random(0)
    two = choose_pairs(responses, 2, rng)
    assert all(x["model"] != y["model"] and x["temperature"] != y["temperature"] for x, y in two)
    assert len({r["id"] for pair in two for r in pair}) == 4
    assert len(choose_pairs(responses, 99, rng)) == 6
    many = [response(str(n), str(n)) for n in range(26)]
    assert len(choose_pairs(many, 300, rng)) == 300 < 26 * 25 / 2
    same = [response(str(n), str(n)) for n in range(4)]
    assert len({r["id"] for pair in choose_pairs(same, 2, rng) for r in pair}) == 4


def test_no_pair_holds_what_the_contract_would_quarantine() -> None:
    row = candidate("c", ["fine", "", " \n", "bell \x07", "x" * 100, "fine too"])
    pairs = make_pairs([row], 99, max_characters=60, seed=0)
    assert [{pair.a["text"], pair.b["text"]} for pair in pairs] == [{"fine", "fine too"}]
    assert make_pairs([candidate("c", ["alone"])], 1, 60, 0) == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=30) | (
    st.sampled_from(
        ["=1+1", "'=1", "@SUM(A1)", "-2", "+3", "\t=x", "a,b;c\td", 'say "hi"', "two\nlines", "cr\rlf\r\n", "''", "'",
         '["a", "b"]', '[{"role": "user", "content": "x"}]', '{"a": 1}', "\uff1d1", "\ufeff", "null", "ü 中 🙂",
         "\n\nHuman: hi", "\n\nHuman: hi\n\nAssistant: ho", "=cmd|' /C calc'!A0", " padded "]
    )
)  # fmt: skip
PROMPTS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=4).map(
    lambda turns: as_messages([{"role": role, "content": text} for role, text in turns], "prompt")
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(PROMPTS, TEXTS, TEXTS, st.sampled_from(["a", " B ", "equal"]), st.sampled_from(",;\t"))
def test_any_text_that_is_labelled_reads_back_as_it_was(
    tmp_path: Path, prompt: list[dict[str, str]], a: str, b: str, label: str, delimiter: str
) -> None:
    write_pairs(tmp_path, [CandidatePair("tether-00001-0", "p", prompt, response("0", a), response("1", b))])
    [row] = read_rows(tmp_path / "pairs.jsonl")
    write_rows(tmp_path / "filled.jsonl", [row | {"label": label}])
    chosen, rejected = (b, a) if label == " B " else (a, b)
    for path in (tmp_path / "filled.jsonl", fill_csv(tmp_path / "pairs.csv", label, delimiter)):
        [back] = read(path)
        assert (back.item["prompt"], back.item["chosen"], back.item["rejected"]) == (prompt, chosen, rejected)
        assert ("tie" in [problem.text for problem in back.problems]) == (label == "equal")


def test_a_row_without_a_label_is_quarantined_and_votes_serve_as_well(tmp_path: Path) -> None:
    write_pairs(tmp_path, make_pairs(CANDIDATES, 1, 20_000, seed=0))
    for name in ("pairs.csv", "pairs.jsonl"):
        assert all([p.check for p in row.problems] == ["votes_valid"] for row in read(tmp_path / name))
    rows = read_rows(tmp_path / "pairs.jsonl")
    write_rows(tmp_path / "votes.jsonl", (row | {"votes_a": 1, "votes_b": 3, "votes_equal": 0} for row in rows))
    for row, back in zip(rows, read(tmp_path / "votes.jsonl"), strict=True):
        assert back.item["chosen"] == row["b"] and (back.item["votes_chosen"], back.item["votes"]) == (3, 4)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([USER], "hi"),
        ([USER, {"role": "assistant", "content": "ho"}, USER], "\n\nHuman: hi\n\nAssistant: ho\n\nHuman: hi"),
        ([{"role": "system", "content": "Be kind."}, USER], None),
        ([USER, {"role": "assistant", "content": " padded "}, USER], None),
        ([{"role": "user", "content": "quotes\n\nAssistant: so"}, USER], None),
    ],
)
def test_a_prompt_is_shown_in_the_most_readable_form_that_keeps_it(prompt: Any, shown: str | None) -> None:
    assert readable(prompt) == (prompt if shown is None else shown)
