"""Commands and links of the documents, and whether they lead anywhere."""

import functools
import html
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typer.exceptions import TyperException
from typer.main import get_command

from flows.cli.__main__ import app
from flows.config.profiles import parse_override, profile_names
from flows.config.run_config import load_config
from tests.reference import slug

_TYPED = re.compile(r"(?:[\d*/]+(?: [\d*/]+){4}\s+)?(?:export )?(?:\w+=\S*\s+)*(?:\S*/)?tether(?: |$)(.*)")
"""A line that starts a command of Tether's, after a schedule of cron and after variables."""
_UNFINISHED = ("MissingParameter", "BadOptionUsage")


class Typed(NamedTuple):
    """A command as a document writes it, without `tether`."""

    text: str
    whole: bool
    """Whether a person may type it as it stands, but for names in capitals; else it only names a command or option."""


def commands(text: str) -> list[Typed]:
    """The commands of Tether's on a Markdown page: those in blocks of code, and those between backticks."""
    fenced = re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.S | re.M)
    rest = plain_code(re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    lines = "\n".join([*fenced, *re.findall(r"^ {4}.*$", rest, re.M)]).replace("\\\n", " ").splitlines()
    named = [
        " ".join(each.split())
        for each in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^ {4}.*$", "", rest, flags=re.M))
    ]
    typed, mentioned = ([found for line in of for found in _of_line(line)] for of in (lines, named))
    return [Typed(text, True) for text in typed] + [Typed(text, False) for text in mentioned]


def plain_code(text: str) -> str:
    """A Markdown page with its `<code>` elements, which stand for code with a pipe in tables, as code spans."""
    return re.sub(r"<code>(.*?)</code>", lambda code: f"`{html.unescape(code[1])}`", text)


def _of_line(line: str) -> Iterator[str]:
    for part in re.split(r"&&|; | \| ", re.split(r"\s#(?:\s|$)", line)[0]):
        if found := _TYPED.fullmatch(part.strip()):
            yield found[1].strip()


def parse(command: Typed) -> dict[str, Any]:
    """Parse a command as the command line does, and run nothing.

    In a command that is only named, brackets are dropped, the first of alternatives counts, and arguments may be
    missing. N and K stand for a number, COMMAND for any command.

    Returns:
        The values of arguments and options by name.

    Raises:
        ValueError: there is no such command or option, or a value or argument is refused.
    """
    text = command.text if command.whole else re.sub(r"\\?\|\S+?(?=[\s\]]|$)", "", command.text)
    text = re.sub(r"\b[NK]\b", "1", text if command.whole else re.sub(r"[\[\]]", "", text))
    words = [word for word in shlex.split(re.sub(r"\$\([^)]*\)", "X", text)) if word != "..."]
    group: Any = _root()
    while hasattr(group, "commands"):
        if not command.whole and words[:1] in ([], ["COMMAND"]):
            return {}
        if not words or words[0] not in group.commands:
            raise ValueError(f"tether {command.text}: there is no such command")
        group = group.commands[words.pop(0)]
    try:
        return dict(group.make_context("tether", words).params)
    except TyperException as error:
        if not command.whole and type(error).__name__ in _UNFINISHED:
            return {}
        raise ValueError(f"tether {command.text}: {error}") from error


@functools.cache
def _root() -> Any:
    return get_command(app)


def check_settings(values: dict[str, Any], *more: str) -> None:
    """Check the `--set` options of a parsed command, and `more` such, against the config of its profile, or the demo's.

    Raises:
        UserError: a key or a value is refused.
    """
    overrides = [parse_override(each) for each in (*(values.get("set_") or ()), *more)]
    profile = values.get("profile")
    if overrides and (profile is None or profile in profile_names() or profile.isupper()):
        load_config(profile if profile in profile_names() else "demo", overrides)


def links(page: Path) -> list[tuple[str, str]]:
    """The links of a Markdown page to other pages and to headings: file (empty for the page itself) and anchor."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    found = re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    return [(link.partition("#")[0], link.partition("#")[2]) for link in found if "://" not in link]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    heads = re.findall(r"^#{1,6}\s+(.*?)\s*$", text, re.M)
    return {slug(head) for head in heads}
