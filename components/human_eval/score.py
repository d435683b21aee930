"""The second half of human_eval: a filled sheet, unblinded and scored."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from components.base.errors import UserError
from components.base.hashing import canonical_json, digest_file
from components.base.jsonl import read_rows, write_json
from components.base.observe import Observe
from components.data.spreadsheet import write_csv
from components.human_eval.blinding import JudgedItem, SealedKey, Side
from components.human_eval.config import ScoreJob
from components.human_eval.sheet import SIMULATED, SheetInfo, SheetRow, rating_columns, read_sheet
from components.stats.intervals import clustered_proportion
from components.stats.votes import fleiss_kappa_interval

_ITEM = re.compile(r"(q\d+)-([0-9a-f]{8})")


class Sample(NamedTuple):
    """A sample artifact: the sheet's description, its unsealed key and the responses, by item."""

    folder: Path
    about: SheetInfo
    policy_side: dict[str, Side]
    responses: dict[str, JudgedItem]

    @property
    def raters(self) -> int:
        """Rating columns of the sheet."""
        return self.about["raters"]

    @classmethod
    def open(cls, folder: Path) -> "Sample":
        """Read it, and check that the key is the one its sheet was sealed with.

        Raises:
            UserError: it isn't.
        """
        about: SheetInfo = json.loads((folder / "sheet.json").read_text(encoding="utf-8"))
        if digest_file(folder / "key.json") != about["key_sha256"]:
            raise UserError(f"{folder / 'key.json'} was changed: the sample's sheet was sealed with another key.")
        key: SealedKey = json.loads((folder / "key.json").read_text(encoding="utf-8"))
        responses = {row["item"]: row for row in read_rows(folder / "responses.jsonl")}
        return cls(folder, about, key["policy_side"], responses)

    def ratings(self, sheet: Path) -> dict[str, tuple[str, ...]]:
        """The ratings (a, b, tie or "") of a filled sheet, by item; items without a row have none.

        Raises:
            UserError: the sheet is another sample's, names an unknown item or one twice, or as `read_sheet`.
        """
        out: dict[str, tuple[str, ...]] = {}
        numbers: dict[str, int] = {}
        for row in read_sheet(sheet, self.raters, self.about["ratings"]):
            item = self._item(sheet, row)
            if item in out:
                raise UserError(f"{sheet}, row {row.number}: item {row.item} stands in row {numbers[item]} already.")
            out[item], numbers[item] = row.ratings, row.number
        return {item: out.get(item, ("",) * self.raters) for item in self.policy_side}

    def _item(self, sheet: Path, row: SheetRow) -> str:
        found = _ITEM.fullmatch(row.item)
        if found and found[2] != self.about["key_sha256"][:8]:
            raise UserError(
                f"{sheet}, row {row.number}: item {row.item} belongs to the sheet of another sample (items of this one "
                f"end in -{self.about['key_sha256'][:8]}). Score the sheet with the run that wrote it."
            )
        if not found or found[1] not in self.policy_side:
            raise UserError(
                f"{sheet}, row {row.number}, column `item`: {row.item[:40]!r} is no item of this sample. "
                f"Items are copied from the sheet as they are."
            )
        return found[1]


class RaterSummary(TypedDict):
    """What one rater's ratings say; shares are None where there is nothing to share out."""

    rater: str
    n: int
    win_rate: float | None
    ties: float | None
    side_a: float | None
    """Share of the ratings that are no ties: far from a half is a habit, not a judgement."""
    agreement: float | None
    """Share of other raters' ratings of the same items that theirs agree with."""


class StratumSummary(TypedDict):
    """The policy's win rate over the rated items of a stratum."""

    stratum: str
    n: int
    win_rate: float


