"""The review page in a browser: three people with a keyboard, a phone and no script answer every pair once, while the
server is killed; and what a page may not do to them."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from components.base.jsonl import read_rows, write_rows
from components.human_eval.sheet import FLAGS
from flows.deployment.local_servers import free_port
from tests.postgresql import new_database, postgresql_server
from tests.servers import clean_environment
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 60
PEOPLE = ("keyboard", "phone", "no script")
HOSTILE = "</div><script>document.title = 'owned'</script><img src=x onerror=alert(1)>\u202e\x00 שלום "
SECOND_CLICK = """new MutationObserver((_, observer) => {
    observer.disconnect();
    document.querySelector("button[value=b]").click();
}).observe(document.body, { childList: true })"""
"""Clicks in the moment in which another pair is shown."""
READY = """() => new Promise((resolve) => {
    const look = () => document.body.classList.contains("busy") ? setTimeout(look, 5) : resolve();
    look();
})"""
KEYS = {"a": "1", "b": "b", "tie": "3", "both_bad": "x"}


class ReviewServer:
    """`tether people page` of a folder of pairs, which can be killed and started again on its port."""

    def __init__(self, folder: Path, home: Path, database: str | None = None) -> None:
        self.folder, self.port, self.links = folder, free_port(0), dict[str, str]()
        self.environment = {**clean_environment(), "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT)}
        if database is not None:
            self.environment["TETHER_REVIEW_DATABASE"] = database
        self._process: subprocess.Popen[str] | None = None

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", "people", *words]

    def start(self) -> None:
        """Start it, and return once it listens."""
        raters = [word for name in PEOPLE for word in ("--rater", name)]
        words = ["page", str(self.folder), "--overlap", "3", "--port", str(self.port), *raters]
        with (self.folder.parent / "log").open("a") as log:
            self._process = subprocess.Popen(
                self.command(*words), env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "answers each" in line, (self.folder.parent / "log").read_text()
        if not self.links:
            self._process.stdout.readline()
            for _ in range(4):
                name, _, url = self._process.stdout.readline().strip().partition(": ")
                self.links[name] = url

    def kill(self) -> None:
        """SIGKILL, as a machine that loses power."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def export(self) -> Path:
        done = subprocess.run(
            self.command("answers", str(self.folder)), env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReviewServer]:
    """A page of 60 pairs, three answers each; the first one is hostile and long. In SQLite if nothing else is asked."""
    rows = [{"id": str(n), "prompt": f"question {n}", "a": f"left {n}", "b": f"right {n}"} for n in range(1, PAIRS + 1)]
    rows[0] |= {"prompt": f"question 1 {HOSTILE}", "a": f"left 1 {HOSTILE}" + "x" * 100_000, "b": f"right 1 {HOSTILE}"}
    write_rows(tmp_path / "batch" / "pairs.jsonl", rows)
    with ExitStack() as stack:
        database = None
        if getattr(request, "param", "sqlite") == "postgresql":
            database = new_database(stack.enter_context(postgresql_server()), "review")
        server = ReviewServer(tmp_path / "batch", tmp_path / "home", database)
        server.start()
        stack.callback(server.kill)
        yield server


def meant(person: str, number: int) -> str:
    """What a person thinks of a pair, as its file has the sides."""
    return ("a", "b", "tie", "both_bad")[(number + PEOPLE.index(person)) % 4]


def to_answer(page: "Page", person: str) -> str:
    """The answer that says so on the sides that are shown."""
    first = page.locator("section[aria-labelledby=reply-a] .text").inner_text()
    side, number = re.match(r"(left|right) (\d+)", first).groups()  # type: ignore[union-attr]
    answer = meant(person, int(number))
    return answer if side == "left" else {"a": "b", "b": "a"}.get(answer, answer)


def wait_for(page: "Page", answered: int) -> None:
    """Wait until the page says that so many are answered."""
    if answered == PAIRS:
        page.get_by_text(re.compile(rf"You answered {PAIRS} pairs")).wait_for()
    else:
        page.locator(".count strong", has_text=re.compile(rf"^{answered}$")).wait_for()
    page.wait_for_load_state("load")  # a key that is pressed before the script has run is nobody's
    if page.locator("body.busy").count():
        page.evaluate(READY)  # sooner than a locator, which asks twice a second


