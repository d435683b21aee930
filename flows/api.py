"""Tether from Python, as in a notebook: run the pipeline, and read what came of it as data frames.

    from flows.api import load_run, run

    found = run("tiny", {"ppo.kl.target": 2})
    found.state                       # "passed", "gate_failed", "awaiting_labels", ...
    found.gates()                     # a gate a row
    found.curves("ppo")["ppo/kl"]     # a metric a column, by step

It is what the commands do, in the same home (`TETHER_HOME`, else `.tether` below the current directory).
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.base.errors import GateFailed, UserError, refuse_credentials
from flows.environment import prepare_environment, tether_home

if TYPE_CHECKING:
    import pandas as pd

    from components.gates.judging import Waiver
    from flows.config.profiles import Override
    from flows.launch.begin import Launch
    from flows.models.lineage import LineageGraph
    from tasks.runs.status import RunStatus


@dataclass(frozen=True)
class Run:
    """A run as it stood when it was loaded."""

    home: Path
    status: "RunStatus"
    """All that `tether status RUN --json` prints, typed."""

    @property
    def id(self) -> str:
        """Its id, which every command takes."""
        return self.status.run

    @property
    def state(self) -> str:
        """`passed`, `gate_failed`, `awaiting_labels`, `failed`, `interrupted` or `running`."""
        return self.status.state

    @property
    def passed(self) -> bool:
        """Whether every stage ended and every gate passed or was waived."""
        return self.state == "passed"

    def metrics(self) -> "pd.DataFrame":
        """The final metrics: columns `stage`, `metric`, `value`; NaN where a value is not known."""
        import pandas as pd

        rows = [(stage.name, name, value) for stage in self.status.stages for name, value in stage.metrics.items()]
        return pd.DataFrame(rows, columns=["stage", "metric", "value"]).astype({"value": "float64"})

    def gates(self) -> "pd.DataFrame":
        """The gates that were judged: columns `gate`, `passed`, `waived`, `off`, `warns`, `value`, `threshold`, `text`.

        A gate that is off has passed. `threshold` is a number, a pair, or None.
        """
        import pandas as pd

        columns = ["gate", "passed", "waived", "off", "warns", "value", "threshold", "text"]
        rows = [
            (each.name, each.passed, each.waived, each.threshold is None, each.warn_only, each.value, each.threshold,
             each.text)
            for stage in self.status.stages for each in stage.gates
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=columns).astype({"value": "float64"})

    def curves(self, stage: str) -> "pd.DataFrame":
        """What a stage measured while it trained: a metric a column, indexed by `step`; no rows where there is nothing.

        Raises:
            UserError: the run has no such stage.
        """
        import pandas as pd

        from tasks.runs.points import curves, points_file, read_points
        from tasks.runs.status import run_folder

        self._stage(stage)
        found = curves(read_points(points_file(run_folder(self.home, self.id), stage)))
        frame = pd.DataFrame({name: pd.Series(dict(pairs), dtype="float64") for name, pairs in found.items()})
        return frame.rename_axis("step").sort_index()

    def artifact(self, stage: str) -> Path:
        """The folder of what a stage published. It is the store's: read it, and never write there.

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
        """The report, an HTML page. It is there once the run has ended."""
        from tasks.runs.journal import REPORT
        from tasks.runs.status import run_folder

        return run_folder(self.home, self.id) / REPORT

    def _stage(self, name: str) -> Any:
        known = {stage.name: stage for stage in self.status.stages}
        if name not in known:
            raise UserError(f"run {self.id} has no stage {name!r}, but {', '.join(known)}.")
        return known[name]

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
    """Run the pipeline, reusing every result that is stored; as `tether run`.

    A failed gate or missing labels end the run and raise nothing: its `state` says so.

    Args:
        profile: a built-in profile's name, or a YAML file.
        options: `--set` as a mapping, such as `{"ppo.kl.target": 2}`.
        until: the stage that the run ends after; None is the last one.
        waive: gates that may fail, with the reason `because`.
        refresh: stages to compute though the store has them.
        home: the home, in place of `TETHER_HOME`, for the rest of this process.

    Raises:
        UserError: what was asked can't be done, as the command says with exit code 2.
    """
    place = _ready(home)
    from flows.config.profiles import profile_name
    from flows.config.run_config import load_config
    from flows.launch.begin import new_run

    config = load_config(profile, _overrides(options)).resolved()
    waivers = _waivers(waive, because)
    return _computed(new_run(place, profile_name(profile), config, waivers, refresh, until=until))


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
    """Compute one stage again, and what follows where it differs, from an earlier run's results; as `tether rerun`.

    Args:
        stage: `validate`, `sft`, `reward`, `ppo` or `human_eval`.
        from_run: the earlier run; None takes the newest whose results before `stage` all stand in the store.
        options, until, waive, because, refresh, home: as `run`.

    Raises:
        UserError: as `run`.
    """
    place = _ready(home if home is not None or not isinstance(from_run, Run) else from_run.home)
    from flows.launch.begin import rerun as again

    name = from_run.id if isinstance(from_run, Run) else from_run
    waivers = _waivers(waive, because)
    return _computed(again(place, stage, name, _overrides(options), waivers=waivers, refresh=refresh, until=until))


def load_run(name: str | None = None, *, home: str | Path | None = None) -> Run:
    """An earlier run; None is the newest.

    Raises:
        UserError: there is no such run, or its file is damaged.
    """
    place = _ready(home)
    from tasks.runs.status import load_status

    return Run(place, load_status(place, name))


def lineage(asked: "str | Run", *, downstream: bool = False, home: str | Path | None = None) -> "LineageGraph":
    """What something was made of, or what was made of it; as `tether lineage`.

    Args:
        asked: a run, a model (`tether-policy@champion`), the beginning of a digest or key, or a file that runs read.
        downstream: what was made of it.
        home: as `run`.

    Raises:
        UserError: nothing of that name is known.
    """
    place = _ready(home if home is not None or not isinstance(asked, Run) else asked.home)
    from flows.models.lineage import lineage as graph

    return graph(place, asked.id if isinstance(asked, Run) else asked, downstream)


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


def _waivers(gates: Sequence[str], because: str) -> "list[Waiver]":
    from components.gates.judging import Waiver
    from tasks.runs.journal import current_user

    refuse_credentials("because", because)
    if gates and not because.strip():
        raise UserError(f"waive={gates[0]!r}: say why, with because=TEXT.")
    return [Waiver(gate=gate, user=current_user(), reason=because.strip()) for gate in gates]


def _computed(launch: "Launch") -> Run:
    from flows.launch.computing import compute
    from tasks.runs.status import load_status

    with contextlib.suppress(GateFailed):  # the run's state says so
        compute(launch)
    return Run(launch.ctx.home, load_status(launch.ctx.home, launch.ctx.run))
