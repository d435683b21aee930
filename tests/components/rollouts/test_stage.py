"""The PPO stage on a server: it learns, says what sampled, and survives the server's death and its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import CheckFailed, Unreachable, UserError
from components.base.jsonl import read_rows
from components.models import sampling
from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.ppo import stage
from components.ppo.learner import Learner
from components.ppo.models import Models
from components.rollouts.client import resolve_rollout
from components.rollouts.config import RolloutConfig
from components.rollouts.engine import INVARIANCE_REQUESTS
from components.training.checkpoint import load_latest
from tests.components.rollouts.standin import StandIn
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
Asking = Callable[..., RolloutConfig]
START = 1 + INVARIANCE_REQUESTS
"""Requests of a process's first update by which it measures batch invariance. Each update has one more, its proof."""


Run = tuple[Path, dict[str, float], list[dict[str, Any]]]

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from components.ppo.config import PpoJob
from components.ppo.stage import run
torch.set_num_threads(1)
inputs = dict(pair.split("=") for pair in sys.argv[4].split(","))
inputs = {name: Path(path) for name, path in inputs.items()}
run(PpoJob.model_validate_json(sys.argv[2]), inputs, Path(sys.argv[3]), lambda *_, **__: None)
"""


@pytest.fixture(scope="module")
def undisturbed(stages: Any, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing happened to: its folder, its metrics and what the server was asked."""
    out = tmp_path_factory.mktemp("undisturbed")
    model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
    with StandIn(model, tokenizer.eos_token_id) as server:
        config = resolve_rollout(RolloutConfig(engine="vllm", url=server.url, concurrency=4))
        return out, stages.run("ppo", out, rollout=config), server.requests


def test_it_trains_on_a_response_of_each_seed_and_says_what_sampled(undisturbed: Run) -> None:
    out, metrics, requests = undisturbed
    assert metrics["ppo/rollouts_bit_exact"] == 1
    history = read_rows(out / "artifact" / "history.jsonl")
    assert len(history) == 5
    for row in history:
        assert 0 <= row["ppo/sampler_kl"] < 1e-6 and row["ppo/importance_truncated"] == 0
        assert row["ppo/importance_max"] == pytest.approx(1, abs=1e-3) and row["ppo/sampler_drift"] < 1e-6
    assert len(requests) == START + 5 * 9 and len({body["seed"] for body in requests}) == 5 * 8
    assert list((out / "sent").iterdir()) == []


@pytest.mark.faults
@pytest.mark.kind("killed while a server samples")
def test_killed_while_it_waits_for_responses_it_goes_on_to_the_same_bytes(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path, digests: Any, undisturbed: Run
) -> None:
    config, ends = asking(server), list[int]()
    job = stages.job("ppo", rollout=config, checkpoint_every=1).model_dump_json()
    inputs = ",".join(f"{name}={folder}" for name, folder in stages.inputs.items())
    command = [sys.executable, "-c", KILLED, str(ROOT), job, str(tmp_path), inputs]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path)

    def kill(choice: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) > START + 3 * 9 + 3 and not ends:
            ends.append(len(server.requests))
            process.kill()
            process.wait()
        return choice

    server.spoil = kill
    assert process.wait(timeout=PATIENCE * 200) == -signal.SIGKILL and ends
    kept = load_latest(tmp_path / "checkpoint" / "ppo")
    assert kept is not None and kept.step == 3 and list((tmp_path / "sent").iterdir())
    stages.run("ppo", tmp_path, rollout=config, checkpoint_every=1)
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")
    assert list((tmp_path / "sent").iterdir()) == [], "weights that the killed process sent are gone"


