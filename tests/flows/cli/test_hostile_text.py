"""What others wrote (a reason, a metric's name, a library of an imported record) commands nothing where people read it.

Terminals obey control characters and rich obeys [markup]; pages could run scripts; Markdown has a syntax.
"""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from components.gates.gate_text import markdown
from components.gates.judging import Verdict, Waiver
from components.keys.fingerprint import PACKAGES, ROOT
from components.store.store import ArtifactStore
from flows.models import lineage_text
from flows.models.card import card
from flows.models.lineage import lineage
from flows.models.model_facts import model_facts
from flows.reports.terminal import markdown as report
from tasks.runs.status import StatusFile, load_status
from tasks.tracking.model_versions import state_lines
from tests.stored_run import publish, stored_run

EVIL = (
    'x"]|><script>alert(1)</script><img src=x onerror=alert(1)>[/x][red]`b`\x1b]0;title\x07\x1b[2J\n\n'
    "# Passed\n> ok\u202e"
)


def hostile_run(home: Path) -> str:
    """A run of a policy, with such a text wherever a record, a gate or a status has one that nobody checks."""
    status = StatusFile.start(home / "runs" / "r1", "r1", "tiny", ["validate", "sft", "ppo"])
    (status.folder / "config.yaml").write_text('{"data": {"preferences": null}, "project": "p", "seed": 0}')
    inputs: dict[str, str] = {EVIL: "d" * 64}
    for stage in ("sft", "ppo"):
        job: dict[str, Any] = {"seed": EVIL, "runtime": {EVIL: EVIL}}
        code = {"version": EVIL, "commit": EVIL, "dirty": True}
        record = publish(
            home, stage, inputs=inputs, parts={"job": job, "libraries": {EVIL: EVIL}, "source": {EVIL: EVIL}}, job=job,
            started=EVIL, metrics={f"{stage}/{EVIL}": 1.0}, environment={"cpu": EVIL, "python": EVIL, "code": code},
        )  # fmt: skip
        inputs = {EVIL: record.digest}
        changed = {"part": "config", "name": EVIL, "change": "changed", "before": EVIL, "now": EVIL}
        why = {
            "outcome": "computed", "run": EVIL, "reason": EVIL, "because": "changed",
            "compared_with": {"run": EVIL, "key": EVIL}, "changes": [changed],
        }  # fmt: skip
        status.update(
            stage, state="waived", key=record.key, digest=record.digest, metrics=record.metrics,
            gates=[GATE], explained={stage: why},
        )  # fmt: skip
    status.finish()
    return "r1"


GATE = Verdict(
    name=f"ppo.{EVIL}", metric=EVIL, value=1.0, op="<=", threshold=0.0, passed=False, waived=True, user=EVIL,
    reason=EVIL, description=EVIL, text=EVIL,
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    hostile_run(tmp_path / "home")
    return tmp_path / "home"


def commands(text: str) -> list[str]:
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "r1"), ("status", "r1", "--why"), ("runs",), ("lineage", "r1"), ("store", "ls"),
        ("diff", "r1", "r1"), ("export", "r1/ppo", "--card"),
    ],
    ids=" ".join,
)
def test_no_command_lets_a_text_command_the_terminal(
    tether: Callable[..., Any], home: Path, arguments: tuple[str, ...]
) -> None:
    done = tether(*arguments, home=home)
    assert done.returncode == 0, done.stderr
    assert not commands(done.stdout + done.stderr)
    assert not re.search(r"^# Passed", done.stdout, re.MULTILINE), "a line of its own looks like one of ours"
    if arguments[0] == "status":
        assert "[/x][red]" in done.stdout, "markup is text"


