"""What is tried again and what never is; a stage that takes too long."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest

from components.base.errors import (
    CheckFailed,
    GateFailed,
    LeaseLost,
    StageTimeout,
    TetherError,
    Unreachable,
    UserError,
    WorkerDied,
)
from components.data.config import DataConfig
from components.models.config import GenerationConfig
from components.store.store import ArtifactStore
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.rows import ledger, working
from tasks.execution import attempts
from tasks.execution.attempts import Attempts, is_breakdown, through_breakdowns, time_limit
from tasks.execution.computing import Work, compute_once
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.stages import STAGES


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(attempts.time, "sleep", found.append)
    return found


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


def foreign(name: str, module: str) -> Exception:
    return type(name, (Exception,), {"__module__": module})("no")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (LeaseLost("stood still"), True),
        (WorkerDied("exit code -9"), True),
        (Unreachable("the bucket"), True),
        (ConnectionResetError("peer"), True),
        (foreign("ConnectError", "httpx"), False),
        (foreign("EndpointConnectionError", "botocore.exceptions"), False),
        (foreign("HTTPClientError", "botocore.exceptions"), True),
        (caused(TetherError("it failed"), foreign("TransportError", "httpx._exceptions")), True),
        (UserError("no such file"), False),
        (GateFailed("policy.kl"), False),
        (CheckFailed("the loss is not finite"), False),
        (StageTimeout("too long"), False),
        (TetherError("cancelled"), False),
        (BrokenPipeError("the terminal"), False),
        (ValueError("ours"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_a_breakdown_is_tried_again(error: Exception, again: bool, slept: list[float]) -> None:
    """Nothing was: a worker that died ended the pipeline. A mistake, a gate or a check would fail again."""
    assert is_breakdown(error) is again
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        through_breakdowns(call, Attempts(retries=3, seconds=2), "ppo", lambda text: None)
    assert len(calls) == (4 if again else 1)
    assert slept == ([2, 4, 8] if again else [])


def test_a_retry_that_succeeds_says_why_it_was_needed(slept: list[float]) -> None:
    answers: list[Exception | str] = [WorkerDied("ppo crashed."), "done"]
    said: list[str] = []

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert through_breakdowns(call, Attempts(1, 5000), "ppo", said.append) == "done"
    assert said == ["ppo: ppo crashed. Retry 1 of 1 in 3600 s."] and slept == [3600]


def test_a_stage_whose_lease_is_lost_goes_on_in_the_same_run(start, kit, calls, monkeypatch, said) -> None:
    """One that stood still for a minute ended its run, which had to be started again by hand."""
    from tasks.execution import computing

    compute, lost = computing.compute, [True]

    def once_lost(*args: object) -> object:
        if lost:
            lost.pop()
            raise LeaseLost("this process stood still.")
        return compute(*args)

    monkeypatch.setattr(computing, "compute", once_lost)
    with start(attempts=Attempts(1, 0.01)) as ctx:
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert result.state == "passed" and calls() == ["toy"]
    assert "sft: this process stood still. Retry 1 of 1 in 0 s." in said(ctx)


def test_a_stage_that_takes_too_long_is_stopped_and_names_its_option() -> None:
    began = time.monotonic()
    with (
        pytest.raises(StageTimeout, match=r"runners\.human_eval\.timeout = 0\.1 s"),
        time_limit(0.1, "human_eval.sample"),
    ):
        time.sleep(30)
    assert time.monotonic() - began < 25
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_limit(60, "sft"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with time_limit(None, "sft"):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "the limit before is over with its block"


def test_a_timeout_is_the_stages_and_leaves_the_key_as_it_is(start, kit, monkeypatch) -> None:
    from tasks.execution import computing

    with start() as ctx:
        key = run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx).record.key
    monkeypatch.setattr(computing, "_call", lambda *_: time.sleep(30))
    with start(timeouts={"sft": 0.1}, refresh=frozenset({"sft"})) as ctx, pytest.raises(StageTimeout):
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert ctx.status.stage("sft").state == "failed" and ctx.status.stage("sft").key == key


def test_a_block_in_a_thread_has_no_limit() -> None:
    """Signals are the main thread's: to set a handler anywhere else is an error."""
    ended: list[str] = []

    def work() -> None:
        with time_limit(0.01, "sft"):
            time.sleep(0.05)
        ended.append("whole")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == ["whole"]


def test_a_stopped_validation_continues_with_its_shards_in_the_next_attempt(tmp_path: Path, monkeypatch) -> None:
    """Its folder had no checkpoint by name, so the runner removed it and every row was read again."""
    monkeypatch.setattr(ledger, "SHARD_ROWS", 9)
    pairs = tmp_path / "pairs.jsonl"
    rows = ({"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(45))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = ValidateJob(
        seed=0, generation=GenerationConfig(), data=DataConfig(preferences=str(pairs), processes=1),
        sft=TokenizerConfig(vocabulary=1000, max_demonstrations=None),
    )  # fmt: skip
    given = {"preferences": Input.of(pairs)}
    work = Work(STAGES["validate"], job, given, "a" * 64, {"inputs": {}, "job": {}}, "run")
    store, written = ArtifactStore(tmp_path / "home"), list[Path]()

    def stopped(path: Path, *args: object) -> None:
        if len(written) == 3:
            written.append(path)
            raise KeyboardInterrupt
        written.append(path)
        write_rows(path, *args)

    write_rows = working.write_rows
    monkeypatch.setattr(working, "write_rows", stopped)
    with pytest.raises(KeyboardInterrupt):
        compute_once(work, store, lambda point: None, lambda text: None)
    compute_once(work, store, lambda point: None, lambda text: None)
    assert len(written) == 6 and written[4].name == written[3].name, "the three finished shards of five are kept"
    assert not (store.work / work.key).exists()