def test_a_server_that_dies_ends_the_stage_with_what_was_learnt_and_another_in_its_place_goes_on(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path, digests: Any, runtime: Runtime, undisturbed: Run
) -> None:
    config = asking(server)

    def dying(step: int, metrics: Any, **_: Any) -> None:
        if step == 3:
            server.dying_after = 8  # among the completions of the fourth update

    with pytest.raises(Unreachable, match="continues from the checkpoint"):
        stages.run("ppo", tmp_path, dying, rollout=config)
    kept = load_latest(tmp_path / "checkpoint" / "ppo")
    assert kept is not None and kept.step == 3, "checkpoint_every is 2: the third is kept all the same"
    server.die()
    model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
    with StandIn(model, tokenizer.eos_token_id, port=server.port) as another:
        stages.run("ppo", tmp_path, rollout=config)
        assert len(another.requests) == START + 2 * 9
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


def test_a_sampler_that_is_another_policy_still_stops_the_run(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path
) -> None:
    """After an honest proof its log-probabilities are off by half a nat: a KL of 0.1 nats a token."""

    def spoil(choice: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) <= START + 1:
            return choice
        off = [min(each + 0.5, 0.0) for each in choice["logprobs"]["token_logprobs"]]
        return choice | {"logprobs": {"token_logprobs": off}}

    server.spoil = spoil
    with pytest.raises(
        CheckFailed, match=r"training path disagree .* 0\.11 nats \(mean KL; 1e-05 is allowed with a server in float32"
    ):
        stages.run("ppo", tmp_path / "out", rollout=asking(server))


def test_a_shared_critic_and_weights_of_whole_responses_take_a_servers_samples(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path
) -> None:
    """The critic's values are not sampled along: they are computed on the training path."""
    options = {"critic": {"kind": "shared"}, "importance": {"level": "sequence"}, "updates": 2}
    stages.run("ppo", tmp_path, rollout=asking(server), **options)
    for row in read_rows(tmp_path / "artifact" / "history.jsonl"):
        assert row["ppo/value_loss"] > 0 and row["ppo/importance_max"] == pytest.approx(1, abs=1e-3)


def test_an_output_layer_that_stays_stale_stops_update_two(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path
) -> None:
    """Nothing is sampled from it: the server was asked for one short response after the first update."""
    server.keeps_output_layer = True
    with pytest.raises(UserError, match=r"does not sample from the weights .* tie_word_embeddings false") as error:
        stages.run("ppo", tmp_path / "out", rollout=asking(server))
    assert error.value.exit_code == 2 and len(server.requests) == START + 9 + 1


def test_a_server_on_the_policys_gpu_sleeps_whenever_models_compute(
    stages: Any, runtime: Runtime, asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is awake when the stage begins, as a killed run leaves it, and only to take weights, prove them and sample."""
    model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
    computed, awake = list[str](), list[str]()

    def observed(target: Any, name: str) -> None:
        compute = getattr(target, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            (computed if server.asleep == {"weights", "kv_cache"} else awake).append(name)
            return compute(*arguments, **options)

        monkeypatch.setattr(target, name, wrapped)

    with StandIn(model, tokenizer.eos_token_id, sleeps=True) as server:
        config = asking(server, sleep=True)
        for target, name in (
            (Models, "load"), (stage, "evaluate"), (stage, "gather_experience"), (Learner, "update"),
            (sampling.LocalEngine, "sample"),
        ):  # fmt: skip
            observed(target, name)
        stages.run("ppo", tmp_path / "whole", rollout=config, updates=2, evaluate_every=1)
        assert not awake and {"load", "evaluate", "gather_experience", "update", "sample"} <= set(computed)
        parts = ("/sleep", "/wake_up", "/collective_rpc", "/v1/completions")
        update = ["/wake_up", "/collective_rpc", "/wake_up", "/v1/completions", "/sleep"]
        assert [route for route in server.called if route in parts] == ["/sleep", *update, *update]

        server.asleep.clear()  # as after SIGKILL while it sampled
        stages.run("ppo", tmp_path / "again", rollout=config, updates=1)
        assert not awake
        server.facts["sleeps"] = False
        with pytest.raises(UserError, match="--enable-sleep-mode"):
            stages.run("ppo", tmp_path / "refused", rollout=config)
