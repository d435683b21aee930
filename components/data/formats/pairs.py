"""Formats of preference pairs: each turns a source's row into the canonical pair, or reports why it cannot.

transcripts     `chosen`, `rejected`: whole conversations with "\\n\\nHuman:" and "\\n\\nAssistant:" turns
strings         `prompt`, `chosen`, `rejected`: texts
conversational  `chosen`, `rejected`: lists of messages, with the prompt inside or as `prompt` beside them (TRL's)
votes           `prompt`, `a`, `b` and `votes` (labels or counts) or `label`; the most frequent answer decides
single votes    `prompt`, `a`, `b`, `annotator` and `label` (or `vote`): the rows of one pair become a row of `votes`
ranking         `prompt`, `responses` (two or more), best first, or with `ranks` (1 is best, equal ranks are ties) or
                `scores` (the highest is best, and differences are margins)

Every format also takes `system` and `history` (earlier turns), `category`, `source` (where the row itself came from),
`margin` (or `score_chosen`, `score_rejected`, also as `chosen_rating` and the like); the first three take vote counts
as `votes_chosen`, `votes`. A vote or label is a (or a1), b (or a2), tie (or equal) or both_bad (a vote for neither).
`votes_a`, `votes_b`, `votes_tie` (or `votes_equal`) and `votes_both_bad` may hold counts instead. A `stance` in a row
with `prompt`, `a` and `b` becomes the prompt's last line.
Votes on single questions, as `votes_helpful` of `votes`, become the shares of the pair's `objectives`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple, cast

from components.base.errors import UserError
from components.base.strict_json import BadJson, parse_json
from components.base.text import counted
from components.data.formats.labels import is_kto_row, is_tie, side_of
from components.data.formats.transcripts import (
    as_messages,
    before_response,
    earlier_turns,
    is_empty,
    is_transcript,
    kind,
    split_answer,
    transcript_messages,
)
from components.data.rows import (
    BadRow,
    Ballot,
    CanonicalRow,
    Message,
    Problem,
    RawRow,
    Row,
    blank,
    is_model,
    listed,
    most_common_format,
    refuse_unreadable,
    shown,
    text_problems,
    unclean,
)
from components.data.splits import prompt_key
from components.data.words import seen

COMPARISONS = "comparisons"
"""The format of rows that hold several pairs (`pairs`, each with `chosen` and `rejected`), as public.py makes them."""
SINGLE_VOTES = "single votes"
"""The format whose rows `gather_votes` combines into rows of the format `votes`."""
_MOST_VOTES = 1_000_000
"""Most votes for one answer in one row, so that sums fit the integer type of the counts."""
_LARGEST = 1e9
"""Largest absolute margin, score or rank. Beyond it, a float32 loss would lose the other rows of its batch."""


_CHOICE = frozenset(
    "best better chosen preferred winner label choice preference selected selection verdict decision vote".split()
)
"""Words in names of fields that may say which of several responses is better."""
RANKING = frozenset("rank ranks ranking rankings order place places position positions".split())
SIDE_SCORES = tuple(
    (form.format("chosen", word), form.format("rejected", word))
    for word in ("score", "rating", "reward", "avg_rating", "avg-rating")
    for form in ("{1}_{0}", "{0}_{1}", "{0}-{1}", "{1}-{0}")
)
"""Names of the two responses' scores, whose difference is the margin."""
_OUTCOMES = ("status", "winner", "preference", "label", "score", "scores", "rating", "ratings")
"""Fields by which a row with `chosen` and `rejected` may say that it is a tie, also by two equal numbers."""


class Parsed(NamedTuple):
    """A pair as read by its format; with `first_wins` and `ballot` if the format has an order and votes."""

    prompt: list[Message]
    chosen: str
    rejected: str
    ballot: Ballot | None = None
    first_wins: bool | None = None
    tie: bool = False
    cast: tuple[tuple[str | None, int], ...] = ()
    twice: str | None = None
    """The first annotator who voted more than once; only the first vote of each counts."""


