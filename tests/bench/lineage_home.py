"""A home of many runs for the questions about lineage: some written by the real pipeline, the others copies of those.

The real pipeline, runner, store and tracking write the first runs; only the stages' functions are replaced, by ones
that write a few bytes. MLflow takes about a second a run, so the others are copies, with ids and digests of their own:
of the runs' folders, of the store's records, of MLflow's rows.
"""

import hashlib
import io
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from components.base.hashing import digest_json
from components.base.settings import Settings
from components.gates.table import GATES
from components.store.records import record_text
from components.store.retention import stored
from components.store.store import ArtifactStore, Record
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config, to_values
from flows.rlhf import pipeline
from flows.sources import Sources
from tasks.execution.context import RunContext
from tasks.execution.runner import run_stage
from tasks.result import Given, Input, StageResult
from tasks.runs.status import list_runs
from tasks.stages import Stage
from tests.champions import make_champion

SFT, REWARD = 25, 10
"""Runs that share one; all share the data."""
WRITTEN = 50
"""Runs that are no copies."""
UPDATES = 5
"""PPO updates, each a point of the curves."""


class Quick(Stage):
    """A stage of the pipeline whose function computes nothing; key, record and life are the real stage's."""

    def load_run(self) -> Callable[..., dict[str, float]]:
        """The function."""
        return lambda job, inputs, out, observe: quick(self, job, inputs, out, observe)


def quick(stage: Stage, job: Settings, inputs: Mapping[str, Path], out: Path, observe: Callable[..., None]) -> Any:
    """An artifact that differs where the job or an input does, and a metric for every gate."""
    artifact = out / "artifact"
    artifact.mkdir(parents=True)
    made_of = {name: path.name for name, path in inputs.items()}
    text = digest_json({"stage": stage.name, "job": job.model_dump(mode="json"), "inputs": made_of})
    (artifact / "result.txt").write_text(text)
    metrics = {gate.metric: int(text[:4], 16) / 65536 for gate in GATES.values() if gate.stage == stage.shown}
    if stage.name == "ppo":
        for step in range(1, UPDATES + 1):
            observe(step, {name: value * step for name, value in metrics.items()}, total=UPDATES)
    return metrics


def config_of(number: int, data: Path) -> RunConfig:
    """The config of a run; those that share an artifact agree on what it depends on."""
    off = [f"gates.{gate.name}=null" for gate in GATES.values()]
    values = [
        f"data.preferences={data}", f"sft.learning_rate={1e-3 * (1 + number // SFT)}",
        f"reward.learning_rate={1e-6 * (1 + number // REWARD)}", f"ppo.kl.coefficient={0.1 + number / 1e5:.6g}",
    ]  # fmt: skip
    return load_config("tiny", [parse_override(text) for text in [*off, *values]]).resolved()


def write_run(home: Path, number: int) -> str:
    """One whole run, recorded in MLflow; returns its id."""
    data, sheet = home.parent / "pairs.jsonl", home.parent / "sheet.csv"
    data.write_text(json.dumps({"prompt": "where is it", "chosen": "here", "rejected": "there"}) + "\n")
    sheet.write_text("")
    config = config_of(number, data)
    console = Console(file=io.StringIO())
    with RunContext.start(home, "tiny", config.gates, config=to_values(config), console=console) as ctx:

        def run(stage: Stage, job: Settings, inputs: Given) -> StageResult:
            return run_stage(Quick(*stage), job, inputs, ctx)

        pipeline(config, Sources(data={"preferences": Input.of(data)}, sheet=Input.of(sheet)), run)
    return ctx.run


