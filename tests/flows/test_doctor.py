"""What `tether doctor` says of the server that samples PPO's rollouts."""

from collections.abc import Iterator

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from flows.cli.server_commands import server_commands
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.doctor import Finding, _rollout_server
from tests.components.rollouts.standin import StandIn


@pytest.fixture
def server() -> Iterator[StandIn]:
    shape = LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with StandIn(LlamaForCausalLM(shape), eos=1) as standing:
        yield standing


def of_profile(*changes: str) -> list[Finding]:
    return _rollout_server(load_config("tiny", [parse_override(text) for text in changes]))


def test_without_a_server_doctor_says_nothing_about_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TETHER_VLLM_URL", raising=False)
    assert _rollout_server(None) == of_profile() == of_profile("ppo.rollout.engine=auto") == []
    (finding,) = of_profile("ppo.rollout.engine=vllm")
    assert finding[:2] == ("fail", "vLLM") and "no server is named" in finding.text and finding.exit_code == 2


def test_doctor_asks_the_server_of_the_environment(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_VLLM_URL", server.url)
    (finding,) = _rollout_server(None)
    assert finding[:3] == ("ok", "vLLM", f"{server.url} answers: 0.32.0, float32, batch-invariant")
    server.facts |= {"version": "0.33.1", "batch_invariant": False, "max_model_len": 8}
    (finding,) = _rollout_server(None)
    assert finding.level == "note" and "not batch-invariant, so PPO will not be bit-exact. Tether was" in finding.text
    assert finding.text.endswith("and this is 0.33.1. `VLLM=0.33.1 make test-vllm` tries it.")
    assert "/sleep" not in server.called and not server.requests, "it changes nothing there"


def test_doctor_says_what_ppo_would_refuse(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    served = ("ppo.rollout.engine=vllm", f"ppo.rollout.url={server.url}")
    assert of_profile(*served)[0].level == "ok"
    server.facts |= {"logprobs_mode": "raw_logprobs", "max_model_len": 8}
    wrong = ("ppo.rollout.sleep=true", "generation.temperature=2.5", "ppo.rollout.dtype=bfloat16")
    (finding,) = of_profile(*served, *wrong)
    assert finding.level == "fail" and finding.exit_code == 2
    for flag in ("--logprobs-mode", "--max-model-len", "--enable-sleep-mode", "temperature is 2.5", "dtype is float32"):
        assert flag in finding.text
    monkeypatch.setenv("TETHER_VLLM_URL", server.url)
    server.die()
    (finding,) = of_profile("ppo.rollout.engine=auto")
    assert finding.level == "fail" and "can't be reached" in finding.text and finding.exit_code == 2


def test_doctor_checks_a_profile_only_if_it_is_named() -> None:
    refused = CliRunner().invoke(server_commands, ["doctor", "--set", "ppo.rollout.engine=vllm"])
    assert refused.exit_code == 2 and "Name it" in refused.output
