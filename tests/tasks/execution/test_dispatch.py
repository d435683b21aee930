"""What a worker accepts as an order, and how it says what differs. (The servers' side: tests/operations/.)"""

from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, Scheduled

from components.base.errors import (
    CheckFailed,
    LeaseLost,
    MachineMismatch,
    StageTimeout,
    TetherError,
    Unreachable,
    UserError,
    WorkerDied,
)
from components.keys.fingerprint import stage_key
from components.models.runtime import Runtime
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from tasks.execution import computing, dispatch
from tasks.execution.attempts import is_breakdown
from tasks.execution.computing import Work
from tasks.execution.dispatch import Order, receive
from tasks.result import Input
from tasks.stages import STAGES

STAGE = STAGES["validate"]


@pytest.fixture
def source(tmp_path: Path) -> Input:
    file = tmp_path / "pairs.jsonl"
    file.write_text("{}\n")
    return Input.of(file)


def order(source: Input, **changes) -> Order:
    job = load_config("tiny").resolved().stage_job(STAGE)
    inputs = {"preferences": source.digest}
    key, parts = stage_key(STAGE.name, job, inputs, STAGE.module, STAGE.libraries)
    fields = {
        "stage": STAGE.name,
        "key": key,
        "run": "r",
        "job": job.model_dump(mode="json"),
        "inputs": {"preferences": source},
        "parts": parts,
    }
    return Order.model_validate({**fields, **changes})


def never(*_: object) -> None:
    raise AssertionError("nothing was to be computed or said")


def publish(store: ArtifactStore, key: str, tmp_path: Path) -> str:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "pairs.txt").write_text("kept")
    return store.publish(key, folder, None, {"stage": "validate"}).digest


def test_an_order_whose_result_is_stored_by_now_computes_nothing(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, wanted = ArtifactStore(tmp_path / "home"), order(source)
    digest = publish(store, wanted.key, tmp_path)
    monkeypatch.setattr(computing, "compute", never)
    assert receive(wanted, store, never, never).digest == digest
    with pytest.raises(AssertionError, match="computed"):
        receive(order(source, refresh=True), store, never, lambda text: None)


def test_an_order_survives_the_way_over_the_server(source: Input) -> None:
    wanted = order(source)
    assert Order.model_validate_json(wanted.model_dump_json()) == wanted


def test_a_worker_with_other_code_or_libraries_refuses_and_names_them(source: Input, tmp_path: Path) -> None:
    parts = order(source).parts
    theirs = {**parts, "libraries": {**parts["libraries"], "pandas": "1.0"}}
    theirs["source"] = {**parts["source"], "data_contracts.validate": "0" * 64}
    with pytest.raises(MachineMismatch) as refused:
        receive(order(source, key="f" * 64, parts=theirs), ArtifactStore(tmp_path / "home"), never, never)
    assert "library pandas 1.0 -> " in str(refused.value)
    assert "data_contracts/validate.py changed" in str(refused.value)
    assert not (tmp_path / "home").exists()


def test_a_worker_with_other_bytes_under_a_path_or_none_refuses(source: Input, tmp_path: Path) -> None:
    wanted = order(source)
    source.path.write_text("{ }\n")
    with pytest.raises(MachineMismatch, match=r"pairs\.jsonl holds other bytes"):
        receive(wanted, ArtifactStore(tmp_path / "home"), never, never)
    source.path.unlink()
    with pytest.raises(MachineMismatch, match=r"pairs\.jsonl does not exist on this worker"):
        receive(wanted, ArtifactStore(tmp_path / "home"), never, never)


def test_a_worker_that_sees_another_folder_says_which_and_what_to_set(source: Input, tmp_path: Path) -> None:
    """It said that a manifest is missing, and no word of another folder behind the same path."""
    theirs, ours = ArtifactStore(tmp_path / "theirs"), ArtifactStore(tmp_path / "ours")
    given = Input(name="data", digest=publish(theirs, "f" * 64, tmp_path), path=tmp_path, stage="sft", stored=True)
    with pytest.raises(MachineMismatch) as refused:
        dispatch._found(given, ours, dispatch._place(theirs))
    said = str(refused.value)
    assert f"{tmp_path / 'ours' / 'store'} on " in said and f"The pipeline has it in {tmp_path / 'theirs'}" in said
    assert "set TETHER_HOME" in said
    assert dispatch._found(given, theirs, "").path.is_dir()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cuda"}, "device: wanted cuda, here cpu"),
        ({"instruction_set": "abacus"}, "instruction_set: wanted abacus, here "),
        ({"threads": 256}, "threads: wanted 256, here "),
    ],
)
def test_a_worker_on_another_machine_refuses_with_the_setting_that_fits(changes, said, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = Runtime().resolve()
    dispatch._check_machine(here)
    with pytest.raises(MachineMismatch) as refused:
        dispatch._check_machine(here.model_copy(update=changes))
    assert said in str(refused.value)
    assert f"threads: {here.threads}, instruction_set: {here.instruction_set}}}" in str(refused.value)


def response(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://server")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))


class Client:
    """A Prefect client that answers, or raises, what it is given; the last for ever."""

    def __init__(self, *answers: State | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.told: list[str | None] = []

    def read_flow_run(self, run: UUID) -> FlowRun:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return FlowRun(id=run, flow_id=run, state=answer)

    def set_flow_run_state(self, run: UUID, state: State) -> str:
        self.told.append(state.name)
        return "accepted"


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FlowRun, list[str]]]:
    """`follow(client)` follows a run to its end; what it ended as, and what was said."""
    monkeypatch.setattr(dispatch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "DOUBT_SECONDS", 1.0)

    def follow(client: Client, timeout: float | None = None) -> tuple[FlowRun, list[str]]:
        said: list[str] = []
        run = FlowRun(id=uuid4(), flow_id=uuid4(), state=Scheduled())
        return dispatch._follow(client, run, lambda: None, "ppo", "gpu", said.append, timeout), said

    return follow


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), response(500), response(502), response(503)])
def test_a_server_that_is_away_is_waited_for_and_said_once(error, follow) -> None:
    """A 500, which is what Prefect says while its database is away, ended the pipeline."""
    run, said = follow(Client(Running(), error, error, error, Running(), Completed()))
    assert run.state.is_completed()
    assert [line.partition("(")[0] for line in said if "Prefect server" in line] == [
        "ppo: the Prefect server does not answer ",
        "ppo: the Prefect server answers again",
    ]


