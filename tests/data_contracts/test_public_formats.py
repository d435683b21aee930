"""Files in the shapes of public data sets, made here: what the contract reads from them, and what it keeps out."""

from pathlib import Path
from typing import Any

from components.base.jsonl import write_rows
from data_contracts.check import check
from data_contracts.rows.reading import reading_of


def judged(job: Any, folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[str, dict[str, Any], Any]:
    """What a file of `rows` is read as, its checks by name, and the report."""
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    reading = reading_of(path, job(**options).data)
    given = job(**options, **{reading.kind: str(path)})
    report = check(given, {reading.kind: path}, folder / "scratch", folder / "out", lambda seen: None, tokenized=False)
    return reading.format, {found["name"]: found for found in report["checks"]}, report


def test_the_undesirable_rows_of_kto_data_are_counted_and_kept_out(job: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "completion": f"r {i}", "label": i % 3 > 0} for i in range(30)]
    name, checks, report = judged(job, tmp_path, rows)
    assert (name, report["rows"], report["quarantined"], report["passed"]) == ("KTO", 30, 10, True)
    assert checks["desirable"]["row_numbers"] == list(range(1, 31, 3)) and "votes_once" not in checks


def test_a_second_vote_of_an_annotator_is_judged_alike_in_rows_of_pairs_and_of_votes(job: Any, tmp_path: Path) -> None:
    wide: list[dict[str, Any]] = []
    for i in range(20):
        votes = [{"annotator": f"ann {who}", "label": "ab"[i % 2]} for who in range(3)]
        again = [{"annotator": "ann 1", "label": "ba"[i % 2]}] * (i == 4)
        wide.append({"prompt": f"q {i}", "a": f"x {i}", "b": f"y {i}", "votes": [*votes, *again]})
    long = [{k: v for k, v in row.items() if k != "votes"} | vote for row in wide for vote in row["votes"]]
    found = []
    for shape in (wide, long):
        folder = tmp_path / str(len(shape))
        folder.mkdir()
        _, checks, report = judged(job, folder, shape)
        assert (
            checks["votes_once"]["rows"] == 1 and checks["votes_valid"]["rows"] == 0 and checks["votes_once"]["passed"]
        )
        found.append((report["pairs"], report["kappa"], report["majority"], report["annotators"]))
    assert found[0] == found[1] and found[0][:2] == (20, 1.0)
