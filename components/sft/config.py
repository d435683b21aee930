"""Options of supervised fine-tuning. Importable without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings, unkeyed
from components.models.config import ChatTemplateConfig, GenerationConfig, ScratchModel
from components.models.runtime import Runtime
from components.training.optim import FitConfig


class SftConfig(ChatTemplateConfig, FitConfig):
    """Supervised fine-tuning: cross-entropy on the response's tokens, including EOS; the prompt is masked."""

    base: str | None = unkeyed(None)
    """A pretrained model: its folder (Hugging Face), a GGUF file or a folder with one, or `org/name@revision` on the
    hub, whose commit is looked up once, when the run begins. Null: build the model `scratch` with random weights."""
    keep: str | None = unkeyed(None)
    """A run of this home whose SFT model, with its data, this run reuses. So all rounds of `tether iterate` have the
    same SFT model as reference. Null trains one on this run's data."""
    train: bool = True
    """False uses `base` unchanged as the SFT policy. The stage is then `skipped`: it measures the base, but its gates
    do not pass, and the run's policy is a candidate for promotion only if they are waived."""
    scratch: ScratchModel = ScratchModel()
    """The model to build if `base` is null."""
    max_demonstrations: int | None = Field(None, ge=1)
    """Train on at most this many demonstrations (the first ones, in data order); null for all. For a model from scratch
    the vocabulary comes from these, including overlong ones."""
    overlong: Literal["drop", "cut"] = "drop"
    """What to do with a demonstration whose response, including EOS, exceeds `generation.max_new_tokens`. `drop` leaves
    it out, in training and in evaluation. `cut` cuts it, so that it has no EOS, which teaches the model not to end."""
    packing: int | None = Field(None, ge=1)
    """Tokens per forward pass if demonstrations are packed end to end into one row, without padding, instead of
    `micro_batch_size`. They do not attend to each other, and losses and gradients are the same up to rounding. A longer
    demonstration is computed alone. Null: no packing, `micro_batch_size` demonstrations, each in its own row."""
    evaluate: int = Field(512, ge=1)
    """Number of held-out demonstrations for loss and perplexity, and of held-out prompts to sample responses to."""

    @model_validator(mode="after")
    def _what_is_evaluated_trains(self) -> Self:
        if not self.train and self.evaluate_every is not None:
            raise ValueError("sft.train is false, so there is no training to evaluate: leave sft.evaluate_every null")
        return self

    @model_validator(mode="after")
    def _a_template_is_of_a_base(self) -> Self:
        changed = [name for name in ChatTemplateConfig.model_fields if getattr(self, name) not in (None, {}, False)]
        if changed and self.base is None and self.keep is None:
            raise ValueError(
                f"sft.{changed[0]} is for the tokenizer of a pretrained model, and sft.base is null: set sft.base, or "
                f"leave sft.{changed[0]} out, since a model from nothing has a template of its own"
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
    """Everything except the inputs on which the stage's output depends."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    sft: SftConfig
