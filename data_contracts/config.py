"""The options that the validate stage's output depends on. Importable without torch or pandas."""

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
from components.data.inputs import DECONTAMINATE, JUDGE
from components.data.support_desk.desk import SupportDeskConfig
from components.models.config import ChatTemplateConfig, GenerationConfig


class TokenizerConfig(ChatTemplateConfig):
    """The options that the run's tokenizer depends on when no pretrained tokenizer is used."""

    vocabulary: int
    """Largest size of the vocabulary."""
    max_demonstrations: int | None
    """Number of training demonstrations that the tokenizer is trained on; null for all."""


class _ReadingJob(Settings):
    generation: GenerationConfig
    """Token limits to which prompts and responses are truncated."""
    sft: TokenizerConfig
    """The options of SFT from which the tokenizer is made."""

    @field_validator("sft", mode="before")
    @classmethod
    def _of_sft(cls, options: Any) -> Any:
        scratch = getattr(options, "scratch", None)  # not SftConfig, whose other options are not part of the key
        if not scratch:
            return options
        made = {"vocabulary": scratch.vocabulary, "max_demonstrations": options.max_demonstrations}
        return made | {name: getattr(options, name) for name in ChatTemplateConfig.model_fields}


class ValidateJob(_ReadingJob):
    """The options that the validate stage's output depends on, in addition to its input files and pretrained
    tokenizer."""

    seed: int
    """Seed of the generator, of samples, and of the choice of `max_pairs`."""
    data: DataConfig
    """Sources, formats, splits, checks and limits."""


class GeneratedJudgePairs(Settings):
    """The judge's pairs that the built-in task generates."""

    judge_pairs: int
    """Number of generated pairs; 0 if pairs are read from files."""


class JudgeData(Settings):
    """The data options that a judge's pairs depend on. Each has the meaning of the field with its name in
    `DataConfig`."""

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
        """Return the judge's data options from `data`."""
        pairs = GeneratedJudgePairs(judge_pairs=data.generator.judge_pairs)
        values = {name: getattr(data, name) for name in cls.model_fields if name != "generator"}
        return cls.model_validate(values | {"generator": pairs})

    def as_preferences(self) -> DataConfig:
        """Return these options for reading the judge's pairs as `preferences`."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name in DataConfig.model_fields}
        values |= {"columns": self.judge_columns, "judge_columns": {}}
        return DataConfig.model_validate(values | {"generator": SupportDeskConfig(**self.generator.model_dump())})


class ValidateJudgeJob(_ReadingJob):
    """The options that a judge's pairs depend on, in addition to their files and the pretrained tokenizer."""

    seed: int
    """Seed of the generator and of samples."""
    data: JudgeData
    """Formats, splits and checks."""

    @field_validator("data", mode="before")
    @classmethod
    def _of_data(cls, data: Any) -> Any:
        return JudgeData.of(data) if isinstance(data, DataConfig) else data

    def as_validation(self) -> ValidateJob:
        """Return the `validate` job that reads these pairs as its preferences."""
        return ValidateJob(seed=self.seed, generation=self.generation, data=self.data.as_preferences(), sft=self.sft)


def of_judge(error: UserError) -> str:
    """Return the text of an error about preferences, with the names of the judge's options in it. An error in a
    file of `data.decontaminate` stays as it is."""
    text = str(error).replace("data.columns", "data.judge_columns")
    return text if text.startswith(f"data.{DECONTAMINATE}: ") else f"data.{JUDGE}: {text}"
