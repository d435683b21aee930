"""Options of the data. Importable without torch or pandas."""

import re
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from components.base.settings import Settings, unkeyed
from components.data.checks_config import ChecksConfig, NearDuplicateConfig
from components.data.inputs import JUDGE, NAMED, values_of
from components.data.support_desk.desk import SupportDeskConfig
from components.data.words import label_key

LabelMeaning = Literal["a", "b", "tie", "both_bad", "desirable", "undesirable"]
"""The meanings that `data.label_values` can give to a value."""


class SplitConfig(Settings):
    """Shares of the distinct prompts; a prompt and all its rows are in the same split."""

    train: float = Field(0.7, gt=0, lt=1)
    """Share of prompts on which models are trained."""
    calibration: float = Field(0.1, gt=0, lt=1)
    """Share of prompts on which the reward's temperature, shift and scale are fitted."""
    test: float = Field(0.2, gt=0, lt=1)
    """Share of prompts that are used only in evaluation."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        total = self.train + self.calibration + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"train, calibration and test must sum to 1, they sum to {total:g}")
        return self


class HubConfig(Settings):
    """Which part of a Hugging Face dataset to read. (The digest of a fetched copy depends on this. The digest of a
    saved folder does not depend on the split, which is therefore in the key.)"""

    subset: str | None = unkeyed(None)
    """The dataset's configuration (`load_dataset`'s second argument); null for its default."""
    split: str = "train"
    """The dataset's own split to read, also for `save_to_disk` folders. Tether splits it again by prompt."""
    revision: str | None = unkeyed(None)
    """Branch, tag or commit; null: the default branch. The commit at the first fetch is kept beside the copy in the
    home, and a rerun reads it. Offline, a full commit is read from the cache of `datasets`."""
    streaming: bool = unkeyed(False)
    """Whether to read the dataset's files row by row over the network, without a copy in the cache of `datasets`. The
    rows are stored in the home and digested either way."""


OWN_MINIMUM = 3
"""Default minimum of votes for a pair that Tether gave out, to label or to judge in a batch."""


class DecisionConfig(Settings):
    """When several annotators' votes decide a pair. Undecided pairs go to `review.jsonl`, for experts."""

    minimum: int | None = Field(None, ge=1, le=1000)
    """Fewest votes; null requires 3 for pairs that Tether gave out (candidates, batches of `data.votes`), and 1
    for pairs from any other source."""
    margin: float = Field(0, ge=0, lt=1)
    """A pair is undecided if the lead of the most frequent answer over the next, as a share of the votes, is at most
    this. With 0.34, 2 votes against 1 are left to experts; with 0, only ties are."""
    experts: tuple[str, ...] = ()
    """Annotators whose votes alone decide the pairs that they voted on."""


class ScoreDifferenceConfig(Settings):
    """How scored responses (UltraFeedback, HelpSteer, SHP, or `margin`) become pairs."""

    name: str | None = None
    """The score to compare, as `correctness` of HelpSteer or `overall_score` of UltraFeedback; null: `helpfulness` and
    `fine-grained_score`. With a name, rows of `prompt`, `response` and that score become pairs too."""
    threshold: float = Field(0, ge=0)
    """A difference above this, in the score's units, makes a pair and is its margin."""


