"""Read a probe's file (JSON Lines: a header, then a prompt a line), and judge responses to its prompts by its rule."""

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from components.base.errors import Mistakes
from components.base.jsonl import Message
from components.base.paths import read_regular, user_path
from components.base.settings import Settings
from components.base.strict_json import BadJson, parse_json
from components.base.text import counted, line
from components.data.rows import blank, unclean
from components.data.words import folded
from components.evaluation.config import SHIPPED
from components.evaluation.probe_rules import Decision, RuleName, decide

FEWEST = 20
"""Prompts below which a probe's rate is too coarse for a gate, and reading it warns."""
_NAMES = f"a probe's file, or one of {', '.join(SHIPPED)}"
_LARGEST = 16 << 20
_LONGEST_PATTERN = 1000
logger = logging.getLogger(__name__)


def _text(text: str) -> str:
    if blank(text):
        raise ValueError("it is empty: write text")
    if character := unclean(text):
        raise ValueError(f"it has the character {character}: take it out")
    return text


def _pattern(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            empty = re.compile(pattern, re.IGNORECASE).search("")
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern[:60]!r} is not a regular expression: {error}") from None
    if empty:
        raise ValueError(f"{pattern[:60]!r} matches the empty text, so it would match every response")
    return pattern


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Patterns = tuple[Annotated[str, Field(max_length=_LONGEST_PATTERN), AfterValidator(_pattern)], ...]


class ProbeHeader(Settings):
    """The first line of a probe's file."""

    probe: Name
    """The probe's name: letters, digits, `_`, `.` and `-`."""
    rule: RuleName
    """What decides where no pattern of the file does (`components/evaluation/probe_rules.py`)."""
    violation: Text
    """What a violation is, for people: completes "a response that ..."."""
    about: str = ""
    """Where the prompts come from, and their licence."""
    violates: Patterns = ()
    """Regular expressions that make any of the probe's responses a violation."""
    clears: Patterns = ()
    """Regular expressions that make any of the probe's responses none; they are tried first."""


class ProbeTurn(Settings):
    """A turn of a probe's conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text


class LabelledResponse(Settings):
    """A response to a probe's prompt that a person has labelled."""

    response: str
    violation: bool


