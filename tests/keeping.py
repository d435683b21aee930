"""Homes of toy runs for backups, a writer that goes on beside one, and calls of both commands' functions."""

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console

from components.store.store import ArtifactStore, Record
from flows.keeping.backup import Written, back_up
from flows.keeping.copying import Steps
from flows.keeping.manifest import Manifest
from flows.keeping.restore import restore
from tasks.runs.journal import Sent
from tasks.runs.status import StatusFile
from tests import stored_run
from tests.stored_run import SOURCE

T = TypeVar("T")


class Beside(Steps):
    """Steps that are shown nowhere, with a call after each item: something happens beside the command."""

    def __init__(self, call: Callable[[], object] = lambda: None) -> None:
        super().__init__(Console(quiet=True))
        self._call = call

    def all(self, part: str, items: Collection[T], work: Callable[[T], object], at_once: int = 1) -> None:
        """Do the work of the items of a part."""
        self._call()
        for item in items:
            work(item)
            self._call()


def backed_up(home: Path, target: Path, call: Callable[[], object] = lambda: None) -> tuple[Written, list[str]]:
    """A backup, and what was said."""
    said: list[str] = []
    return back_up(home, target, Beside(call), said.append), said


def restored(source: Path, home: Path, call: Callable[[], object] = lambda: None) -> Manifest:
    """A restore."""
    return restore(source, home, Beside(call), lambda _: None)


class Writer:
    """Runs of two stages, written step by step as a run does it: `ppo` is made from `sft`, and registered in MLflow."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = ArtifactStore(home)
        home.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
            database.execute("create table if not exists facts (run text, stage text)")
            database.execute("create table if not exists registered (digest text)")
        self._left: Iterator[None] = iter(())
        self.runs = 0

    def step(self) -> None:
        """Do the next thing that a run does; after its last, the next run begins."""
        for _ in self._left:
            return
        self.runs += 1
        self._left = self._run(f"r{self.runs:03d}")
        next(self._left)

    def whole_run(self) -> str:
        """Do a run to its end; returns its id."""
        self.runs += 1
        for _ in self._run(f"r{self.runs:03d}"):
            pass
        return f"r{self.runs:03d}"

    def _run(self, run: str) -> Iterator[None]:
        folder = self.home / "runs" / run
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump({"project": "toy", "seed": 0}))
        status = StatusFile.start(folder, run, "tiny", ["sft", "ppo"])
        yield
        sent = Sent(project="toy", experiment="1", parent=run)
        sent.save(folder)
        yield
        inputs = {"data": SOURCE}
        for stage in ("sft", "ppo"):
            status.begin(stage)
            yield
            record = publish(self.store, stage, run, inputs)
            yield
            status.update(stage, state="passed", key=record.key, digest=record.digest)
            yield
            self._insert("insert into facts values (?, ?)", run, stage)
            yield
            sent.done[stage] = 1
            sent.save(folder)
            yield
            inputs = {"sft": record.digest}
        self._insert("insert into registered values (?)", record.digest)
        yield
        status.finish()
        yield

    def _insert(self, statement: str, *values: str) -> None:
        with closing(sqlite3.connect(self.home / "mlflow.db")) as database, database:
            database.execute(statement, values)


def publish(store: ArtifactStore, stage: str, run: str, inputs: dict[str, str]) -> Record:
    """A record of a stage, with one file of its own and one that all have."""
    files = {"value": f"{stage} {run}", "tokenizer.json": "the same in all"}
    return stored_run.publish(store.home, stage, run, files=files, inputs=inputs, parts={"source": {"run": run}})


def dangling(home: Path) -> list[str]:
    """What a home names and does not have: records of runs, of the registry and of records, and facts of MLflow."""
    store, found = ArtifactStore(home), []
    records = [
        record
        for folder in (home / "store" / "records").glob("*")
        for record in store.published(folder.name)
        if isinstance(store.lookup(record.key, record.digest), Record)
    ]
    known = {record.digest for record in records} | {SOURCE}
    for record in records:
        found += [f"{record.stage} of {record.run}: {name}" for name, sha in record.inputs.items() if sha not in known]
    with closing(sqlite3.connect(home / "mlflow.db")) as database:
        facts = set(database.execute("select run, stage from facts"))
        found += [
            f"registered {digest}"
            for (digest,) in database.execute("select digest from registered")
            if digest not in known
        ]
    for path in home.glob("runs/*/run.json"):
        for stage in json.loads(path.read_text())["stages"]:
            if stage["digest"] and stage["digest"] not in known:
                found.append(f"run {path.parent.name}: {stage['name']}")
        sent = Sent.load(path.parent)
        found += [f"facts of {path.parent.name}" for stage in sent.done if (path.parent.name, stage) not in facts]
        if sent.project != "toy" and (path.parent / "mlflow.json").exists():
            found.append(f"project of {path.parent.name}")
    return found
