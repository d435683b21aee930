"""Use Tether from Python, for example in a notebook: run the pipeline and read its results as data frames.

    from flows.api import load_run, run

    found = run("tiny", {"ppo.kl.target": 2})
    found.state                       # "passed", "gate_failed", "awaiting_labels", ...
    found.gates()                     # one row per gate
    found.curves("ppo")["ppo/kl"]     # one column per metric, by step

These functions do what the commands do, in the same home (`TETHER_HOME`, else `.tether` in the current directory).
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.base.errors import GateFailed, UserError
from flows.environment import prepare_environment, tether_home

if TYPE_CHECKING:
    import pandas as pd

    from flows.config.profiles import Override
    from flows.launch.begin import Launch
    from flows.models.lineage import LineageGraph
    from tasks.runs.status import RunStatus


@dataclass(frozen=True)
class Run:
    """The state of a run at the time it was loaded."""

    home: Path
    status: "RunStatus"
    """What `tether status RUN --json` prints, typed."""

    @property
    def id(self) -> str:
        """Return the run's id, which every command accepts."""
        return self.status.run

    @property
    def state(self) -> str:
        """Return `passed`, `gate_failed`, `awaiting_labels`, `failed`, `interrupted` or `running`."""
        return self.status.state

    @property
    def passed(self) -> bool:
        """Return whether every stage ended and every gate passed or was waived."""
        return self.state == "passed"

    def metrics(self) -> "pd.DataFrame":
        """Return the final metrics: columns `stage`, `metric`, `value`; an unknown value is NaN."""
        import pandas as pd

        rows = [(stage.name, name, value) for stage in self.status.stages for name, value in stage.metrics.items()]
        return pd.DataFrame(rows, columns=["stage", "metric", "value"]).astype({"value": "float64"})

    def gates(self) -> "pd.DataFrame":
        """Return the judged gates: columns `gate`, `passed`, `waived`, `off`, `warns`, `value`, `threshold`, `text`.

        A gate that is off counts as passed. `threshold` is a number, a pair, or None if the gate is off.
        """
        import pandas as pd

        columns = ["gate", "passed", "waived", "off", "warns", "value", "threshold", "text"]
        rows = [
            (gate.name, gate.passed, gate.waived, gate.threshold is None, gate.warn_only, gate.value, gate.threshold,
             gate.text)
            for stage in self.status.stages for gate in stage.gates
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns).astype({"value": "float64"})

    def curves(self, stage: str) -> "pd.DataFrame":
        """Return the metrics that a stage recorded during training: one column per metric, indexed by `step`;
        empty if it recorded none.

        Raises:
            UserError: the run has no such stage.
        """
        import pandas as pd

        from tasks.runs.points import curves, points_file, read_points
        from tasks.runs.status import run_folder

        self._stage(stage)
        series = curves(read_points(points_file(run_folder(self.home, self.id), stage)))
        frame = pd.DataFrame({name: pd.Series(dict(pairs), dtype="float64") for name, pairs in series.items()})
        return frame.rename_axis("step").sort_index()

    def artifact(self, stage: str) -> Path:
        """Return the folder of a stage's artifact in the store. Do not write to it.

        Raises:
            UserError: the run has no such stage, or the stage published nothing.
        """
        from components.store.store import ArtifactStore

        digest = self._stage(stage).digest
        if digest is None:
            raise UserError(f"stage {stage} of run {self.id} has published nothing: it is {self._stage(stage).state}.")
        return ArtifactStore(self.home).path(digest)

    @property
    def report(self) -> Path:
        """Return the path of the HTML report. The file exists once the run has ended."""
        from tasks.runs.journal import REPORT
        from tasks.runs.status import run_folder

        return run_folder(self.home, self.id) / REPORT

    def _stage(self, name: str) -> Any:
        by_name = {stage.name: stage for stage in self.status.stages}
        if name not in by_name:
            raise UserError(f"run {self.id} has no stage {name!r}; its stages are {', '.join(by_name)}.")
        return by_name[name]

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage.name} {stage.state}" for stage in self.status.stages)
        return f"<Run {self.id} ({self.status.profile}): {self.state}; {stages}>"