def detect(rows: Sequence[RawRow], path: object, score: str | None = None) -> str:
    """Return the format of most of the first rows, by their fields. `score` is `data.score.name`.

    Raises:
        UserError: they have no known format; the message names the fields found and those expected.
    """
    form, fields = most_common_format(rows, format_of)
    if form:
        return form
    refuse_unreadable(rows, path)
    if any(is_kto_row(row.data) for row in rows if row.problem is None):
        pairs = "" if score else ", and data.score.name=label makes pairs of them"
        raise UserError(
            f"{path}: its rows are single responses with a label (KTO), and a reward model learns from two responses "
            "to one prompt. Give the file as data.demonstrations: SFT learns the desirable responses, and "
            f"policy.method=kto all labels. If prompts have responses with both labels, write each as `prompt` and "
            f"`response` (data.columns.response=completion if they are in `completion`){pairs}."
        )
    sides = [side for side in ("chosen", "rejected") if side in fields]
    missing = ({"chosen", "rejected"} - set(sides)).pop() if len(sides) == 1 else None
    what = f"every pair lacks `{missing}`" if missing else "its rows are not preference pairs"
    raise UserError(
        f"{path}: {what}. The fields found in {counted(len(rows), 'row')} are {listed(fields)}; expected are "
        "`chosen` and `rejected` (transcripts or lists of messages), with `prompt` (texts), or `prompt`, `a`, `b` and "
        "`votes` or `label`, or `prompt` and `responses` (a ranking). Add what is missing, or "
        "map your names with data.columns."
    )


def format_of(data: Mapping[str, object]) -> str | None:
    """Return the name of the pair format that a row's fields match; None if they match none."""
    if "chosen" in data and "rejected" in data:
        if any(isinstance(data[side], list | dict) for side in ("chosen", "rejected")):
            return "conversational"
        whole = is_transcript(data["chosen"]) and is_transcript(data["rejected"])
        return "strings" if data.get("prompt") is not None and not whole else "transcripts"
    if {"prompt", "a", "b"} <= data.keys():
        if "votes" not in data and "annotator" in data and data.keys() & {"label", "vote"}:
            return SINGLE_VOTES
        if data.keys() & {"votes", "label", "votes_a"}:
            return "votes"
    return "ranking" if {"prompt", "responses"} <= data.keys() else None


def parse_pairs(raw: RawRow, name: str, source: str, max_characters: int) -> list[Row]:
    """Return the pairs of row `raw`: one, or all of a ranking's (or of a row of comparisons), with weights of sum 1.

    k responses give k (k - 1) / 2 pairs (Ouyang et al. 2022, section 3.5), fewer if ranks are equal.
    """
    if name not in ("ranking", COMPARISONS) or raw.problem:
        return [parse_pair(raw, name, source, max_characters)]
    try:
        pairs = _ranking(raw.data) if name == "ranking" else cast("list[dict[str, object]]", raw.data["pairs"])
    except BadRow as bad:
        return [Row(source, raw, problems=[bad.problem])]
    rest = {key: value for key, value in raw.data.items() if key not in ("responses", "ranks", "scores", "pairs")}
    rows = []
    for pair in pairs:
        row = parse_pair(raw._replace(data=rest | pair), "strings", source, max_characters)
        if row.item is not None:
            row.item["weight"] = 1 / len(pairs)
        rows.append(row)
    return rows


