"""What reaches a webhook, from a real Prefect server. No worker runs: the tests set the states."""

import json
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Running

from components.base.errors import UserError
from flows.deployment import alerts
from flows.deployment.alerts import alert, report_low_disk
from tasks.prefect_flow.server import TAG
from tests.servers import PrefectServer
from tests.waiting import PATIENCE

GATE = 'reward: 1 gate(s) failed. reward.accuracy_low is 0.478, must be >= 0.5 ("low"; <b>\nNothing downstream starts.'


class Receiver(NamedTuple):
    """A chat's webhook."""

    url: str
    got: "queue.Queue[dict[str, Any]]"

    def next(self, seconds: float = 10) -> dict[str, Any]:
        """The next alert."""
        return self.got.get(timeout=PATIENCE * seconds)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    got: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Receiver(f"http://127.0.0.1:{server.server_port}/hooks/s3cret", got)
        server.shutdown()


@pytest.fixture(scope="module")
def client(server: PrefectServer, receiver: Receiver) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        alert(receiver.url)
        time.sleep(3)  # the server loads them
        yield client
        for each in client.read_automations():
            client.delete_automation(each.id)


@flow(name="rlhf")
def pipeline() -> None:
    """Never called: its runs are made by hand."""


@flow(name="human-eval")
def scoring() -> None:
    """Likewise."""


@flow(name="compute")
def computing() -> None:
    """Likewise."""


def end(client: SyncPrefectClient, state: "State[Any]", of: Any = pipeline, tags: tuple[str, ...] = (TAG,)) -> FlowRun:
    run = client.create_flow_run(of, name="demo 20261123-1", tags=tags, state=Running())
    client.set_flow_run_state(run.id, state)
    return run


@pytest.mark.servers
def test_a_failed_gate_reaches_the_webhook_with_run_gate_value_and_a_link_that_opens(
    client: SyncPrefectClient, receiver: Receiver
) -> None:
    run = end(client, Failed(name="GateFailed", message=GATE))
    told = receiver.next()
    assert told == {
        "text": f"Tether: demo 20261123-1: a gate failed. {GATE} {told['url']}",
        "what": "a gate failed", "run": "demo 20261123-1", "state": "GateFailed", "message": GATE, "url": told["url"],
    }  # fmt: skip
    opened = urlopen(Request(told["url"], headers={"Accept": "text/html"}), timeout=60)  # as a browser asks
    assert str(run.id) in told["url"] and opened.status == 200 and "Prefect" in opened.read().decode()


@pytest.mark.servers
def test_what_needs_a_person_is_told_and_what_does_not_is_not(client: SyncPrefectClient, receiver: Receiver) -> None:
    silent = [
        end(client, Completed()), end(client, Completed(), of=computing), end(client, Crashed(), of=computing),
        end(client, Failed(name="GateFailed"), tags=("another-team",)),
    ]  # fmt: skip
    told = []
    for state, of in (
        (Crashed(), pipeline), (Completed(name="AwaitingLabels"), pipeline), (Failed(name="UserError"), pipeline),
        (Completed(), scoring),
    ):  # fmt: skip
        end(client, state, of)
        told.append(receiver.next()["what"])
    assert told == ["crashed", "waits for people's labels", "failed", "people's labels are scored"]
    assert len(silent) == 4 and receiver.got.empty()


def test_a_home_that_is_away_is_no_full_disk(tmp_path: Path) -> None:
    assert not report_low_disk(tmp_path / "home", least=float("inf"))


@pytest.mark.servers
def test_a_full_disk_reaches_the_webhook(client: SyncPrefectClient, receiver: Receiver, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert not report_low_disk(tmp_path, least=free / 2) and report_low_disk(tmp_path, least=2 * free)
    told = receiver.next()
    assert told["what"] == "disk low" and str(tmp_path) in told["message"]
    time.sleep(2)
    assert receiver.got.empty()


@pytest.mark.servers
def test_the_address_which_may_hold_a_token_is_shown_to_nobody_and_a_second_call_makes_no_second_alert(
    client: SyncPrefectClient, receiver: Receiver
) -> None:
    alert(receiver.url)
    names = [each.name for each in client.read_automations()]
    assert all(names.count(name) == 1 for name in (alerts.RUNS, alerts.LABELS, alerts.DISK))
    shown = [each.model_dump_json() for each in client.read_automations()]
    block = client.read_block_document_by_name(alerts.BLOCK, "webhook", include_secrets=False)
    assert "s3cret" not in "".join(shown) + block.model_dump_json()


@pytest.mark.parametrize("url", ["ftp://chat.example/x", "chat.example/hooks", "", "http://", "http://[::1"])
def test_an_address_that_is_none_is_refused_before_the_server_is_asked(url: str) -> None:
    with pytest.raises(UserError, match="--alert"):
        alert(url)