@pytest.mark.parametrize("server", ["sqlite", "postgresql"], indirect=True)
def test_three_people_give_180_answers_and_none_is_lost_or_counted_twice(
    server: ReviewServer, open_page: Callable, violations: Callable, overflow: Callable, picture: Callable
) -> None:
    page = open_page(server.links["keyboard"]).page
    serious = [each for each in violations(page) if "(serious)" in each or "(critical)" in each]
    assert serious == []
    picture(page, "review-wide")
    for n in range(PAIRS):
        page.keyboard.press(KEYS[to_answer(page, "keyboard")])
        wait_for(page, n + 1)
        if n == 20:  # a slip, taken back
            page.keyboard.press("u")
            wait_for(page, n)
            page.keyboard.press(KEYS[to_answer(page, "keyboard")])
            wait_for(page, n + 1)

    visit = open_page(server.links["phone"], width=390)
    page = visit.page
    assert overflow(page) == 0 and page.title() == "Which reply is better?"
    page.locator("#guidelines summary").click()
    assert page.evaluate("document.documentElement.scrollHeight") < 4_000, "100 kB are capped"
    picture(page, "review-phone")
    for n in range(PAIRS):
        button = page.locator(f"button[value={to_answer(page, 'phone')}]")
        if n == 10:  # dead before the tap
            server.kill()
            button.click()
            page.get_by_text("kept in this browser").wait_for()
            server.start()
        elif n == 30:  # dies right after the tap; the page is opened anew
            button.click(no_wait_after=True)
            server.kill()
            page.goto("about:blank")
            server.start()
            page.goto(server.links["phone"])
        else:
            button.click()
        wait_for(page, n + 1)

    page = open_page(server.links["no script"], java_script_enabled=False).page
    for n in range(PAIRS):
        if n == 5:
            page.locator(".extras summary").click()
            page.get_by_label(FLAGS["false"]).check()
            page.get_by_label("Comment").fill("said <b>so</b>")
        page.locator(f"button[value={to_answer(page, 'no script')}]").click()
        wait_for(page, n + 1)

    votes = {row["id"]: row["votes"] for row in read_rows(server.export())}
    expected = {
        str(n): [{"annotator": f"rater_{i}", "label": meant(person, n)} for i, person in enumerate(PEOPLE, 1)]
        for n in range(1, PAIRS + 1)
    }
    assert votes == expected
    visit = open_page(server.links["administrator"])
    shown = visit.page.locator("main").inner_text()
    assert "180 of 180 answers" in shown and "said <b>so</b>" in shown and visit.errors == []
    assert [each for each in violations(visit.page) if "(serious)" in each or "(critical)" in each] == []
    picture(visit.page, "review-progress")


def test_an_answer_that_is_sent_again_or_a_second_click_is_not_an_answer_to_the_next_pair(
    server: ReviewServer, open_page: Callable
) -> None:
    page = open_page(server.links["phone"], width=390).page
    page.route("**/vote", lambda route: route.abort())
    page.locator("button[value=a]").click()
    page.get_by_text("kept in this browser").wait_for()
    held: list[Route] = []
    page.unroute("**/vote")
    page.route("**/vote", lambda route: held.append(route), times=1)
    page.reload()
    page.get_by_text("Your last answer is being sent").wait_for()
    assert not page.locator("#pair").is_visible(), "the pair is answered, and is replaced while somebody reads it"
    page.keyboard.press("b")
    until("the answer is sent again", lambda: held or page.wait_for_timeout(20), 30)
    held[0].continue_()
    wait_for(page, 1)

    page.evaluate(SECOND_CLICK)
    page.locator("button[value=b]").click()
    wait_for(page, 2)
    page.wait_for_timeout(500)
    assert page.locator(".count strong").inner_text() == "2", "nobody has read the pair in the time of a double click"
    assert [len(row["votes"]) for row in read_rows(server.export())] == [1, 1]


def test_hostile_replies_are_text_and_nothing_is_asked_of_another_host(
    server: ReviewServer, open_page: Callable
) -> None:
    visit = open_page(server.links["keyboard"], bypass_csp=True)
    assert visit.page.title() == "Which reply is better?" and visit.errors == []
    assert visit.page.locator("main img, main script").count() == 0
    shown = visit.page.locator(".text").first.inner_text()
    assert "<script>" in shown and "⟨U+202E⟩⟨U+0000⟩" in shown and "שלום" in shown
    own = f"http://127.0.0.1:{server.port}/"
    assert [url for url in visit.requests if not url.startswith((own, "data:"))] == []
    capped = visit.page.locator(".capped")
    height = capped.bounding_box()["height"]
    visit.page.get_by_text("Show all of it").click()
    assert height < 500 < capped.bounding_box()["height"]
    visit.page.keyboard.press("g")
    assert not visit.page.locator("#guidelines[open]").count(), "it was open on the first pair"