def _ranking(data: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the `chosen` and the `rejected` response of each pair of a ranking, with its `margin` if it has scores.

    Raises:
        BadRow: another field may rate the responses or name the best: these may be in no order.
    """
    responses = data.get("responses")
    if not isinstance(responses, list) or len(responses) < 2:
        raise BadRow("fields_present", "`responses` is not a list of two or more texts")
    name = next((name for name in ("ranks", "scores") if data.get(name) is not None), None)
    if name is None and (other := _numbers(data, len(responses))):
        text = f"`{other}` has a number for each response, but neither `ranks` (1 is best) nor `scores` is there"
        plain = not any(isinstance(number, dict) for number in list_in_cell(data[other]))
        ours = "ranks" if RANKING & set(re.split(r"[^a-z]+", other.lower())) else "scores"
        advice = f"say which it is, as --set data.columns.{ours}={other}" if plain else "write one of them"
        raise BadRow("fields_present", f"{text}; {advice}")
    if name is None and (other := _choice(data, responses)):
        text = f"`{other}` is {shown(data[other])} and may say which response is better"
        raise BadRow("fields_present", f"{text}; write `ranks` (1 is best), a number for each response")
    placed: Any = list_in_cell(list(range(1, len(responses) + 1)) if name is None else data[name])
    if not isinstance(placed, list) or len(placed) != len(responses):
        raise BadRow("fields_present", f"`{name}` doesn't give each of {len(responses)} responses a number")
    sign = -1 if name == "scores" else 1
    ordered = sorted((sign * number_field(number, f"{name}[{i}]"), i) for i, number in enumerate(placed))
    pairs: list[dict[str, object]] = [
        {"chosen": responses[i], "rejected": responses[j]} | ({"margin": worse - better} if name == "scores" else {})
        for (better, i), (worse, j) in combinations(ordered, 2)
        if better < worse
    ]
    if not pairs:
        raise BadRow("decided", "tie")
    return pairs


def list_in_cell(value: Any) -> Any:
    """Return a list that is in a cell of CSV; other values unchanged."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(BadJson):
            return parse_json(value)
    return value


def _numbers(data: Mapping[str, object], count: int) -> str | None:
    for name, value in data.items():
        numbers = list_in_cell(value)
        if isinstance(numbers, list) and len(numbers) == count:
            rated = (number.values() if isinstance(number, dict) else [number] for number in numbers)
            if all(any(map(_is_number, number)) for number in rated):
                return name
    return None


def _choice(data: Mapping[str, object], responses: Sequence[object]) -> str | None:
    """Return the first field whose name and value say that it is one of the responses: a place, a letter or a text."""
    places = {str(place) for place in range(len(responses) + 1)}
    for name, value in data.items():
        if _CHOICE & set(re.split(r"[^a-z]+", name.lower())) and value is not None:
            text = str(value).strip().lower().removesuffix(".0")
            if text in places or (len(text) == 1 and text.isalpha()) or value in responses:
                return name
    return None


def _is_number(value: object) -> bool:
    with suppress(TypeError, ValueError, OverflowError):
        return not isinstance(value, bool) and math.isfinite(float(cast("Any", value)))
    return False


def parse_pair(raw: RawRow, name: str, source: str, max_characters: int) -> Row:
    """Parse row `raw` of `source` in the format `name`, with all its problems."""
    row = Row(source, raw)
    try:
        if raw.problem:
            raise BadRow(*raw.problem)
        pair = _PARSERS[name](raw.data)
        ballot = pair.ballot or _counted_ballot(raw.data, name)
        row.item = _item(raw, source, pair, ballot)
        row.ballot, row.first_wins, row.cast = ballot, pair.first_wins, pair.cast
        row.models = _models(raw.data) if name == "votes" else None
        row.problems = text_problems(pair.prompt, {"chosen": pair.chosen, "rejected": pair.rejected}, max_characters)
        if pair.twice is not None:
            text = f"annotator {shown(pair.twice)} votes twice on this pair; the first vote counts"
            row.problems.append(Problem("votes_once", text))
        if (
            pair.tie
            or (name != "votes" and tied_by(raw.data))
            or (ballot and pair.first_wins is None and ballot.first == ballot.second)
        ):
            row.problems.append(Problem("decided", "tie"))
            row.lead = 0.0
        elif name != "votes" and row.item["margin"] == 0:
            row.problems.append(Problem("decided", "tie: both responses have the same score, or `margin` is 0"))
            row.lead = 0.0
    except BadRow as bad:
        row.problems = [bad.problem]
    return row


def _item(raw: RawRow, source: str, pair: Parsed, ballot: Ballot | None) -> CanonicalRow:
    chosen_votes = None if ballot is None else (ballot.second if pair.first_wins is False else ballot.first)
    item: CanonicalRow = {
        "prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected, "margin": _margin(raw.data),
        "votes_chosen": chosen_votes, "votes": None if ballot is None else sum(ballot),
        "soft_label": None if ballot is None else ((chosen_votes or 0) + ballot.equal / 2) / sum(ballot),
        "objectives": _objectives(raw.data, ballot), "weight": 1.0,
        "category": category_of(raw.data), "source": _source(raw.data) or source, "row": raw.number,
    }  # fmt: skip
    if of_models := sum(is_model(annotator) for annotator, _ in pair.cast):
        item["votes_of_models"] = of_models
    if (batch := raw.data.get("judged_in")) is not None:  # human_eval writes it
        item["judged_in"] = cast("str", batch)  # the schema refuses one that is not text
    return item


def _models(data: Mapping[str, object]) -> tuple[str, str] | None:
    a, b = (data.get(name) for name in ("model_a", "model_b"))
    if not isinstance(a, str) or not isinstance(b, str) or blank(a) or blank(b) or a == b:
        return None
    return _named(a), _named(b)


def category_of(data: Mapping[str, object]) -> str | None:
    """Return a row's category; the schema refuses one that is not text."""
    return cast("str | None", data.get("category") or None)


def _source(data: Mapping[str, object]) -> str | None:
    """Return the source that the row itself names; None if it is not readable text."""
    named = data.get("source")
    return named.strip() if isinstance(named, str) and not blank(named) and unclean(named) is None else None


_EQUAL = ("votes_equal", "votes_tie", "votes_both_bad")
_NOT_OBJECTIVES = ("votes_chosen", "votes_rejected", "votes_a", "votes_b", *_EQUAL)


def _objectives(data: Mapping[str, object], ballot: Ballot | None) -> dict[str, float] | None:
    """Return the share of votes for the chosen response on each single question, from `votes_NAME` of `votes`."""
    names = [n for n in data if n.startswith("votes_") and n not in _NOT_OBJECTIVES and data[n] is not None]
    if not names or ballot is None or "chosen" not in data:
        return None
    shares = {name.removeprefix("votes_"): _count(data[name], name) / sum(ballot) for name in names}
    too_many = next((name for name, share in shares.items() if share > 1), None)
    if too_many:
        raise BadRow("votes_valid", f"votes_{too_many} is {data[f'votes_{too_many}']} of {sum(ballot)} votes")
    return shares


def _transcripts(data: Mapping[str, object]) -> Parsed:
    if data.get("prompt") is None and "Assistant:" not in text_field(data, "chosen"):
        raise BadRow("turns_valid", "no assistant turn ('\\n\\nAssistant:') in `chosen`, and no `prompt` beside it")
    before, chosen = before_response(text_field(data, "chosen"))
    prompt = transcript_messages(before)
    other, rejected = before_response(text_field(data, "rejected"))
    if other != before:
        prompt = agreed(prompt, transcript_messages(other))
    if data.get("prompt") is not None and not _holds(prompt, as_messages(data["prompt"], "prompt")):
        raise BadRow("prompts_agree", "`prompt` is not in the transcripts")
    return Parsed(earlier_turns(data, prompt), chosen, rejected)


def _strings(data: Mapping[str, object]) -> Parsed:
    prompt = earlier_turns(data, as_messages(data.get("prompt"), "prompt"))
    return Parsed(prompt, text_field(data, "chosen"), text_field(data, "rejected"))


def _conversational(data: Mapping[str, object]) -> Parsed:
    (before, chosen), (other, rejected) = (split_answer(data.get(side), side) for side in ("chosen", "rejected"))
    lists = all(isinstance(data[side], list) for side in ("chosen", "rejected"))
    prompt = agreed(before, other) if lists else before or other
    if data.get("prompt") is not None:
        turns = as_messages(data["prompt"], "prompt")
        if not _holds(prompt, turns):
            if turns[-1]["role"] == next((m["role"] for m in prompt if m["role"] != "system"), None):
                raise BadRow("prompts_agree", "`prompt` is not in the conversations, which start with another turn")
            prompt = [*turns, *prompt]
    if not prompt:
        raise BadRow("turns_valid", "no turn before the response")
    return Parsed(earlier_turns(data, prompt), chosen, rejected)


def _holds(prompt: list[Message], turns: list[Message]) -> bool:
    """Return whether the turns `turns` stand in `prompt`, one after the other."""
    whole, part = ([(m["role"], seen(m["content"])) for m in messages] for messages in (prompt, turns))
    return any(whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1))


