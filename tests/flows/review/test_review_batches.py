"""What the page takes as a batch, what it writes back, and that scoring takes that."""

import contextlib
import csv
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, text

from components.base.errors import UserError
from components.base.jsonl import read_rows, write_rows
from components.human_eval.returned_labels import Sample, rated_columns, rating_count
from data_contracts.rows.ledger import quarantine_line
from flows.people.rater_sheets import LABELS, joined
from flows.review import review_batches
from flows.review.answer_export import VOTES, export
from flows.review.answer_progress import progress_of_run
from flows.review.database.connect import database_file, database_url, open_database, writing
from flows.review.database.tables import item as item_table
from flows.review.page.page_html import shown, shown_guidelines
from flows.review.personal_links import add_raters, enter_batch, renew_link
from flows.review.rater_votes import SKIP
from flows.review.review_status import early_bound
from flows.review.serve import after_completion
from tasks.runs.awaited_labels import LabelProgress
from tests.flows.review.conftest import Site, answer, make_source
from tests.sheets import write_sample

ITEMS = 6


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of run `run-1` with a sample for two ratings of each item; the policy says yes."""
    folder = write_sample(tmp_path / "sample", ITEMS, criteria=("helpful",))
    home = tmp_path / "home"
    (home / "runs" / "run-1").mkdir(parents=True)
    monkeypatch.setattr(review_batches, "has_run", lambda home, run: run == "run-1")
    monkeypatch.setattr(review_batches, "sample_folder", lambda home, run: folder)
    return home


def for_policy(first: str) -> str:
    return "a" if first.startswith("yes") else "b"


def test_three_people_who_share_a_run_s_items_give_files_that_score_as_what_they_meant(
    run: Path, site: Callable[..., Site]
) -> None:
    source = review_batches.find_batch(run, "run-1")
    assert (source.overlap, source.criteria[0]["name"], len(source.pairs)) == (2, "helpful", ITEMS)
    page = site(raters=3, source=source)
    page.judge(for_policy, comment="=1+1 \u202e", flags=["false"], criteria={"helpful": "a"}, seconds=3.0)
    files = export(page.voting, source)
    assert [file.name for file in files] == ["rater_1.csv", "rater_2.csv", "rater_3.csv"]
    assert export(page.voting, source) == files, "and once more"
    sample = Sample.open(run.parent / "sample")
    labels = sample.ratings(*files)
    assert len(rated_columns(labels)) == 3 and rating_count(labels, sample.raters) == 2 * ITEMS
    for item, each in labels.items():
        assert [rating for rating in each if rating] == [sample.policy_side[item]] * 2, "sides are unexchanged"
    with files[0].open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["rating"]]
    assert {(row["flags"], row["comment"][-1], row["raters"]) for row in rows} == {("false", "\u202e", "3")}
    assert {row["seconds"] for row in rows} <= {"0.0", "0.1", "0.2", "0.3"}, "no more than the server measured"
    assert {row["helpful"] for row in rows} <= {"a", "b"}
    folder = run / "runs" / "run-1"
    joint = joined(folder, run.parent / "sample", folder / "raters")
    assert joint == folder / LABELS and sample.ratings(joint) == labels, "the joint file has all three columns"


def test_a_skipped_pair_is_an_empty_rating_and_counts_as_none(run: Path, site: Callable[..., Site]) -> None:
    page = site(raters=2, source=review_batches.find_batch(run, "run-1"))
    page.judge(lambda first: SKIP if first[-1] == "0" else "tie")
    labels = Sample.open(run.parent / "sample").ratings(*export(page.voting, page.source))
    assert rating_count(labels, 2) == 2 * (ITEMS - 1)


def test_ratings_that_somebody_filled_in_by_hand_are_not_overwritten(run: Path, site: Callable[..., Site]) -> None:
    folder = run / "runs" / "run-1" / "raters"
    shutil.copytree(run.parent / "sample" / "raters", folder)
    page = site(raters=2, source=review_batches.find_batch(run, "run-1"))
    with pytest.raises(UserError, match="nobody has answered"):
        export(page.voting, page.source)
    page.judge(for_policy, people=1)
    export(page.voting, page.source)
    empty = (run.parent / "sample" / "raters" / "rater_2.csv").read_bytes().decode("utf-8-sig")
    by_hand = empty.replace('"2",""', '"2","tie"', 1)
    (folder / "rater_2.csv").write_bytes(by_hand.encode())
    page.judge(for_policy)
    with pytest.raises(UserError, match="did not come from the page"):
        export(page.voting, page.source)
    assert (folder / "rater_2.csv").read_bytes() == by_hand.encode()
    assert len(export(page.voting, page.source, run / "elsewhere")) == 2


def test_the_page_never_opens_the_key_and_the_bound_is_that_of_the_answers(
    run: Path, site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = run.parent / "sample"
    key = (sample / "key.json").read_bytes()
    (sample / "key.json").unlink()
    (sample / "responses.jsonl").rename(sample / "away")
    page = site(raters=2, source=review_batches.find_batch(run, "run-1"))
    page.judge(for_policy)
    assert page.browser(page.admin).get("/progress").status_code == 200
    export(page.voting, page.source)
    (sample / "key.json").write_bytes(key)
    (sample / "away").rename(sample / "responses.jsonl")
    found = early_bound(page.voting.engine, page.voting.batch.id, sample, overlap=2)
    assert (found.items, found.items_asked) == (ITEMS, ITEMS) and 0.2 < found.low < 0.8
    assert found.low_of_people == 0, "two raters say nothing of all people"
    half = early_bound(page.voting.engine, page.voting.batch.id, sample, overlap=3)
    assert (half.items, half.low) == (0, 0.0), "items without all their answers do not enter"


def test_candidates_come_back_as_votes_that_data_can_be_read_from(tmp_path: Path, site: Callable[..., Site]) -> None:
    prompt = [{"role": "user", "content": "hello"}]
    rows = [{"id": f"tether-{n:05d}-x", "prompt": prompt, "a": f"yes {n}", "b": "no", "label": None} for n in range(3)]
    write_rows(tmp_path / "pairs.jsonl", rows)
    (tmp_path / "key.jsonl").write_text("not JSON: who opens it fails")
    source = review_batches.find_batch(tmp_path, str(tmp_path), overlap=2)
    page = site(raters=2, source=source)
    page.judge(for_policy)
    assert "Who is winning" not in page.browser(page.admin).get("/progress").text, "there is no key to that"
    (file,) = export(page.voting, source)
    assert file == tmp_path / VOTES
    for row in read_rows(file):
        assert row["prompt"] == prompt and row["a"].startswith("yes")
        assert row["votes"] == [{"annotator": f"rater_{n}", "label": "a"} for n in (1, 2)]


def test_experts_decide_pairs_without_a_majority_and_do_not_see_how_others_voted(
    tmp_path: Path, site: Callable[..., Site]
) -> None:
    data = {"prompt": "q <|x|>", "a": "yes", "b": "no", "votes": {"a": 1, "b": 1}}
    (tmp_path / "review.jsonl").write_bytes(
        b"".join(quarantine_line("d.jsonl", n, [], data | {"prompt": f"q {n}"}) for n in (4, 9))
    )
    source = review_batches.find_batch(tmp_path, str(tmp_path / "review.jsonl"))
    page = site(raters=1, source=source)
    assert "votes" not in page.browser(page.links[0]).get("/").text
    page.judge(for_policy)
    (file,) = export(page.voting, source)
    assert {row["votes"][0]["annotator"] for row in read_rows(file)} == {"expert_1"}
    found = [(row["prompt"][0]["content"], row["a"], row["votes"][0]["label"]) for row in read_rows(file)]
    assert sorted(found) == [
        (f"q {n}", side, {"yes": "a", "no": "b"}[side]) for n, (_, side, _) in zip((4, 9), found, strict=True)
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such run"), ("", "has no pairs"), ("[1]\n", "has no pairs"), ("{\n", "can't be read"),
        ('{"a": "x"}\n', "row 1: `a` and `b` must be texts"), ('{"a": "x", "b": "y", "prompt": 7}\n', "row 1"),
        ('{"id": "1", "a": "x", "b": "y", "prompt": "p"}\n' * 2, "1 appears twice"),
        ('{"data": {"prompt": "p"}}\n', "not preference pairs"),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused_by_name(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "pairs.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=said):
        review_batches.find_batch(tmp_path, str(file))


def test_a_batch_that_changed_another_overlap_and_a_name_twice_are_refused(site: Callable[..., Site]) -> None:
    page = site(raters=2)
    engine, number = page.voting.engine, page.voting.batch.id
    assert enter_batch(engine, page.source._replace(overlap=9)) == (number, None)
    for source, said in (
        (page.source._replace(digest="e"), "changed"),
        (page.source._replace(overlap=9), "answers per item"),
    ):
        with pytest.raises(UserError, match=said):
            enter_batch(engine, source, check_overlap=True)
    for name in ("person 1", " ", "x" * 101, "a\u202e"):
        with pytest.raises(UserError):
            add_raters(engine, number, ["new", name])
    assert len(page.raters) == 2, "and with it nobody is added"
    renewed = renew_link(engine, number, "person 1")
    assert page.voting.person(page.links[0].token) is None and page.voting.person(renewed.token) is not None
    assert page.browser(renew_link(engine, number, "administrator")).get("/progress").status_code == 200
    assert page.voting.person(page.admin.token) is None
    with pytest.raises(UserError, match="not a rater"):
        renew_link(engine, number, "nobody")


def test_progress_is_read_from_outside_and_completion_is_told_once(tmp_path: Path, site: Callable[..., Site]) -> None:
    file = database_file(tmp_path, "run-1")
    assert progress_of_run(tmp_path, "run-1") is None
    with pytest.raises(UserError, match="no page has been served"):
        open_database(file, create=False)
    engine = open_database(file)
    page = site(raters=2, items=1, overlap=2, engine=engine)
    assert progress_of_run(tmp_path, "run-1") == LabelProgress(0, 2)
    for link in page.links:
        client = page.browser(link)
        ticket = client.get("/").text.split('name="ticket" value="')[1].split('"')[0]
        client.post("/vote", data={"ticket": ticket, "answer": "a"})
        client.post("/vote", data={"ticket": ticket, "answer": "a"})
    progress = progress_of_run(tmp_path, "run-1", str(file))
    assert progress == LabelProgress(2, 2) and progress.complete and page.completed == ["run-1"]
    assert "Thank you" in page.browser(page.links[0]).get("/").text
    assert progress_of_run(tmp_path, "other", str(file)) is None
    with pytest.raises(UserError, match="no page has been served"):
        enter_batch(engine, page.source._replace(name="other"), create=False)
    engine.dispose()


def test_what_follows_completion_is_done_again_where_it_failed(site: Callable[..., Site], tmp_path: Path) -> None:
    page = site(raters=1, items=1, overlap=1, place=tmp_path)
    person = page.raters[0]
    pair = page.voting.next_pair(person)
    assert pair is not None and page.voting.take(person, pair.ticket, answer("a"))
    assert page.voting.complete() and page.voting.hand_on(), "the server died here"
    page.app.state.finish()
    page.app.state.finish()
    assert page.completed == ["run-1"] and not page.voting.hand_on()
    told: list[str] = []
    after_completion(page.voting, page.source, lambda run, files: f"{run} of {files}", told.append)("run-1")
    assert (tmp_path / "raters" / "rater_1.csv").exists() and told[1] == f"run-1 of {tmp_path / 'raters'}"


def test_a_database_is_private_safe_and_not_of_a_newer_version(tmp_path: Path) -> None:
    engine = open_database(tmp_path / "new.db")
    assert (tmp_path / "new.db").stat().st_mode & 0o777 == 0o600
    with engine.connect() as connection:
        settings = [
            connection.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert settings == ["wal", 2, 1], "FULL: a vote that was answered is on the disk"
    with writing(engine) as connection:
        connection.exec_driver_sql("UPDATE review_version SET version_num = '9999'")
    engine.dispose()
    with pytest.raises(UserError, match="newer Tether"):
        open_database(tmp_path / "new.db")


@pytest.mark.parametrize("url", ["mysql://x/y", "://", "http://x"])
def test_another_database_is_refused(url: str) -> None:
    with pytest.raises(UserError):
        database_url(url)


def test_a_database_that_does_not_answer_is_the_users_to_mend_and_its_password_is_not_told() -> None:
    with pytest.raises(UserError) as refused:
        open_database("postgresql://me:hunter2@127.0.0.1:1/nothing")
    assert "hunter2" not in str(refused.value) and "can't be used" in str(refused.value)


@pytest.mark.parametrize(
    ("given_text", "html"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("a\u202eb\x00\u200b\ufeff", "a⟨U+202E⟩b⟨U+0000⟩⟨U+200B⟩⟨U+FEFF⟩"),
        ("\ud800 \U000e0041 \u3164", "⟨U+D800⟩ ⟨U+E0041⟩ ⟨U+3164⟩"),
        ("a\r\nb\tc\x1b[2J", "a\nb\tc⟨U+001B⟩[2J"),
        ("👩\u200d💻 שלום", "👩\u200d💻 שלום"),
        ("pass\u200dword", "pass⟨U+200D⟩word"),
        ("⟨|system|⟩ {{ 7 * 7 }}", "⟨|system|⟩ {{ 7 * 7 }}"),
    ],
)
def test_hostile_text_is_shown_as_text(given_text: str, html: str) -> None:
    assert shown(given_text).html.replace('<span class="unseen">', "").replace("</span>", "") == html


def test_guidelines_are_headings_paragraphs_and_quotations_and_nothing_else() -> None:
    blocks = shown_guidelines("# One\ntext <b>\n\n> said\n> so\n\n[x](javascript:1)")
    assert blocks == [
        ("h2", "One"), ("p", "text &lt;b&gt;"), ("blockquote", "said\nso"), ("p", "[x](javascript:1)"),
    ]  # fmt: skip


def test_a_long_reply_is_capped_and_hostile_ones_change_nothing_of_the_page(site: Callable[..., Site]) -> None:
    source = make_source(items=1)
    hostile = source.pairs[0]._replace(a="x" * 100_000, b="</div></main><script>alert(1)</script>\u202e")
    page = site(source=source._replace(pairs=[hostile]))
    shown_page = page.browser(page.links[0]).get("/").text
    assert shown_page.count("Show all of it (100,000 characters)") == 1 and shown_page.count(" capped") == 1
    assert shown_page.count("<script") == 1 and shown_page.count("</main>") == 1 and "\u202e" not in shown_page


def test_texts_that_no_database_takes_are_kept_as_the_page_shows_them(database: Engine) -> None:
    """A NUL in a prompt ended `serve` with PostgreSQL, half a surrogate pair with either."""
    hostile = "a\x00b\ud83d"
    source = make_source(items=1)
    source = source._replace(guidelines=hostile, pairs=[source.pairs[0]._replace(prompt=hostile, a=hostile)])
    number, _ = enter_batch(database, source)
    with database.connect() as connection:
        kept = connection.execute(
            select(item_table.c.prompt, item_table.c.a, item_table.c.b).where(item_table.c.batch == number)
        ).one()
    assert tuple(kept) == ("a⟨U+0000⟩b⟨U+D83D⟩", "a⟨U+0000⟩b⟨U+D83D⟩", "right 1")


@pytest.mark.parametrize("field", ["a", "prompt", "id"])
def test_half_a_character_is_refused_by_row_and_field(tmp_path: Path, field: str) -> None:
    row = {"id": "1", "prompt": "q", "a": "x", "b": "y"}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"id": "2"} | {field: "\ud83d"}) + "\n")
    with pytest.raises(UserError, match=rf"pairs\.jsonl, row 2: `{field}` holds '\\ud83d', half of a character"):
        review_batches.find_batch(tmp_path, str(file))


def test_another_programs_table_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "shared.db")) as connection:
        connection.execute("CREATE TABLE item (id INTEGER)")
    with pytest.raises(UserError, match=r"shared\.db: the review page's database can't be used: .*item already exists"):
        open_database(tmp_path / "shared.db")


def test_a_damaged_database_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "review.db"
    open_database(file).dispose()
    valid = file.read_bytes()
    for data in (b"x" * 9000, valid[:4096] + b"NaN" + valid[4096:], valid[: len(valid) // 2]):
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"review\.db: the review page's database can't be used"):
            open_database(file, create=False)