def run(job: ScoreJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Score the filled sheet `inputs["sheet"]` (a file) of the sample `inputs["sample"]`.

    An item's score is the mean over its ratings of 1 (policy preferred), a half (tie) or 0; the win rate is the mean
    over rated items, its interval clustered by prompt. Writes `result.json` and `ratings.csv` (unblinded). Kappa is no
    metric where it is undefined (one rater, or one rating only), so that its gate fails if it is asked for.

    Raises:
        UserError: as `Sample.ratings`, or nothing is rated.
    """
    sample = Sample.open(inputs["sample"])
    ratings = sample.ratings(inputs["sheet"])
    rated = {item: given for item, given in ratings.items() if any(given)}
    if not rated:
        raise UserError(f"{inputs['sheet']} holds no rating yet. Fill in {', '.join(rating_columns(sample.raters))}.")
    scores = {item: item_score(given, sample.policy_side[item]) for item, given in rated.items()}
    clusters = [canonical_json(sample.responses[item]["prompt"]) for item in scores]
    win = clustered_proportion(list(scores.values()), clusters, job.human_eval.level)
    metrics = {
        "human_eval/win_rate": win.value,
        "human_eval/win_rate_low": win.low,
        "human_eval/win_rate_high": win.high,
        "human_eval/labels_complete": sum(all(given) for given in ratings.values()) / len(ratings),
        "human_eval/items": float(len(rated)),
    }
    valid = sample.about["ratings"]
    votes = [[given.count(value) for value in valid] for given in rated.values()]
    kappa = fleiss_kappa_interval(votes, clusters, level=job.human_eval.level)
    metrics |= kappa.metrics("human_eval/fleiss_kappa")
    result = {
        "judges": judged_by(sample, ratings),
        "target": "share of items on which the policy is preferred to SFT; a tie counts a half; mean over raters first",
        "level": job.human_eval.level,
        "win_rate": win._asdict(),
        **kappa.named("fleiss_kappa"),
        "items": len(rated),
        "items_sampled": len(ratings),
        "labels_complete": metrics["human_eval/labels_complete"],
        "ratings": {"given": sum(bool(r) for g in ratings.values() for r in g), "asked": len(ratings) * sample.raters},
        "raters": list(_per_rater(sample, ratings)),
        "strata": _by_stratum(sample, scores),
        "key_sha256": sample.about["key_sha256"],
    }
    write_json(out / "artifact" / "result.json", result)
    write_unblinded(out / "artifact" / "ratings.csv", sample, ratings, scores)
    observe(len(rated), metrics, total=len(rated))
    return metrics


def item_score(ratings: Sequence[str], policy_side: str) -> float:
    """Mean over the ratings given of 1 where the policy's side is preferred, a half for a tie, 0 otherwise."""
    values = [0.5 if r == "tie" else float(r == policy_side) for r in ratings if r]
    return sum(values) / len(values)


def judged_by(sample: Sample, ratings: Mapping[str, tuple[str, ...]]) -> str:
    """`simulated` if the ratings are the simulated judges' own, else `people`."""
    file = sample.folder / SIMULATED
    return "simulated" if file.exists() and sample.ratings(file) == ratings else "people"


def _per_rater(sample: Sample, ratings: Mapping[str, tuple[str, ...]]) -> Iterator[RaterSummary]:
    for index, column in enumerate(rating_columns(sample.raters)):
        own = {item: given[index] for item, given in ratings.items() if given[index]}
        sides = Counter(own.values())
        others = [own[item] == other for item in own for i, other in enumerate(ratings[item]) if i != index and other]
        decided = sides["a"] + sides["b"]
        wins = [item_score([rating], sample.policy_side[item]) for item, rating in own.items()]
        yield {
            "rater": column,
            "n": len(own),
            "win_rate": sum(wins) / len(wins) if wins else None,
            "ties": sides["tie"] / len(own) if own else None,
            "side_a": sides["a"] / decided if decided else None,
            "agreement": sum(others) / len(others) if others else None,
        }


def write_unblinded(
    path: Path, sample: Sample, ratings: Mapping[str, tuple[str, ...]], scores: Mapping[str, float]
) -> None:
    """Every item with its authors named, each rating as policy, sft or tie, and its score."""
    columns = ["item", "stratum", "prompt", "sft", "policy", "policy_side", *rating_columns(sample.raters), "score"]
    rows = []
    for item, given in ratings.items():
        side, row = sample.policy_side[item], sample.responses[item]
        named = {"": "", "tie": "tie", side: "policy", "b" if side == "a" else "a": "sft"}
        rows.append({
            "item": item, "stratum": row["stratum"], "prompt": canonical_json(row["prompt"]), "sft": row["sft"],
            "policy": row["policy"], "policy_side": side, "score": str(scores.get(item, "")),
            **{name: named[r] for name, r in zip(rating_columns(sample.raters), given, strict=True)},
        })  # fmt: skip
    write_csv(path, columns, rows)


def _by_stratum(sample: Sample, scores: Mapping[str, float]) -> list[StratumSummary]:
    found: dict[str, list[float]] = {}
    for item, score in scores.items():
        found.setdefault(sample.responses[item]["stratum"], []).append(score)
    return [{"stratum": name, "n": len(s), "win_rate": sum(s) / len(s)} for name, s in sorted(found.items())]
