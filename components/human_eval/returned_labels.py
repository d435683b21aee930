"""Join raters' answers from the files that they returned, and refuse files that do not match what was given out."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from components.base.errors import Mistakes, UserError
from components.base.hashing import digest_file
from components.base.jsonl import read_rows
from components.human_eval.batch.returned_sheets import ReturnedSheet, parse_sheet
from components.human_eval.batch.returned_texts import first_difference, plain, same
from components.human_eval.blinding import AuthoredItem, SealedKey, Side
from components.human_eval.sheet import SheetInfo, SheetRow, rating_columns, write_joint

_ITEM = re.compile(r"(q\d+)-([0-9a-f]{8})")
_SIDES = ("prompt", "response_a", "response_b")
_BY_CHANCE = 1e-6
"""Probability below which a column's order counts as sorted."""

Labels = dict[str, tuple[str, ...]]
"""Maps an item to its ratings, one per rater; "" is a missing one."""
Seconds = Mapping[tuple[str, int], float]
"""Maps item (`q0001`) and rater (from 0) to the seconds that the rater's tool measured."""
OVERALL = "rating"
"""The name of the question that is always asked: which reply one would rather receive."""


class Answers(NamedTuple):
    """All answers of the raters."""

    ratings: Labels
    """Overall ratings of the judged pairs, including repeated ones."""
    criteria: dict[str, Labels]
    """The same for each criterion: a, b or tie."""
    attention: Labels
    """Ratings of the attention checks, which count only for the raters' attention."""
    seconds: Seconds


class Texts(NamedTuple):
    """The texts of an item, after `plain`."""

    prompt: str
    response_a: str
    response_b: str


@dataclass(frozen=True)
class Sample:
    """A sample artifact: the sheet's description, its unsealed key and the responses, by item."""

    folder: Path
    about: SheetInfo
    policy_side: dict[str, Side]
    responses: dict[str, AuthoredItem]
    repeat_of: dict[str, str]
    """Maps an item to the one that it repeats with sides exchanged."""
    attention: Mapping[str, Side] = field(default_factory=dict)
    """Maps an attention check to its right answer. These items are in neither of the other maps."""

    @property
    def raters(self) -> int:
        """Return the number of rating columns of the sheet."""
        return self.about["raters"]

    @classmethod
    def open(cls, folder: Path) -> "Sample":
        """Read a sample, and check that its key is the one with which its sheet was sealed.

        Raises:
            UserError: it is not.
        """
        about: SheetInfo = json.loads((folder / "sheet.json").read_text(encoding="utf-8"))
        if digest_file(folder / "key.json") != about["key_sha256"]:
            raise UserError(f"{folder / 'key.json'} was changed: the sample's sheet was sealed with another key.")
        key: SealedKey = json.loads((folder / "key.json").read_text(encoding="utf-8"))
        responses = {row["item"]: row for row in read_rows(folder / "responses.jsonl")}
        return cls(folder, about, key["policy_side"], responses, key.get("repeat_of", {}), key.get("attention") or {})

    @cached_property
    def texts(self) -> dict[str, Texts]:
        """Return the texts that were given out, by the item's name on the sheet."""
        rows = read_rows(self.folder / "sheet.jsonl")
        return {row["item"]: Texts(*(plain(row[name]) for name in _SIDES)) for row in rows}

    @property
    def criteria(self) -> list[str]:
        """Return the criteria that are asked in addition to the overall preference."""
        return [criterion["name"] for criterion in self.about.get("criteria", [])]

    def ratings(self, *files: Path) -> Labels:
        """Return only the overall ratings; see `answers`."""
        return self.answers(*files).ratings

    def answers(self, *files: Path, may_be_empty: bool = False) -> Answers:
        """Return the answers in returned sheets, by item; items without a row have no answers.

        Args:
            files: the joint sheet, or raters' own files, in any mixture.
            may_be_empty: whether files without a rating are no error.

        Raises:
            Mistakes: all mistakes in them: those of `parse_sheet`; items that are unknown, repeated or of another
                sample; texts that differ from those given out; a column of ratings that was sorted without the items;
                two answers by one rater.
            UserError: nothing is rated.
        """
        mistakes: list[str] = []
        answers: dict[tuple[str, str, int], tuple[str, str]] = {}
        seconds: dict[tuple[str, int], float] = {}
        people = self.raters
        for path in files:
            try:
                sheet = parse_sheet(path, self.raters, self.about["ratings"], self.criteria)
            except UserError as error:
                mistakes.append(str(error))
                continue
            mistakes += sheet.mistakes
            people = max(people, sheet.raters)
            for row, item in self._items(sheet, mistakes):
                place = f"{path}, row {row.number}"
                seconds |= {(item, rater): taken for rater, taken in enumerate(row.seconds[: self.raters]) if taken}
                for question, cells in zip((OVERALL, *self.criteria), (row.ratings, *row.criteria), strict=True):
                    for rater, rating in enumerate(cells):
                        other, where = answers.get((question, item, rater), (rating, ""))
                        if rating and other != rating:
                            subject = "" if question == OVERALL else f" about `{question}`"
                            mistakes.append(
                                f"{place}: rater {rater + 1} answers {rating} to {row.item}{subject}, and {other} in "
                                f"{where}. Keep one of them; two people need two rater numbers."
                            )
                        elif rating:
                            answers[question, item, rater] = rating, place
        if mistakes:
            raise Mistakes(*mistakes)
        if not may_be_empty and not any(question == OVERALL for question, _, _ in answers):
            columns = ", ".join(rating_columns(self.raters))
            named = " and ".join(map(str, files))
            raise UserError(f"{named} holds no rating yet. Fill in {columns}, or `rating` in a rater's own file.")

        def of(question: str, items: Iterable[str]) -> Labels:
            return {
                item: tuple(answers.get((question, item, rater), ("", ""))[0] for rater in range(people))
                for item in items
            }

        criteria = {name: of(name, self.policy_side) for name in self.criteria}
        return Answers(of(OVERALL, self.policy_side), criteria, of(OVERALL, self.attention), seconds)

    def write(self, path: Path, answers: Answers) -> None:
        """Write answers as the joint sheet. Equal answers give equal bytes, whatever files they came from."""
        every = answers.ratings | answers.attention
        raters, timed = len(rated_columns(every)), range(self.raters if answers.seconds else 0)
        none = ("",) * raters
        numbered = ((row["item"].split("-")[0], row) for row in read_rows(self.folder / "sheet.jsonl"))
        filled = [
            SheetRow(
                number, row["item"], row["prompt"], row["response_a"], row["response_b"], every.get(item, none),
                tuple(answers.criteria[name].get(item, none) for name in self.criteria),
                tuple(answers.seconds.get((item, rater)) for rater in timed),
            )
            for number, (item, row) in enumerate(numbered, 2)
        ]  # fmt: skip
        write_joint(path, filled, raters, shared=raters > self.raters, criteria=self.criteria)

    def _items(self, sheet: ReturnedSheet, mistakes: list[str]) -> list[tuple[SheetRow, str]]:
        """Return the rows of a sheet with their items' numbers; add mistakes to `mistakes`."""
        mark = self.about["key_sha256"][:8]
        foreign = [row for row in sheet.rows if (named := _ITEM.fullmatch(row.item)) and named[2] != mark]
        if foreign:
            mistakes.append(
                f"{sheet.path}, row {foreign[0].number}: item {foreign[0].item} belongs to the sheet of another sample "
                f"(items of this one end in -{mark}), as do {len(foreign)} of {len(sheet.rows)} rows. Score a sheet "
                "with the run that wrote it."
            )
            return []
        valid: list[tuple[SheetRow, str]] = []
        numbers: dict[str, int] = {}
        for row in sheet.rows:
            where = f"{sheet.path}, row {row.number}"
            item = row.item.split("-")[0]
            if not _ITEM.fullmatch(row.item) or row.item not in self.texts:
                mistakes.append(
                    f"{where}, column `item`: {row.item[:40]!r} is not an item of this sample. Copy items from "
                    "the sheet unchanged."
                )
            elif item in numbers:
                mistakes.append(f"{where}: item {row.item} is in row {numbers[item]} already.")
            else:
                mistakes += (f"{where}, {wrong}" for wrong in self._moved(row, sheet.lossy))
                numbers[item] = row.number
                valid.append((row, item))
        mistakes += (f"{sheet.path}, {wrong}" for wrong in _sorted_alone(valid, sheet.raters))
        return valid

    def _moved(self, row: SheetRow, lossy: bool) -> Iterator[str]:
        """Yield a mistake for each text of a row that is not its item's."""
        originals, returned = self.texts[row.item], Texts(*map(plain, row[2:5]))
        for name, was, now in zip(_SIDES, originals, returned, strict=True):
            if not same(was, now, lossy):
                place = first_difference(was, now)
                yield (
                    f"column `{name}`: the text is not the one given out for {row.item} (from its character "
                    f"{place + 1}: {now[place : place + 30]!r}, was {was[place : place + 30]!r}). If columns were "
                    "moved, exchanged or sorted alone, put them back; else copy the text from the sheet that the run "
                    "wrote."
                )


