"""`tether data label`: let a model vote on the pairs of a file, and keep each answer as it arrives."""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.jsonl import write_json, write_rows
from components.base.paths import user_text
from components.base.settings import keyed_values
from components.base.text import counted
from components.data.config import DataConfig
from components.data.hub import resolve_source
from components.data.rows import Ballot, RawRow, Row, blank
from components.gates.gate_text import number
from components.labelling.config import EndpointConfig
from components.labelling.feedback.answers import StoredAnswers
from components.labelling.feedback.feedback_votes import PairToJudge, VoteRule, ask, vote_rows
from components.labelling.feedback.judges import EndpointJudge, FolderJudge, Judge
from components.labelling.feedback.rubric import FORM, RUBRIC
from components.models.runtime import Runtime
from components.store.store import ArtifactStore
from data_contracts.rows.gather import RowSource, judged_rows, renamed
from flows.config.config_errors import validated
from flows.config.profiles import Override
from flows.config.run_config import load_config
from flows.data.candidates import find_models
from flows.data.data_check import DEFAULTS

VOTES, REPORT, QUARANTINE = "votes.jsonl", "report.json", "quarantine.jsonl"
_STAY = ("decided", "votes_once")
"""Checks that a pair may fail and still be judged."""


@dataclasses.dataclass(frozen=True)
class LabelOptions:
    """How a judge is asked, and what is written."""

    model: str | None = None
    """The model's name at an endpoint."""
    rubric: Path | None = None
    """A rubric file; None for the built-in rubric."""
    rule: VoteRule = "mean"
    max_pairs: int | None = None
    """The largest number of pairs: a seeded choice that does not depend on the order of the file."""
    seed: int = 0
    alone: bool = False
    """Write only the judge's votes, not those that the pairs already have."""
    endpoint: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further options of `EndpointConfig`."""


class ReadPairs(NamedTuple):
    """The pairs of a file."""

    pairs: list[PairToJudge]
    """Each pair once, in the order of the file."""
    repeated: int
    """Number of rows whose pair is already in an earlier row."""
    quarantined: list[Row]


def label_file(
    home: Path,
    file: str,
    judge: str,
    out: Path,
    overrides: Sequence[Override],
    options: LabelOptions,
    report: Callable[[int, int], None],
    on_wait: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Ask `judge` about the pairs of `file`, write votes and report into `out`, and return the report.

    If `out` holds answers of the same judge and rubric, they are reused and only the rest is asked. Votes and report
    are written anew, of the pairs of this call alone. The returned report also has `other_pairs`, the number of pairs
    that earlier calls asked about and this one did not.

    Args:
        judge: the folder of a language model, a run's model (RUN:sft, RUN:ppo), or the URL of an OpenAI-compatible
            endpoint.
        report: called with the number of pairs done and their total.
        on_wait: called if another process is already writing to `out`.

    Raises:
        UserError: the file, the judge or the rubric can't be read, or `out` has other content.
        Unreachable: the endpoint does not answer.
    """
    path = options.rubric
    rubric = RUBRIC if path is None else user_text(str(path), "--rubric").replace("\r\n", "\n")
    data = load_config(DEFAULTS, overrides).data
    read = read_pairs(resolve_source(file, data.hub, home / "datasets", "FILE"), data)
    chosen = _chosen(read.pairs, options)
    name, described, open_judge = _judge(judge, home, options)
    about = {**described, "name": name, "rubric": rubric, "form": hashlib.sha256(FORM.encode()).hexdigest()}
    store = ArtifactStore(home)
    with store.lock(digest_json(["label", str(out.absolute())]), on_wait) as lease:

        def checked(done: int, total: int) -> None:
            lease.check()
            report(done, total)

        with StoredAnswers(out, about) as earlier:
            answers = ask(chosen, rubric, earlier, open_judge, checked)
            others = earlier.others(answers)
        from components.labelling.feedback.feedback_quality import judge_report  # brings scipy

        places = {pair.id: place for place, pair in enumerate(read.pairs)}
        in_order = sorted(chosen, key=lambda pair: places[pair.id])
        summary = {
            "judge": name,
            "rubric_sha256": hashlib.sha256(rubric.encode()).hexdigest(),
            "rule": options.rule,
            "repeated": read.repeated,
            "quarantined": len(read.quarantined),
            **judge_report(in_order, answers, options.rule),
        }
        write_rows(out / VOTES, vote_rows(in_order, answers, name, options.rule, options.alone))
        bad = ({"row": row.number, "reasons": [p.text for p in row.problems]} for row in read.quarantined)
        write_rows(out / QUARANTINE, bad)
        write_json(out / REPORT, summary)
    return {**summary, "other_pairs": others}


