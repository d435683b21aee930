"""Options of the data, of the stage that validates them and of candidates. Importable without torch or pandas."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from components.data.checks_config import ChecksConfig, NearDuplicateConfig
from components.data.support_desk import SupportDeskConfig
from components.generation import GenerationConfig
from components.runtime import Runtime
from components.settings import Settings, unkeyed
from components.sft.config import SftConfig


class SplitConfig(Settings):
    """Shares of the distinct prompts; a prompt and all its rows stand in one split."""

    train: float = Field(0.7, gt=0, lt=1)
    """Share of prompts that models learn from."""
    calibration: float = Field(0.1, gt=0, lt=1)
    """Share of prompts that the reward's temperature, shift and scale are fitted on."""
    test: float = Field(0.2, gt=0, lt=1)
    """Share of prompts that only evaluation sees."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        total = self.train + self.calibration + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"train, calibration and test must sum to 1, they sum to {total:g}")
        return self


class HubConfig(Settings):
    """Which part of a Hugging Face dataset to take. A fetched copy's digest says it in a key; a saved folder's doesn't
    say which split is read."""

    subset: str | None = unkeyed(None)
    """The dataset's configuration (`load_dataset`'s second argument); null for its default."""
    split: str = "train"
    """The dataset's own split to read; Tether splits it by prompt again. Also read from `save_to_disk` folders."""
    revision: str | None = unkeyed(None)
    """Branch, tag or commit; null takes the newest at the first fetch and keeps that copy."""


class DataConfig(Settings):
    """Where preferences and demonstrations come from, and what becomes of them."""

    preferences: str | None = unkeyed(None)
    """A path or hub name of preference pairs; null generates the support desk's."""
    demonstrations: str | None = unkeyed(None)
    """A path or hub name of demonstrations; null takes the chosen responses, or the support desk's demonstrations."""
    prompts: str | None = unkeyed(None)
    """A path or hub name of the prompts that PPO uses; null takes those of the preferences."""
    hub: HubConfig = HubConfig()
    """Which part of a hub dataset to read."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Standard field -> column of the preferences where names differ, as in `{chosen: better, rejected: worse}`."""
    demonstration_columns: dict[str, str] = Field(default_factory=dict)
    """Standard field -> column of the demonstrations where names differ."""
    prompt_columns: dict[str, str] = Field(default_factory=dict)
    """Standard field -> column of the prompts where names differ."""
    split: SplitConfig = SplitConfig()
    """How prompts are divided."""
    max_pairs: int | None = Field(None, ge=10)
    """At most this many valid pairs, a seeded choice that doesn't depend on their order; null keeps all."""
    max_characters: int = Field(20_000, ge=10)
    """Longest prompt and response together, in characters; longer rows are quarantined."""
    labels: Literal["majority", "dawid_skene"] = "majority"
    """Which response is chosen where annotators voted: the most frequent answer's, or the likelier one once each
    annotator's competence is estimated from all votes (Dawid and Skene 1979)."""
    checks: ChecksConfig = ChecksConfig()
    """What is checked, how grave each finding is, and from where on."""
    near_duplicate: NearDuplicateConfig = NearDuplicateConfig()
    """What counts as a near-duplicate."""
    generator: SupportDeskConfig = SupportDeskConfig()
    """Size and habits of the built-in task (read where `preferences` or `demonstrations` is generated)."""


class TokenizerConfig(Settings):
    """What the run's tokenizer depends on, where it has no pretrained one."""

    vocabulary: int
    """Most tokens."""
    max_demonstrations: int | None
    """It is made from this many training demonstrations; null for all."""


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
        if isinstance(given, SftConfig):
            return {"vocabulary": given.scratch.vocabulary, "max_demonstrations": given.max_demonstrations}
        return given


class CandidatesConfig(Settings):
    """Responses to label: how many, from what, and which of them make a pair."""

    temperatures: tuple[Annotated[float, Field(gt=0, le=100)], ...] = Field((0.7, 1.0), min_length=1)
    """Softmax temperatures that every model is sampled at."""
    per_prompt: int = Field(4, ge=1)
    """Responses drawn a prompt, spread over models and temperatures; identical ones are kept once."""
    pairs: int = Field(1, ge=0)
    """Pairs to label a prompt; fewer where it has fewer different responses."""
    max_prompts: int | None = Field(None, ge=1)
    """At most this many prompts, a seeded choice that doesn't depend on their order; null takes all."""
    max_characters: int = Field(20_000, ge=10)
    """Longest prompt, and prompt and longer response of a pair, in characters: what `data.max_characters` lets in."""
    batch_size: int = Field(64, ge=1)
    """Responses generated at a time, and between checkpoints."""

    @field_validator("temperatures")
    @classmethod
    def _distinct(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each temperature may be given once")
        return value


class CandidatesJob(Settings):
    """What the candidates' bytes depend on, beside prompts and models."""

    seed: int
    """Seed of the choice of prompts, the responses, the pairs and their blinding."""
    runtime: Runtime
    """The machine that generates."""
    generation: GenerationConfig
    """How responses are sampled, at each of `candidates.temperatures` in the place of its own."""
    candidates: CandidatesConfig
    """Responses and pairs."""
