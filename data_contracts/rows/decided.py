"""Explain why votes do not decide a pair: too few votes, a narrow lead, or a tie. Experts' votes take precedence.

The contract makes the decision with the columns `lead` and `deciding_votes`; this module only writes the explanation.
"""

from collections.abc import Mapping
from typing import Any

from components.data.config import OWN_MINIMUM, DecisionConfig
from components.data.formats.pairs import COMPARISONS, parse_pair, parse_pairs
from components.data.rows import Problem, RawRow, Row
from components.data.spreadsheet import LABELLED
from components.human_eval.batch.halves import JUDGED_IN
from data_contracts.rows.measuring import lead_of


def by_votes(raw: RawRow, name: str, source: str, max_characters: int, config: DecisionConfig) -> list[Row]:
    """Return the pairs of a row, as `parse_pairs`, with a problem of the check `decided` if votes do not decide a pair.

    With n votes, n_1 of them for the most frequent answer and n_2 for the next, a pair is decided if n >= minimum and
    (n_1 - n_2) / n > margin. Where experts voted, their votes alone decide, however few; the others still count in the
    annotators' agreement.
    """
    rows = parse_pairs(raw, name, source, max_characters)
    if name in ("ranking", COMPARISONS) or rows[0].item is None or rows[0].ballot is None:
        return rows
    (row,) = rows
    row.given_out = str(raw.data.get("id", "")).startswith(LABELLED) or JUDGED_IN in raw.data
    if experts := _of_experts(raw.data.get("votes"), config.experts):
        decided = parse_pair(raw._replace(data={**raw.data, "votes": experts}), name, source, max_characters)
        if decided.lead is None and decided.ballot is not None:
            decided.lead = lead_of(decided.ballot)
        decided.raw, decided.ballot, decided.cast, decided.decided_otherwise = raw, row.ballot, row.cast, True
        return [decided]
    if not any(problem.check == "decided" for problem in row.problems) and (text := _undecided(row, config)):
        row.problems.append(Problem("decided", text))
    return rows


def _of_experts(votes: object, experts: tuple[str, ...]) -> list[Mapping[str, Any]]:
    if not isinstance(votes, list):
        return []
    return [vote for vote in votes if isinstance(vote, dict) and str(vote.get("annotator")) in experts]


def _undecided(row: Row, config: DecisionConfig) -> str:
    """Return why the votes of a row with a majority do not decide it; empty if they do."""
    assert row.ballot is not None
    minimum = config.minimum or (OWN_MINIMUM if row.given_out else 1)
    _, second, first = sorted(row.ballot)
    votes = sum(row.ballot)
    if votes < minimum:
        return f"{votes} of the {minimum} votes that decide a pair (data.decision.minimum)"
    if config.margin and first - second <= config.margin * votes + 1e-9:
        return f"narrow: {first} of {votes} votes against {second} (data.decision.margin)"
    return ""