def read_pairs(path: Path, data: DataConfig) -> ReadPairs:
    """Return the pairs of a preference file in any format, labelled or not, such as those of `tether data candidates`.

    Raises:
        UserError: the file can't be read, or has no pair.
    """
    source = RowSource.named("preferences", path, data)._replace(reward_columns=())
    unlabelled: set[int] = set()
    rows = judged_rows(source._replace(rows=_with_labels(renamed(source), unlabelled), columns={}), data.max_characters)
    pairs, repeated, quarantined = dict[str, PairToJudge](), 0, list[Row]()
    for row in rows:
        if row.item is None or any(problem.check not in _STAY for problem in row.problems):
            quarantined.append(row)
            continue
        pair = _pair(row, row.number in unlabelled)
        repeated += pair.id in pairs
        pairs.setdefault(pair.id, pair)
    if not pairs:
        why = f" Row {quarantined[0].number}: {quarantined[0].problems[0].text}." if quarantined else ""
        raise UserError(f"{path} has no pair to judge.{why} Give rows with `prompt`, `a` and `b`.")
    return ReadPairs(list(pairs.values()), repeated, quarantined)


def _with_labels(rows: Iterable[RawRow], unlabelled: set[int]) -> Iterator[RawRow]:
    """Yield `rows`, with each unlabelled pair marked as a tie so that it can be read; its number goes to
    `unlabelled`."""
    for raw in rows:
        data = raw.data
        if raw.problem is None and {"prompt", "a", "b"} <= data.keys() and not {"votes_a", "annotator"} & data.keys():
            votes, label = data.get("votes"), data.get("label")
            if not votes and (label is None or blank(str(label))):
                unlabelled.add(raw.number)
                raw = raw._replace(data={n: v for n, v in data.items() if n != "votes"} | {"label": "tie"})
        yield raw


def _pair(row: Row, unlabelled: bool) -> PairToJudge:
    item = row.item
    assert item is not None
    swapped = row.first_wins is False
    a, b = (item["rejected"], item["chosen"]) if swapped else (item["chosen"], item["rejected"])
    votes: tuple[tuple[str | None, int], ...] = ()
    if not unlabelled:
        counted = row.ballot or Ballot(int(not swapped), int(swapped), 0)
        if row.ballot is None and any(problem.check == "decided" for problem in row.problems):
            counted = Ballot(0, 0, 1)
        votes = row.cast or tuple((None, side) for side, n in enumerate(counted) for _ in range(n))
    fields = {name: value for name in ("category", "source") if (value := item.get(name)) and value != row.source}
    return PairToJudge(row.number, item["prompt"], a, b, votes, fields)


def _chosen(pairs: Sequence[PairToJudge], options: LabelOptions) -> list[PairToJudge]:
    """Return the pairs to ask about, in the order of asking. With the same seed a larger choice starts with a smaller
    one, so a continued run reuses its answers."""
    if options.max_pairs is None:
        return list(pairs)
    drawn = sorted(pairs, key=lambda pair: hashlib.sha256(f"label {options.seed} {pair.id}".encode()).digest())
    return drawn[: options.max_pairs]


def _judge(judge: str, home: Path, options: LabelOptions) -> tuple[str, dict[str, Any], Callable[[], Judge]]:
    """Return a judge's name, its description, and how to open it."""
    if re.match(r"https?://", judge):
        if options.model is None:
            raise UserError(f"--judge {judge}: name the endpoint's model with --model NAME.")
        values = {"url": judge, "model": options.model, **options.endpoint}
        config = validated(EndpointConfig, values, "tether data label")
        return config.model, {"endpoint": keyed_values(config)}, partial(EndpointJudge, config)
    if options.model is not None or options.endpoint:
        raise UserError(f"--judge {judge}: --model and --max-tokens need an endpoint's URL, and this is not a URL.")
    (model,) = find_models([judge], home, "--judge")
    runtime = Runtime().resolve()
    described = {"digest": model.digest, "runtime": runtime.model_dump(mode="json")}
    return Path(judge).name or judge, described, partial(FolderJudge, model.folder, runtime)


def report_text(report: dict[str, Any]) -> str:
    """Return the report on a judge as text."""
    lines = [f"{report['judge']}: {counted(report['pairs'], 'pair')}, {counted(report['prompts'], 'prompt')}."]
    if report["repeated"]:
        lines.append(f"Left out as repeated pairs: {counted(report['repeated'], 'row')}.")
    if report["unreadable"]:
        lines.append(
            f"{counted(report['unreadable'], 'pair has', 'pairs have')} no vote, because an answer is missing or names "
            "neither response."
        )
    if "first" in report:
        lines += [
            f"Votes: {report['votes']['a']} a, {report['votes']['b']} b, {counted(report['votes']['tie'], 'tie')}.",
            f"The judge prefers the response shown first: {_ranged(report, 'first')} (impartial: 0.5).",
            f"Both orders give the same winner: {_ranged(report, 'consistent')}.",
        ]
    if "longer" in report:
        lines.append(f"Votes for the longer response: {_ranged(report, 'longer')}.")
    if "agreement" in report:
        lines += [
            f"Agreement with people on {counted(report['decided_by_people'], 'pair')}: "
            f"{_ranged(report, 'agreement')}, over {report['interval_over']}.",
            f"Always choosing the longer response would agree: {_ranged(report, 'longer_agreement')}.",
        ]
    return "\n".join([*lines, "Intervals: 95 %, clustered by prompt."] if "first" in report else lines)


def _ranged(report: dict[str, Any], name: str) -> str:
    return f"{number(report[name])} ({number(report[f'{name}_low'])} to {number(report[f'{name}_high'])})"
