"""The engine of studies: compute runs that share stages, one after the other, within a budget of minutes.

A sub-run is an ordinary run with two tags: the study's name, and a digest of its config. The tags are the study's only
record. After a kill the same call continues: a sub-run that has ended is not computed again unless its inputs or code
have changed, and one that was stopped begins again under the same keys, so stored results are found and training
continues from its checkpoint.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten

from pydantic import JsonValue

from components.base.errors import CheckFailed, GateFailed, UserError
from components.base.hashing import digest_json
from components.store.leases import leased
from flows.config.run_config import RunConfig, to_values
from flows.launch.begin import Launch, new_run
from flows.launch.request import Request
from flows.launch.run_computing import compute, first_to_compute
from tasks.execution.context import Reuse
from tasks.runs.config import run_values
from tasks.runs.run_label import LONGEST_NAME, Label
from tasks.runs.status import RunStatus, load_readable, load_status

ENDED = ("passed", "cached", "waived", "skipped", "gate_failed")
"""States of a run that is not computed again. A failed gate is an outcome; what failed otherwise is tried again."""


@dataclass
class Study:
    """A study that this process computes: `begin` each of its runs, and `run` it while the study is `held`."""

    home: Path
    kind: str
    """What its runs' tag is called, such as `sweep`."""
    name: str
    profile: str
    minutes: float | None = None
    """No run begins later than this; None for any time."""
    server: ExitStack = field(default_factory=ExitStack)
    """Stops the Prefect server that its runs share, if they have started one."""
    began: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """Return the folder of its page and its lock."""
        return self.home / f"{self.kind}s" / self.name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the study's lock and server. Raises UserError if another process computes the study."""

        def refuse() -> None:
            raise UserError(f"{self.kind} {self.name}: another process computes it. Wait until it has ended.")

        with leased(self.folder / "lock", refuse), self.server:
            yield

    def begin(self, name: str, config: RunConfig, until: str = "ppo") -> Launch:
        """Return a run of `config` that ends after the stage `until`, begun but not yet computed. Raises UserError as
        `new_run`."""
        label = self.label(name, [to_values(config), until])
        return new_run(self.home, self.profile, config, Request(until=until, label=label))

    def run(self, launch: Launch) -> RunStatus | None:
        """Return the run that has ended with what `launch`'s inputs and code give today, or else compute `launch`; None
        if the budget is spent.

        A failed gate or check is an outcome, which the status has. Other errors of a stage are passed on unchanged.
        """
        document = launch.ctx.status.document
        with ExitStack() as unless_computed:
            unless_computed.callback(launch.ctx.discard)
            ended = next((run for run in self.runs(document.tags) if _is_current(run, launch)), None)
            spent = self.minutes is not None and time.monotonic() >= self.began + 60 * self.minutes
            if ended is not None or spent:
                return ended
            unless_computed.pop_all()
        launch.ctx.say(f"{self.kind} {self.name}: {document.name}")
        try:
            compute(launch, self.server)
        except (GateFailed, CheckFailed) as error:
            launch.ctx.say(f"{document.name}: {error}")
        return load_status(self.home, launch.ctx.run)

    def label(self, name: str, options: JsonValue) -> Label:
        """Return the label of a run, which `options` tell from the study's other runs."""
        key = digest_json(options)[:16]
        return Label(shorten(name, LONGEST_NAME, placeholder=" …"), {self.kind: self.name, f"{self.kind}.key": key})

    def runs(self, tags: Mapping[str, str], states: Collection[str] = ENDED) -> Iterator[RunStatus]:
        """Yield the runs with these tags in one of `states`, newest first."""
        of_study = {self.kind: self.name, **tags}.items()
        yield from (run for run in load_readable(self.home)[0] if of_study <= run.tags.items() and run.state in states)


def _is_current(ended: RunStatus, launch: Launch) -> bool:
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
