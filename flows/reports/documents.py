"""What the report reads of a stage's artifact: its JSON documents, typed; fields that the report does not show are left
out, and those that an earlier version did not write are None.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field, SkipValidation

Text = Annotated[str, SkipValidation]
"""What people or models wrote: it may hold what UTF-8 cannot."""


class CheckResult(BaseModel):
    """A check of the data's contract."""

    name: str = Field(validation_alias=AliasChoices("name", "check"))
    source: str = Field(validation_alias=AliasChoices("source", "suite"))
    description: str | None = None
    severity: str
    passed: bool
    value: float | None = None
    threshold: float | tuple[float, float] | None = None
    rows: int | None = None
    row_numbers: list[int] = Field([], validation_alias=AliasChoices("row_numbers", "first_rows"))


class KeptOut(BaseModel):
    """A row that was kept out."""

    file: Text
    row: int
    reasons: Annotated[Sequence[str], SkipValidation]
    data: object


class Bin(BaseModel):
    """Held-out pairs of like confidence."""

    n: int
    confidence: float
    accuracy: float
    low: float
    high: float


class SliceResult(BaseModel):
    """Calibration on a slice of the held-out pairs; a small one has no interval."""

    kind: Text
    slice: Text
    pairs: int
    accuracy: float | None = None
    accuracy_low: float | None = None
    ece: float | None = None
    ece_null_joint: float | None = None


class ProbeResult(BaseModel):
    """What a tail without an answer does to the score."""

    rise: float | None
    high: float | None
    texts: int


class RewardResult(BaseModel):
    """`calibration.json` and `robustness.json` of the reward model."""

    bins: list[Bin] = []
    slices: list[SliceResult] = []
    probes: dict[str, ProbeResult] = {}


class Tether(BaseModel):
    """What held KL: the part of `ppo.kl` that the report says."""

    control: str
    coefficient: float | None = None
    target: float | None = None
    unit: str = "response"
    stop_above: float | None = None


class Turn(BaseModel):
    """One turn of a prompt."""

    role: Text
    content: Text


class Answer(BaseModel):
    """A response with its scores."""

    response: Text
    score: float
    kl: float
    tokens: int
    ended: bool
    gold: float | None = None


class Evaluated(BaseModel):
    """A held-out prompt with the policy's response and SFT's."""

    prompt: list[Turn] | Text
    policy: Answer
    sft: Answer


class Rate(BaseModel):
    """A share with its interval."""

    value: float | None
    low: float | None
    high: float | None


class Ratings(BaseModel):
    """How many judgements were asked for, and how many came."""

    given: int
    asked: int


class RaterResult(BaseModel):
    """One rater's judgements."""

    rater: Text
    n: int
    win_rate: float | None
    ties: float | None
    agreement: float | None


class StratumResult(BaseModel):
    """The comparison on one stratum of the prompts."""

    stratum: Text
    n: int
    win_rate: float | None


class ComparisonResult(BaseModel):
    """`result.json` of the human evaluation."""

    judges: str
    target: str
    level: float
    items: int
    fleiss_kappa: float | None
    win_rate: Rate
    ratings: Ratings
    raters: list[RaterResult]
    strata: list[StratumResult]


class SheetAbout(BaseModel):
    """`sheet.json`: what people were asked to judge."""

    items: int
    raters: int
