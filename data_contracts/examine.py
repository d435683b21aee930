"""Read and judge a run's data, before any row is kept or written."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from components.base.errors import CheckFailed
from components.data.inputs import (
    DECONTAMINATE,
    DEPLOYMENT,
    KINDS,
    REFERENCE,
    SUITE,
    VOTES,
    kind_of,
    label_of,
    of_kind,
    refuse_unknown_sources,
)
from components.data.readers import read_source
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
from data_contracts.findings.agreement import (
    Agreement,
    AgreementReport,
    AnnotatorRow,
    PairwiseRow,
    agreement_of,
    annotator_table,
)
from data_contracts.findings.beside import (
    Forbidden,
    compared_pairs,
    compared_prompts,
    forbidden_prompts,
    held_out_prompts,
    mark_forbidden,
    one_a_prompt,
    prompt_texts,
    sampled_pairs,
    sampled_prompts,
)
from data_contracts.findings.noise import LabelNoise, label_noise
from data_contracts.findings.row_judging import RowJudge, refuse_unknown
from data_contracts.findings.strengths import ModelRow
from data_contracts.findings.texts import SAMPLE, RowTexts, TextReading, read_texts
from data_contracts.findings.whole import (
    TEST,
    TRAIN,
    chosen_by_rank,
    competence,
    mark_duplicates,
    mark_near_duplicates,
    near_training,
    place_judged,
    relabelled,
)
from data_contracts.rows import frames
from data_contracts.rows.gather import DETECT_ON, RowSource, bytes_of, judged_rows, not_one_valid
from data_contracts.rows.ledger import Ledger, combined, first_of_each
from data_contracts.rows.measuring import FACTS
from data_contracts.rows.processes import ALONE, Beside, count_of, prepare
from data_contracts.rows.schemas import SourceReading
from data_contracts.rows.working import begin, read_sources

logger = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]
"""Is called from time to time with the number of rows read, and with the number at the end, None while files
are read. Rows whose texts are read count a second time."""
SEVERAL_SHARDS = 16 * 2**20
"""If the input files have more bytes than this, worker processes are started early, because they will probably be
needed."""


class LabelNoiseReport(TypedDict):
    """An estimate, from the pairs, of the share of flipped labels."""

    share: float | None
    """None if the model is right too rarely for an estimate."""
    interval: list[float] | None
    accuracy: float
    """Share of pairs on which a cross-validated model of words and lengths agrees with the label."""


class KeptOut(TypedDict):
    """A quarantined row."""

    file: str
    """The kind of data, or the label of the file if there are several."""
    row: int
    reasons: list[str]


class FileReport(AgreementReport):
    """What `tether data check --json` prints."""

    rows: int
    pairs: int
    quarantined: int
    kept_out: NotRequired[list[KeptOut]]
    """The first quarantined rows."""
    checks: Sequence[suites.JudgedCheck]
    longer_wins: float | None
    """Share of decided rows, duplicates included, in which the longer response (in words) wins."""
    passed: bool
    reasons: NotRequired[list[str]]
    """Why the file did not pass, if no check explains it."""
    unjudged: NotRequired[list[str]]
    """Names of a user's expectations that judged no value: they need a tokenizer, or their column has no value."""
    read: NotRequired[list[SourceReading]]
    """How each file was read."""
    unread: NotRequired[dict[str, dict[str, int]]]
    """For each kind of data, the number of rows with something in a field that is not read (`prompt[].name`)."""
    annotators: NotRequired[list[AnnotatorRow]]
    pairwise: NotRequired[list[PairwiseRow]]
    """Agreement of each pair of annotators with enough rows in common, lowest agreement first."""
    models: NotRequired[list[ModelRow]]
    """Models that voted or whose responses were compared, the strongest first."""
    inseparable: NotRequired[str]
    """Why model strengths cannot be estimated."""
    label_noise: NotRequired[LabelNoiseReport]
    languages: NotRequired[dict[str, float]]
    """Share of each language (ISO 639-1) in a sample of the kept responses, or of prompts, the most frequent first."""


@dataclass
class Examined:
    """All rows of one kind of data, after reading."""

    sources: Sequence[RowSource]
    """The files that hold the rows."""
    ledger: Ledger
    judge: RowJudge
    """Judges these rows by the contract."""
    kept: NDArray[np.bool_] = field(init=False)
    """Which rows are neither quarantined nor dropped by a `max_pairs` (n,)."""
    texts: RowTexts = field(init=False)

    @property
    def facts(self) -> Any:
        """Return the facts of the kept rows."""
        return self.ledger.facts[self.kept]

    def token_lengths(self, split: int, others: bool = False) -> NDArray[np.int32]:
        """Return the token counts of the longer response of one kept row of each prompt in a split (`others`: in all
        other splits)."""
        index = self.texts.index
        here = self.kept[index] & ((self.ledger.facts["split"][index] == split) != others)
        here = first_of_each(here, self.ledger.facts["prompt"][index])
        return self.texts.tokens[here, 1:].max(1, initial=-1)


