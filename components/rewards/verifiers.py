"""Built-in checks of a response against an expected value: exact text, a number, a pattern, a JSON schema."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from components.base.errors import UserError
from components.rewards.config import VerifierReward
from components.rewards.source import Replies, named

_SIGN = r"(?<![^\W_])(?<![%)\]])(?<!\d[$€£¥])([-+\u2212\u2013\uff0d])[$€£¥]?"
"""A minus or plus that follows no letter, digit, % or bracket: there it is a hyphen, a dash or an operation."""
_THOUSANDS = "(?:,|\\{,\\}|\\\\,|[\u00a0\u2009\u202f'’])"
_NUMBER = re.compile(
    rf"(?:{_SIGN})?(\d{{1,3}}(?:{_THOUSANDS}\d{{3}})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)(?:[eE]([-+−]?\d+))?"
)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class Verifier:
    """Scores 1 if a check holds, else 0."""

    def __init__(self, config: VerifierReward) -> None:
        """Raises UserError if `value` does not fit the check, for example if it is not a number for `number`."""
        self._config, self._holds = config, _CHECKS[config.check]
        if config.value is not None:
            self._ready(config.value, "value")

    def score(self, replies: Replies) -> list[float]:
        """Return 1.0 or 0.0 for each response. Raises UserError if a row lacks the column or has a value that fits
        not."""
        return [float(self._one(replies, index)) for index in range(len(replies.responses))]

    def close(self) -> None:
        """Nothing is open."""

    def _one(self, replies: Replies, index: int) -> bool:
        config, text = self._config, replies.responses[index]
        if config.column is None:
            expected = self._ready(config.value, "value")
        else:
            row = replies.rows[index]
            if row.get(config.column) is None:
                raise UserError(
                    f"ppo.rewards: {config.source}: the row of {named(replies, index)} has no column {config.column!r} "
                    f"(it has {', '.join(sorted(row)) or 'none'}). Name it in data.reward_columns, and give each row "
                    "of the prompts a value."
                )
            expected = self._ready(row[config.column], f"column {config.column!r} of {named(replies, index)}")
        if config.extract is not None:
            match = re.search(config.extract, text, re.DOTALL)
            if match is None:
                return False
            text = (match[1] if match.re.groups else match[0]) or ""
        return self._holds(text, expected, config)

    def _ready(self, value: Any, where: str) -> Any:
        try:
            return _EXPECTED[self._config.check](value, self._config)
        except (ValueError, TypeError, re.error) as error:
            raise UserError(f"ppo.rewards: {self._config.source}: {where} is {value!r:.80}: {error}.") from None


def last_number(text: str) -> float | None:
    """Return the last number in a text; None if there is none.

    The end of a range (12-15) or a date is positive. Thousands may have commas, apostrophes, LaTeX's commas and
    thin spaces, or spaces that do not break.
    """
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits, power = numbers[-1]
    plain = re.sub(_THOUSANDS, "", digits)
    value = float(f"{plain}e{power.replace('−', '-')}" if power else plain)
    return value if sign in ("", "+") else -value


def _number(value: Any, config: VerifierReward) -> float:
    number = None if isinstance(value, bool) else last_number(str(value))
    if number is None or not math.isfinite(number):
        raise ValueError("expected a number")
    return number


def _schema(value: Any, config: VerifierReward) -> Any:
    import jsonschema

    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, dict | bool):
            raise ValueError("a JSON schema is an object")
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"this is not a JSON schema: {error.message}") from None
    return kind(schema)


def _is_same(text: str, expected: str, config: VerifierReward) -> bool:
    ours, theirs = " ".join(text.split()), " ".join(expected.split())
    return ours.casefold() == theirs.casefold() if config.ignore_case else ours == theirs


def _is_number(text: str, expected: float, config: VerifierReward) -> bool:
    number = last_number(text)
    return number is not None and abs(number - expected) <= config.tolerance * max(1.0, abs(expected))


def _is_found(text: str, expected: re.Pattern[str], config: VerifierReward) -> bool:
    return expected.search(text) is not None


def _fits(text: str, expected: Any, config: VerifierReward) -> bool:
    fenced = _FENCE.search(text)
    try:
        document = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return expected.is_valid(document)


_EXPECTED: dict[str, Callable[[Any, VerifierReward], Any]] = {
    "exact": lambda value, config: str(value),
    "number": _number,
    "regex": lambda value, config: re.compile(str(value), re.IGNORECASE if config.ignore_case else 0),
    "json_schema": _schema,
}
_CHECKS: dict[str, Callable[[str, Any, VerifierReward], bool]] = {
    "exact": _is_same, "number": _is_number, "regex": _is_found, "json_schema": _fits,
}  # fmt: skip
