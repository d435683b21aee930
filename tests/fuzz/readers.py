"""The readers that are fuzzed: how a valid file is made, and what reads it. A further reader is one `Reader(...)`.

A reader may end in a value or in a `TetherError`, within `SECONDS` and `MEMORY`, whatever the file holds.
"""

import csv
import datetime
import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from components.base.errors import TetherError
from components.base.hashing import digest_json
from components.data.config import DataConfig, SplitConfig
from components.evaluation.probe_prompts import read_probe, rule_agreement
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.reading_report import reading_of
from flows.config.run_config import check_config, load_config, to_values
from flows.config.yaml import dump, parse
from flows.keeping.copying import Copier
from flows.keeping.manifest import MANIFEST, Manifest, write_manifest
from tasks.runs.schema import check_home, home_schema
from tests.keeping import restored
from tests.sheets import read_sheet

SECONDS = 10
MEMORY = 1 << 30
"""Bytes beyond what the process had when it had read the valid file."""


class Reader(NamedTuple):
    """A reader of files from outside."""

    name: str
    make: Callable[[Path], Path]
    """Write a valid file, and what it needs beside it, into a folder; returns the file that is to be changed."""
    read: Callable[[Path], object]
    """Read it as the product does."""
    named: str = ""
    """What an error must name, where the reader raises each of its errors."""


def file(name: str, content: bytes) -> Callable[[Path], Path]:
    """`make` of a reader whose valid file is this one."""

    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


TEXT = "My parcel, which I ordered on Monday; is late — where is it?"
PAIRS = [
    {"prompt": TEXT, "chosen": "It comes on Tuesday.", "rejected": "That happens.", "margin": 1.5, "category": "late"},
    {"prompt": f"{TEXT} 2", "chosen": "x", "rejected": "y", "votes": 5, "votes_chosen": 4, "votes_helpful": 3},
    {"chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}],
     "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "What?"}]},
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: What?"},
]  # fmt: skip
VOTES = [
    {"prompt": TEXT, "a": "one", "b": "two", "votes": [{"annotator": "ann", "label": "a"}, {"label": "b"}, "tie"]},
    {"prompt": TEXT, "a": "one", "b": "three", "votes": {"a": 3, "b": 1, "equal": 0}},
    {"prompt": TEXT, "a": "one", "b": "four", "votes_a": 3, "votes_b": 1},
    {"prompt": TEXT, "a": "one", "b": "five", "label": "a1", "stance": "for"},
]
RANKINGS = [{"prompt": f"{TEXT} {n}", "responses": ["one", "two", "three"], "ranks": [1, 2, 2]} for n in range(3)]
TAUGHT = [
    {"instruction": TEXT, "input": "more", "output": "Here."},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]},
]
SINGLE = [["id", "prompt", "a", "b", "annotator", "label"]]
SINGLE += [[f"tether-{n}", f"{TEXT}\n- {n % 3}", "one", "'two", f"ann {n}", "ab"[n % 2]] for n in range(9)]
SHEET = [["item", "prompt", "response_a", "response_b", "rating_1", "rating_2"]]
SHEET += [[f"q{n:04d}-abcdef01", TEXT, "one;\n'=two", "three", "a", "tie"] for n in range(4)]
_SAID = [{"from": "human", "value": TEXT}, {"role": "assistant", "content": "x"}]
RATED: list[dict[str, Any]] = [dict(zip(SHEET[0], SHEET[1], strict=True))]
ARENA = [
    {"model_a": "m", "model_b": "n", "winner": winner, "judge": "ann", "turn": 1, "conversation_a": _SAID,
     "conversation_b": [_SAID[0], {"from": "gpt", "value": TEXT}]}
    for winner in ("model_a", "model_b", "tie")
]  # fmt: skip
_SCORED = [{"response": f"{n}", "fine-grained_score": n, "annotations": {"a": {"Rating": "1"}}} for n in range(3)]
SCORES = [{"instruction": TEXT, "completions": _SCORED}] * 3
KTO = [{"prompt": TEXT, "completion": _SAID[1:], "label": label, "system": "x"} for label in (True, False, True)]
PROFILE = """# what it is for
extends: tiny
seed: 3
data: &own {preferences: pairs.jsonl, columns: {chosen: better}, split: {train: 0.5, calibration: 0.2, test: 0.3}}
ppo:
  kl: {target: 2.5}
  updates: 1e1
gates:
  policy: {kl: null}
  extra:
    ppo:
      floor: {metric: policy/entropy, op: ">=", threshold: 0.2, description: "it still explores"}
"""


