"""Options of the blind comparison. Importable without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings
from components.models.config import GenerationConfig
from components.models.runtime import Runtime

INSTRUCTIONS = """\
Each row shows a conversation and two replies to it, A and B, in an order drawn at random.
Read both replies and write in your rating column which one you would rather receive.
Prefer the reply that helps more; of two that help alike, the one that is honest and does no harm.
A longer reply is not better for its length.
Judge each row alone, do not talk to the other raters about it, and leave a row empty if you cannot judge it.
Change nothing but your rating column, do not sort or move single columns, and save the file as CSV (UTF-8)."""


class HumanEvalConfig(Settings):
    """Who judges how many pairs of responses, and how they are drawn."""

    items: int = Field(256, ge=2)
    """Held-out prompts to judge; fewer if the test split holds fewer."""
    raters: int = Field(3, ge=1, le=26)
    """Ratings per item, a column each. Agreement (Fleiss' kappa) needs at least 2."""
    judges: Literal["simulated", "people"] = "people"
    """`simulated`: the built-in task's careful judges fill the sheet; `people`: the run waits for a filled sheet."""
    scale: Literal["a/b/tie/both_bad", "a/b/tie", "a/b"] = "a/b/tie/both_bad"
    """Ratings that a rater may give. `both_bad` counts as a tie in the win rate, and is reported as a share."""
    repeats: float = Field(0.1, ge=0, le=1)
    """Share of the items that are shown again with sides exchanged, to see whether a rater agrees with themselves."""
    level: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the win rate's interval."""
    strata: Literal["auto", "category", "length", "none"] = "auto"
    """What the sample is spread over in proportion: prompts' `category`, their length, or `auto`: category if all have
    one, else length."""
    length_strata: int = Field(4, ge=1, le=64)
    """Strata of equal size that prompts are cut into by length in characters."""
    pairs: Literal["one", "all"] = "one"
    """Of more than two models that are compared (`tether human-eval compare`): one pair of them on each prompt, all
    pairs equally often, or every pair on each prompt."""
    batch_size: int = Field(64, ge=1)
    """Responses generated at a time, and between checkpoints."""
    instructions: str = Field(INSTRUCTIONS, min_length=1)
    """What raters are told; stands in `sheet.json` and at the top of each rater's own file."""

    @property
    def ratings(self) -> tuple[str, ...]:
        """The values a rating may have."""
        return tuple(self.scale.split("/"))

    @model_validator(mode="after")
    def _simulated_judges_tie(self) -> Self:
        if self.judges == "simulated" and "tie" not in self.ratings:
            raise ValueError("simulated judges may find a tie: set human_eval.scale=a/b/tie")
        return self


class SampleJob(Settings):
    """What the sample's bytes depend on."""

    seed: int
    """Seed of the sample, the responses and their blinding."""
    runtime: Runtime
    """The machine that generates."""
    generation: GenerationConfig
    """How both models' responses are sampled."""
    human_eval: HumanEvalConfig
    """The comparison."""


class ScoreJob(Settings):
    """What the result depends on beside sample and sheet."""

    seed: int
    """The run's seed (nothing is drawn when scoring)."""
    human_eval: HumanEvalConfig
    """The comparison."""
