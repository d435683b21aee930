"""Keep a judge's answers on disk: a pair that was answered is not asked again, even after a kill."""

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.files import make_folder
from components.base.hashing import digest_json
from components.base.jsonl import AppendedLines, Message, json_line, write_json
from components.base.strict_json import parse_json
from components.labelling.feedback.judges import JudgeAnswer

ANSWERS, JUDGE = "answers.jsonl", "judge.json"


class BothOrders(NamedTuple):
    """A judge's answers to a pair."""

    in_order: JudgeAnswer
    """With `a` shown first."""
    swapped: JudgeAnswer
    """With `b` shown first."""

    @property
    def sides(self) -> tuple[float, float] | None:
        """Return the preference for `a` in either order; None if an answer cannot be read."""
        in_order, swapped = self.in_order["first"], self.swapped["first"]
        return None if in_order is None or swapped is None else (in_order, 1 - swapped)


def pair_id(prompt: list[Message], a: str, b: str) -> str:
    """Return a pair's name in `answers.jsonl`."""
    return digest_json([prompt, a, b])[:32]


class StoredAnswers(ExitStack[None]):
    """The file `answers.jsonl` of a folder: a line per pair, synced to disk before the next pair is asked."""

    def __init__(self, folder: Path, judge: Mapping[str, Any]) -> None:
        """Open the file; a last line that a kill cut off is dropped.

        Args:
            judge: the judge and its rubric, as stored in `judge.json`.

        Raises:
            UserError: the folder has another judge's answers, or something else, or is a file.
        """
        super().__init__()
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out {folder} is a file. Name a new folder.")
        make_folder(folder)
        _check_same(folder, judge)
        self._lines = AppendedLines(folder / ANSWERS, _read)
        self.callback(self._lines.close)
        self._known = dict(self._lines.found)

    def get(self, pair: str) -> BothOrders | None:
        """Return the answers to a pair; None if it was not asked."""
        return self._known.get(pair)

    def others(self, pairs: Collection[str]) -> int:
        """Return the number of answers to pairs that are not among `pairs`."""
        return len(self._known.keys() - set(pairs))

    def add(self, pair: str, answers: BothOrders) -> None:
        """Store the answers to a pair; they are on disk when this returns."""
        self._known[pair] = answers
        self._lines.add(json_line({"pair": pair, "given": answers.in_order, "swapped": answers.swapped}))


def _read(row: Any) -> tuple[str, BothOrders]:
    return str(row["pair"]), BothOrders(_answer(row["given"]), _answer(row["swapped"]))


def _answer(value: Any) -> JudgeAnswer:
    first = value["first"]
    if first is not None and not (type(first) in (int, float) and 0 <= first <= 1):
        raise ValueError("not a preference of 0 to 1")
    answer: JudgeAnswer = value
    return answer


def _check_same(folder: Path, judge: Mapping[str, Any]) -> None:
    """Write `judge.json`, or refuse a folder with another judge's file, or with other files but no `judge.json`."""
    path = folder / JUDGE
    if not path.exists():
        if any(folder.iterdir()):
            raise UserError(f"--out {folder} holds other files. Name a new folder.")
        write_json(path, judge)
        return
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}). Name another folder with --out.") from error
    if stored != json.loads(json.dumps(judge)):
        differ = [name for name in judge if not isinstance(stored, dict) or stored.get(name) != judge[name]]
        raise UserError(
            f"--out {folder} holds the answers of another judge: {', '.join(differ) or 'more'} differs. Name a new "
            "folder."
        )
