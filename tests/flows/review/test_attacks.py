"""Attacks on the page: nothing is read or written without the secret of a link."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import uvicorn
from sqlalchemy import func, select

from flows.review.database.tables import metadata, rater, vote
from flows.review.page import guard
from flows.review.page.guard import LARGEST_BODY
from flows.review.rater_votes import AskedPair, ReviewRater, Voting
from tests.flows.review.conftest import ORIGIN, TICKET, Site, answer
from tests.waiting import until

SECRETS = ("left 1", "right 1", "question 1", "person 2", "Be fair")
"""What stands in the database."""


@pytest.fixture
def page(site: Callable[..., Site]) -> Site:
    return site(raters=2, items=3, overlap=2)


def votes_of(page: Site) -> int:
    with page.voting.engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(vote)) or 0


def ticket_of(page: Site, number: int = 0) -> str:
    """A form that a rater was shown."""
    found = TICKET.search(page.browser(page.links[number]).get("/").text)
    assert found is not None
    return found[1]


def form(page: Site, **changes: Any) -> dict[str, Any]:
    return {"ticket": ticket_of(page), "answer": "a", **changes}


@pytest.mark.parametrize("path", ["/", "/guidelines", "/progress", "/?late=1", "//", "/r/", "/r/x", "/vote", "/undo"])
def test_without_a_link_nothing_is_read(page: Site, path: str) -> None:
    answer = page.browser().get(path)
    assert answer.status_code in (401, 404, 405)
    assert not [secret for secret in SECRETS if secret in answer.text]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/%2e%2e/votes.py", "/static//etc/passwd",
        "/static/review.css/../../../pair.html", "/templates/pair.html", "/docs", "/openapi.json", "/redoc",
    ],
)  # fmt: skip
def test_path_names_lead_to_no_file(page: Site, path: str) -> None:
    client = page.browser(page.links[0])
    request = client.build_request("GET", "http://testserver/")
    request.url = httpx.URL("http://testserver", raw_path=path.encode())
    answer = client.send(request)
    assert answer.status_code == 404 and "There is nothing here" in answer.text


GUESSES = ["", "x", "0" * 43, "' OR '1'='1", "%", "../..", "\u202e", "a" * 5000, "None"]


@pytest.mark.parametrize("token", GUESSES)
def test_a_guessed_token_opens_nothing(page: Site, token: str) -> None:
    assert page.voting.person(token) is None
    client = page.browser()
    if token:
        assert client.get(f"/r/{quote(token, safe='')}").status_code == 404
    assert "set-cookie" not in client.get("/").headers


def test_neither_a_stored_hash_nor_the_start_of_a_token_is_one(page: Site) -> None:
    with page.voting.engine.connect() as connection:
        hashes = connection.scalars(select(rater.c.token_hash)).all()
    for guess in (*hashes, page.links[0].token[:-1], page.links[0].token + "A", page.links[0].token.swapcase()):
        assert page.voting.person(guess) is None


FORGED: dict[str, tuple[int, Callable[[Site], dict[str, Any]]]] = {
    "no ticket": (403, lambda page: {"answer": "a"}),
    "another's ticket": (403, lambda page: form(page, ticket=ticket_of(page, 1))),
    "another item in a ticket": (403, lambda page: form(page, ticket="3" + ticket_of(page)[1:])),
    "another nonce in a ticket": (403, lambda page: form(page, ticket=ticket_of(page).replace("~", "0~"))),
    "a ticket without its mac": (403, lambda page: form(page, ticket=ticket_of(page).split("~")[0])),
    "SQL in a ticket": (403, lambda page: form(page, ticket="1'; DROP TABLE vote; --~x")),
    "an answer that is none": (400, lambda page: form(page, answer="policy")),
    "SQL as an answer": (400, lambda page: form(page, answer="a'); DELETE FROM vote; --")),
    "no answer": (400, lambda page: form(page, answer="")),
    "a flag that is none": (400, lambda page: form(page, flag=["harmful", "<script>"])),
    "a criterion that is not asked": (400, lambda page: form(page, on_helpful="a")),
    "a long comment": (413, lambda page: form(page, comment="x" * 5000)),
    "an oversize body": (413, lambda page: form(page, comment="x" * LARGEST_BODY)),
    "a thousand fields": (400, lambda page: form(page, **{f"field_{n}": "x" for n in range(1000)})),
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_forged_form_writes_nothing(page: Site, attack: str) -> None:
    status, made = FORGED[attack]
    answer = page.browser(page.links[0]).post("/vote", data=made(page))
    assert (answer.status_code, votes_of(page)) == (status, 0)


FOREIGN: dict[str, dict[str, str]] = {
    "another site": {"Origin": "https://evil.example"},
    "another port": {"Origin": "http://testserver:81"},
    "a name that ends alike": {"Origin": "http://nottestserver"},
    "a name that begins alike": {"Origin": "http://testserver.evil.example"},
    "a sandboxed frame": {"Origin": "null"},
    "no origin": {"Origin": ""},
    "another site, as its browser says": {**ORIGIN, "Sec-Fetch-Site": "cross-site"},
    "a neighbour, as its browser says": {**ORIGIN, "Sec-Fetch-Site": "same-site"},
    "no page": {**ORIGIN, "Sec-Fetch-Site": "none"},
}


@pytest.mark.parametrize("where", FOREIGN)
@pytest.mark.parametrize("path", ["/vote", "/undo"])
def test_a_form_from_elsewhere_writes_nothing(page: Site, where: str, path: str) -> None:
    client = page.browser(page.links[0])
    answer = client.post(path, data=form(page, nonce="n" * 32), headers=FOREIGN[where])
    assert (answer.status_code, votes_of(page)) == (403, 0)


def test_the_pages_own_form_is_taken_and_one_sent_again_counts_once(page: Site) -> None:
    client, sent = page.browser(page.links[0]), form(page, flag="false", comment="\x00a <b>\u202e")
    for _ in range(3):
        assert client.post("/vote", data=sent).status_code == 200
    assert votes_of(page) == 1
    other = page.browser(page.links[1])
    assert (other.post("/vote", data=sent).status_code, votes_of(page)) == (403, 1), "another's link"


def test_the_count_beside_a_pair_never_holds_its_own_answer(page: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    given, next_pair = answer("a"), Voting.next_pair

    def answered_meanwhile(voting: Voting, person: ReviewRater) -> AskedPair | None:
        pair = next_pair(voting, person)
        assert pair is not None and voting.take(person, pair.ticket, given)
        return pair

    monkeypatch.setattr(Voting, "next_pair", answered_meanwhile)
    shown = page.browser(page.links[0]).get("/").text
    assert "<strong>0</strong> answered by you" in shown and votes_of(page) == 1


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x", ""])
def test_a_body_of_another_kind_is_refused(page: Site, kind: str) -> None:
    client = page.browser(page.links[0])
    answer = client.post("/vote", content=b"answer=a", headers={"Content-Type": kind})
    assert (answer.status_code, votes_of(page)) == (415, 0)


def test_a_body_that_does_not_say_its_length_is_cut_off(page: Site) -> None:
    client = page.browser(page.links[0])
    endless = (b"x" * 4096 for _ in range(100))
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/vote", content=endless, headers=kind).status_code == 413
    assert client.post("/vote", content=b"a=b", headers={**kind, "Content-Length": "-1"}).status_code == 413


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(page: Site, method: str) -> None:
    assert page.browser(page.links[0]).request(method, "/vote").status_code == 405


def test_a_rater_does_not_see_progress_and_the_administrator_does_not_vote(page: Site) -> None:
    assert page.browser(page.links[0]).get("/progress").status_code == 403
    admin = page.browser(page.admin)
    assert "Progress of run-1" in admin.get("/").text
    assert (admin.post("/vote", data=form(page)).status_code, votes_of(page)) == (403, 0)
    assert admin.post("/undo", data={"nonce": "n" * 32}).status_code == 403


def test_every_answer_carries_the_headers_and_the_cookie_is_out_of_reach_for_scripts(page: Site) -> None:
    client = page.browser()
    opened = client.get(f"/r/{page.links[0].token}", follow_redirects=False)
    cookie = opened.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie and opened.headers["referrer-policy"] == "no-referrer"
    for path in ("/", "/guidelines", "/nothing", "/r/wrong", "/static/review.js", "/progress"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy, path
        assert "unsafe" not in policy and headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin" and "server" not in headers
    assert client.get("/").headers["cache-control"] == "no-store"
    assert client.post("/vote", data={}, headers={"Origin": "http://x"}).headers["x-frame-options"] == "DENY"


def test_no_token_stands_in_the_database_in_a_page_or_in_what_is_logged(
    page: Site, caplog: pytest.LogCaptureFixture
) -> None:
    client = page.browser(page.links[0])
    shown = client.get("/").text + client.get("/guidelines").text + page.browser(page.admin).get("/progress").text
    tokens = [page.admin.token, *(link.token for link in page.links)]
    with page.voting.engine.connect() as connection:
        rows = [str(row) for table in metadata.sorted_tables for row in connection.execute(select(table))]
    assert len(rows) > 10
    assert not [token for token in tokens if token in shown or token in "".join(rows) or token in caplog.text]
    assert not [row for row in rows if "policy" in row], "nor a word on who wrote what"


def test_a_link_replaces_a_login_only_if_its_form_is_sent(page: Site) -> None:
    """A link sent to a rater would make their further answers another person's."""
    client = page.browser(page.links[0])
    there = f"/r/{page.links[1].token}"
    asked = client.get(there)
    assert asked.status_code == 200 and "set-cookie" not in asked.headers and page.links[1].token not in asked.text
    assert "In this browser person 1 answers" in asked.text and "This link is person 2" in asked.text
    assert client.post("/vote", data=form(page)).status_code == 200, "still the first person"
    assert client.post(there, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post(there, follow_redirects=False).status_code == 303
    assert client.get(f"/r/{page.links[1].token}", follow_redirects=False).status_code == 303, "their own link again"
    assert client.post(f"/r/{'x' * 43}", follow_redirects=False).status_code == 404


@pytest.fixture
def port(page: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a real server, which gives a request half a second."""
    monkeypatch.setattr(guard, "REQUEST_S", 0.5)
    config = uvicorn.Config(page.app, log_level="warning", lifespan="off", http=guard.PromptRequests)
    server = uvicorn.Server(config)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


HALF = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: x\r\n",
    "half a form": b"POST /vote HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nContent-Length: 99\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nCookie: COOKIE\r\n\r\na=",
    "a second half": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /",
}


@pytest.mark.parametrize("half", HALF)
def test_half_a_request_is_closed_in_time(
    page: Site, port: int, half: str, caplog: pytest.LogCaptureFixture
) -> None:
    cookie = next(f"{each.name}={each.value}" for each in page.browser(page.links[0]).cookies.jar)
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(HALF[half].replace(b"COOKIE", cookie.encode()))
        answered, begun = b"", time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < begun + 8:
                client.settimeout(0.1)
                with suppress(TimeoutError):
                    if not (got := client.recv(1 << 16)):
                        break
                    answered += got
                if half != "nothing":
                    client.sendall(b"b")  # bytes that drip do not prolong it
        assert 0.3 < time.monotonic() - begun < 6
        assert (b"200 OK" in answered) == (half == "a second half")
    assert httpx.get(f"http://127.0.0.1:{port}/health").text == "ok\n"
    assert not guard.PromptRequests._half and "Traceback" not in caplog.text


def test_more_halves_than_allowed_push_out_the_oldest(
    page: Site, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "REQUEST_S", 60)
    monkeypatch.setattr(guard, "MOST_HALF", 3)
    with ExitStack() as stack:
        halves = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(5)]
        assert halves[0].recv(1) == b"" and halves[1].recv(1) == b""
        assert httpx.get(f"http://127.0.0.1:{port}/health").text == "ok\n"
    until("all connections to end", lambda: not guard.PromptRequests._half, 10)