def _votes(data: Mapping[str, object]) -> Parsed:
    prompt = as_messages(data.get("prompt"), "prompt")
    if isinstance(stance := data.get("stance"), str) and prompt[-1]["role"] == "user":
        prompt[-1] = {"role": "user", "content": f"{prompt[-1]['content']}\n{stance.strip()}"}
    prompt = earlier_turns(data, prompt)
    first, second = text_field(data, "a"), text_field(data, "b")
    votes, twice = _once_each(data.get("votes"))
    cast = _cast(votes)
    ballot = _ballot({**data, "votes": votes}, cast)
    answers = ballot or Ballot(*(int(side == side_of(data["label"])) for side in Ballot._fields))
    most = max(answers)
    winners = [side for side, n in zip(Ballot._fields, answers, strict=True) if n == most]
    second_wins = winners == ["second"]
    chosen, rejected = (second, first) if second_wins else (first, second)
    tie = len(winners) > 1 or winners == ["equal"]
    return Parsed(prompt, chosen, rejected, ballot, not second_wins, tie, cast, twice)


def _once_each(votes: Any) -> tuple[Any, str | None]:
    """Return each annotator's first vote in a list, and the first annotator who voted again."""
    if not isinstance(votes, list) or not all(isinstance(vote, dict) for vote in votes):
        return votes, None
    seen: set[str] = set()
    first_votes, twice = [], None
    for vote in votes:
        annotator = vote.get("annotator")
        if annotator is None or blank(str(annotator)) or str(annotator) not in seen:
            first_votes.append(vote)
        else:
            twice = twice or _named(annotator)
        seen.add(str(annotator))
    return first_votes, twice


