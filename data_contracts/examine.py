"""Read and compare a run's data, step by step, before any row is written: read, compare texts, select.

Each step returns frozen values. The rows themselves are in ledgers on disk, which record what each step measures.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.base.errors import CheckFailed, UserError
from components.data.inputs import (
    DECONTAMINATE,
    KINDS,
    REFERENCE,
    SUITE,
    VOTES,
    kind_of,
    label_of,
    of_kind,
    refuse_unknown_sources,
)
from components.data.rows import CanonicalRow, RawRow, Row
from components.data.splits import SPLITS, prompt_key
from components.data.support_desk.desk import generate
from components.human_eval.batch.halves import HELD_OUT, PREFERENCES
from components.models.tokenizers import Demonstration, TrainingTexts, load_tokenizer, train_tokenizer
from components.stats.dawid_skene import DawidSkene
from components.stats.intervals import Interval, clustered_proportion
from data_contracts.config import ValidateJob
from data_contracts.expectations import suites
from data_contracts.expectations.own import UserSuite, load_suite
from data_contracts.expectations.row_expectations import row_checks
from data_contracts.findings import drift
from data_contracts.findings.agreement import Agreement, AnnotatorRow, agreement_of, annotator_table
from data_contracts.findings.comparisons import (
    Forbidden,
    forbidden_prompts,
    held_out_prompts,
    mark_forbidden,
    one_a_prompt,
    prompt_texts,
)
from data_contracts.findings.noise import LabelNoise, label_noise
from data_contracts.findings.row_judging import RowJudge, refuse_unknown
from data_contracts.findings.texts import SAMPLE, RowTexts, TextReading, read_texts
from data_contracts.findings.whole import (
    TRAIN,
    competence,
    mark_duplicates,
    mark_near_duplicates,
    place_rated,
    relabelled,
    selected_by_rank,
)
from data_contracts.rows.gather import DETECT_ON, FileRows, RowSource, judged_rows, not_one_valid
from data_contracts.rows.ledger import Ledger, combined, first_of_each
from data_contracts.rows.measuring import FACTS, longer_wins
from data_contracts.rows.processes import count_of
from data_contracts.rows.working import begin, read_sources

logger = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
"""Is called from time to time with the number of rows read, and with the number at the end, None while files
are read. Rows whose texts are read count a second time."""
ALL_SPLITS = range(len(SPLITS))


@dataclass(frozen=True)
class ReadRows:
    """All rows of one kind of data, read and compared with each other."""

    sources: Sequence[RowSource]
    """The files that hold the rows."""
    ledger: Ledger
    judge: RowJudge
    """Judges these rows by the contract."""
    competence: DawidSkene | None
    """The fitted annotator model; None unless `data.labels` takes labels from it."""

    def nothing_valid(self) -> UserError | None:
        """Return an error if every row is quarantined; otherwise None."""
        if self.ledger.good().any():
            return None
        files = self.sources[0]._replace(title=_title(self.sources))
        return not_one_valid(files, self.ledger.count(), self.ledger.reasons(), self.ledger.named)


@dataclass(frozen=True)
class Examined(ReadRows):
    """All rows of one kind of data, after all comparisons."""

    texts: RowTexts
    selected: NDArray[np.bool_]
    """Which rows are neither quarantined nor dropped by a `max_pairs` (n,)."""

    @property
    def facts(self) -> Any:
        """Return the facts of the selected rows."""
        return self.ledger.facts[self.selected]

    def token_lengths(self, split: int, others: bool = False) -> NDArray[np.int32]:
        """Return the token counts of the longer response of one selected row of each prompt in a split (`others`: in
        all other splits)."""
        index = self.texts.index
        here = self.selected[index] & ((self.ledger.facts["split"][index] == split) != others)
        here = first_of_each(here, self.ledger.facts["prompt"][index])
        return self.texts.tokens[here, 1:].max(1, initial=-1)


@dataclass(frozen=True)
class Examination:
    """A job's data with all findings about its rows. What holds of the data as a whole is computed from them."""

    job: ValidateJob
    inputs: Mapping[str, Path]
    kinds: Mapping[str, Examined]
    """The rows of each kind of data."""
    invalid: Mapping[str, str]
    """Maps each kind without a valid row to the reason; empty in a run, which stops there."""
    tokenizer: Any
    context: Any
    """Great Expectations' context, which holds all suites and results."""

    @property
    def rows_read(self) -> int:
        """Return the number of rows read; rows whose texts are read count a second time."""
        return sum(len(rows.ledger.facts) + int(rows.texts.wanted.sum()) for rows in self.kinds.values())

    @property
    def pairs(self) -> Examined:
        """Return the preference pairs."""
        return self.kinds["preferences"]

    @property
    def demonstrations(self) -> Examined:
        """Return the rows for SFT: demonstrations, but undesirable ones, if there are any, else the chosen responses of
        the pairs."""
        rows = self.kinds.get("demonstrations") or self.pairs
        return replace(rows, selected=rows.selected & (rows.ledger.facts["desirable"] != 0))

    @cached_property
    def single_labels(self) -> Examined | None:
        """Return the demonstrations with a single label, desirable and undesirable ones, that no other label
        contradicts, and whose response is in no pair; None without any."""
        if (rows := self.kinds.get("demonstrations")) is None:
            return None
        facts = rows.ledger.facts
        labelled = rows.selected & ~np.isnan(facts["desirable"]) & rows.ledger.passes("consistent")
        if pairs := self.kinds.get("preferences"):
            of_pairs = [combined(pairs.facts["prompt"], pairs.facts[side]) for side in ("chosen", "rejected")]
            response = np.where(facts["desirable"] == 0, facts["rejected"], facts["chosen"])
            labelled &= ~np.isin(combined(facts["prompt"], response), of_pairs)
        return replace(rows, selected=labelled) if labelled.any() else None

    @cached_property
    def label_counts(self) -> dict[str, int]:
        """Return the numbers of kept single labels, `desirable` and `undesirable`; empty without any."""
        labels = [] if self.single_labels is None else self.single_labels.facts["desirable"].tolist()
        return {"desirable": labels.count(1), "undesirable": labels.count(0)} if labels else {}

    @property
    def prompts(self) -> Examined:
        """Return the rows with the prompts for PPO and evaluation: `data.prompts` if there are any, else the pairs."""
        return self.kinds.get("prompts") or self.pairs

    @cached_property
    def agreement(self) -> Agreement:
        """Return the annotators' agreement over all readable rows."""
        return agreement_of(self.pairs.ledger.facts) if "preferences" in self.kinds else Agreement()

    @cached_property
    def annotators(self) -> list[AnnotatorRow]:
        """Return the rows of `annotator_table`; empty if no vote names its annotator."""
        named = "preferences" in self.kinds and self.pairs.ledger.annotators
        return annotator_table(self.pairs.ledger, self.pairs.competence) if named else []

    @cached_property
    def label_noise(self) -> LabelNoise | float | None:
        """Return the estimated share of flipped labels (`noise.label_noise`), from a sample of the pairs of all
        splits."""
        if "preferences" not in self.kinds:
            return None
        rows = [row for split in ALL_SPLITS for row in self.pairs.texts.samples.get(split, [])]
        chosen, rejected = ([row[side] for row in rows] for side in ("chosen", "rejected"))
        return label_noise(chosen, rejected, self.job.seed, [prompt_key(row["prompt"]) for row in rows])

    @property
    def language_drift(self) -> drift.DriftMeasure | None:
        """Return how far the languages of training and held-out pairs differ, in samples of both."""
        train, held_out = (
            [f"{row['chosen']} {row['rejected']}" for row in one_a_prompt(sample(self.job, self.pairs.texts, splits))]
            for splits in ((TRAIN,), [split for split in ALL_SPLITS if split != TRAIN])
        )
        return drift.language_drift(train, held_out, self.job.seed)

    @cached_property
    def languages(self) -> dict[str, float]:
        """Return the share of each language in a sample of the rows, the most frequent first."""
        kind, examined = next(iter(self.kinds.items()))
        rows = sample(self.job, examined.texts)[: drift.LANGUAGE_SAMPLE]
        if kind == "prompts":
            return drift.language_shares(prompt_texts(rows))
        return drift.language_shares([row.get("response") or f"{row['chosen']} {row['rejected']}" for row in rows])

    @cached_property
    def longer_wins(self) -> Interval | None:
        """Return the share of selected pairs in which the longer response (in words) wins, clustered by prompt."""
        facts = self.pairs.facts if "preferences" in self.kinds else np.empty(0, FACTS)
        wins = longer_wins(facts["words"])
        counted = ~np.isnan(wins)
        return clustered_proportion(wins[counted], facts["prompt"][counted]) if counted.any() else None

    @cached_property
    def unread(self) -> dict[str, dict[str, int]]:
        """Return for each kind of data the fields that are not read, with the number of rows in which they hold
        something, the most frequent first."""
        counts = {
            kind: sum((source.unread or Counter() for source in examined.sources), Counter[str]())
            for kind, examined in self.kinds.items()
        }
        return {kind: dict(sorted(c.items(), key=lambda item: (-item[1], item[0]))) for kind, c in counts.items() if c}

    @cached_property
    def splits_of_prompts(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the distinct prompts (hashes, sorted) of the selected rows, and the number of splits that each occurs
        in."""
        prompts, splits = (
            np.concatenate([examined.facts[name] for examined in self.kinds.values()]) for name in ("prompt", "split")
        )
        distinct, place = np.unique(prompts, return_inverse=True)
        occurs = np.zeros((len(distinct), len(SPLITS)), bool)
        occurs[place, splits] = True
        return distinct, occurs.sum(1)


Sources = Callable[[ValidateJob, Mapping[str, Path], bool], dict[str, list[RowSource]]]


def sources_of(job: ValidateJob, inputs: Mapping[str, Path], alone: bool) -> dict[str, list[RowSource]]:
    """Return the sources of each kind of data: the files, or (unless `alone`) the built-in task's generator."""
    data = job.data
    sources = {kind: files for kind in KINDS if (files := source_files(job, inputs, kind))}
    for kind in KINDS:
        if getattr(data, kind) is not None and kind not in sources:
            what = f"data.{kind} is {getattr(data, kind)!r}"
            raise CheckFailed(f"{what}, but the stage was given no input of that name")
    if "preferences" not in sources and not alone:
        demonstrations, pairs = generate(job.seed, data.generator)
        made = {"demonstrations": [generated("demonstrations", demonstrations)]}
        sources = made | {"preferences": [generated("preferences", pairs)]} | sources
    # Votes on earlier policies' responses are preferences whose rows name their batch (`place_rated`).
    sources["preferences"] = sources.get("preferences", []) + [
        RowSource("preferences", str(path), FileRows(path), {}, "data.columns", label, data.decision, needs_one=False)
        for name, folder in of_kind(inputs, VOTES).items()
        for file, what in ((PREFERENCES, "votes"), (HELD_OUT, "judged"))
        if (path := folder / file).stat().st_size
        for label in [f"{what}-{name.partition('/')[2]}"]
    ]
    return {kind: sources[kind] for kind in KINDS if sources.get(kind)}


def source_files(job: ValidateJob, inputs: Mapping[str, Path], kind: str) -> list[RowSource]:
    """Return the files of a kind of data as sources."""
    files = of_kind(inputs, kind)
    return [RowSource.named(kind, path, job.data, label_of(name)) for name, path in files.items()]


def generated(kind: str, rows: Iterable[Mapping[str, object]]) -> RowSource:
    """Return rows of the built-in task as a source of a kind of data."""
    raws = [RawRow(number, row) for number, row in enumerate(rows, 1)]
    return RowSource(kind, "the support desk's generator", raws, {}, "")


class _Plan(NamedTuple):
    """What every step needs."""

    job: ValidateJob
    inputs: Mapping[str, Path]
    shards: Path
    suite: UserSuite
    """The user's own expectations; empty without a suite."""
    context: Any
    processes: int
    progress: Progress


def examine(
    job: ValidateJob, inputs: Mapping[str, Path], folder: Path, progress: Progress, *,
    alone: bool = False, tokenized: bool = True, sources: Sources = sources_of,
) -> Examination:  # fmt: skip
    """Read all data of `job`, judge its rows, and select those that are used.

    Args:
        inputs: `preferences` (each of several `preferences/LABEL`), `demonstrations`, `prompts` (files or saved
            folders), `suite`, `decontaminate` (likewise), `deployment_prompts`, `reference` (an earlier artifact of
            `validate`) and `base` (a pretrained model's folder), where the job names them.
        folder: for data that is too large for memory. Do not remove it while the result is in use. Shards that an
            interrupted examination of the same job and files left there are reused.
        alone: judge only the sources in `inputs`, and report a kind without a valid row; by default missing sources are
            generated.
        tokenized: apply the checks that need a tokenizer.
        sources: returns the sources of each kind of data.

    Raises:
        UserError: a source can't be read, or has no valid row, or `data.sources` names what is no source.
    """
    refuse_unknown_sources(job.data.sources, inputs)
    shards, processes = folder / "shards", count_of(job.data.processes)
    begin(shards, job, inputs)
    suite = load_suite(inputs[SUITE]) if SUITE in inputs else UserSuite(Path())
    plan = _Plan(job, inputs, shards, suite, suites.context(), processes, progress)
    forbidden = _forbidden(plan)
    read = _read_all(plan, sources(job, inputs, alone), alone)
    place_rated([rows.ledger for rows in read.values()])
    valid = all(rows.ledger.good().any() for rows in read.values())
    tokenizer = _tokenizer(job, inputs, read) if tokenized and valid else None
    texts = _read_all_texts(plan, read, tokenizer)
    kinds = {kind: _selected(plan, kind, rows, texts[kind], forbidden) for kind, rows in read.items()}
    errors = {kind: error for kind, examined in kinds.items() if (error := examined.nothing_valid())}
    for error in errors.values() if not alone else ():
        raise error
    invalid = {kind: str(error) for kind, error in errors.items()}
    return Examination(job, inputs, kinds, invalid, tokenizer, plan.context)


def _forbidden(plan: _Plan) -> list[Forbidden]:
    forbidden, data = [], plan.job.data
    if benchmarks := of_kind(plan.inputs, DECONTAMINATE):
        forbidden.append(forbidden_prompts(benchmarks, data, plan.shards))
    if REFERENCE in plan.inputs:
        forbidden.append(held_out_prompts(plan.inputs[REFERENCE], data, plan.shards))
    return forbidden


def _read_all(plan: _Plan, sources: Mapping[str, Sequence[RowSource]], alone: bool) -> dict[str, ReadRows]:
    """Read the rows of each kind of data and judge them by themselves and against each other."""
    read: dict[str, ReadRows] = {}
    first = next(iter(sources), "")
    for kind, files in sources.items():
        before = sum(len(rows.ledger.facts) for rows in read.values())
        read[kind] = _read(plan, kind, files, kind == first, _counting_on(plan.progress, before))
        if not alone and (error := read[kind].nothing_valid()):
            raise error
    return read


def _read(
    plan: _Plan, kind: str, sources: Sequence[RowSource], is_first: bool, progress: Callable[[int], None]
) -> ReadRows:
    data = plan.job.data
    ranked = bool(data.max_pairs or any(options.max_pairs for options in data.sources.values()))
    ledger = Ledger(plan.shards / kind, data.split, plan.job.seed, ranked)
    judge = _judge(plan, kind, ledger, is_first)
    ledger.extra = tuple(judge.further())
    if plan.suite.rows or plan.suite.whole:
        refuse_unknown(judge, plan.suite.path, _columns(sources))
    annotators = None
    if kind == "preferences" and data.labels == "dawid_skene":
        named = [source._replace(extra=ledger.extra) for source in sources]
        annotators = competence(_rows(named, data.max_characters), _title(sources))
        again = _rows([source._replace(unread=None) for source in named], data.max_characters)
        ledger.fill(relabelled(again, annotators.posterior), progress)
    else:
        read_sources(ledger, sources, data.max_characters, plan.processes, progress)
    judge.judge("read")
    if kind == "demonstrations" and np.isnan(ledger.facts["desirable"][ledger.facts["made"]]).all():
        judge.checks = [check for check in judge.checks if check.of_user or check.name != "consistent"]
    ledger.facts["half"][ledger.out & (ledger.facts["half"] == 1)] = -1  # a quarantined row moves no prompt
    for source in sources:
        rows = ledger.of(source.file)
        if source.needs_one and len(sources) > 1 and ledger.out[rows].all():
            raise not_one_valid(source, ledger.count(rows), ledger.reasons(source.file), ledger.named)
    mark_duplicates(ledger)
    judge.judge("compared")
    return ReadRows(sources, ledger, judge, annotators)


def _judge(plan: _Plan, kind: str, ledger: Ledger, is_first: bool) -> RowJudge:
    """Return the judge of a kind's rows: the built-in checks that the user's suite leaves, and those of the suite.

    An expectation that names no kind is about the first one."""
    built_in = plan.suite.over(row_checks(plan.job.data, plan.job.generation, kind, set(map(kind_of, plan.inputs))))
    rows, whole = (
        [check for check in checks if check.source == kind or (is_first and not check.source)]
        for checks in (plan.suite.rows, plan.suite.whole)
    )
    return RowJudge(plan.context, kind, ledger, [*built_in, *rows], whole)


def _counting_on(progress: Progress, before: int, total: int | None = None) -> Callable[[int], None]:
    """Return a function that reports a number of rows plus `before`."""
    return lambda rows: progress(before + rows, total)


def _columns(sources: Sequence[RowSource]) -> list[str]:
    first = (row for source in sources for row in islice(source.rows, DETECT_ON))
    return list(dict.fromkeys(str(column) for row in first for column in row.data))


def _rows(sources: Iterable[RowSource], max_characters: int) -> Iterator[Row]:
    return chain.from_iterable(judged_rows(source, max_characters) for source in sources)


def _title(sources: Iterable[RowSource]) -> str:
    return " and ".join(source.title for source in sources)


def _tokenizer(job: ValidateJob, inputs: Mapping[str, Path], read: Mapping[str, ReadRows]) -> Any:
    """Return the pretrained model's tokenizer, or train one as SFT does, on the training rows that are good so far.

    Rows that `max_pairs` or the text checks drop later are included.
    """
    if "base" in inputs:
        return load_tokenizer(inputs["base"], template=job.sft, stop=job.generation.stop)
    taught = read.get("demonstrations") or read.get("preferences")
    if taught is None:
        return None
    ledger, facts = taught.ledger, taught.ledger.facts
    train = ledger.good() & (facts["split"] == TRAIN) & (facts["desirable"] != 0)
    once = first_of_each(train, combined(facts["prompt"], facts["chosen"]))
    most = job.sft.max_demonstrations

    def demonstrations() -> Iterator[Demonstration]:
        for _, row in islice(ledger.items(once, mixed=True), most):
            yield {"prompt": row["prompt"], "response": row["response" if "response" in row else "chosen"]}

    texts = TrainingTexts(demonstrations, min(int(once.sum()), most or len(once)))
    return train_tokenizer(texts, job.sft.vocabulary, job.generation.stop)


def _read_all_texts(plan: _Plan, read: Mapping[str, ReadRows], tokenizer: Any) -> dict[str, RowTexts]:
    """Read the texts of all rows that are not quarantined; without a tokenizer, leave out the checks that need one."""
    rows_read = sum(len(rows.ledger.facts) for rows in read.values())
    total = rows_read + sum(int(rows.ledger.good().sum()) for rows in read.values())
    texts: dict[str, RowTexts] = {}
    for kind, rows in read.items():
        if tokenizer is None:
            rows.judge.leave_out_tokens()
        before = rows_read + sum(int(other.wanted.sum()) for other in texts.values())
        how = TextReading(tokenizer, plan.job.generation, plan.job.data.near_duplicate, rows.judge.asks("language"))
        texts[kind] = read_texts(rows.ledger, how, _counting_on(plan.progress, before, total), plan.processes)
    return texts


def sample(job: ValidateJob, texts: RowTexts, splits: Iterable[int] = ALL_SPLITS) -> list[CanonicalRow]:
    """Return a seeded sample of up to `SAMPLE` rows of some splits."""
    rows = [item for split in splits for item in texts.samples.get(split, [])]
    return Random(f"rows {job.seed}").sample(rows, min(SAMPLE, len(rows)))


def _selected(plan: _Plan, kind: str, rows: ReadRows, texts: RowTexts, forbidden: Sequence[Forbidden]) -> Examined:
    """Compare the texts of a kind's rows, judge them, and select the rows that are used."""
    data = plan.job.data
    mark_near_duplicates(rows.ledger, texts, data.near_duplicate)
    for prompts in forbidden:
        mark_forbidden(rows.ledger, texts, prompts, data.near_duplicate)
    rows.judge.judge("texts")
    most, of_files = None, {}
    if kind == "preferences":
        most = data.max_pairs
        of_files = {name: options.max_pairs for name, options in data.sources.items() if options.max_pairs is not None}
    return Examined(**vars(rows), texts=texts, selected=selected_by_rank(rows.ledger, most, of_files))
