"""The engine of studies: compute runs that share stages, one after the other, within a budget of minutes.

A sub-run is an ordinary run with two tags: the study's name, and a digest of its config. The tags are the study's only
record. After a kill the same call continues: a sub-run that has ended is not computed again unless its inputs or code
have changed, and one that was stopped begins again under the same keys, so stored results are found and training
continues from its checkpoint.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from rich.console import Console

from components.base.errors import CheckFailed, GateFailed, UserError
from components.base.hashing import digest_json
from components.store.leases import Lease, leased
from flows.config.run_config import RunConfig, to_values
from flows.launch.begin import Launch, new_run
from flows.launch.request import Request
from flows.launch.run_computing import compute, first_to_compute
from tasks.execution.context import Reuse
from tasks.execution.stage_progress import output, say
from tasks.runs.config import run_values
from tasks.runs.run_label import LONGEST_NAME, Label
from tasks.runs.status import RunStatus, load_readable, load_status

ENDED = ("passed", "cached", "waived", "skipped", "gate_failed")
"""States of a run that is not computed again. A failed gate is an outcome; what failed otherwise is tried again."""


class SubRun(NamedTuple):
    """A run of a study, whether or not it has begun; `until` is its last stage."""

    name: str
    config: RunConfig
    until: str = "ppo"

    @property
    def key(self) -> str:
        """Return the start of a digest of its options, which tells it from the study's other runs."""
        return digest_json([to_values(self.config), self.until])[:16]


@dataclass
class Study:
    """A study that this process computes. `kind`, such as `sweep`, is the name of its runs' tag."""

    home: Path
    kind: str
    name: str
    profile: str
    deadline: float = float("inf")
    """No run begins after it, on the clock of `time.monotonic`."""
    console: Console = field(default_factory=output)
    server: ExitStack = field(default_factory=ExitStack)
    """Stops the Prefect server that its runs share, if they have started one."""

    @property
    def folder(self) -> Path:
        """Return the folder of its page and its lock."""
        return self.home / f"{self.kind}s" / self.name

    def lock(self) -> AbstractContextManager[Lease]:
        """Hold the study's lock. Raises UserError if another process computes the study."""

        def refuse() -> None:
            raise UserError(f"{self.kind} {self.name}: another process computes it. Wait until it has ended.")

        return leased(self.folder / "lock", refuse)

    def runs(self, key: str | None, states: Collection[str] = ENDED) -> Iterator[RunStatus]:
        """Yield the runs with this key (None: with any) in one of `states`, newest first."""
        tags = {self.kind: self.name}.items() if key is None else self.label("", key).tags.items()
        yield from (run for run in load_readable(self.home)[0] if tags <= run.tags.items() and run.state in states)

    def run(self, sub_run: SubRun) -> RunStatus | None:
        """Return the run of `sub_run`, computed unless one has ended with what its inputs and code give today; None if
        the budget is spent.

        A failed gate or check is an outcome, which the status has. Other errors of a stage are passed on unchanged.
        """
        launch, ended = self.begin(sub_run)
        if ended is not None or time.monotonic() >= self.deadline:
            launch.ctx.discard()
            return ended
        say(self.console, f"{self.kind} {self.name}: {sub_run.name}")
        try:
            compute(launch, self.server)
        except (GateFailed, CheckFailed) as error:
            say(self.console, f"{sub_run.name}: {error}")
        return load_status(self.home, launch.ctx.run)

    def begin(self, sub_run: SubRun) -> tuple[Launch, RunStatus | None]:
        """Begin the run of `sub_run`, not yet computed, and return it with the one that has ended with what its inputs
        and code give today, None without one. Raises UserError as `new_run`."""
        request = Request(until=sub_run.until, label=self.label(sub_run.name, sub_run.key))
        launch = new_run(self.home, self.profile, sub_run.config, request)
        try:
            return launch, next((run for run in self.runs(sub_run.key) if is_current(run, launch)), None)
        except BaseException:
            launch.ctx.discard()
            raise

    def label(self, name: str, key: str) -> Label:
        """Return the label of the run with this key."""
        return Label(shorten(name, LONGEST_NAME, placeholder=" …"), {self.kind: self.name, f"{self.kind}.key": key})


def is_current(ended: RunStatus, launch: Launch) -> bool:
    """Return whether a run that has ended has the gates of `launch`, and results of the keys that `launch` gives them:
    of the files and the code as they are now."""
    try:
        gates = run_values(launch.ctx.home, ended.run).get("gates")
    except UserError:  # a damaged file
        return False
    if gates != to_values(launch.config)["gates"]:
        return False
    # A stage that every new run recomputes (a reward without a version) keeps its key.
    ctx = replace(launch.ctx, reuse=Reuse(pinned=launch.ctx.reuse.pinned))
    stopped = next((stage.name for stage in ended.stages if stage.state == "gate_failed"), ended.until)
    return first_to_compute(launch.config, launch.sources, ctx, stopped, ended.results) is None
