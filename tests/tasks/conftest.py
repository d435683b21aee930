"""Toy stages: real files, a real store, real MLflow on SQLite where a test asks for it."""

import io
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from components.base.settings import Settings, unkeyed
from components.gates.judging import GatesConfig
from tasks.execution.context import Execution, Reporting, Reuse, RunContext
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.stages import Stage

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

TOY = '''
"""A stage that adds numbers, resumes, and does as its job says."""
import json
import os
import signal
import time


def run(job, inputs, out, observe):
    calls = out.parents[2] / "calls.txt"
    with calls.open("a") as file:
        file.write(job.name + chr(10))
    artifact, checkpoint = out / "artifact", out / "checkpoint"
    artifact.mkdir()
    first = int((checkpoint / "step.json").read_text()) + 1 if checkpoint.is_dir() else 1
    for step in range(first, job.steps + 1):
        observe(step, {"ppo/proxy_reward": step / 10, "ppo/kl": step * 2.0}, total=job.steps)
        time.sleep(job.pause)
        if job.checkpoint:
            checkpoint.mkdir(exist_ok=True)
            (checkpoint / "step.json").write_text(str(step))
        if step == job.stop_at and not (out.parents[2] / "stopped").exists():
            (out.parents[2] / "stopped").touch()
            if job.stop == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if job.stop == "interrupt":
                raise KeyboardInterrupt
            if job.stop == "user":
                from components.base.errors import UserError
                raise UserError("the data is empty")
            raise RuntimeError("broken")
    total = job.value + sum(int((path / "value.txt").read_text()) for path in inputs.values() if path.is_dir())
    (artifact / "value.txt").write_text(str(total))
    (artifact / "samples.jsonl").write_text(json.dumps(
        {"step": 1, "prompt": [{"role": "user", "content": "where is it"}], "response": "here"}) + chr(10))
    (out / "attachments").mkdir()
    (out / "attachments" / "timings.json").write_text(str(os.getpid()))
    return {name: float(value) for name, value in job.metrics.items()}
'''


JUDGED = {
    "reward": {"accuracy_low": 0.6}, "policy": {"kl": 8.0, "reward_gain_low": 0.0}, "human_eval": {"win_rate_low": 0.5},
}  # fmt: skip
"""The thresholds that a candidate for promotion needs, as a run's config has them."""


class ToyJob(Settings):
    """What a toy stage does."""

    name: str = "toy"
    value: int = 1
    steps: int = 3
    metrics: dict[str, str] = {"toy/loss": "0.5"}  # noqa: RUF012 (pydantic copies it)
    sft: dict[str, bool] = {}  # noqa: RUF012
    stop: str = ""
    stop_at: int = unkeyed(0)
    checkpoint: bool = unkeyed(False)
    pause: float = unkeyed(0.0)


@pytest.fixture
def toy_source(tmp_path, monkeypatch) -> Path:
    """The toy stage's file; its folder is importable and is where fingerprints look."""
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "toy_stage.py"
    path.write_text(textwrap.dedent(TOY))
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("toy_stage", None)
    yield path
    sys.modules.pop("toy_stage", None)


def toy(name: str = "toy") -> Stage:
    """A stage whose code is the toy's."""
    return Stage(name, "toy_stage", "conftest:ToyJob", ("pydantic",))


def thresholds(**given: dict) -> GatesConfig:
    """Every gate off but those given as `stage={gate: threshold}`."""
    return GatesConfig.model_validate(given)


@pytest.fixture
def home(tmp_path) -> Path:
    """A fresh TETHER_HOME."""
    return tmp_path / "home"


@pytest.fixture
def start(home, toy_source, monkeypatch, request) -> Callable[..., RunContext]:
    """Begins runs in `home` over toy stages; MLflow only where `track=True`."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def begin(gates: GatesConfig | None = None, **options) -> RunContext:
        options.setdefault("stages", ("sft", "ppo", "human_eval"))
        options.setdefault("track", False)
        options.setdefault("console", Console(file=io.StringIO(), width=200))
        if options["track"] and not (home / "mlflow.db").exists():
            home.mkdir(exist_ok=True)
            shutil.copy(request.getfixturevalue("empty_mlflow"), home)
        options["root"] = toy_source.parent
        for name, record in (("execution", Execution), ("reuse", Reuse), ("reporting", Reporting)):
            options[name] = record(**{key: options.pop(key) for key in vars(record()) if key in options})
        return RunContext.start(home, "test", gates or thresholds(), **options)

    return begin


@pytest.fixture
def client(home):
    """A client of the home's own MLflow, after runs have been tracked there."""

    def connect():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from tasks.tracking.mlflow_client import connect

            return connect(home)

    return connect


@pytest.fixture
def pipeline(start, kit, tmp_path):
    """Runs sft -> ppo -> human_eval on toy stages, tracked."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("{}\n")

    def run(gates=None, metrics="6", steps=5, pause=0.0, value=1, train=True, win=0.6, judged=JUDGED, measured=None,
            promote=True, base=1, **options):  # fmt: skip
        config = {"seed": 1, "ppo": {"x": 2}, "mlflow": {"weights": "none"}}  # toys hold no model
        config |= {"gates": judged, "promote": promote}
        ctx = start(gates or kit.thresholds(**judged), track=True, config=config, **options)
        with ctx:
            validated = run_stage(kit.toy("validate"), kit.ToyJob(steps=0), {"preferences": Input.of(data)}, ctx)
            sft_job = kit.ToyJob(value=base) if train else kit.ToyJob(sft={"train": False})
            sft = run_stage(kit.toy("sft"), sft_job, {"data": validated}, ctx)
            numbers = {"policy/kl_high": metrics, "ppo/kl": "5.5", "policy/reward_gain_low": "1"} | (measured or {})
            job = kit.ToyJob(metrics=numbers, steps=steps, pause=pause, value=value)
            ppo = run_stage(kit.toy("ppo"), job, {"data": validated, "sft": sft}, ctx)
            rates = {"win_rate": win, "win_rate_low": win - 0.05, "win_rate_high": win + 0.05}
            people = kit.ToyJob(steps=0, metrics={f"human_eval/{name}": str(rate) for name, rate in rates.items()})
            human = run_stage(kit.toy("human_eval"), people, {"ppo": ppo, "sft": sft}, ctx)
        return ctx, {"validate": validated, "sft": sft, "ppo": ppo, "human_eval": human}

    return lambda *args, **kwargs: run(*args, stages=("validate", "sft", "ppo", "human_eval"), **kwargs)


@pytest.fixture
def said() -> Callable[[RunContext], str]:
    """What a run printed."""
    return lambda ctx: ctx.reporting.console.file.getvalue()


@pytest.fixture
def calls(home) -> Callable[[], list[str]]:
    """The names of the jobs that were really computed, in order."""
    return lambda: (home / "calls.txt").read_text().split() if (home / "calls.txt").exists() else []


@pytest.fixture
def kit():
    """The helpers above, for tests (conftest can't be imported by name in importlib mode)."""

    class Kit:
        ToyJob = ToyJob
        toy = staticmethod(toy)
        thresholds = staticmethod(thresholds)
        json = json
        judged = JUDGED

    return Kit
