"""What the validate stage's output depends on. Importable without torch or pandas."""

from typing import Any, Literal

from pydantic import field_validator

from components.base.errors import UserError
from components.base.settings import Settings
from components.data.checks_config import ChecksConfig, NearDuplicateConfig
from components.data.config import (
    DataConfig,
    DecisionConfig,
    HubConfig,
    LabelMeaning,
    ReaderPlugin,
    ScoreDifferenceConfig,
    SplitConfig,
)
from components.data.inputs import JUDGE
from components.data.support_desk.desk import SupportDeskConfig
from components.models.config import GenerationConfig


class TokenizerConfig(Settings):
    """The options that the run's tokenizer depends on, beside a pretrained one."""

    vocabulary: int
    """Most tokens."""
    max_demonstrations: int | None
    """It is made from this many training demonstrations; null for all."""
    chat_template: str | None = None
    """A name or the text of a chat template that replaces the pretrained one's."""


def _tokenizer_part(given: Any) -> Any:
    scratch = getattr(given, "scratch", None)  # SftConfig is not imported: its other options are no part of the key
    if not scratch:
        return given
    made = {"vocabulary": scratch.vocabulary, "max_demonstrations": given.max_demonstrations}
    return made | {"chat_template": given.chat_template}


class ValidateJob(Settings):
    """What the validate stage's output depends on, beside its input files and the pretrained tokenizer."""

    seed: int
    """Seed of the generator, of samples, and of the choice of `max_pairs`."""
    generation: GenerationConfig
    """Lengths that texts are cut to."""
    data: DataConfig
    """Sources, formats, splits, checks and limits."""
    sft: TokenizerConfig
    """The part of SFT's options that makes the tokenizer."""

    @field_validator("sft", mode="before")
    @classmethod
    def _of_sft(cls, given: Any) -> Any:
        return _tokenizer_part(given)


class GeneratedJudgePairs(Settings):
    """What the built-in task writes for a judge."""

    judge_pairs: int
    """How many pairs; 0 where files are read."""


class JudgeData(Settings):
    """The options of the data that a judge's pairs depend on; each is `DataConfig`'s of its name."""

    hub: HubConfig
    readers: dict[str, ReaderPlugin]
    judge_columns: dict[str, str | tuple[str, ...]]
    label_values: dict[str, LabelMeaning]
    score: ScoreDifferenceConfig
    split: SplitConfig
    max_characters: int
    labels: Literal["majority", "dawid_skene"]
    decision: DecisionConfig
    checks: ChecksConfig
    near_duplicate: NearDuplicateConfig
    generator: GeneratedJudgePairs

    @classmethod
    def of(cls, data: DataConfig) -> "JudgeData":
        """Return the judge's part of `data`."""
        pairs = GeneratedJudgePairs(judge_pairs=data.generator.judge_pairs)
        own = {name: getattr(data, name) for name in cls.model_fields if name != "generator"}
        return cls.model_validate(own | {"generator": pairs})

    def as_preferences(self) -> DataConfig:
        """Return the same options for pairs that are read as `preferences`."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name in DataConfig.model_fields}
        own |= {"columns": self.judge_columns, "judge_columns": {}}
        return DataConfig.model_validate(own | {"generator": SupportDeskConfig(**self.generator.model_dump())})


class ValidateJudgeJob(Settings):
    """What the pairs that a judge learns from depend on, beside their files and the pretrained tokenizer."""

    seed: int
    """Seed of the generator and of samples."""
    generation: GenerationConfig
    """Lengths that texts are cut to."""
    data: JudgeData
    """Formats, splits and checks."""
    sft: TokenizerConfig
    """The part of SFT's options that makes the tokenizer."""

    @field_validator("data", mode="before")
    @classmethod
    def _of_data(cls, given: Any) -> Any:
        return JudgeData.of(given) if isinstance(given, DataConfig) else given

    @field_validator("sft", mode="before")
    @classmethod
    def _of_sft(cls, given: Any) -> Any:
        return _tokenizer_part(given)

    def as_validation(self) -> ValidateJob:
        """Return the job of `validate` that reads these pairs as its preferences."""
        return ValidateJob(seed=self.seed, generation=self.generation, data=self.data.as_preferences(), sft=self.sft)


def of_judge(error: UserError) -> str:
    """Return the text of an error about preferences, for those of the judge."""
    return f"data.{JUDGE}: {str(error).replace('data.columns', 'data.judge_columns')}"