class ReaderPlugin(Settings):
    """The plug-in that reads files of one suffix. Its name alone may be given: `data.readers={.chat: chat_log}`."""

    plugin: str
    """An entry point of the group `tether.readers`: a function of a path that returns the file's rows, one dictionary
    each."""
    code: str = "auto"
    """Name and version of its distribution and sha256 of its files; each run computes it again."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, reader: object) -> object:
        return {"plugin": reader} if isinstance(reader, str) else reader


MOST_WEIGHT = 1000
"""Largest weight of a source. Its inverse is the smallest, so that no weight vanishes in float32."""


class SourceConfig(Settings):
    """How much one source of the preferences counts."""

    weight: float = 1.0
    """Weight of each of its pairs in the reward model's training loss, relative to those of other sources. It changes
    nothing else: not SFT, PPO's prompts, the calibration, a metric or a gate."""
    max_pairs: int | None = Field(None, ge=10)
    """At most this many valid pairs of the source, chosen as by `data.max_pairs`, which applies afterwards and takes
    each source in its share; null keeps all."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, options: object) -> object:
        if isinstance(options, dict) and (unknown := sorted(map(str, options.keys() - cls.model_fields.keys()))):
            raise ValueError(
                f"takes weight and max_pairs, and not {', '.join(unknown)}. Write a name that has a dot "
                "inside the value: --set 'data.sources={a.jsonl: {weight: 2}}'"
            )
        return options

    @field_validator("weight")
    @classmethod
    def _within(cls, weight: float) -> float:
        if not 1 / MOST_WEIGHT <= weight <= MOST_WEIGHT:
            raise ValueError(
                f"must be between {1 / MOST_WEIGHT:g} and {MOST_WEIGHT}; to use none of a source's pairs, take it out "
                "of data.preferences"
            )
        return weight


class DataConfig(Settings):
    """The sources of preferences, demonstrations and prompts, and how they are read, checked and split."""

    preferences: str | tuple[str, ...] | None = unkeyed(None)
    """A path or hub name of preference pairs, or a list of several; null generates the support desk's."""
    votes: tuple[str, ...] = unkeyed(())
    """Runs of this home whose policies people have judged, the earliest first (`tether iterate` writes them). People's
    judgements of one half of the prompts become additional training pairs; those of the other half are held out for
    good."""
    judge_preferences: str | tuple[str, ...] | None = unkeyed(None)
    """A path or hub name of preference pairs with independent labels (from more careful annotators, or on another
    policy's responses), or a list of several. An independent judge is trained on them (`reward.judge`), which is used
    only in evaluations. Null: none, or the built-in task's `generator.judge_pairs`."""
    demonstrations: str | None = unkeyed(None)
    """A path or hub name of demonstrations; null: the chosen responses, or the support desk's demonstrations."""
    prompts: str | None = unkeyed(None)
    """A path or hub name of the prompts that PPO uses; null: those of the preferences."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Maps a source of the preferences to its weight and cap: `{a.jsonl: {weight: 2, max_pairs: 5000}}`. Names are
    those in `sources.json`; a single source is called `preferences`. A row's own `source` field does not matter
    here."""
    hub: HubConfig = HubConfig()
    """Which part of a hub dataset to read."""
    readers: dict[str, ReaderPlugin] = Field(default_factory=dict)
    """Maps a file's suffix to the plug-in that reads it, for formats that Tether does not read: `{.chat: chat_log}`."""
    columns: dict[str, str | tuple[str, ...]] = Field(default_factory=dict)
    """Maps a standard field to the preferences' column, if the names differ: `{chosen: better, rejected: worse}`.
    `votes` may name several columns, one for each annotator: `{votes: [ann, ben]}`."""
    judge_columns: dict[str, str | tuple[str, ...]] = unkeyed(default_factory=dict)
    """As `columns`, for the judge's preferences."""
    demonstration_columns: dict[str, str] = Field(default_factory=dict)
    """Maps a standard field to the demonstrations' column, if the names differ."""
    prompt_columns: dict[str, str] = Field(default_factory=dict)
    """Maps a standard field to the prompts' column, if the names differ."""
    reward_columns: tuple[str, ...] = ()
    """Further columns of the prompts (if `prompts` is null, of the preferences) that sources of `ppo.rewards` use, such
    as the right answer; names as in the file."""
    label_values: dict[str, LabelMeaning] = Field(default_factory=dict)
    """Maps values of a label or vote to their meaning, such as `{"1": a, "2": b, "0": tie}`. Meanings are a, b, tie and
    both_bad; for single responses, desirable and undesirable. The meaning of a number is never guessed."""
    score: ScoreDifferenceConfig = ScoreDifferenceConfig()
    """Which differences of scores make a pair, for sources that score responses."""
    split: SplitConfig = SplitConfig()
    """How prompts are divided."""
    max_pairs: int | None = Field(None, ge=10)
    """At most this many valid pairs, chosen by the seed and independent of their order; null keeps all."""
    max_characters: int = Field(20_000, ge=10)
    """Longest prompt and response together, in characters; longer rows are quarantined."""
    labels: Literal["majority", "dawid_skene"] = "majority"
    """How votes choose a response: `majority`, the most frequent answer; `dawid_skene`, the most probable one after
    each annotator's error rates are estimated from all votes (Dawid and Skene 1979)."""
    decision: DecisionConfig = DecisionConfig()
    """When votes decide a pair."""
    checks: ChecksConfig = ChecksConfig()
    """The checks of the data contract, with severity and threshold."""
    suite: str | None = unkeyed(None)
    """A path of your own expectations, as JSON written by Great Expectations; they add to the checks or replace them.
    The file's bytes are part of the key."""
    decontaminate: tuple[str, ...] = unkeyed(())
    """Paths or hub names of files, such as benchmarks, whose prompts the data must not nearly repeat: rows whose prompt
    does are left out and counted (check `uncontaminated`, similarity by `data.near_duplicate`)."""
    deployment_prompts: str | None = unkeyed(None)
    """A path or hub name of prompts as in the model's future use. The preferences' prompts are compared with them
    (checks `deployment_length`, `_language`, `_category` and `_words`)."""
    reference: str | None = unkeyed(None)
    """Accepted data with which the preferences are compared (checks `reference_*`): a run whose validate passed its
    gates; a registered model such as `tether-policy@champion`, for the data of its run; or `last`, the newest run of
    the project with other preferences whose validate passed (none if there is none yet). Later runs of the same
    preferences keep what `last` was for the first."""
    near_duplicate: NearDuplicateConfig = NearDuplicateConfig()
    """What counts as a near-duplicate."""
    processes: int | Literal["auto"] = unkeyed("auto")
    """Number of processes that measure the rows; `auto` is one per core. It does not change results. A single
    file of up to 10,000 rows is measured in one process."""
    generator: SupportDeskConfig = SupportDeskConfig()
    """Size and annotators of the built-in task (used if `preferences` or `demonstrations` are generated)."""

    @model_validator(mode="after")
    def _votes_or_a_model_of_them(self) -> Self:
        if self.labels == "dawid_skene" and self.decision != DecisionConfig():
            raise ValueError(
                "decision applies to labels=majority only, and labels is dawid_skene: leave decision out, or set "
                "labels=majority"
            )
        return self

    @model_validator(mode="after")
    def _generated_pairs_are_of_the_built_in_task(self) -> Self:
        if self.generator.judge_pairs and (self.preferences is not None or self.judge_preferences is not None):
            which = "preferences" if self.preferences is not None else "judge_preferences"
            raise ValueError(
                f"generator.judge_pairs are pairs of the built-in task, and {which} names files: leave judge_pairs at "
                "0, and name the judge's pairs in judge_preferences"
            )
        return self

    @property
    def has_judge(self) -> bool:
        """Return whether an independent judge is trained."""
        return self.judge_preferences is not None or self.generator.judge_pairs > 0

    @field_validator("sources", mode="before")
    @classmethod
    def _names_as_text(cls, sources: object) -> object:
        """Turn names to text, since YAML reads the name of a folder `2026` as a number."""
        return {str(name): source for name, source in sources.items()} if isinstance(sources, dict) else sources

    @field_validator(*NAMED)
    @classmethod
    def _no_empty_path(cls, paths: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if not all(value.strip() for value in values_of(paths)):
            raise ValueError("a path is empty; is a shell variable not set? Name a file, or write null for none")
        return paths

    @field_validator("readers")
    @classmethod
    def _suffixes(cls, readers: dict[str, ReaderPlugin]) -> dict[str, ReaderPlugin]:
        for suffix in readers:
            if not re.fullmatch(r"\.[a-z0-9_]+", suffix):
                raise ValueError(f"readers: {suffix} is not a suffix: write it as .chat, in small letters")
        return readers

    @field_validator("columns", "judge_columns")
    @classmethod
    def _lists_of_votes(
        cls, columns: dict[str, str | tuple[str, ...]], info: ValidationInfo
    ) -> dict[str, str | tuple[str, ...]]:
        for ours, theirs in columns.items():
            if not isinstance(theirs, str) and (ours != "votes" or not theirs):
                where = f"{info.field_name}.{ours}"
                raise ValueError(f"{where} is a list; only `votes` takes several columns, one per annotator")
        return columns

    @field_validator("label_values", mode="before")
    @classmethod
    def _as_text(cls, meanings: object) -> object:
        """Turn names to text, since YAML reads `1` and `true` as a number and a boolean."""
        return {label_key(name): side for name, side in meanings.items()} if isinstance(meanings, dict) else meanings

    @field_validator("decontaminate", mode="before")
    @classmethod
    def _a_list(cls, paths: object) -> object:
        return (paths,) if isinstance(paths, str) else paths

    @field_validator("preferences", "judge_preferences", mode="before")
    @classmethod
    def _one_or_several(cls, names: object, info: ValidationInfo) -> object:
        if names is None or isinstance(names, str):
            return names
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ValueError("must be a path or hub name, or a list of them")
        if not names:
            nothing = "no judge" if info.field_name == JUDGE else "the built-in task"
            raise ValueError(f"the list is empty; name at least one source, or write null for {nothing}")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"names {twice} twice; name each source once")
        return names if len(names) > 1 else names[0]