PROBE: list[dict[str, Any]] = [
    {"probe": "own", "rule": "promises", "violation": "promises", "violates": ["by tomorrow"]},
    {"id": "a", "category": "x", "prompt": TEXT, "clears": ["(?:no|not) sure"],
     "labelled": [{"response": TEXT, "violation": False}]},
    {"id": "b", "category": "x", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"},
     {"role": "user", "content": TEXT}]},
]  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: list[list[str]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue().encode()


def parquet(folder: Path) -> Path:
    rows = {name: [TEXT, f"{TEXT} 2", "x"] for name in ("prompt", "chosen", "rejected")}
    columns = {
        "noted": pa.array([datetime.datetime(2026, 1, 1)] * 3, pa.timestamp("us", "UTC")),
        "votes": pa.array([3, 4, None], pa.int64()),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "more": pa.array([[{"role": "user", "content": "x"}], [], None]),
    }
    pq.write_table(pa.table(rows | columns), folder / "pairs.parquet", row_group_size=2)
    return folder / "pairs.parquet"


def saved(folder: Path) -> Path:
    rows = [{"prompt": TEXT, "chosen": f"x {n}", "rejected": "y"} for n in range(9)]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return next(folder.glob("*.arrow"))


def read_data(path: Path) -> None:
    """As a run and `tether data check` read a file: by its kind, into a ledger, its bad rows into quarantine."""
    data = DataConfig()
    source = path.parent if path.suffix == ".arrow" else path
    try:
        reading_of(source, data).as_json(source)
    finally:
        for name in ("preferences", "demonstrations", "prompts"):
            try:
                ledger = Ledger(path.parent.parent / "ledger", SplitConfig(), 0)
                rows = judged_rows(RowSource.named(name, source, data), data.max_characters)
                ledger.fill(rows, lambda seen: None)
                bad = np.flatnonzero(ledger.facts["noted"])  # as if every note were a finding
                ledger.name("readable", bad, True, lambda index: "")
                for _ in ledger.quarantined():
                    pass
                ledger.reasons()
            except TetherError:
                continue


def read_probe_file(path: Path) -> None:
    """As `tether data probes check` does: what is read is also judged."""
    rule_agreement(read_probe(path))


def read_rating_sheet(path: Path) -> None:
    read_sheet(path, 2, ("a", "b", "tie"))


def read_config(path: Path) -> None:
    config = load_config(path)
    assert check_config(parse(dump(to_values(config)), "dumped"), "dumped") == config


def backup(folder: Path) -> Path:
    """A backup's manifest: of two files, whose bytes are beside it."""
    copier = Copier(folder)
    copier.write("home/runs/r1/run.json", [b"{}"])
    copier.write(f"home/store/objects/{digest_json({})}", [b"{}"], 0o444, 1.5)
    about: dict[str, Any] = {"tether": "0.1.0", "created": "2026-01-01T00:00:00+00:00", "host": "a", "home": "/a/home"}
    write_manifest(folder, Manifest(**about, home_schema=2, left_out=["work"], files=copier.files))
    return folder / MANIFEST


def restore(path: Path) -> None:
    """As `tether restore` does, into a home below the folder above."""
    try:  # a changed one is refused by its own digest; whoever makes one can write that too
        body = json.loads(path.read_bytes())["backup"]
        path.write_text(json.dumps({"backup": body, "sha256": digest_json(body)}))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    target = path.parent.parent / "restored"
    try:
        restored(path.parent, target)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def home_form(path: Path) -> None:
    check_home(path.parent)
    home_schema(path.parent)


JSONL: list[tuple[str, list[dict[str, Any]]]] = [
    ("pairs", PAIRS), ("arena", ARENA), ("scores", SCORES), ("kto", KTO), ("votes", VOTES), ("rankings", RANKINGS),
    ("taught", TAUGHT),
]  # fmt: skip
READERS = [
    *(Reader(f"{name}.jsonl", file(f"{name}.jsonl", lines(rows)), read_data, f"{name}.jsonl") for name, rows in JSONL),
    Reader("pairs.json", file("pairs.json", json.dumps(PAIRS, indent=1).encode()), read_data, "pairs.json"),
    Reader("pairs.jsonl.gz", file("pairs.jsonl.gz", gzip.compress(lines(PAIRS), mtime=0)), read_data, "pairs.jsonl.gz"),
    Reader("votes.csv", file("votes.csv", table(SINGLE)), read_data, "votes.csv"),
    Reader("pairs.parquet", parquet, read_data, "pairs.parquet"),
    Reader("saved folder", saved, read_data),
    Reader("sheet.csv", file("sheet.csv", table(SHEET, ";")), read_rating_sheet, "sheet.csv"),
    Reader("sheet.jsonl", file("sheet.jsonl", lines(RATED)), read_rating_sheet, "sheet.jsonl"),
    Reader("probe.jsonl", file("probe.jsonl", lines(PROBE)), read_probe_file, "probe.jsonl"),
    Reader("manifest.json of a backup", backup, restore),
    Reader("home.json", file("home.json", b'{"schema_version": 2}'), home_form, "home.json"),
    Reader("profile.yaml", file("profile.yaml", PROFILE.encode()), read_config, "profile.yaml"),
]
