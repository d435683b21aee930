"""Around Prefect: errors come through as they were, and a server whose run was killed is ended."""

from pathlib import Path

import httpx
import pytest

from components.base.errors import GateFailed, TetherError, UserError
from tasks.prefect_flow.server import check_server

pytest.importorskip("prefect")
from prefect.client.schemas.objects import State
from prefect.states import Cancelled

from tasks.prefect_flow.stage_tasks import Outcome, prefect_runner, unless_gone


@pytest.mark.parametrize("error", [GateFailed("kl"), UserError("the data are empty")])
def test_an_expected_error_names_the_state_and_comes_through(error: TetherError) -> None:
    outcome: Outcome[int] = Outcome()

    def call() -> int:
        raise error

    state = outcome.capture(call, lambda result: "Completed")
    assert (state.type.value, state.name, state.message) == ("FAILED", type(error).__name__, str(error))
    with pytest.raises(type(error)) as caught:
        outcome.get(state)
    assert caught.value is error


def test_an_unexpected_error_comes_through_with_its_trace() -> None:
    outcome: Outcome[int] = Outcome()
    state = outcome.capture(lambda: 1 // 0, lambda result: "Completed")
    assert (state.name, state.message) == ("Failed", "ZeroDivisionError: integer division or modulo by zero")
    with pytest.raises(ZeroDivisionError) as caught:
        outcome.get(state)
    assert caught.traceback[-1].path == Path(__file__)


def test_an_interrupt_is_not_swallowed() -> None:
    def call() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Outcome[int]().capture(call, lambda result: "Completed")


def test_a_result_names_its_state_even_where_it_is_nothing() -> None:
    outcome: Outcome[None] = Outcome()
    state = outcome.capture(lambda: None, lambda result: "AwaitingLabels")
    assert (state.type.value, state.name) == ("COMPLETED", "AwaitingLabels")
    assert outcome.get(state) is None


def test_what_prefect_did_not_let_run_is_said() -> None:
    with pytest.raises(TetherError, match="Cancelled: by a person"):
        Outcome[int]().get(Cancelled(message="by a person"))


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outside server that has gone away."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")


def test_stages_go_on_without_a_server_that_is_gone(gone: None, start, kit, said) -> None:
    with start() as ctx:
        result = prefect_runner(ctx)(kit.toy("sft"), kit.ToyJob(), {})
    assert result.state == "passed"
    assert "sft: Prefect's server does not answer" in said(ctx)


def test_what_was_computed_outlives_the_server(gone: None) -> None:
    outcome: Outcome[int] = Outcome()

    def flow() -> State:
        outcome.capture(lambda: 7, lambda result: "Completed")
        raise ConnectionError("refused")

    assert outcome.get(unless_gone(flow)) == 7
    with pytest.raises(TetherError, match="server does not answer"):
        Outcome[int]().get(unless_gone(flow))


def test_an_error_of_ours_is_not_taken_for_a_server_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ZeroDivisionError):
        unless_gone(lambda: 1 // 0)


def test_a_server_that_is_back_by_the_time_it_is_asked_was_away_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def call() -> int:
        raise httpx.ConnectError("refused")

    assert unless_gone(call) is None


def test_a_prefect_server_that_is_named_but_silent_is_the_users_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(UserError, match=r"PREFECT_API_URL = http://127\.0\.0\.1:9/api"):
        check_server(timeout=1)
    monkeypatch.delenv("PREFECT_API_URL")
    check_server()
