"""Readers of what homes, stores, archives and models' folders hold."""

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.base.errors import TetherError
from components.models import tokenizers
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm, load_base, load_reward_model, save_model
from components.models.runtime import Runtime
from components.models.tokenizers import train_tokenizer
from components.store.retention import collect
from components.store.store import ArtifactStore, Record
from components.store.verify import verify
from flows.reports.page import page
from flows.reports.run_facts import run_facts
from tasks.retention.run_archive import export_run, import_results
from tasks.runs import status
from tasks.runs.config import run_values
from tasks.runs.journal import read_done, readable_done, recorded_inputs
from tasks.runs.points import read_points
from tests.fuzz.readers import Reader
from tests.stored_run import stored_run, toy_run

CONFIG = "seed: 0\ngates: {ppo: {kl: 8.0}}\n"
KL = {"name": "policy.kl", "metric": "policy/kl_high", "value": 2.0, "op": "<=", "threshold": 8.0, "passed": True}
RUNTIME = Runtime(device="cpu", dtype="float32", threads=1, instruction_set="default")
FILES = {"record.json": "records/", "manifest.json": "objects/"}
"""The members of an export that are changed alone, by the file that is changed."""


def home(folder: Path) -> Path:
    """A home with a run of two stages, r1; returns it."""
    metrics = {"sft": {"sft/loss": 1.5}, "ppo": {"policy/kl": 1.5, "policy/kl_high": 2.0}}
    ends: Any = {"sft": {"metrics": metrics["sft"]}, "ppo": {"metrics": metrics["ppo"], "gates": [KL]}}
    toy_run(folder / "other", config=CONFIG, ends=ends)
    return folder / "other"


def exported(folder: Path) -> Path:
    return export_run(ArtifactStore(home(folder)), "r1", folder / "run.tar")


def member(name: str) -> Callable[[Path], Path]:
    """`make` of one member of an export, beside which the whole lies."""

    def make(folder: Path) -> Path:
        with tarfile.open(exported(folder)) as tar:
            found = next(each for each in tar.getnames() if each.startswith(FILES[name]))
            content = tar.extractfile(found)
            assert content is not None
            (folder / name).write_bytes(content.read())
        return folder / name

    return make


def import_archive(path: Path) -> None:
    """As `tether store import`, into a home without anything."""
    target = path.parent / "home"
    try:
        import_results(ArtifactStore(target), path)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def import_with(path: Path) -> None:
    """Import the export beside `path`, with that file in the place of its own."""
    target = path.parent / "changed.tar"
    with tarfile.open(path.parent / "run.tar") as old, tarfile.open(target, "w") as new:
        changed = next(each for each in old.getnames() if each.startswith(FILES[path.name]))
        for info in old:
            data = old.extractfile(info)
            assert data is not None
            content = path.read_bytes() if info.name == changed else data.read()
            info.size = len(content)
            new.addfile(info, io.BytesIO(content))
    import_archive(target)


def of_home(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = next(home(folder).glob(name))
        path.chmod(0o644)
        return path

    return make


def read_home(path: Path) -> None:
    """As commands that list and show runs, continue one, and look into the store."""
    place = next(each for each in path.parents if each.name == "other")
    store = ArtifactStore(place)
    for look in (
        lambda: status.load_status(place, "r1"),
        lambda: status.load_readable(place),
        lambda: status.list_runs(place),
        lambda: run_values(place, "r1"),
        lambda: read_points(place / "runs" / "r1" / "metrics" / "ppo.jsonl"),
        lambda: [store.lookup(folder.name) for folder in (place / "store" / "records").iterdir()],
        lambda: [each for stage in ("sft", "ppo") for each in store.published_by(stage) if isinstance(each, Record)],
        lambda: verify(store),
        lambda: collect(store, dict, dry_run=True),
    ):
        try:
            look()
        except TetherError:
            continue


def of_run(name: str) -> Callable[[Path], Path]:
    """`make` of a file of a whole run's folder."""

    def make(folder: Path) -> Path:
        return folder / "whole" / "runs" / stored_run(folder / "whole") / name

    return make


def read_run(path: Path) -> None:
    """As the report, its page and the carrier to MLflow read a run's folder."""
    place = next(each for each in path.parents if each.name == "whole")
    (run,) = (each.name for each in (place / "runs").iterdir())
    for look in (
        lambda: page(run_facts(place, run)),
        lambda: read_done(place / "runs" / run),
        lambda: readable_done(place / "runs" / run),
        lambda: recorded_inputs(place, [run]),
    ):
        try:
            look()
        except TetherError as error:
            assert path.name in str(error), error


def model(name: str, kind: str = "policy") -> Callable[[Path], Path]:
    """`make` of a file in the folder of a small language model or reward model."""

    def make(folder: Path) -> Path:
        tokenizer = train_tokenizer(["my order is late what can you do"], 300)
        save_model(build_causal_lm(ScratchModel(hidden_size=8, layers=1, heads=2), tokenizer, 64, 0), tokenizer,
                   folder / "policy")  # fmt: skip
        if kind == "reward":
            save_model(*load_reward_model(folder / "policy", RUNTIME, seed=0), folder / "reward")
        return folder / kind / name

    return make


def read_model(path: Path) -> None:
    """As a run reads a base model, and PPO a reward model. The chat template's process of its own is left out."""
    kept, tokenizers.try_template = tokenizers.try_template, lambda *_: None
    try:
        if path.parent.name == "reward":
            load_reward_model(path.parent, RUNTIME)
        else:
            load_base(path.parent)
    finally:
        tokenizers.try_template = kept


READERS = [
    Reader("run.tar", exported, import_archive),
    *(Reader(f"{name} of run.tar", member(name), import_with) for name in FILES),
    *(Reader(name, of_home(f"runs/r1/{name}"), read_home) for name in ("run.json", "config.yaml")),
    Reader("metrics.jsonl", of_home("runs/r1/metrics/ppo.jsonl"), read_home),
    Reader("record.json", of_home("store/records/*/1.ppo.json"), read_home),
    *(Reader(f"{name} of a run", of_run(name), read_run) for name in ("run.json", "config.yaml", "done/ppo.json")),
    Reader("points of a run", of_run("metrics/ppo.jsonl"), read_run),
    *(Reader(name, model(name), read_model)
      for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")),
    Reader("reward config.json", model("config.json", "reward"), read_model),
]  # fmt: skip