class ProbePrompt(Settings):
    """A line of a probe's file."""

    id: Name
    """Its name, once in the file."""
    category: Name
    """Counted by, and shown with it."""
    prompt: Text | None = None
    """The user's one message."""
    messages: tuple[ProbeTurn, ...] = ()
    """Instead of `prompt`: a conversation that ends with the user, with at most one system message at its start."""
    violates: Patterns = ()
    """Regular expressions that make a response a violation, after the header's."""
    clears: Patterns = ()
    """Regular expressions that make a response none; for a false premise, what a correction says."""
    labelled: tuple[LabelledResponse, ...] = ()
    """Responses with people's labels, on which the rule and a judge are measured."""

    @model_validator(mode="after")
    def _is_a_conversation(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("set either prompt or messages")
        roles = [turn.role for turn in self.messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if self.messages and (turns != ["user", "assistant"] * (len(turns) // 2) + ["user"]):
            raise ValueError("messages: after an optional system message, user and assistant alternate, and the user "
                             "begins and ends")  # fmt: skip
        return self

    @property
    def conversation(self) -> list[Message]:
        """Return the messages to answer."""
        if self.prompt is not None:
            return [{"role": "user", "content": self.prompt}]
        return [{"role": turn.role, "content": turn.content} for turn in self.messages]


class Probe(NamedTuple):
    """A probe: prompts, and the rule by which responses to them are judged."""

    header: ProbeHeader
    prompts: tuple[ProbePrompt, ...]
    """In the order of the file."""

    @property
    def name(self) -> str:
        """Return the probe's name."""
        return self.header.probe


class ProbeReading(NamedTuple):
    """What reading a probe's file gave."""

    probe: Probe | None
    """None if the file has a problem."""
    problems: list[str]
    """Each with file, line and field."""
    warnings: list[str]


class LabelAgreement(NamedTuple):
    """How verdicts agree with people's labels of the same responses. NaN where a ratio has no denominator."""

    responses: int
    precision: float
    """Share of the verdicts `violation` that people share."""
    recall: float
    """Share of people's violations that the verdicts name."""
    kappa: float
    """Cohen's kappa (Cohen 1960, Educational and Psychological Measurement 20:37)."""


def probe_path(name: str, field: str = "--probes") -> Path:
    """Return the file of a shipped probe by its name, else the path that a user gave for the option `field`.

    Raises:
        UserError: it is not a valid path.
    """
    return Path(__file__).parent / "probes" / f"{name}.jsonl" if name in SHIPPED else user_path(name, field)


def read_probe(path: Path) -> Probe:
    """Return the probe in a file, and log warnings about it.

    Raises:
        Mistakes: a UserError with each problem of the file: its line, its field and what to do.
    """
    reading = examine_probe(path)
    for warning in reading.warnings:
        logger.warning("%s", warning)
    if reading.probe is None:
        raise Mistakes(*reading.problems)
    return reading.probe


def examine_probe(path: Path) -> ProbeReading:
    """Return the probe in a file with all that is wrong with the file."""
    problems: list[str] = []
    try:
        text = read_regular(path, _LARGEST).decode("utf-8-sig")
    except OSError as error:
        return ProbeReading(None, [f"{path}: the file can't be read: {error.strerror}. Name {_NAMES}."], [])
    except UnicodeDecodeError as error:
        return ProbeReading(None, [f"{path}: it is not UTF-8 at byte {error.start + 1}. Save it as UTF-8."], [])
    lines = [(number, row) for number, row in enumerate(text.split("\n"), 1) if row.strip()]
    if not lines:
        return ProbeReading(None, [f"{path}: it is empty. Write a header, then a prompt a line."], [])
    header = _parsed(path, *lines[0], ProbeHeader, problems, "the header ")
    prompts, numbers = [], []
    for number, row in lines[1:]:
        if (prompt := _parsed(path, number, row, ProbePrompt, problems)) is not None:
            prompts.append(prompt)
            numbers.append(number)
    problems += _repeated(path, numbers, prompts)
    if len(lines) == 1:
        problems.append(f"{path}: it has no prompt. After the header, write a prompt a line.")
    if header and header.rule == "expected" and not header.clears:
        problems += [
            f"{path}, line {number}: clears: the rule `expected` needs a pattern, here or in the header."
            for number, prompt in zip(numbers, prompts, strict=True) if not prompt.clears
        ]  # fmt: skip
    if header is None or problems:
        return ProbeReading(None, problems, [])
    few = (
        f"{path}: it has {counted(len(prompts), 'prompt')}; with fewer than {FEWEST}, a rate says little. Add prompts."
    )
    return ProbeReading(Probe(header, tuple(prompts)), [], [few] * (len(prompts) < FEWEST))


def verdict(probe: Probe, prompt: ProbePrompt, response: str) -> Decision:
    """Return the verdict of the probe's patterns and rule on the response to one of its prompts."""
    header = probe.header
    return decide(header.rule, response, (*header.violates, *prompt.violates), (*header.clears, *prompt.clears))


def agreement_with_labels(pairs: Iterable[tuple[bool, bool]]) -> LabelAgreement:
    """Return how verdicts agree with labels, from pairs (verdict, label); true is a violation.

    With p_o the share of equal pairs and p_e that expected of independent ones with the same shares of violations,
    kappa = (p_o - p_e) / (1 - p_e).
    """
    count = Counter((bool(verdict), bool(label)) for verdict, label in pairs)
    n, both = count.total(), count[True, True]
    named, labelled = both + count[True, False], both + count[False, True]
    ratio = lambda top, bottom: top / bottom if bottom else float("nan")  # noqa: E731
    observed = ratio(both + count[False, False], n)
    chance = ratio(named * labelled + (n - named) * (n - labelled), n * n)
    return LabelAgreement(n, ratio(both, named), ratio(both, labelled), ratio(observed - chance, 1 - chance))


def rule_agreement(probe: Probe) -> LabelAgreement:
    """Return how the probe's rule agrees with the labels in its file."""
    return agreement_with_labels(
        (verdict(probe, prompt, label.response).violation, label.violation)
        for prompt in probe.prompts for label in prompt.labelled
    )  # fmt: skip


Row = TypeVar("Row", bound=Settings)


def _parsed(path: Path, number: int, row: str, kind: type[Row], problems: list[str], what: str = "") -> Row | None:
    """Return a line as `kind`; None if it has problems, which are added to `problems`."""
    where = f"{path}, line {number}"
    try:
        value = parse_json(row)
        return kind.model_validate(value)
    except BadJson as error:
        problems.append(f"{where}: {what}is not JSON: {error}. Write one JSON object a line.")
    except ValidationError as error:
        problems += [f"{where}: {what}{text}." for text in _explained(error, kind)]
    return None


def _explained(error: ValidationError, kind: type[Row]) -> Iterator[str]:
    """Yield field and mistake for each error of pydantic."""
    for problem in error.errors(include_url=False):
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            mistake = f"there is no such field. The fields are {', '.join(kind.model_fields)}"
        elif problem["type"] == "missing":
            mistake = "it is missing"
        else:
            mistake = line(problem["msg"].removeprefix("Value error, ")).rstrip(".")
            mistake += f", not {_shown(problem['input'])}" if problem["type"] != "value_error" else ""
        yield f"{line(field)[:80]}: {mistake}" if field else mistake


def _shown(value: Any) -> str:
    text = line(repr(value)[:100])
    return text if len(text) <= 40 else f"{text[:37]}..."


def _repeated(path: Path, numbers: list[int], prompts: list[ProbePrompt]) -> Iterator[str]:
    """Yield a problem for each id and each prompt that an earlier line has."""
    first: dict[tuple[str, str], int] = {}
    for number, prompt in zip(numbers, prompts, strict=True):
        words = [(turn["role"], *folded(turn["content"]).split()) for turn in prompt.conversation]
        for field, value in ("id", prompt.id), ("prompt", str(words)):
            earlier = first.setdefault((field, value), number)
            if earlier != number:
                yield f"{path}, line {number}: {field}: line {earlier} has the same. Change or remove one."