def test_an_answer_that_is_no_outage_ends_the_following(follow) -> None:
    with pytest.raises(httpx.HTTPStatusError):
        follow(Client(response(401)))


def test_a_run_that_the_server_took_for_dead_has_time_to_say_that_it_lives(follow) -> None:
    """A server that was away set the live run to Crashed, and its pipeline ended with it."""
    doubted = Crashed(message=f"{dispatch.NO_HEARTBEAT}: its worker died.")
    run, _ = follow(Client(doubted, doubted, doubted, Running(), Completed()))
    assert run.state.is_completed()
    run, _ = follow(client := Client(doubted))
    assert run.state.is_crashed() and client.asked > 5
    run, _ = follow(client := Client(Crashed(message="exited with status code -9")))
    assert run.state.is_crashed() and client.asked == 1, "what the worker saw die is dead"


def test_a_run_that_takes_too_long_and_does_not_stop_itself_is_cancelled(follow, monkeypatch) -> None:
    """A process that hangs in a library's code does not see its own limit."""
    monkeypatch.setattr(dispatch, "STOP_SECONDS", 0.05)
    client = Client(Running())
    with pytest.raises(StageTimeout, match=r"longer than 0\.05 s"):
        follow(client, timeout=0.05)
    assert client.told == ["Cancelling"]
    queued = Client(*[Scheduled()] * 20, Completed())
    assert follow(queued, timeout=0.05)[0].state.is_completed() and queued.told == [], "waiting for a place is no work"


@pytest.mark.parametrize(
    ("state", "error", "again"),
    [
        (Crashed(message="exited with status code -9"), WorkerDied, True),
        (Failed(name="LeaseLost", message="stood still."), LeaseLost, True),
        (Failed(name="Unreachable", message="the bucket"), Unreachable, True),
        (Failed(name="CheckFailed", message="NaN"), CheckFailed, False),
        (Failed(name="StageTimeout", message="too long"), StageTimeout, False),
        (Failed(message="KeyError"), TetherError, False),
        (Cancelled(), TetherError, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_worker_ended_as_says_whether_it_is_ordered_again(state, error, again, source: Input) -> None:
    wanted = order(source)
    work = Work(STAGE, load_config("tiny"), {}, wanted.key, wanted.parts, "r")
    with pytest.raises(error) as caught:
        dispatch._raise_unless_completed(FlowRun(id=uuid4(), flow_id=uuid4(), state=state), work)
    assert type(caught.value) is error and is_breakdown(caught.value) is again


def test_a_worker_refuses_an_order_of_files_that_it_does_not_allow(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_ALLOWED_FOLDERS", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"pairs\.jsonl is outside the folders that TETHER_ALLOWED_FOLDERS allows"):
        receive(order(source), ArtifactStore(tmp_path / "home"), never, never)