def _cast(votes: Any) -> tuple[tuple[str | None, int], ...]:
    """Return annotator (None if not named) and index in `Ballot` of each vote in a list; empty for counts."""
    answers = [vote if isinstance(vote, dict) else {"label": vote} for vote in votes] if isinstance(votes, list) else []
    named = [None if (name := vote.get("annotator")) is None else _named(name) for vote in answers]
    sides = [Ballot._fields.index(side_of(vote.get("label", vote.get("vote")))) for vote in answers]
    return tuple(zip(named, sides, strict=True))


def _named(annotator: Any) -> str:
    """Return the annotator's name, with invalid UTF-8 escaped."""
    return str(annotator).encode("utf-8", "backslashreplace").decode()


def _ballot(data: Mapping[str, object], cast: Sequence[tuple[str | None, int]]) -> Ballot | None:
    """Return the votes of a row with `a` and `b`, of which the listed ones are `cast`; None if it has only a label."""
    votes = data.get("votes")
    if cast:
        sides = Counter(Ballot._fields[side] for _, side in cast)
    elif isinstance(votes, dict) and any(votes.values()):
        sides = Counter()
        for name, n in votes.items():
            sides[side_of(name)] += _count(0 if n is None else n, f"votes.{name}")
    elif "votes_a" in data:
        columns = (("first", "votes_a"), ("second", "votes_b"), *(("equal", name) for name in _EQUAL))
        sides = Counter()
        for side, name in columns:
            sides[side] += _count(data.get(name, 0), name)
    elif data.get("label") is not None:
        return None
    else:
        name = "votes" if "votes" in data and data["votes"] is not None else "label"
        raise BadRow("votes_valid", f"`{name}` is {kind(data.get(name))} without votes")
    if not sum(sides.values()):
        raise BadRow("votes_valid", "no votes")
    return Ballot(sides["first"], sides["second"], sides["equal"])


