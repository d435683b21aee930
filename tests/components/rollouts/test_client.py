"""Errors of a server's routes, each with what to do: a wrong address, another version, silence, death."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from components.base.errors import Unreachable, UserError
from components.base.settings import keyed_values
from components.models.config import GenerationConfig
from components.ppo.config import ImportanceConfig, PpoConfig
from components.rollouts.client import VllmClient, resolve_rollout
from components.rollouts.config import RolloutConfig
from components.rollouts.engine import check_server
from tests.components.rollouts.standin import RECORD, StandIn, recorded, shape

Asking = Callable[..., RolloutConfig]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def checked(config: RolloutConfig, **generation: Any) -> None:
    check_server(config, GenerationConfig(**generation))


def test_what_the_server_is_stands_in_the_key_and_where_it_is_does_not(server: StandIn, asking: Asking) -> None:
    found = asking(server)
    assert keyed_values(found) == {"engine": "vllm", "version": "0.32.0", "dtype": "float32", "batch_invariant": True}
    assert found.is_resolved and found.bit_exact
    server.facts |= {"version": "0.33.1", "dtype": "torch.bfloat16", "batch_invariant": False}
    other = asking(server)
    assert keyed_values(other) == {"engine": "vllm", "version": "0.33.1", "dtype": "bfloat16", "batch_invariant": False}
    assert not other.bit_exact and RolloutConfig().bit_exact


def test_what_is_named_is_not_asked_for(asking: Asking) -> None:
    named = RolloutConfig(
        engine="vllm", url=f"http://127.0.0.1:{free_port()}", version="0.32.0", dtype="bfloat16", batch_invariant=False
    )
    assert resolve_rollout(named) == named and resolve_rollout(RolloutConfig()) == RolloutConfig()


def test_weights_are_on_by_default_for_a_server_and_off_where_they_are_told_to_be() -> None:
    server = {"engine": "vllm", "url": "http://127.0.0.1:8000"}
    assert PpoConfig().importance_level is None
    assert PpoConfig(rollout=server).importance_level == "token"
    for level in ("off", "sequence"):
        found = PpoConfig(rollout=server, importance=ImportanceConfig(level=level)).importance_level
        assert found == (None if level == "off" else level)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host/?key=1"])
def test_an_address_that_is_none_is_refused_before_anything_runs(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        RolloutConfig(engine="vllm", url=url)


def test_the_environment_names_the_server_where_the_config_does_not(
    server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record holds no address, so this is how `tether reproduce` finds a server."""
    with pytest.raises(UserError, match=r"no server is named: set ppo.rollout.url, .* TETHER_VLLM_URL"):
        resolve_rollout(RolloutConfig(engine="vllm"))
    monkeypatch.setenv("TETHER_VLLM_URL", server.url)
    assert resolve_rollout(RolloutConfig(engine="vllm")).version == "0.32.0"
    monkeypatch.setenv("TETHER_VLLM_URL", "http://me:hunter2@127.0.0.1:8000")
    with pytest.raises(UserError, match="TETHER_VLLM_URL holds a password"):
        resolve_rollout(RolloutConfig(engine="vllm"))