def write_home(home: Path, runs: int, written: int = WRITTEN) -> None:
    """Runs until there are so many: `written` by the pipeline, then as many copies of all these as fit."""
    there = len(list_runs(home)) if (home / "runs").is_dir() else 0
    for number in range(there, min(runs, written)):
        write_run(home, number)
        print(f"run {number + 1}", file=sys.stderr)
        make_champion(home, weights="none")
    if runs >= 2 * written:
        names = [run for run in list_runs(home) if Copy.IDS.fullmatch(run)]  # a copy's id is longer
        found = [each.record for each in stored(ArtifactStore(home), ArtifactStore(home).place)]
        records = [each for each in found if isinstance(each, Record) and each.run in names]
        for copy in range(max(1, there // written), runs // written):
            Copy(home, copy, names, records).write()


class Copy:
    """The written runs once more, under other ids; only the data are the same.

    Args:
        number: of the copy; the same number gives the same ids.
        runs: those that were written.
        records: what they computed.
    """

    IDS = re.compile(r"\b(?:[0-9a-f]{64}|[0-9a-f]{32}|\d{8}-\d{6}-[0-9a-f]{4})\b|m-[0-9a-f]{32}")
    TABLES = (
        "runs", "metrics", "latest_metrics", "params", "tags", "datasets", "inputs", "input_tags", "logged_models",
        "logged_model_metrics", "logged_model_params", "logged_model_tags", "model_versions", "model_version_tags",
    )  # fmt: skip

    def __init__(self, home: Path, number: int, runs: Sequence[str], records: Sequence[Record]) -> None:
        self.home, self.number, self.runs, self.records = home, number, runs, records
        self.store = ArtifactStore(home)
        data = [each for each in self.records if each.stage == "validate"]
        self.kept = {id_: id_ for each in data for id_ in (each.key, each.digest, *each.inputs.values())}
        self.kept |= {id_[:32]: id_ for id_ in list(self.kept)}
        self.digests: dict[str, str] = {}
        self.digests = {
            each.digest: digest_json({name: self.id(sha) for name, sha in each.files.items()})
            for each in self.records
            if each.stage != "validate"
        }
        self.digests |= {old[:32]: new[:32] for old, new in list(self.digests.items())}

    def id(self, old: str) -> str:
        """Another id, digest or key of the same form, the same for the same one."""
        if old in self.kept:
            return old
        if old in self.digests:
            return self.digests[old]
        new = hashlib.sha256(f"{old[:34]} {self.number}".encode()).hexdigest()
        if old.startswith("m-"):
            return f"m-{new[:32]}"
        return f"{old[:-4]}{self.number:02d}{new[:4]}" if old[8:9] == "-" else new[: len(old)]

    def text(self, old: str) -> str:
        """A text with other ids."""
        return self.IDS.sub(lambda found: self.id(found.group()), old)

    def write(self) -> None:
        """Folders, records, rows."""
        for run in self.runs:
            for path in (self.home / "runs" / run).rglob("*"):
                if path.is_file():
                    target = self.home / "runs" / self.id(run) / path.relative_to(self.home / "runs" / run)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(self.text(path.read_text()))
        for record in self.records:
            if record.stage != "validate":
                new = Record.model_validate_json(self.text(record.model_dump_json()))
                self.store.place.create(f"records/{new.key}/1.{new.stage}.json", record_text(new).encode())
        with closing(sqlite3.connect(self.home / "mlflow.db")) as database, database:
            for table in self.TABLES:
                self._copy_rows(database, table)

    def _copy_rows(self, database: sqlite3.Connection, table: str) -> None:
        written = database.execute(f"select * from {table} where rowid <= ?", (self._written(database, table),))
        columns = [column[0] for column in written.description]
        version = columns.index("version") if "version" in columns else None
        rows = []
        for row in written.fetchall():
            new = [self.text(value) if isinstance(value, str) else value for value in row]
            if version is not None:
                new[version] += self.number * 1000
            rows.append(new)
        marks = ",".join("?" * len(columns))
        database.executemany(f"insert or ignore into {table} values ({marks})", rows)

    def _written(self, database: sqlite3.Connection, table: str) -> int:
        """The last row that is no copy: noted before the first one is made."""
        noted = self.home / "rows.json"
        if not noted.is_file():
            last = {each: database.execute(f"select max(rowid) from {each}").fetchone()[0] for each in self.TABLES}
            noted.write_text(json.dumps(last))
        return json.loads(noted.read_text())[table]