def _counted_ballot(data: Mapping[str, object], name: str) -> Ballot | None:
    """Return the votes of a row with `chosen`: `votes_chosen` of `votes` (both counts)."""
    if name == "votes" or (data.get("votes_chosen") is None and data.get("votes") is None):
        return None
    chosen, votes = _count(data.get("votes_chosen"), "votes_chosen"), _count(data.get("votes"), "votes")
    if votes < 1 or not votes / 2 <= chosen <= votes:
        raise BadRow("votes_valid", f"the chosen response has {chosen} of {votes} votes, expected half to all of them")
    return Ballot(chosen, votes - chosen, 0)


def _count(value: Any, name: str) -> int:
    text = str(value).strip().removesuffix(".0")
    if isinstance(value, bool) or not re.fullmatch("0*[0-9]{1,7}", text) or int(text) > _MOST_VOTES:
        raise BadRow("votes_valid", f"`{name}` is {shown(value)}, expected a count of votes, at most {_MOST_VOTES}")
    return int(text)


def _margin(data: Mapping[str, object]) -> float | None:
    if not _unscored(data.get("margin")):
        margin, what = number_field(data["margin"], "margin"), "`margin`"
    elif (names := _side_scores(data)) is None:
        return None
    else:
        chosen, rejected = (number_field(data[name], name) for name in names)
        margin, what = chosen - rejected, " - ".join(names)
    if margin < 0:
        raise BadRow("votes_valid", f"{what} is {margin:g}: by it, the rejected response is the better one")
    return margin


def _side_scores(data: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the names of the two responses' scores. Under names other than `score_chosen`, a value that is no number
    is no score."""
    for names in SIDE_SCORES:
        both = [data.get(name) for name in names]
        if not any(map(_unscored, both)) and (names == SIDE_SCORES[0] or all(map(_is_number, both))):
            return names
    return None


def _unscored(value: object) -> bool:
    return is_empty(value) or str(value).strip().lower() in ("nan", "none", "n/a")


def tied_by(data: Mapping[str, object]) -> str | None:
    """Return the field by which a row with `chosen` and `rejected` says that neither response is better."""
    return next((name for name in _OUTCOMES if name in data and is_tie(list_in_cell(data[name]))), None)


def number_field(value: Any, name: str) -> float:
    """Read a number of a row; `name` is the field's, for messages."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # OverflowError: an integer of over 308 digits
        number = float("nan")
    if isinstance(value, bool) or not abs(number) <= _LARGEST:
        raise BadRow("fields_present", f"`{name}` is {shown(value)}, expected a number from -1e9 to 1e9")
    return number


def text_field(data: Mapping[str, object], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise BadRow("fields_present", f"`{name}` is {kind(value)}, expected text")
    return value


def agreed(prompt: list[Message], other: list[Message]) -> list[Message]:
    """Return the prompt of two responses. Raises BadRow if they answer prompts that look different."""
    if prompt != other and prompt_key(prompt) != prompt_key(other):
        raise BadRow("prompts_agree", "prompts differ")
    return prompt


_PARSERS: dict[str, Callable[[Mapping[str, object]], Parsed]] = {
    "transcripts": _transcripts, "strings": _strings, "conversational": _conversational, "votes": _votes,
}  # fmt: skip
