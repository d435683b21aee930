"""Options of the sources of PPO's reward. Importable without torch."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from components.base.settings import Settings, keyed_if_set, unkeyed

KINDS = ("pipeline", "model", "function", "plugin", "http", "verifier")
_NAME = r"^[A-Za-z][A-Za-z0-9_]{0,39}$"


class _SourceConfig(Settings):
    """The options of every source."""

    name: str = Field("", pattern=_NAME)
    """The name in its metrics, as `ppo/reward_NAME`; letters, digits and `_`. Empty: derived from `source`."""
    weight: float = 1.0
    """The weight in the sum of the sources' scaled scores; a negative weight makes it a cost."""
    judge: bool = False
    """Only score the final evaluation (`policy/judge_NAME_gain`), and never reward, whatever `weight` is."""
    shift: float | None = None
    """Subtracted from a raw score, in the source's unit; null: the mean over SFT responses."""
    scale: float | None = Field(None, gt=0)
    """Divides the shifted score, in the source's unit; null: the standard deviation over SFT responses."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, options: Any) -> Any:
        if isinstance(options, dict) and not options.get("name") and isinstance(options.get("source"), str):
            return options | {"name": own_name(options["source"])}
        return options

    @model_validator(mode="after")
    def _no_metric_of_another(self) -> Self:
        if "gain" in self.name.split("_") or self.name == "rank_correlation":
            raise ValueError(f"name = {self.name}: policy/reward_{self.name} is another metric: choose another name")
        return self


class PipelineReward(_SourceConfig):
    """The reward model of the stage `reward`."""

    source: Literal["pipeline"] = "pipeline"
    """`pipeline`."""


class ModelReward(_SourceConfig):
    """Another reward model: an artifact of a reward stage, or a Hugging Face sequence classifier with one label."""

    source: str = unkeyed(..., pattern=r"^model:.+$")
    """`model:` followed by a folder, or by `org/name@revision` on the hub. The model gets the conversation as text and
    uses its own tokenizer and chat template."""


class _CalledReward(_SourceConfig):
    """The options of a Python function, called in a separate process."""

    source: str
    timeout: float = unkeyed(60.0, gt=0)
    """Time limit in seconds of one call, which scores all responses of an update, and of importing the module."""

    @property
    def where(self) -> str:
        """Return the option and the function, for messages."""
        return f"ppo.rewards: {self.source}"


class FunctionReward(_CalledReward):
    """A Python function, called in a separate process: `function(prompts, responses, rows)` returns the scores."""

    source: str = Field(..., pattern=r"^function:[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`function:MODULE:NAME`."""
    root: str = unkeyed(".", min_length=1)
    """The folder that MODULE is imported from; `.`: the current directory when the run begins."""
    code: str = "auto"
    """sha256 over the source of MODULE and of the modules that it imports from `root`; each run computes it again."""

    @property
    def target(self) -> tuple[str, str]:
        """Module and name of the function."""
        _, module, name = self.source.split(":")
        return module, name


class PluginReward(_CalledReward):
    """A function of an installed distribution, named by an entry point of the group `tether.rewards`. It is called like
    a `function:`."""

    source: str = Field(..., pattern=r"^plugin:[\w.-]+$")
    """`plugin:NAME`."""
    code: str = "auto"
    """Name and version of its distribution and sha256 of its files; each run computes it again."""

    @property
    def entry(self) -> str:
        """Return the entry point's name."""
        return self.source.partition(":")[2]


