"""The distinct prompts of any file that Tether reads: rows with a `prompt`, or preference pairs in any format."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.text import counted
from components.data.checks_config import RowChecks
from components.data.formats.pairs import detect, parse_pair
from components.data.formats.transcripts import PROMPT_PARTS, SYSTEMS
from components.data.readers import read_source
from components.data.rows import Message, RawRow, Row, text_problems
from components.data.splits import prompt_key

_STAND_IN = {"a": "first", "b": "second", "label": "a"}


class Prompts(NamedTuple):
    """The prompts of a file."""

    rows: int
    distinct: list[list[Message]]
    """Each prompt once, as messages, in the order of its first row."""
    quarantined: list[Row]
    """Rows without a usable prompt, with their problems."""

    def as_json(self) -> dict[str, object]:
        """Return its part of the output of `tether data candidates --json`, with the fields of `tether data check`.

        There are no votes and no verdicts here; `checks` are those by which rows were left out.
        """
        numbers: dict[str, list[int]] = {}
        for row in self.quarantined:
            for check in {problem.check for problem in row.problems}:
                numbers.setdefault(check, []).append(row.number)
        defaults = RowChecks()
        checks = [
            {"name": name, "rows": len(rows), "row_numbers": rows, "value": len(rows) / self.rows,
             **getattr(defaults, name).model_dump()}
            for name, rows in sorted(numbers.items())
        ]  # fmt: skip
        return {"checks": checks, **dict.fromkeys(("kappa", "alpha", "longer_wins", "majority"))}


def read_prompts(path: Path, max_characters: int) -> Prompts:
    """Read the prompts of a file or saved folder.

    Raises:
        UserError: it cannot be read, or no row has a prompt.
    """
    count = 0
    prompts: dict[str, list[Message]] = {}
    quarantined = []
    for count, raw in enumerate(read_source(path), 1):  # noqa: B007 (the last one is the number of rows)
        row = parse_prompt(raw, max_characters)
        if row.problems or row.item is None:
            quarantined.append(row)
        else:
            prompts.setdefault(prompt_key(row.item["prompt"]), row.item["prompt"])
    if not prompts:
        text, times = Counter(problem.text for row in quarantined for problem in row.problems).most_common(1)[0]
        first = next(row.number for row in quarantined if any(p.text == text for p in row.problems))
        raise UserError(
            f"{path} has no valid prompt in {counted(count, 'row')}. The most common reason: {text} "
            f"({counted(times, 'row')}, the first "
            f"is row {first}). Give rows with a `prompt` (text, transcript or messages), or preference pairs."
        )
    return Prompts(count, list(prompts.values()), quarantined)


def parse_prompt(raw: RawRow, max_characters: int) -> Row:
    """Parse row `raw` as `{prompt}` (messages), with the problems of its prompt only."""
    if raw.problem or {"chosen", "rejected"} <= raw.data.keys():
        parsed = parse_pair(raw, "transcripts" if raw.problem else detect([raw], "the file"), "prompts", max_characters)
    else:
        # Responses and label are not needed and are filled in; a `stance` and earlier turns are part of the prompt.
        names = ("prompt", "stance", "history", *SYSTEMS, *PROMPT_PARTS)
        fields = {name: raw.data[name] for name in names if name in raw.data}
        parsed = parse_pair(raw._replace(data=fields | _STAND_IN), "votes", "prompts", max_characters)
    row = Row("prompts", raw, problems=parsed.problems)
    if parsed.item is not None:
        row.item = {"prompt": parsed.item["prompt"]}
        row.problems = text_problems(row.item["prompt"], {}, max_characters)
    return row