def test_an_error_and_a_warning_command_nothing_either(tether: Callable[..., Any], home: Path) -> None:
    done = tether("status", "\x1b]0;title\x07\x1b[2J", home=home)
    assert done.returncode == 2 and r"\x1b]0;title" in done.stderr and not commands(done.stdout + done.stderr)
    (home / "runs" / "bad\x1b[2J").mkdir()
    (home / "runs" / "bad\x1b[2J" / "run.json").write_text("{")
    done = tether("status", home=home)
    assert done.returncode == 0 and r"bad\x1b[2J" in done.stderr and not commands(done.stdout + done.stderr)


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_lineage_page_holds_no_tag_of_others_and_allows_nothing_but_its_style(home: Path) -> None:
    found = Tags(lineage_text.page(lineage(home, "r1"))).found
    assert {"script", "red"}.isdisjoint({tag for tag, _ in found})
    images = [attrs for tag, attrs in found if tag == "img"]  # the page's one picture, which it holds itself
    assert [(attrs.keys(), (attrs["src"] or "").partition(",")[0]) for attrs in images] == [
        ({"src", "alt"}, "data:image/svg+xml;base64")
    ]
    assert not [attrs for _, attrs in found if any(name.startswith("on") for name in attrs)]
    (policy,) = [attrs["content"] for _, attrs in found if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "script-src" not in policy and "unsafe" not in policy


def words_of(text: str) -> None:
    """Nothing in a Markdown page is of the text's making: no heading, quote, tag, link, table cell or image."""
    for line in text.splitlines():
        assert not re.match(r"# Passed|> ok", line), line
        plain = re.sub(r"\\.|`[^`]*`", "", line)
        assert "<script" not in plain and "<img" not in plain and "[/x]" not in plain, line
    assert not commands(text)


def test_markdown_takes_a_reason_of_several_lines_for_words(home: Path) -> None:
    facts = model_facts(home, "r1/ppo")
    text = card(facts)
    words_of(text.partition("\n---\n")[2])
    waived = [line for line in text.splitlines() if "was waived by" in line]
    assert waived and all(line.startswith("> Gate `") and "Passed" in line for line in waived), "it stays in its quote"
    words_of(report(load_status(home, "r1")).partition("\n")[2])
    words_of(markdown([GATE]))
    (row,) = markdown([GATE]).splitlines()[2:]
    assert len(re.findall(r"(?<!\\)\|", row)) == 7


def test_a_versions_life_is_words() -> None:
    term = {"from": EVIL, "by": EVIL, "because": EVIL, "until": EVIL, "ended_by": EVIL, "ended_because": EVIL}
    waiver = {**Waiver(gate="g", user=EVIL, reason=EVIL).model_dump(), "run": EVIL}
    tags = {
        "tether.champion": [term], "tether.demoted": {"at": EVIL, "by": EVIL, "because": EVIL},
        "tether.waivers": {EVIL: waiver},
        "tether.human_eval": {"run": EVIL, "state": EVIL, "win_rate": None},
    }  # fmt: skip
    lines = list(state_lines({**{name: json.dumps(value) for name, value in tags.items()}, "tether.imported": EVIL}))
    assert len(lines) == 5 and all("\n" not in line for line in lines)
    words_of("\n".join(lines))


@pytest.mark.parametrize("change", ["[" * 100_000, "5", '[{"name": 5}]', '[{"severity": "x"}]', "{"])
def test_a_report_of_an_imported_artifact_that_no_stage_writes_is_one_sentence(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.base.errors import UserError
    from flows.reports.page import write_page
    from flows.reports.run_facts import StageFacts

    run, store = stored_run(tmp_path), ArtifactStore(tmp_path)
    record = store.published(load_status(tmp_path, run).stage("validate").key or "")[0]
    shutil.rmtree(store.local.root / "records" / record.key)
    store.commit(record.model_copy(update={"imported": "2026-01-01"}))
    monkeypatch.setattr(StageFacts, "text", lambda self, name: change if name == "report.json" else None)
    with pytest.raises(UserError, match="an imported artifact of run"):
        write_page(tmp_path, run)
    monkeypatch.undo()
    assert ", imported<br>" in write_page(tmp_path, run).read_text()


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_every_line_of_the_command_line_goes_through_one_echo() -> None:
    prints = re.compile(r"\btyper\.(echo|secho)\(|\bsys\.std(out|err)\.write\(")
    found = {path.relative_to(ROOT).as_posix() for path in sources() if prints.search(path.read_text(encoding="utf-8"))}
    assert found == {"flows/cli/command.py"}


def test_every_page_that_is_written_has_a_content_policy() -> None:
    written = [*sources(), *(ROOT / "flows").rglob("*.html")]
    pages = [path for path in written if "<!doctype html" in path.read_text(encoding="utf-8").lower()]
    assert len(pages) >= 3
    served = ROOT / "flows" / "review"  # whose server sends the policy as a header: tests/flows/review/test_attacks.py
    without = [path for path in pages if "Content-Security-Policy" not in path.read_text(encoding="utf-8")]
    assert [path for path in without if served not in path.parents] == []


def test_an_imported_record_whose_options_no_stage_has_gives_a_sentence_and_no_export(tmp_path: Path) -> None:
    from components.base.errors import UserError
    from flows.models.model_export import export

    home = tmp_path / "home"
    hostile_run(home)
    key = load_status(home, "r1").stage("ppo").key or ""
    store = ArtifactStore(home)
    record = store.published(key)[0]
    job = {**record.job, "generation": {"temperature": "hot"}}
    shutil.rmtree(store.local.root / "records" / key)
    store.commit(record.model_copy(update={"job": job, "imported": "2026-01-01"}))
    with pytest.raises(UserError, match="has no card: an imported record"):
        export(home, "r1/ppo", tmp_path / "out", allow_failed=True)
    assert not (tmp_path / "out").exists()