class HttpReward(_SourceConfig):
    """A scorer behind HTTP. A bearer token comes from the environment variable TETHER_REWARD_TOKEN."""

    source: str = Field(..., pattern=r"^http:https?://[^\s/?#@]+(/[^\s?#]*)?$")
    """`http:URL`, as `http:http://127.0.0.1:8000/score`; without credentials or a query."""
    shape: Literal["tether", "openrlhf"] = "tether"
    """`tether` sends prompts (messages), responses and rows; `openrlhf` sends what OpenRLHF sends its reward server."""
    version: str = "auto"
    """The scorer's version. `auto` asks the scorer (GET URL) when each run begins."""
    told: str = ""
    """The version that the scorer reported to this run. `none`: it reports no version, and no stored result of PPO is
    reused."""
    batch_size: int = unkeyed(64, ge=1)
    """Most responses in one request."""
    timeout: float = unkeyed(60.0, gt=0)
    """Time limit of one answer in seconds."""
    patience: float = unkeyed(300.0, ge=0)
    """How many seconds to retry, while one batch is scored, if the scorer does not answer, or answers 429 or 5xx; the
    waits double from 1 s to 15 s. After that the stage ends, and the same command continues from its checkpoint."""

    @property
    def version_known(self) -> str:
        """Return the version that scores must come from; `none` if the scorer reports none, empty before it was
        asked."""
        return self.told if self.version == "auto" else self.version

    @property
    def url(self) -> str:
        """Return the scorer's address."""
        return self.source.removeprefix("http:")


class VerifierReward(_SourceConfig):
    """A built-in check of the response: 1 if it holds, else 0."""

    source: str = Field(..., pattern=r"^verifier:(exact|number|regex|json_schema)$")
    """`verifier:exact` (the same text), `verifier:number` (the last number of the response), `verifier:regex` (the
    pattern is found) or `verifier:json_schema` (JSON that fits the schema)."""
    column: str | None = None
    """The column of the prompt's row that holds the expected value; `data.reward_columns` must name it too."""
    value: JsonValue = None
    """The expected value for every response, instead of `column`: a text, a number, a pattern or a schema."""
    extract: str | None = None
    """A regular expression. Only the match of its first group (without groups, of the whole) is checked; no match
    scores 0."""
    ignore_case: bool = False
    """`exact` and `regex`: ignore the difference between upper and lower case."""
    tolerance: float = Field(1e-6, ge=0)
    """`number`: the largest allowed difference, divided by max(1, |expected number|)."""

    @property
    def check(self) -> str:
        """Return the name of the check."""
        return self.source.partition(":")[2]

    @model_validator(mode="after")
    def _expects_one_thing(self) -> Self:
        if (self.column is None) == (self.value is None):
            raise ValueError(f"{self.source}: set either column (of the prompt's row) or value (one for all)")
        patterns = [("extract", self.extract)] + ([("value", self.value)] if self.check == "regex" else [])
        for field, pattern in patterns:
            if pattern is not None:
                try:
                    re.compile(str(pattern))
                except re.error as error:
                    raise ValueError(f"{field} = {pattern}: this is not a regular expression: {error}") from None
        return self


class RuleFunction(FunctionReward):
    """A function that counts violations of `ppo.rules`."""

    @property
    def where(self) -> str:
        return f"ppo.rules: {self.source}"