def _sorted_alone(rows: Sequence[tuple[SheetRow, str]], raters: int) -> Iterator[str]:
    """Yield columns of ratings that were sorted without the items.

    The texts cannot show this. But in the sheet's random order, n ratings of k kinds are grouped by kind only with
    probability k! n_1! ... n_k! / n!.
    """
    items = [item for _, item in rows]
    if items != sorted(items):
        return  # whole rows were sorted, which does no harm
    for rater in range(raters):
        ratings = [(row.number, row.ratings[rater]) for row, _ in rows if row.ratings[rater]]
        counts = Counter(rating for _, rating in ratings)
        changes = sum(one[1] != other[1] for one, other in itertools.pairwise(ratings))
        chance = math.lgamma(len(counts) + 1) + sum(math.lgamma(n + 1) for n in counts.values())
        chance -= math.lgamma(len(ratings) + 1)
        if len(counts) > 1 and changes == len(counts) - 1 and chance < math.log(_BY_CHANCE):
            kinds = ", then ".join(counts)
            yield (
                f"rows {ratings[0][0]} to {ratings[-1][0]}: the ratings of rater {rater + 1} are sorted ({kinds}) "
                "while the items are in the sheet's order, so the ratings no longer match their rows. Undo the sorting."
            )


def rated_columns(labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the columns `rating_1` to `rating_k` of all who rated; more than the sheet's raters if people shared
    items."""
    return rating_columns(max(map(len, labels.values()), default=0))


def rating_count(labels: Mapping[str, Sequence[str]], per_item: int) -> int:
    """Return how many of the `per_item` ratings of each item were given; further ones of an item do not count."""
    return sum(min(per_item, sum(map(bool, ratings))) for ratings in labels.values())
