"""The record of a gate: the rule, what a failure usually means, and what to change."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from components.gates.remedies import OptionChange, Setting

Op = Literal["<=", ">=", ">", "==", "between"]


@dataclass(frozen=True)
class Gate:  # long: a row of the page of gates
    """One rule for one final metric. Its threshold is not here: profiles hold the thresholds."""

    name: str
    """`group.short`: the name that `--waive` takes, and the key below `gates` in a config."""
    op: Op
    """The comparison. Gains use `>`: if nothing changed, the interval has width 0, and a gain of 0 must fail."""
    description: str
    metric: str = ""
    """The metric `group/name` that is judged; empty means `group/short`."""
    interval: Literal["end", "both", "none"] = "end"
    """`end`: the metric is an end of an interval, or `or_within` says what chance reaches. `both`: both ends,
    `<metric>_low` and `<metric>_high`, must lie within the range. `none`: a count, or a check without such error."""
    or_within: str | tuple[str, str] | None = None
    """A metric that replaces an upper threshold if it is larger (ECE's simulated null); for `between`, the two metrics
    of a second allowed range (the slope's simulated null)."""
    stage: str = ""
    """The stage whose final metrics it judges; empty means the stage `group`."""
    warn_only: bool = False
    """Shown and recorded, but never stops a run."""
    if_measured: bool = False
    """For a metric that not every run has: the gate is off if neither the metric nor its `estimate` is there. It fails
    on NaN, and on an estimate whose interval is unknown."""
    cause: str = ""
    """What a failure usually means, as Markdown; names of options stand in backticks."""
    remedy: str = ""
    """What to change, as Markdown."""
    changes: tuple[OptionChange, ...] = ()
    """Changes of options. The first that applies to a run is suggested, with a value computed from the run's own."""
    command: str = ""
    """A command to try if no change applies. A name in capitals, such as FILE, stands for the reader's own."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.metric or self.name.replace(".", "/", 1))
        object.__setattr__(self, "stage", self.stage or self.group)

    @property
    def group(self) -> str:
        """Return its group below `gates` in a config, and the group of its metric."""
        return self.name.partition(".")[0]

    @property
    def estimate(self) -> str:
        """Return the metric of whose interval it judges an end: `policy/kl` for `policy/kl_high`; else its own."""
        return self.metric.removesuffix("_low").removesuffix("_high")

    @property
    def short(self) -> str:
        """Return its key below `gates.<group>` in a config."""
        return self.name.partition(".")[2]

    def setting(
        self, value: float | None, threshold: float | tuple[float, float] | None, values: Mapping[str, JsonValue]
    ) -> Setting | None:
        """Return the option to change after the gate failed; None if no change applies.

        Args:
            value: the metric that failed.
            threshold: its threshold.
            values: the run's options by dotted name.
        """
        settings = (change.setting(value, threshold, values) for change in self.changes)
        return next((setting for setting in settings if setting is not None), None)