class RulesConfig(Settings):
    """The team's own rules for responses: patterns, or a Python function, that count violations."""

    file: str | None = unkeyed(None, min_length=1)
    """A YAML or JSON file of patterns, `name: regular expression`; it is read into `patterns` when the run begins."""
    patterns: dict[str, str] = Field(default_factory=dict)
    """Maps a name to a Python regular expression. Each match in a response is a violation."""
    function: str | None = Field(None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`MODULE:NAME`, instead of patterns: `function(prompts, responses, rows)` returns each response's number of
    violations. It runs like a `function:` of `ppo.rewards`."""
    root: str = unkeyed(".", min_length=1)
    """The folder that MODULE is imported from; `.`: the current directory when the run begins."""
    timeout: float = unkeyed(60.0, gt=0)
    """Time limit in seconds of one call of the function, and of importing its module."""
    code: str = "auto"
    """sha256 over the source of MODULE and of the modules that it imports from `root`; each run computes it again."""
    drop: tuple[str, ...] = keyed_if_set(())
    """PPO's updates leave out responses that violate one of these rules: names of patterns, or `violations` for any
    violation. Nothing is learned from them, not even to avoid them. They stay in all metrics but the losses'."""
    penalty: dict[str, float] = keyed_if_set({})
    """Maps a rule, named as in `drop`, to what PPO subtracts once from the rewarded score of each response that
    violates it: above 0, in standard deviations of SFT's scores, as `ppo.score.length_penalty`, and not clipped."""

    @model_validator(mode="after")
    def _patterns_or_a_function(self) -> Self:
        if (self.function is None) == (self.file is None and not self.patterns):
            raise ValueError("rules: set either file (or patterns) or function")
        for name, pattern in self.patterns.items():
            check_pattern(name, pattern)
        return self if self.file is not None else self.with_known_names()  # a file is read when the run begins

    def with_known_names(self) -> Self:
        """Return the rules. Raises ValueError if `drop` or `penalty` is not of a rule, or a penalty is not above 0."""
        for option, names in (("drop", self.drop), ("penalty", self.penalty)):
            if unknown := sorted({*names} - {"violations", *self.patterns}):
                rules = ", ".join(["violations", *self.patterns])
                raise ValueError(f"rules.{option}: there is no rule {unknown[0]}. Name one of {rules}")
        if twice := sorted({*self.drop} & {*self.penalty}):
            raise ValueError(f"rules: {twice[0]} is in drop and in penalty. A dropped response has no score to lower")
        if low := sorted(name for name, amount in self.penalty.items() if amount <= 0):
            raise ValueError(f"rules.penalty: {low[0]} is {self.penalty[low[0]]:g}. Set it above 0; it is subtracted")
        return self

    @property
    def caller(self) -> RuleFunction | None:
        """Return how to call the function; None if there are patterns."""
        if self.function is None:
            return None
        options = {"root": self.root, "timeout": self.timeout, "code": self.code}
        return RuleFunction(source=f"function:{self.function}", **options)


def check_pattern(name: str, pattern: str) -> None:
    """Raise ValueError if a rule's name is not valid in a metric's name, or if its pattern is not usable."""
    if not re.fullmatch(_NAME, name) or name.startswith("violations"):
        raise ValueError(f"rules: {name}: a name has letters, digits and _, and does not begin with violations")
    try:
        empty = re.search(pattern, "") is not None
    except re.error as error:
        raise ValueError(f"rules: {name}: {pattern} is not a regular expression: {error}") from None
    if empty:
        raise ValueError(f"rules: {name}: {pattern} matches the empty text, so it would match everywhere. Correct it")


def own_name(source: str) -> str:
    """Return the default name of a source: the function's, the verifier's, the last part of the model's, or its
    kind."""
    kind, _, rest = source.partition(":")
    if kind == "model":
        rest = rest.partition("@")[0].rstrip("/").rpartition("/")[2]
    last = re.sub(r"\W+", "_", rest.rpartition(":")[2], flags=re.ASCII).strip("_")
    return kind if kind in ("http", "pipeline") or not re.match(_NAME, last) else last


def _kind(entry: Any) -> str | None:
    source = entry.get("source") if isinstance(entry, dict) else getattr(entry, "source", None)
    kind = str(source).partition(":")[0]
    return kind if kind in KINDS else None


RewardSource = Annotated[
    Annotated[PipelineReward, Tag("pipeline")]
    | Annotated[ModelReward, Tag("model")]
    | Annotated[FunctionReward, Tag("function")]
    | Annotated[PluginReward, Tag("plugin")]
    | Annotated[HttpReward, Tag("http")]
    | Annotated[VerifierReward, Tag("verifier")],
    Discriminator(
        _kind,
        custom_error_type="reward_source",
        custom_error_message="needs a source: pipeline, model:FOLDER_OR_HUB_ID, function:MODULE:NAME, plugin:NAME, "
        "http:URL or verifier:NAME",
    ),
]
"""An entry of `ppo.rewards`; its options depend on its `source`."""


def check_rewards(sources: tuple[RewardSource, ...]) -> None:
    """Raise ValueError if a list of sources gives no reward, or if two of them have the same name."""
    if not sources:
        raise ValueError("rewards: the list is empty: name a source, or leave rewards out for the pipeline's own model")
    if not any(source.weight and not source.judge for source in sources):
        raise ValueError("rewards: no source rewards: each is a judge or has weight 0. Give one a weight")
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rewards: two sources are called {name}: give each a name of its own")
