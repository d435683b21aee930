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


def make_app(voting: Voting, on_complete: OnComplete | None = None, secure: bool = False) -> FastAPI:
    """Return the app that serves a batch's page.

    Args:
        on_complete: called once with the batch's name, in a thread, after the last slot is answered. If it raises, or
            the server dies meanwhile, it is called again when the page is next served.
        secure: the page is reached by https, so the cookie is sent only over https.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard)
    folder = Path(__file__).parent / "static"
    files = {name: (folder / name).read_bytes() for name in _STATIC}
    version = hashlib.sha256(b"".join(files.values())).hexdigest()[:12]
    pages = Environment(
        loader=PackageLoader("flows.review.page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    pages.filters["shown"] = shown
    pages.globals |= {
        "version": version, "batch": voting.batch, "guidelines": shown_guidelines(voting.batch.guidelines),
        "answers": {each: ANSWERS[each] for each in (*voting.batch.ratings, SKIP)}, "flags": FLAGS, "comment": COMMENT,
        "meanings": MEANINGS,
    }  # fmt: skip
    cookie = f"tether_review_{hashlib.sha256(voting.batch.name.encode()).hexdigest()[:8]}"

    def page(name: str, status: int = 200, **values: Any) -> HTMLResponse:
        return HTMLResponse(pages.get_template(name).render(**{"who": "", **values}), status)

    def person(request: Request) -> ReviewRater:
        found = voting.person(request.cookies.get(cookie, ""))
        if found is None:
            raise RequestRefused(401, _NO_LINK)
        return found

    def rater(request: Request) -> ReviewRater:
        found = person(request)
        if found.number == 0:
            raise RequestRefused(403, "The administrator’s link does not vote. Open a rater’s link in another browser.")
        return found

    async def form_of(request: Request) -> FormData:
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/x-www-form-urlencoded":
            raise RequestRefused(415, "This form is not one of this page’s. Load the page again.")
        return await request.form(max_fields=100)

    def finish() -> None:
        """Hand a complete batch on to `on_complete`."""
        if voting.complete() or voting.hand_on():
            try:
                if on_complete is not None:
                    on_complete(voting.batch.name)
                voting.handed_on()
            except Exception:
                logger.exception(
                    "%s is complete, but the next step failed; serve the page again to repeat it", voting.batch.name
                )

    app.state.finish = finish

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> Response:
        return page("told.html", error.status, told=error.told)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return page("told.html", error.status_code, told="There is nothing here.")

    @app.api_route("/r/{token}", methods=["GET", "POST"])
    def enter(request: Request, token: str) -> Response:
        """Log in by a link, in place of another person's login only if this page's own form says so."""
        found, before = voting.person(token), voting.person(request.cookies.get(cookie, ""))
        if found is None:
            raise RequestRefused(404, _NO_LINK)
        if before is not None and before != found and request.method == "GET":
            return page("switch.html", now=before.name, then=found.name)
        response = RedirectResponse("/", 303, headers={"Referrer-Policy": "no-referrer"})
        response.set_cookie(cookie, token, max_age=_DAYS_90, httponly=True, samesite="lax", secure=secure)
        return response

    @app.get("/")
    def ask(request: Request, late: int = 0) -> Response:
        found = person(request)
        if found.number == 0:
            return RedirectResponse("/progress", 303)
        answered = voting.answered_by(found)  # before the pair: an answered pair never stands beside the new count
        pair = voting.next_pair(found)
        with voting.engine.connect() as connection:
            whole = progress_of(connection, voting.batch.id)
        return page(
            "pair.html" if pair is not None else "done.html", pair=pair, rater=found, late=bool(late), whole=whole,
            who=voting.mark(found), answered=answered, undo=secrets.token_hex(16),
        )  # fmt: skip

    @app.post("/vote")
    async def vote(request: Request) -> Response:
        found = await run_in_threadpool(rater, request)
        form = await form_of(request)
        counts = await run_in_threadpool(voting.take, found, _field(form, "ticket"), _given(form))
        done = BackgroundTask(partial(run_in_threadpool, finish))
        return RedirectResponse("/" if counts else "/?late=1", 303, background=done)

    @app.post("/undo")
    async def undo(request: Request) -> Response:
        found = await run_in_threadpool(rater, request)
        form = await form_of(request)
        await run_in_threadpool(voting.undo, found, _field(form, "nonce"))
        return RedirectResponse("/", 303)

    @app.get("/guidelines")
    def read_guidelines(request: Request) -> Response:
        return page("guidelines.html", who=voting.mark(person(request)))

    @app.get("/progress")
    def look(request: Request) -> Response:
        if person(request).number != 0:
            raise RequestRefused(403, "This page is the administrator’s.")
        return page("progress.html", found=summary(voting))

    @app.get("/health")
    def health() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return Response(files[name], media_type=_STATIC[name], headers=headers)

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
    flags = sorted({str(each) for each in form.getlist("flag")})
    return GivenAnswer(
        _field(form, "answer"), criteria, flags, comment.encode("utf-8", "replace").decode(),
        seconds if 0 <= seconds < 1e6 else None,
    )  # fmt: skip
