"""The page's requests. Without a personal link nobody can read or write anything."""

import hashlib
import logging
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from components.human_eval.sheet import FLAGS, MEANINGS
from flows.review.answer_progress import progress_of
from flows.review.batch_summary import summary
from flows.review.page.guard import Guard
from flows.review.page.page_html import shown, shown_guidelines
from flows.review.rater_votes import SKIP, GivenAnswer, RequestRefused, ReviewRater, Voting

logger = logging.getLogger(__name__)

ANSWERS = {
    "a": ("A is better", "1 a"),
    "b": ("B is better", "2 b"),
    "tie": ("Equally good", "3 t"),
    "both_bad": ("Both bad", "4 x"),
    SKIP: ("Can’t judge", "5 s"),
}
"""The label and keys of each answer."""
COMMENT = 4_000
_DAYS_90 = 90 * 24 * 3600
_STATIC = {"review.css": "text/css", "review.js": "text/javascript"}
_NO_LINK = "Open the personal link that you were given. If it no longer works, ask for a new one."

OnComplete = Callable[[str], None]


class _Site:
    """The page of one batch: its requests, and the templates that answer them."""

    def __init__(self, voting: Voting, on_complete: OnComplete | None, secure: bool) -> None:
        self._voting, self._on_complete, self._secure = voting, on_complete, secure
        folder = Path(__file__).parent / "static"
        self._files = {name: (folder / name).read_bytes() for name in _STATIC}
        self._pages = Environment(
            loader=PackageLoader("flows.review.page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        self._pages.filters["shown"] = shown
        self._pages.globals |= {
            "version": hashlib.sha256(b"".join(self._files.values())).hexdigest()[:12], "batch": voting.batch,
            "guidelines": shown_guidelines(voting.batch.guidelines),
            "answers": {rating: ANSWERS[rating] for rating in (*voting.batch.ratings, SKIP)}, "flags": FLAGS,
            "comment": COMMENT, "meanings": MEANINGS,
        }  # fmt: skip
        self._cookie = f"tether_review_{hashlib.sha256(voting.batch.name.encode()).hexdigest()[:8]}"

    def finish(self) -> None:
        """Hand a complete batch on to `on_complete`."""
        if self._voting.complete() or self._voting.hand_on():
            name = self._voting.batch.name
            try:
                if self._on_complete is not None:
                    self._on_complete(name)
                self._voting.handed_on()
            except Exception:
                logger.exception("%s is complete, but the next step failed; serve the page again to repeat it", name)

    def refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestRefused)
        return self._page("told.html", error.status, told=error.told)

    def unknown(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._page("told.html", error.status_code, told="There is nothing here.")

    def enter(self, request: Request, token: str) -> Response:
        """Log in by a link, in place of another person's login only if this page's own form says so."""
        visitor, before = self._voting.person(token), self._voting.person(request.cookies.get(self._cookie, ""))
        if visitor is None:
            raise RequestRefused(404, _NO_LINK)
        if before is not None and before != visitor and request.method == "GET":
            return self._page("switch.html", now=before.name, then=visitor.name)
        response = RedirectResponse("/", 303, headers={"Referrer-Policy": "no-referrer"})
        response.set_cookie(self._cookie, token, max_age=_DAYS_90, httponly=True, samesite="lax", secure=self._secure)
        return response

    def ask(self, request: Request, late: int = 0) -> Response:
        visitor, voting = self._person(request), self._voting
        if visitor.number == 0:
            return RedirectResponse("/progress", 303)
        answered = voting.answered_by(visitor)  # before the pair: an answered pair never stands beside the new count
        pair = voting.next_pair(visitor)
        with voting.engine.connect() as connection:
            whole = progress_of(connection, voting.batch.id)
        return self._page(
            "pair.html" if pair is not None else "done.html", pair=pair, rater=visitor, late=bool(late), whole=whole,
            who=voting.mark(visitor), answered=answered, undo=secrets.token_hex(16),
        )  # fmt: skip

    async def vote(self, request: Request) -> Response:
        voter, form = await self._form_of(request)
        counts = await run_in_threadpool(self._voting.take, voter, _field(form, "ticket"), _given(form))
        done = BackgroundTask(partial(run_in_threadpool, self.finish))
        return RedirectResponse("/" if counts else "/?late=1", 303, background=done)

    async def undo(self, request: Request) -> Response:
        voter, form = await self._form_of(request)
        await run_in_threadpool(self._voting.undo, voter, _field(form, "nonce"))
        return RedirectResponse("/", 303)

    def read_guidelines(self, request: Request) -> Response:
        return self._page("guidelines.html", who=self._voting.mark(self._person(request)))

    def progress(self, request: Request) -> Response:
        if self._person(request).number != 0:
            raise RequestRefused(403, "This page is the administrator’s.")
        return self._page("progress.html", found=summary(self._voting))

    def health(self) -> Response:
        return PlainTextResponse("ok\n")

    def static(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(self._files[name], media_type=_STATIC[name], headers=headers)

    def _page(self, name: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(self._pages.get_template(name).render(**{"who": "", **values}), status)

    def _person(self, request: Request) -> ReviewRater:
        visitor = self._voting.person(request.cookies.get(self._cookie, ""))
        if visitor is None:
            raise RequestRefused(401, _NO_LINK)
        return visitor

    async def _form_of(self, request: Request) -> tuple[ReviewRater, FormData]:
        """Return the rater who sent a form, and the form."""
        voter = await run_in_threadpool(self._person, request)
        if voter.number == 0:
            raise RequestRefused(403, "The administrator’s link does not vote. Open a rater’s link in another browser.")
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/x-www-form-urlencoded":
            raise RequestRefused(415, "This form is not one of this page’s. Load the page again.")
        return voter, await request.form(max_fields=100)


def make_app(voting: Voting, on_complete: OnComplete | None = None, secure: bool = False) -> FastAPI:
    """Return the app that serves a batch's page.

    Args:
        on_complete: called once with the batch's name, in a thread, after the last slot is answered. If it raises, or
            the server dies meanwhile, it is called again when the page is next served.
        secure: the page is reached by https, so the cookie is sent only over https.
    """
    site = _Site(voting, on_complete, secure)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard)
    app.add_exception_handler(RequestRefused, site.refused)
    app.add_exception_handler(HTTPException, site.unknown)
    app.state.finish = site.finish
    app.api_route("/r/{token}", methods=["GET", "POST"])(site.enter)
    app.post("/vote")(site.vote)
    app.post("/undo")(site.undo)
    for path, answer in (
        ("/", site.ask), ("/guidelines", site.read_guidelines), ("/progress", site.progress), ("/health", site.health),
        ("/static/{name}", site.static),
    ):  # fmt: skip
        app.get(path)(answer)
    return app


def _field(form: FormData, name: str) -> str:
    value = form.get(name, "")
    return value if isinstance(value, str) else ""


def _given(form: FormData) -> GivenAnswer:
    """Return the answer in a form.

    Raises:
        RequestRefused: the comment is too long.
    """
    comment = _field(form, "comment").replace("\0", "").strip()
    if len(comment) > COMMENT:
        raise RequestRefused(413, f"A comment has at most {COMMENT} characters. Go back and shorten it.")
    try:
        seconds = float(_field(form, "seconds"))
    except ValueError:
        seconds = float("nan")
    criteria = {
        name.removeprefix("on_"): str(value) for name, value in form.items() if name.startswith("on_") and value
    }
    flags = sorted({str(flag) for flag in form.getlist("flag")})
    return GivenAnswer(
        _field(form, "answer"), criteria, flags, comment.encode("utf-8", "replace").decode(),
        seconds if 0 <= seconds < 1e6 else None,
    )  # fmt: skip