def test_auto_asks_a_server_only_where_one_is_named(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key holds what was found, and that nothing was found is the key of a run without the option."""
    auto = RolloutConfig(engine="auto")
    assert not auto.by_server and not auto.is_resolved
    assert resolve_rollout(auto) == RolloutConfig()
    by_url = resolve_rollout(RolloutConfig(engine="auto", url=server.url))
    monkeypatch.setenv("TETHER_VLLM_URL", server.url)
    by_environment = resolve_rollout(auto)
    assert by_environment.engine == by_url.engine == "vllm"
    assert keyed_values(by_environment) == keyed_values(by_url) == keyed_values(resolve_rollout(by_environment))
    assert resolve_rollout(RolloutConfig()) == RolloutConfig(), "what samples is not changed by a variable alone"


def test_nobody_at_the_address_is_the_users_to_mend_and_may_be_tried_again(asking: Asking) -> None:
    wrong = RolloutConfig(engine="vllm", url=f"http://127.0.0.1:{free_port()}", retries=2)
    with pytest.raises(
        Unreachable, match=r"can't be reached .*Check that it is running.*continues from the checkpoint"
    ) as error:
        resolve_rollout(wrong)
    assert error.value.exit_code == 2


def test_a_server_that_is_no_vllm_or_an_old_one_is_refused(server: StandIn, asking: Asking) -> None:
    for version, message in ((None, "known to Tether"), ("trunk", "known to Tether"),
                             ("0.22.1", "vLLM 0.22.1: 0.29 is the first")):  # fmt: skip
        server.facts["version"] = version
        with pytest.raises(UserError, match=message):
            asking(server)
    server.route = lambda *_: b"<html>It works!</html>"  # type: ignore[method-assign]
    with pytest.raises(UserError, match="It works"):
        asking(server)


def test_without_the_routes_of_development_the_error_says_how_to_start_it(server: StandIn, asking: Asking) -> None:
    config = asking(server)
    with VllmClient(config) as client, pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
        client.post("/no_such_route")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "--enable-sleep-mode"),
        ({"version": "0.32.1"}, "version is 0.32.1, and the run was resolved for 0.32.0"),
        ({"dtype": "torch.float16"}, "dtype is float16"),
        ({"batch_invariant": False}, "VLLM_BATCH_INVARIANT is False"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"speculative": {"method": "ngram"}}, "speculative"),
        ({"max_model_len": 70}, "--max-model-len 320"),
    ],
)
def test_another_server_than_the_run_was_resolved_for_is_refused_with_the_flag_that_mends_it(
    server: StandIn, asking: Asking, change: dict[str, Any], message: str
) -> None:
    config = asking(server, sleep=not change)
    server.facts |= change
    with pytest.raises(UserError, match=message):
        checked(config)


def test_the_stand_in_answers_as_vllm_was_recorded(server: StandIn, stages: Any) -> None:
    """Each of its fields has the type that vLLM gave it, under the same status; vLLM has more fields."""
    ours = shape(recorded(server.url, stages.inputs["sft"] / "model"))
    assert ours.items() <= shape(json.loads(RECORD.read_text())).items()


def test_a_version_that_was_never_tried_is_named_in_a_warning(
    server: StandIn, asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    checked(asking(server))
    assert not caplog.records
    server.facts["version"] = "0.33.0"
    checked(asking(server))
    assert f"{server.url}: Tether was tried with vLLM 0.29.0 and 0.32.0 only, and this is 0.33.0." in caplog.text


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_that_vllm_would_change_or_refuse_is_refused(
    server: StandIn, asking: Asking, temperature: float
) -> None:
    with pytest.raises(UserError, match=r"vLLM samples between 0.01 and 2"):
        checked(asking(server), temperature=temperature)


def test_a_server_that_is_busy_for_a_moment_is_asked_again_and_no_longer_than_the_retries(
    server: StandIn, asking: Asking
) -> None:
    with VllmClient(asking(server, retries=2)) as client:
        server.failing = 2
        assert client.version() == "0.32.0"
        server.failing, before = 99, len(server.called)
        with pytest.raises(Unreachable, match=r"503: .*overloaded"):
            client.version()
        assert len(server.called) - before == 3


def test_an_answer_that_does_not_come_in_time_is_not_asked_for_again(
    server: StandIn, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    with VllmClient(asking(server, timeout=0.2, retries=5)) as client:
        asked, request = list[str](), client._http.request

        def counted(method: str, url: str, **given: Any) -> Any:
            asked.append(url)
            return request(method, url, **given)

        monkeypatch.setattr(client._http, "request", counted)
        server.delay = 2.0
        with pytest.raises(Unreachable, match=r"no answer within ppo.rollout.timeout = 0.2 s"):
            client.post("/v1/completions", {"prompt": [3]})
        assert len(asked) == 1


def test_a_key_of_the_environment_is_sent_and_stands_in_no_message(
    server: StandIn, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hunter2-secret")
    with VllmClient(asking(server)) as client:
        assert client._http.headers["Authorization"] == "Bearer hunter2-secret"
        with pytest.raises(UserError) as error:
            client.post("/no_such_route")
    assert "hunter2" not in str(error.value)