class Examination:
    """A job's sources, read into ledgers, with all findings."""

    def __init__(
        self, job: ValidateJob, inputs: Mapping[str, Path], folder: Path, progress: Progress,
        alone: bool = False, tokenized: bool = True,
    ) -> None:  # fmt: skip
        """Read and judge all data of `job`.

        Args:
            inputs: `preferences` (each of several `preferences/LABEL`), `demonstrations`, `prompts` (files or saved
                folders), `suite`, `decontaminate` (likewise), `deployment_prompts`, `reference` (an earlier artifact of
                `validate`) and `base` (a pretrained model's folder), where the job names them.
            folder: for data that is too large for memory. Do not remove it while this object is in use. Shards that an
                interrupted examination of the same job and files left there are reused.
            alone: judge only the given sources; by default missing sources are generated.
            tokenized: apply the checks that need a tokenizer.

        Raises:
            UserError: a source can't be read, or has no valid row, or `data.sources` names what is no source.
        """
        refuse_unknown_sources(job.data.sources, inputs)
        self.job, self.inputs, self.alone = job, inputs, alone
        self.nothing: dict[str, str] = {}
        """With `alone`: maps the name of a source without a valid row to the reason."""
        self.shards = folder / "shards"
        begin(self.shards, job, inputs)
        self.processes = count_of(job.data.processes)
        if self.processes > 1 and bytes_of(inputs.values()) > SEVERAL_SHARDS:
            prepare()
        self.read = 0
        """Number of rows read so far; rows whose texts are read count a second time."""
        self._progress = progress
        self._total: int | None = None
        self.context = suites.context()
        """Great Expectations' context, which holds all suites and results."""
        self.expected: dict[str, list[suites.Check]] = {}
        """Maps what is judged to its expectations; complete after `judge`."""
        self.suite = load_suite(inputs[SUITE]) if SUITE in inputs else UserSuite(Path())
        """The user's own expectations; empty without a suite."""
        self.forbidden = self._forbidden()
        self.competence: DawidSkene | None = None
        """The fitted annotator model; None unless `data.labels` takes labels from it."""
        found = self._sources()
        self._main = next(iter(found), "")
        self.sources = {name: self._read(name, sources) for name, sources in found.items()}
        place_judged([examined.ledger for examined in self.sources.values()])
        self.pairs = self.sources.get("preferences")
        self.tokenizer = self._tokenizer() if tokenized and not self.nothing else None
        for examined in self.sources.values():
            if self.tokenizer is None:
                examined.judge.leave_out_tokens()
        self._total = self.read + sum(int(examined.ledger.good().sum()) for examined in self.sources.values())
        for name, examined in self.sources.items():
            self._examine_texts(examined)
            self._need_one(name, examined.sources, examined.ledger)
            of_pairs = name == "preferences"
            examined.kept = chosen_by_rank(
                examined.ledger, job.data.max_pairs if of_pairs else None, self._limits if of_pairs else {}
            )

    @property
    def _limits(self) -> dict[str, int]:
        return {name: each.max_pairs for name, each in self.job.data.sources.items() if each.max_pairs is not None}

    def _forbidden(self) -> list[Forbidden]:
        found, data = [], self.job.data
        if benchmarks := of_kind(self.inputs, DECONTAMINATE):
            found.append(forbidden_prompts(benchmarks, data, self.shards))
        if REFERENCE in self.inputs:
            found.append(held_out_prompts(self.inputs[REFERENCE], data, self.shards))
        return found

    def _sources(self) -> dict[str, list[RowSource]]:
        data = self.job.data
        given = {name: found for name in KINDS if (found := self._given(name))}
        for name in KINDS:
            if getattr(data, name) is not None and name not in given:
                what = f"data.{name} is {getattr(data, name)!r}"
                raise CheckFailed(f"{what}, but the stage was given no input of that name")
        if "preferences" not in given and not self.alone:
            taught, labelled = generate(self.job.seed, data.generator)
            made = {"demonstrations": [generated("demonstrations", taught)]}
            given = made | {"preferences": [generated("preferences", labelled)]} | given
        if votes := self._votes():
            given["preferences"] = [*given["preferences"], *votes]
        return {name: given[name] for name in KINDS if name in given}

    def _given(self, name: str) -> list[RowSource]:
        inputs = of_kind(self.inputs, name)
        return [RowSource.named(name, path, self.job.data, label_of(each)) for each, path in inputs.items()]

    def _votes(self) -> list[RowSource]:
        """Return the sources of votes on earlier policies' responses. They are preferences whose rows name their batch
        (`place_judged`)."""
        files = [
            (f"{label}-{name.partition('/')[2]}", path / file)
            for name, path in of_kind(self.inputs, VOTES).items()
            for label, file in (("votes", PREFERENCES), ("judged", HELD_OUT))
        ]
        decision = self.job.data.decision
        return [
            RowSource("preferences", str(path), read_source(path), {}, "data.columns", label, decision, needs_one=False)
            for label, path in files
            if path.stat().st_size
        ]

    def _read(self, name: str, sources: Sequence[RowSource]) -> Examined:
        data = self.job.data
        ledger = Ledger(self.shards / name, data.split, self.job.seed, bool(data.max_pairs or self._limits))
        judge = self._judge_of(name, ledger)
        further = tuple(judge.further())
        if self.suite.rows or self.suite.whole:
            refuse_unknown(judge, self.suite.path, self._columns(name, sources))
        before = self.read
        if name == "preferences" and data.labels == "dawid_skene":
            rows: Iterable[Row] = _judged(_asking(sources, further), data.max_characters)
            self.competence = competence(rows, _shown(sources))
            again = [*(self._given(name) or sources[:1]), *self._votes()]  # each file's rows are read only once
            rows = relabelled(_judged(_asking(again, further), data.max_characters), self.competence.posterior)
            ledger.fill(rows, lambda seen: self._progress(before + seen, None), further)
        else:
            progress = lambda seen: self._progress(before + seen, None)  # noqa: E731
            read_sources(ledger, sources, data.max_characters, self.processes, progress, further)
        self.read += len(ledger.facts)
        judge.judge("read")
        ledger.facts["half"][ledger.out & (ledger.facts["half"] == 1)] = -1  # a quarantined row moves no prompt
        for source in sources:
            of = ledger.of(source.file)
            if source.needs_one and len(sources) > 1 and ledger.out[of].all():
                raise not_one_valid(source, ledger.count(of), ledger.reasons(source.file), ledger.named)
        mark_duplicates(ledger)
        judge.judge("compared")
        self._need_one(name, sources, ledger)
        return Examined(sources, ledger, judge)

    def _judge_of(self, name: str, ledger: Ledger) -> RowJudge:
        beside = {kind_of(given) for given in self.inputs}
        ours = self.suite.over(row_checks(self.job.data, self.job.generation, name, beside))
        rows, whole = (
            [check for check in checks if (check.source or self._main) == name]
            for checks in (self.suite.rows, self.suite.whole)
        )
        return RowJudge(self.context, name, ledger, [*ours, *rows], whole)

    def _columns(self, name: str, sources: Sequence[RowSource]) -> list[str]:
        first = (row for source in self._given(name) or sources for row in islice(source.rows, DETECT_ON))
        return list(dict.fromkeys(str(column) for row in first for column in row.data))

    def _tokenizer(self) -> Any:
        """Return the pretrained model's tokenizer, or train one as SFT does, on the training rows that are good so far.

        Rows that `max_pairs` or the text checks drop later are included.
        """
        if "base" in self.inputs:
            return load_tokenizer(self.inputs["base"], template=self.job.sft, stop=self.job.generation.stop)
        taught = self.sources.get("demonstrations") or self.pairs
        if taught is None:
            return None
        ledger, facts = taught.ledger, taught.ledger.facts
        train = ledger.good() & (facts["split"] == TRAIN)
        once = first_of_each(train, combined(facts["prompt"], facts["chosen"]))
        most = self.job.sft.max_demonstrations

        def taught_rows() -> Iterator[Demonstration]:
            for _, row in islice(ledger.items(once, mixed=True), most):
                yield {"prompt": row["prompt"], "response": row["response" if "response" in row else "chosen"]}

        texts = TrainingTexts(taught_rows, min(int(once.sum()), most or len(once)))
        return train_tokenizer(texts, self.job.sft.vocabulary, self.job.generation.stop)

    def _examine_texts(self, examined: Examined) -> None:
        job, ledger, before = self.job, examined.ledger, self.read
        near = job.data.near_duplicate
        how = TextReading(self.tokenizer, job.generation, near, examined.judge.asks("language"))
        progress = lambda seen: self._progress(before + seen, self._total)  # noqa: E731
        examined.texts = read_texts(ledger, how, progress, self.processes)
        self.read += int(examined.texts.wanted.sum())
        if examined is self.pairs:
            self._begin_beside(examined)
        mark_near_duplicates(ledger, examined.texts, near)
        for forbidden in self.forbidden:
            mark_forbidden(ledger, examined.texts, forbidden, near)
        examined.judge.judge("texts")

    def _begin_beside(self, pairs: Examined) -> None:
        """Begin what depends on the sampled texts alone, while this process continues to judge."""
        rows, splits = pairs.texts.samples, range(len(SPLITS))
        sampled = [item for split in splits for item in rows.get(split, [])]
        sides = [[row[side] for row in sampled] for side in ("chosen", "rejected")]
        prompts = [prompt_key(row["prompt"]) for row in sampled]
        self._label_noise = Beside(self.apart, label_noise, *sides, self.job.seed, prompts)
        said = [self._said(pairs, (TRAIN,)), self._said(pairs, range(TRAIN + 1, len(SPLITS)))]
        self._language_drift = Beside(self.apart, drift.language_drift, *said, self.job.seed)

    def _need_one(self, name: str, sources: Sequence[RowSource], ledger: Ledger) -> None:
        if not ledger.good().any():
            shown = sources[0]._replace(shown=_shown(sources))
            error = not_one_valid(shown, ledger.count(), ledger.reasons(), ledger.named)
            if not self.alone:
                raise error
            self.nothing.setdefault(name, str(error))  # the contract reports it; a run would stop here

    # Results

    @property
    def apart(self) -> bool:
        """Return whether other processes compute some things: there may be several, and the rows are many."""
        return self.processes > 1 and any(len(found.ledger.shards) > ALONE for found in self.sources.values())

    @cached_property
    def taught(self) -> Examined:
        """Return the rows for SFT: demonstrations if given, else the chosen responses of the pairs."""
        return self.sources.get("demonstrations") or self.only_pairs

    @cached_property
    def asked(self) -> Examined:
        """Return the rows with the prompts for PPO and evaluation: `data.prompts` if given, else the pairs."""
        return self.sources.get("prompts") or self.only_pairs

    @property
    def only_pairs(self) -> Examined:
        """Return the preference pairs."""
        assert self.pairs is not None
        return self.pairs

    @cached_property
    def agreement(self) -> Agreement:
        """Return the annotators' agreement over all readable rows."""
        return Agreement(None, None, None, None) if self.pairs is None else agreement_of(self.pairs.ledger.facts)

    @cached_property
    def annotators(self) -> list[AnnotatorRow]:
        """Return the rows of `annotator_table`; empty if no vote names its annotator."""
        named = self.pairs is not None and self.pairs.ledger.annotators
        return annotator_table(self.only_pairs.ledger, self.competence) if named else []

    @cached_property
    def label_noise(self) -> LabelNoise | float | None:
        """Return the estimated share of flipped labels (`noise.label_noise`), from a sample of the kept pairs of all
        splits."""
        return None if self.pairs is None else self._label_noise.result()

    @cached_property
    def languages(self) -> dict[str, float]:
        """Return the share of each language in a sample of the kept rows, the most frequent first."""
        examined = self.pairs or next(iter(self.sources.values()))
        rows = self._sample(examined, range(len(SPLITS)))[: drift.LANGUAGE_SAMPLE]
        if examined is self.sources.get("prompts"):
            return drift.language_shares(prompt_texts(rows))
        return drift.language_shares([row.get("response") or f"{row['chosen']} {row['rejected']}" for row in rows])

    @cached_property
    def longer_wins(self) -> Interval | None:
        """Return the share of kept pairs in which the longer response (in words) wins, clustered by prompt."""
        facts = np.empty(0, FACTS) if self.pairs is None else self.pairs.facts
        wins = frames.longer_wins(facts["words"])
        counted = ~np.isnan(wins)
        return clustered_proportion(wins[counted], facts["prompt"][counted]) if counted.any() else None

    @cached_property
    def unread(self) -> dict[str, dict[str, int]]:
        """Return for each kind of data the fields that are not read, with the number of rows in which they hold
        something, the most frequent first."""
        counts = {
            kind: sum((source.unread or Counter() for source in examined.sources), Counter[str]())
            for kind, examined in self.sources.items()
        }
        return {kind: dict(sorted(c.items(), key=lambda each: (-each[1], each[0]))) for kind, c in counts.items() if c}

    @cached_property
    def standing(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the distinct prompts (hashes, sorted) of the kept rows, and the number of splits that each occurs
        in."""
        return frames.splits_of([(found.ledger, found.kept) for found in self.sources.values()])

    def judge(self) -> tuple[list[suites.JudgedCheck], Any]:
        """Return every check's outcome (see `suites.judge`) and the Great Expectations context that holds them."""
        checks, contract = self.job.data.checks, []
        outcomes = []
        for examined in self.sources.values():
            outcomes += [*examined.judge.outcomes(), *examined.judge.judge_whole(examined.kept)]
        if self.pairs is not None:
            prompts, splits = self.standing
            facts, near = self.pairs.facts, self.job.data.near_duplicate
            nearly = near_training(self.pairs.ledger, self.pairs.kept, self.pairs.texts, near)
            of_each = splits[np.searchsorted(prompts, facts["prompt"])]
            frame = frames.pair_frame(self.pairs.ledger, self.pairs.kept, of_each, nearly)
            contract.append(suites.Suite("kept_pairs", frame, suites.pair_checks(checks, frame)))
        measures = self._measures()
        if measures:
            frame = frames.measure_frame({name: measured.value for name, measured in measures.items()})
            chance = {name: measured.chance for name, measured in measures.items()}
            contract.append(suites.Suite("whole", frame, suites.measure_checks(checks, chance)))
        outcomes += [outcome for suite in contract for outcome in suites.judge(self.context, suite)]
        self.expected = {name: [*found.judge.checks, *found.judge.whole] for name, found in self.sources.items()}
        self.expected |= {suite.name: list(suite.checks) for suite in contract}
        for outcome in outcomes:
            of = outcome["suite"].partition("_")[0]
            outcome["source"] = of if of in KINDS else "kept"
            if outcome["name"] == "length_preference" and self.longer_wins is not None:
                outcome |= {"interval": ends} if (ends := self.longer_wins.ends) else {}
        return outcomes, self.context

    def _measures(self) -> dict[str, drift.DriftMeasure]:
        found: dict[str, drift.DriftMeasure | None] = {}
        if (pairs := self.pairs) is not None:
            sizes = np.bincount(pairs.facts["split"], minlength=len(SPLITS))
            counts = {"every_split": sizes.min(), "enough_pairs": sizes.sum(), "enough_test_pairs": sizes[TEST]}
            found |= {name: drift.DriftMeasure(float(count), 0) for name, count in counts.items()}
            if self.tokenizer is not None:
                found["length_drift"] = drift.length_drift(pairs.token_lengths(TRAIN), pairs.token_lengths(TRAIN, True))
            found["language_drift"] = self._language_drift.result()
            if (prompts := self.sources.get("prompts")) is not None:
                every = range(len(SPLITS))
                one, other = (prompt_texts(self._sample(examined, every)) for examined in (pairs, prompts))
                found["prompts_alike"] = drift.told_apart(one, other, self.job.seed)
            if (deployed := self.inputs.get(DEPLOYMENT)) is not None:
                theirs = sampled_prompts(deployed, self.job.data, self.job.seed)
                found |= compared_prompts(self._sample(pairs, range(len(SPLITS))), theirs, self.job.seed)
            if (earlier := self.inputs.get(REFERENCE)) is not None:
                theirs = sampled_pairs(earlier, self.job.seed)
                found |= compared_pairs(self._sample(pairs, range(len(SPLITS))), theirs, self.job.seed)
        if self.tokenizer is not None:
            found["known_tokens"] = drift.DriftMeasure((self.pairs or self.taught).texts.unknown, 0)
        return {name: measured for name, measured in found.items() if measured is not None}

    def _sample(self, examined: Examined, splits: Iterable[int]) -> list[CanonicalRow]:
        rows = [item for split in splits for item in examined.texts.samples.get(split, [])]
        return random.Random(f"rows {self.job.seed}").sample(rows, min(SAMPLE, len(rows)))

    def _said(self, pairs: Examined, splits: Iterable[int]) -> list[str]:
        return [f"{item['chosen']} {item['rejected']}" for item in one_a_prompt(self._sample(pairs, splits))]


def _judged(sources: Iterable[RowSource], max_characters: int) -> Iterator[Row]:
    return chain.from_iterable(judged_rows(source, max_characters) for source in sources)


def _asking(sources: Iterable[RowSource], further: tuple[str, ...]) -> list[RowSource]:
    return [source._replace(extra=further) for source in sources]


def _shown(sources: Iterable[RowSource]) -> str:
    return " and ".join(source.shown for source in sources)


def generated(name: str, rows: Iterable[Mapping[str, object]]) -> RowSource:
    """Return rows of the built-in task as a source of a kind of data."""
    raws = [RawRow(number, row) for number, row in enumerate(rows, 1)]
    return RowSource(name, "the support desk's generator", raws, {}, "")
