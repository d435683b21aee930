"""Options of supervised fine-tuning. Importable without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings, unkeyed
from components.models.config import GenerationConfig, ScratchModel
from components.models.runtime import Runtime
from components.training.optim import FitConfig


class SftConfig(FitConfig):
    """Supervised fine-tuning: cross-entropy on the response's tokens, EOS among them; the prompt is masked."""

    base: str | None = unkeyed(None)
    """A pretrained model: its folder (Hugging Face), a GGUF file or a folder with one, or `org/name@revision` on the
    hub, whose commit is looked up once, when the run begins. Null builds `scratch` from nothing."""
    chat_template: str | None = Field(None, min_length=1, max_length=100_000)
    """How a conversation becomes text; it replaces the template of the tokenizer of `base`: `chatml`, `llama3`,
    `plain`, a file with a Jinja template, or the template's text, which the run's config then holds. Markers that it
    writes, such as <|im_start|>, become tokens where the tokenizer lacks them; the one after a response becomes EOS."""
    keep: str | None = unkeyed(None)
    """A run of this home whose SFT model this run takes as it is, with the data it learned from: so the rounds of
    `tether iterate` are all tethered to one model. Null trains one on this run's data."""
    train: bool = True
    """False takes `base` as the SFT policy as it is. The stage is then `skipped`: it measures the base, but its gates
    do not pass, and the run's policy is no candidate for promotion unless they are waived."""
    scratch: ScratchModel = ScratchModel()
    """The model to build where `base` is null."""
    max_demonstrations: int | None = Field(None, ge=1)
    """Train on this many demonstrations at most (the first ones, in data order); null for all. A model from scratch
    takes its vocabulary from the first ones, overlong ones too, and is trained on those of them that fit."""
    overlong: Literal["drop", "cut"] = "drop"
    """What becomes of a demonstration whose response, EOS included, exceeds `generation.max_new_tokens`: it is left
    out, in training and on the held-out side, or cut and without EOS, which teaches the model not to end."""
    packing: int | None = Field(None, ge=1)
    """Tokens of a forward pass whose demonstrations stand end to end in one row, without padding, in place of
    `micro_batch_size`; none sees another, and losses and gradients are the same to rounding. A demonstration that
    exceeds it is computed alone. Null: `micro_batch_size` demonstrations, each in a row of its own."""
    evaluate: int = Field(512, ge=1)
    """Held-out demonstrations for loss and perplexity, and held-out prompts to sample responses to."""

    @model_validator(mode="after")
    def _what_is_evaluated_trains(self) -> Self:
        if not self.train and self.evaluate_every is not None:
            raise ValueError("sft.train is false, so there is no training to evaluate: leave sft.evaluate_every null")
        return self

    @model_validator(mode="after")
    def _a_template_is_of_a_base(self) -> Self:
        if self.chat_template is not None and self.base is None and self.keep is None:
            raise ValueError(
                "sft.chat_template is for the tokenizer of a pretrained model, and sft.base is null: set sft.base, or "
                "leave sft.chat_template out, since a model from nothing has a template of its own"
            )
        return self

    @model_validator(mode="after")
    def _something_is_the_policy(self) -> Self:
        if not self.train and self.base is None and self.keep is None:
            raise ValueError(
                "sft.train is false, so sft.base is the SFT policy: set sft.base to its folder or its name on the hub, "
                "or leave sft.train true"
            )
        return self


class SftJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    sft: SftConfig
