"""The options that the validate stage's output depends on. Importable without torch or pandas."""

from typing import Any

from pydantic import field_validator, model_validator

from components.base.errors import UserError
from components.base.settings import Settings
from components.data.config import DataConfig
from components.data.inputs import DECONTAMINATE, JUDGE
from components.data.support_desk.desk import SupportDeskConfig
from components.models.config import ChatTemplateConfig, GenerationConfig


class TokenizerConfig(ChatTemplateConfig):
    """The options that the run's tokenizer depends on when no pretrained tokenizer is used."""

    vocabulary: int
    """Largest size of the vocabulary."""
    max_demonstrations: int | None
    """Number of training demonstrations that the tokenizer is trained on; null for all."""


class ValidateJob(Settings):
    """The options that the validate stage's output depends on, in addition to its input files and pretrained
    tokenizer."""

    generation: GenerationConfig
    """Token limits to which prompts and responses are truncated."""
    sft: TokenizerConfig
    """The options of SFT from which the tokenizer is made."""
    seed: int
    """Seed of the generator, of samples, and of the choice of `max_pairs`."""
    data: DataConfig
    """Sources, formats, splits, checks and limits."""

    @field_validator("sft", mode="before")
    @classmethod
    def _of_sft(cls, options: Any) -> Any:
        scratch = getattr(options, "scratch", None)  # not SftConfig, whose other options are not part of the key
        if not scratch:
            return options
        made = {"vocabulary": scratch.vocabulary, "max_demonstrations": options.max_demonstrations}
        return made | {name: getattr(options, name) for name in ChatTemplateConfig.model_fields}


class JudgeGenerator(SupportDeskConfig):
    """The judge's pairs that the built-in task generates."""

    judge_pairs: int = 0
    """Number of generated pairs; 0 if pairs are read from files."""


class JudgeData(DataConfig):
    """The data options of a judge's pairs, which are read as preferences. Made from a run's `DataConfig`."""

    generator: JudgeGenerator = JudgeGenerator()

    @model_validator(mode="before")
    @classmethod
    def _of_data(cls, data: Any) -> Any:
        if not isinstance(data, DataConfig) or isinstance(data, cls):
            return data
        made = {"generator": JudgeGenerator(judge_pairs=data.generator.judge_pairs), "columns": data.judge_columns}
        return {name: getattr(data, name) for name in _OF_JUDGE} | made


_OF_JUDGE = (
    "hub", "readers", "label_values", "score", "split", "max_characters", "labels", "decision", "checks",
    "near_duplicate",
)  # fmt: skip
"""The options of a run's data that apply to the judge's pairs too."""


class ValidateJudgeJob(ValidateJob):
    """The options that a judge's pairs depend on, in addition to their files and the pretrained tokenizer."""

    data: JudgeData


def of_judge(error: UserError) -> str:
    """Return the text of an error about preferences, with the names of the judge's options in it. An error in a
    file of `data.decontaminate` stays as it is."""
    text = str(error).replace("data.columns", "data.judge_columns")
    return text if text.startswith(f"data.{DECONTAMINATE}: ") else f"data.{JUDGE}: {text}"