def run(
    profile: str = "demo",
    options: Mapping[str, Any] | None = None,
    *,
    until: str | None = None,
    waive: Sequence[str] = (),
    because: str = "",
    refresh: Sequence[str] = (),
    home: str | Path | None = None,
) -> Run:
    """Run the pipeline as `tether run` does, and reuse every stored result.

    A failed gate or missing labels end the run without an exception: check `state` of the returned run.

    Args:
        profile: a built-in profile's name, or a YAML file.
        options: option names and values, as `--set` takes them, such as `{"ppo.kl.target": 2}`.
        until: the last stage to run; None runs all of them.
        waive: gates that may fail; `because` gives the reason.
        refresh: stages to recompute even if a result is stored.
        home: the Tether home; it also replaces `TETHER_HOME` for the rest of this process.

    Raises:
        UserError: an option, file or run is wrong; the command would end with exit code 2.
    """
    place = _ready(home)
    from flows.config.run_config import load_config
    from flows.launch.begin import new_run
    from flows.launch.request import Request, asked_waivers

    request = Request(asked_waivers(waive, because), refresh, until)
    return _computed(new_run(place, str(profile), load_config(profile, _overrides(options)), request))


def rerun(
    stage: str,
    from_run: "str | Run | None" = None,
    options: Mapping[str, Any] | None = None,
    *,
    until: str | None = None,
    waive: Sequence[str] = (),
    because: str = "",
    refresh: Sequence[str] = (),
    home: str | Path | None = None,
) -> Run:
    """Recompute one stage from an earlier run's results, as `tether rerun` does.

    Later stages are recomputed too if the result differs.

    Args:
        stage: a stage as `tasks.stages.PIPELINE` names it, or a sub-stage such as `reward.judge`.
        from_run: the earlier run; None takes the newest one whose results before `stage` are all in the store.
        options, until, waive, because, refresh, home: as `run`.

    Raises:
        UserError: as `run`.
    """
    place = _ready(home if home is not None or not isinstance(from_run, Run) else from_run.home)
    from flows.launch.begin import rerun as again
    from flows.launch.request import Request, asked_waivers

    name = from_run.id if isinstance(from_run, Run) else from_run
    request = Request(asked_waivers(waive, because), refresh, until)
    return _computed(again(place, stage, name, _overrides(options), request=request))


def load_run(name: str | None = None, *, home: str | Path | None = None) -> Run:
    """Load an earlier run; None loads the newest.

    Raises:
        UserError: there is no such run, or its status file is damaged.
    """
    place = _ready(home)
    from tasks.runs.status import load_status

    return Run(place, load_status(place, name))


def lineage(start: "str | Run", *, downstream: bool = False, home: str | Path | None = None) -> "LineageGraph":
    """Return what an artifact was made of, or what was made of it, as `tether lineage` does.

    Args:
        start: a run, a model (`tether-policy@champion`), the start of a digest or key, or a file that runs have read.
        downstream: return what was made of it.
        home: as for `run`.

    Raises:
        UserError: nothing with that name is known.
    """
    place = _ready(home if home is not None or not isinstance(start, Run) else start.home)
    from flows.models.lineage import lineage as graph

    return graph(place, start.id if isinstance(start, Run) else start, downstream)


def _ready(home: str | Path | None) -> Path:
    if home is not None:
        os.environ["TETHER_HOME"] = str(home)
    place = tether_home()
    prepare_environment(place)
    from tasks.runs.schema import check_home

    check_home(place)
    return place


def _overrides(options: Mapping[str, Any] | None) -> "list[Override]":
    from flows.config.profiles import Override

    return [Override(tuple(name.split(".")), value) for name, value in (options or {}).items()]


def _computed(launch: "Launch") -> Run:
    from flows.launch.run_computing import compute
    from tasks.runs.status import load_status

    with contextlib.suppress(GateFailed):  # the state of the run reports it
        compute(launch)
    return Run(launch.ctx.home, load_status(launch.ctx.home, launch.ctx.run))
