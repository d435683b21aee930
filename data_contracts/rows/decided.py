"""Whether the votes on a pair decide it: enough of them, a lead that is wide enough, and experts before all others."""

from collections.abc import Mapping
from typing import Any

from components.data.config import OWN_MINIMUM, DecisionConfig
from components.data.formats.pairs import COMPARISONS, parse_pair, parse_pairs
from components.data.rows import Problem, RawRow, Row
from components.data.spreadsheet import LABELLED
from components.human_eval.halves import JUDGED_IN


def by_votes(raw: RawRow, name: str, source: str, max_characters: int, config: DecisionConfig) -> list[Row]:
    """The pairs of a row, as `parse_pairs`; one that its votes do not decide fails the check `decided`.

    With n votes, n_1 of them for the most frequent answer and n_2 for the next, a pair is decided if n >= minimum and
    (n_1 - n_2) / n > margin. Where experts voted, their votes alone decide, however few; the others still count in
    the annotators' agreement.
    """
    rows = parse_pairs(raw, name, source, max_characters)
    if name in ("ranking", COMPARISONS) or rows[0].item is None or rows[0].ballot is None:
        return rows
    (row,) = rows
    if experts := _of_experts(raw.data.get("votes"), config.experts):
        decided = parse_pair(raw._replace(data={**raw.data, "votes": experts}), name, source, max_characters)
        decided.ballot, decided.votes = row.ballot, row.votes
        decided.data = raw.data if decided.problems else {}
        return [decided]
    if not any(problem.check == "decided" for problem in row.problems) and (text := _undecided(raw, row, config)):
        row.problems.append(Problem("decided", text))
        row.data = raw.data
    return rows


def _of_experts(votes: object, experts: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """The votes, of a list of them, whose annotators are experts."""
    if not isinstance(votes, list):
        return []
    return [each for each in votes if isinstance(each, dict) and str(each.get("annotator")) in experts]


def _undecided(raw: RawRow, row: Row, config: DecisionConfig) -> str:
    """Why the votes of a row that has a majority do not decide it; empty where they do."""
    assert row.ballot is not None
    ours = str(raw.data.get("id", "")).startswith(LABELLED) or JUDGED_IN in raw.data
    minimum = config.minimum or (OWN_MINIMUM if ours else 1)
    _, second, first = sorted(row.ballot)
    votes = sum(row.ballot)
    if votes < minimum:
        return f"{votes} of the {minimum} votes that decide a pair (data.decision.minimum)"
    if config.margin and first - second <= config.margin * votes + 1e-9:
        return f"narrow: {first} of {votes} votes against {second} (data.decision.margin)"
    return ""
