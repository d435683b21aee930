"""A worker of the pool `gpu` finds the vLLM server of its own host, and never that of who deploys or orders the run."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.runs.config import run_values
from tasks.runs.status import load_status
from tests.components.rollouts.standin import StandIn
from tests.operations.site import BIN, ROOT, Stack, child, end, ended, log, trigger
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.servers, pytest.mark.long, pytest.mark.timeout(1800)]


class ServerOfAnyModel(StandIn):
    """Takes the shape of what it is sent, and writes down each request's key."""

    keys: set[str | None] = set()  # noqa: RUF012

    def reload(self, body: dict[str, Any]) -> dict[str, Any]:
        self.model = AutoModelForCausalLM.from_pretrained(Path(body["kwargs"]["weights_path"])).eval()
        return {"results": [None]}

    def answer(self, handler: Any, body: Any) -> None:
        self.keys.add(handler.headers["Authorization"])
        super().answer(handler, body)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerOfAnyModel]:
    shape = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with ServerOfAnyModel(LlamaForCausalLM(shape), eos=-1) as standing:
        yield standing


@pytest.fixture(scope="module")
def stack(server: ServerOfAnyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Servers and a worker for each pool. That of `gpu` alone has the address and the key of the server."""
    stack = Stack(tmp_path_factory.mktemp("operations"))
    stack.environment |= {"TETHER_VLLM_URL": "http://127.0.0.1:9", "VLLM_API_KEY": "of the pipeline"}
    started = [stack.terminal(0, go_on=True)]
    try:
        until("both servers are up", lambda: "Ctrl-C" in stack.said(0))
        deployed = stack.terminal(1)
        assert deployed.wait(PATIENCE * 120) == 0, stack.said(1)
        own = {"TETHER_VLLM_URL": server.url, "VLLM_API_KEY": "of the gpu host"}
        for pool, variables in (("cpu", {}), ("gpu", own)):
            environment = stack.environment | {"TETHER_HOME": str(stack.home), "PREFECT_API_URL": stack.api} | variables
            with (stack.logs / f"{pool}.log").open("wb") as output:
                command = [BIN / "tether", "serve", "--pool", pool]
                started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
        for pool in ("cpu", "gpu"):
            until(f"the worker of {pool} is up", lambda pool=pool: "Ctrl-C" in (stack.logs / f"{pool}.log").read_text())
        yield stack
    finally:
        for process in reversed(started):
            end("a process has ended", process)


def test_a_worker_asks_the_server_of_its_own_host(
    stack: Stack, client: SyncPrefectClient, server: ServerOfAnyModel
) -> None:
    named = {"engine": "vllm", "version": "0.32.0", "dtype": "float32", "batch_invariant": True}
    run = ended(client, trigger(client, rollout=named), "a run with a server ends")
    assert run.state is not None and run.state.is_completed(), log(client, run)
    ppo = child(client, run)
    assert ppo is not None and ppo.work_pool_name == "gpu"
    assert server.keys == {"Bearer of the gpu host"} and len(server.requests) > 3 * 16
    status = load_status(stack.home)
    rollout = run_values(stack.home, status.run)["ppo"]["rollout"]
    assert rollout["version"] == "0.32.0" and rollout["url"] is None
    stored = client.read_deployment_by_name("rlhf/tiny")
    assert "of the gpu host" not in str(stored) + str(ppo) + str(run) and "of the pipeline" not in str(stored)
