"""What a server is asked for and held to: the distribution, the seeds, the weights, and every answer."""

import copy
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from components.base.errors import Unreachable, UserError
from components.data.tables.published import read_split
from components.models.adapters import Backbone
from components.models.batching import encode_prompt
from components.models.config import AdapterConfig, GenerationConfig
from components.models.folders import load_causal_lm
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.models.sampling import Samples
from components.ppo.models import Packed, scatter
from components.rollouts.config import RolloutConfig
from components.rollouts.engine import Rollouts, VllmEngine, open_rollouts, response_seed
from components.rollouts.transfer import FolderTransfer, weights_on_first
from tests.components.rollouts.standin import StandIn
from tests.forks import Forked
from tests.waiting import PATIENCE

Asking = Callable[..., RolloutConfig]
CAP = GenerationConfig(max_prompt_tokens=64, max_new_tokens=8)


@pytest.fixture
def policy(stages: Any, runtime: Runtime) -> Any:
    """SFT's weights, moved a little: never those that the server was started with."""
    model, _ = load_causal_lm(stages.inputs["sft"], runtime)
    with torch.no_grad():
        model.model.norm.weight.add_(0.3)
    return model.requires_grad_(False)


@pytest.fixture
def tokenizer(stages: Any, runtime: Runtime) -> Any:
    return load_causal_lm(stages.inputs["sft"], runtime)[1]


@pytest.fixture
def prompts(stages: Any, tokenizer: Any) -> list[list[int]]:
    rows = read_split(stages.inputs["data"] / "prompts.train")[:6]
    return [encode_prompt(tokenizer, row["prompt"], 64) for row in rows]


@pytest.fixture
def rollouts(tokenizer: Any, runtime: Runtime, tmp_path: Path) -> Callable[..., Any]:
    return lambda config: open_rollouts(config, tokenizer, runtime, tmp_path / "sent")


@pytest.fixture
def opened(server: StandIn, asking: Asking, rollouts: Any) -> Iterator[Rollouts]:
    with rollouts(asking(server)) as found:
        yield found


def rows(samples: Samples) -> list[list[int]]:
    return [ids[mask].tolist() for ids, mask in zip(samples.response_ids, samples.response_mask, strict=True)]


@pytest.mark.parametrize(("temperature", "adapted"), [(1.0, False), (0.7, False), (1.0, True)])
def test_its_log_probabilities_are_the_training_paths_of_the_weights_that_were_sent(
    opened: Rollouts, policy: Any, tokenizer: Any, prompts: Any, runtime: Runtime, temperature: float,
    adapted: bool,
) -> None:  # fmt: skip
    """Token by token, at the temperature, pad excluded, whatever the server's own defaults are."""
    if adapted:
        policy = Backbone(policy).add("policy", AdapterConfig(), seed=0)
        for each in policy.parameters():
            each.data.add_(0.05)
    generation = CAP.model_copy(update={"temperature": temperature})
    with opened.engine(policy, None) as engine:
        samples = engine.sample(prompts, generation, seed=5)
    assert samples.stats is None, "what was recomputed is believed, not what a server says"
    batch = Packed.of(samples, range(len(prompts)))
    found = token_stats(policy, batch.ids, batch.mask, batch.counts, runtime, temperature)
    mask = samples.response_mask
    assert (scatter(found.logprobs, mask) - samples.logprobs)[mask].abs().max() < 1e-4
    assert not samples.logprobs[~mask].any() and len(set(mask.sum(1).tolist())) > 1


def test_sampled_tokens_have_the_policys_frequencies(
    opened: Rollouts, policy: Any, tokenizer: Any, prompts: Any
) -> None:
    """Not those of the server's own defaults (temperature 0.5, top_k 2, a penalty), nor of its first weights."""
    one = GenerationConfig(max_prompt_tokens=64, max_new_tokens=1)
    with opened.engine(policy, None) as engine:
        drawn = engine.sample([prompts[0]] * 400, one, seed=1).response_ids[:, 0]
    logits = policy(torch.tensor([prompts[0]])).logits[0, -1]
    logits[tokenizer.pad_token_id] = -torch.inf
    likely = logits.argsort(descending=True)
    exact = torch.stack([each.sum() for each in logits.softmax(-1)[likely].split(40)])
    found = torch.stack([torch.isin(drawn, each).float().mean() for each in likely.split(40)])
    assert (exact - found).abs().max() < 0.1, "four standard deviations of a share of 400"
    assert exact[0] < 0.7, "the server's own defaults never leave the likeliest two"


def test_rounding_in_bfloat16_of_a_response_of_one_token_passes_the_proof(
    server: StandIn, asking: Asking, policy: Any, tokenizer: Any, prompts: Any, runtime: Runtime, tmp_path: Path
) -> None:
    """0.2 nats at one token are a KL of 0.019, more than 0.01 a token allows; rounding does that in some percent."""
    server.spoil = lambda choice: choice | {
        "logprobs": {"token_logprobs": [min(each - 0.2, 0.0) for each in choice["logprobs"]["token_logprobs"]]}
    }
    one = GenerationConfig(max_prompt_tokens=64, max_new_tokens=1)
    coarse = runtime.model_copy(update={"dtype": "bfloat16"})
    rollouts = open_rollouts(asking(server), tokenizer, coarse, tmp_path / "sent")
    with rollouts as opened, opened.engine(policy, None) as engine:
        assert engine.sample(prompts, one, seed=1).response_mask.all()


def test_a_responses_seed_is_its_number_s_alone_whoever_its_neighbours_are(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any
) -> None:
    with opened.engine(policy, None) as engine:
        assert len({tuple(row) for row in rows(engine.sample([prompts[0]] * 6, CAP, seed=3))}) > 1
        assert len({body["seed"] for body in server.requests[-6:]}) == 6
        whole = rows(engine.sample(prompts, CAP, seed=3))
        apart = rows(engine.sample(prompts[4:], CAP, seed=3, numbers=[4, 5]))
        other = rows(engine.sample(prompts, CAP, seed=4))
    assert apart == whole[4:] and other != whole
    seeds = {response_seed(s, n) for s in (3, 2**62 - 1) for n in range(100)}
    assert len(seeds) == 200 and all(0 <= each < 2**63 for each in seeds)


def test_answers_stand_in_the_prompts_order_however_many_are_open_at_a_time(
    server: StandIn, asking: Asking, rollouts: Any, policy: Any, prompts: Any
) -> None:
    found = []
    for concurrency in (1, 6):
        with rollouts(asking(server, concurrency=concurrency)) as opened, opened.engine(policy, None) as engine:
            found.append(engine.sample(prompts, CAP, seed=3))
    assert rows(found[0]) == rows(found[1])
    asked = [ids[mask].tolist() for ids, mask in zip(found[0].prompt_ids, found[0].prompt_mask, strict=True)]
    assert asked == prompts


def test_eos_ends_a_response_and_counts_the_cap_cuts_one_and_pad_is_never_sampled(
    server: StandIn, asking: Asking, rollouts: Any, policy: Any, tokenizer: Any, prompts: Any
) -> None:
    """With a policy that likes nothing more than pad, and EOS next."""
    eager = copy.deepcopy(policy)
    weight = eager.get_output_embeddings().weight
    last = policy(torch.tensor([prompts[0]]), output_hidden_states=True).hidden_states[-1][0, -1]
    for token, pull in ((tokenizer.pad_token_id, 30.0), (tokenizer.eos_token_id, 4.0)):
        weight[token] = last * pull / last.square().sum()
    with rollouts(asking(server)) as opened, opened.engine(eager, None) as engine:
        samples = engine.sample([prompts[0]] * 40, CAP, seed=2)
        assert eager(torch.tensor([prompts[0]])).logits[0, -1].argmax() == tokenizer.pad_token_id
    lengths = samples.response_mask.sum(1)
    assert tokenizer.pad_token_id not in {token for row in rows(samples) for token in row}
    assert 0 < samples.ended.sum() < 40 and lengths.max() == CAP.max_new_tokens
    for row, ended in zip(rows(samples), samples.ended.tolist(), strict=True):
        assert (row[-1] == tokenizer.eos_token_id) is ended and tokenizer.eos_token_id not in row[:-1]
        assert ended or len(row) == CAP.max_new_tokens


def test_new_weights_are_sampled_from_and_the_prefix_cache_of_the_old_is_gone(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any
) -> None:
    with opened.engine(policy, None) as engine:
        before = rows(engine.sample(prompts, CAP, seed=3))
    moved = copy.deepcopy(policy)
    moved.model.norm.weight.mul_(-1)
    with opened.engine(moved, None) as engine:
        assert rows(engine.sample(prompts, CAP, seed=3)) != before
    assert torch.equal(server.model.model.norm.weight, moved.model.norm.weight)
    sent = [route for route in server.called if route in ("/collective_rpc", "/reset_prefix_cache", "/v1/completions")]
    assert sent == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"] * 2


def test_folders_of_weights_are_removed_once_the_next_are_loaded_and_at_the_end(
    server: StandIn, asking: Asking, rollouts: Any, policy: Any, tmp_path: Path
) -> None:
    shared = tmp_path / "shm"
    with rollouts(asking(server, folder=str(shared))) as opened:
        for _ in range(3):
            with opened.engine(policy, None):
                (own,) = shared.iterdir()
                (place,) = own.iterdir()
                assert (place / "model.safetensors").is_file() and place.name == server.weights
    assert list(shared.iterdir()) == []


def test_weights_that_killed_runs_sent_go_when_another_starts_and_those_of_a_live_run_stay(
    server: StandIn, asking: Asking, rollouts: Any, policy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shm"

    def die_sending() -> None:
        transfer = FolderTransfer(SimpleNamespace(config=asking(server), post=lambda *_: None), shared)  # type: ignore[arg-type]
        transfer.send(weights_on_first(policy, torch.float32), policy.config, "tether-a-0")
        with patch("components.rollouts.transfer.save_file", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            transfer.send(weights_on_first(policy, torch.float32), policy.config, "tether-a-1")

    killed = Forked(target=die_sending)
    killed.start()
    killed.join(PATIENCE * 60)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = shared.iterdir()
    assert sorted(path.name for path in left.iterdir()) == [".tether-a-1.partial", "tether-a-0"]
    elsewhere = shared / f"sent-00000000-{left.name.partition('-')[2].partition('-')[2]}"
    theirs = shared / "model-of-somebody"
    elsewhere.mkdir()
    theirs.mkdir()
    with rollouts(asking(server, folder=str(shared))) as one, one.engine(policy, None):
        assert not left.exists() and elsewhere.exists() and theirs.exists()
        assert str(elsewhere) in caplog.text and "before it was booted" in caplog.text
        (own,) = set(shared.iterdir()) - {elsewhere, theirs}
        with rollouts(asking(server, folder=str(shared))) as other, other.engine(policy, None):
            assert own.exists() and len(list(shared.iterdir())) == 4
        assert own.exists() and len(list(shared.iterdir())) == 3
    assert set(shared.iterdir()) == {elsewhere, theirs}


def test_a_server_that_keeps_its_old_weights_is_refused(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any
) -> None:
    server.ignores_weights = True
    with pytest.raises(UserError, match=r"samples from the weights 'default', and 'tether-\w+-0' were sent"):
        opened.engine(policy, None).__enter__()


def test_a_server_that_calls_itself_batch_invariant_is_measured(
    server: StandIn, asking: Asking, rollouts: Any, policy: Any, prompts: Any
) -> None:
    """A neighbour changes its logits by a hundred thousandth; a server without the variable may do so."""
    server.depends_on_neighbours, server.delay = True, 0.02
    no = r"runs with VLLM_BATCH_INVARIANT=1, and .* Start it without"
    with pytest.raises(UserError, match=no), rollouts(asking(server)) as opened, opened.engine(policy, None) as engine:
        engine.sample(prompts, CAP, seed=3)
    server.facts["batch_invariant"] = False
    with rollouts(asking(server)) as opened, opened.engine(policy, None) as engine:
        assert len(rows(engine.sample(prompts, CAP, seed=3))) == len(prompts)


def test_a_full_disk_names_the_option(server: StandIn, asking: Asking, policy: Any, tmp_path: Path) -> None:
    client, limits = SimpleNamespace(config=asking(server)), resource.getrlimit(resource.RLIMIT_FSIZE)
    transfer = FolderTransfer(client, tmp_path / "shm")  # type: ignore[arg-type]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"\.partial.*: File too large\. .* ppo\.rollout\.folder names another"):
            transfer.send(weights_on_first(policy, torch.float32), policy.config, "tether-a-0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_weights_that_change_while_it_samples_end_the_stage_so_that_it_may_go_on(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any
) -> None:
    with opened.engine(policy, None) as engine:
        server.weights = "tether-of-another-run-7"
        with pytest.raises(Unreachable, match=r"another-run-7' replaced .* a server of its own"):
            engine.sample(prompts, CAP, seed=3)


def test_a_server_that_shares_the_gpu_sleeps_while_the_policy_trains(
    stages: Any, runtime: Runtime, asking: Asking, rollouts: Any, policy: Any, prompts: Any, tokenizer: Any
) -> None:
    with (
        StandIn(policy, tokenizer.eos_token_id, sleeps=True) as server,
        rollouts(asking(server, sleep=True)) as opened,
    ):
        for _ in range(2):
            with opened.engine(policy, None) as engine:
                assert not server.asleep and len(rows(engine.sample(prompts, CAP, seed=3))) == len(prompts)
            assert server.asleep == {"weights", "kv_cache"}
        with pytest.raises(ZeroDivisionError), opened.engine(policy, None):
            _ = 1 // 0
        assert server.asleep == {"weights", "kv_cache"}, "an error leaves the GPU to the next attempt"
    steps = [each for each in server.called if each in ("/wake_up", "/collective_rpc", "/sleep")]
    again = ["/wake_up", "/collective_rpc", "/wake_up", "/sleep"]
    assert steps == ["/collective_rpc", "/wake_up", "/sleep", *again, *again]


SPOILED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": [1, 2]}, "another prompt than was sent"),
    ({"token_ids": None}, "no vLLM server known to Tether does"),
    ({"token_ids": ["7"]}, "no vLLM server known to Tether does"),
    ({"token_ids": []}, "no vLLM server known to Tether does"),  # even an empty text ends by a token
    ({"logprobs": None}, "no vLLM server known to Tether does"),
    ({"finish_reason": "abort"}, "ended by 'abort'"),
    ({"finish_reason": "stop", "token_ids": [7, 8]}, "--generation-config vllm"),
    ({"finish_reason": "length", "token_ids": [7, 8]}, "--max-model-len"),
    ({"token_ids": [10**6, 8]}, "not one of the policy's"),
]


@pytest.mark.parametrize(("change", "message"), SPOILED, ids=[str(i) for i in range(len(SPOILED))])
def test_an_answer_that_is_not_what_was_asked_for_is_refused(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any, change: dict[str, Any], message: str
) -> None:
    def spoil(choice: dict[str, Any]) -> dict[str, Any]:
        spoiled = choice | change
        if change.get("logprobs", 0) is not None and isinstance(change.get("token_ids"), list):
            spoiled["logprobs"] = {"token_logprobs": [-1.0] * len(change["token_ids"])}
        return spoiled

    server.spoil = spoil
    with opened.engine(policy, None) as engine, pytest.raises(UserError, match=message) as error:
        engine.sample(prompts[:1], CAP, seed=3)
    assert error.value.exit_code == 2 and not isinstance(error.value, Unreachable)


def test_pads_and_ends_in_the_middle_and_log_probabilities_that_are_none_are_refused(
    opened: Rollouts, policy: Any, tokenizer: Any
) -> None:
    with opened.engine(policy, None) as engine:
        assert isinstance(engine, VllmEngine)
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        asked = engine.request([1], CAP, seed=0)
        for ids, logprob, message in (
            ([7, pad, eos], -1.0, "pad token"), ([eos, 7, eos], -1.0, "went on after the end"),
            ([7, eos], -9999.0, "log-probability is not below 0"), ([7, eos], 0.5, "log-probability is not below 0"),
        ):  # fmt: skip
            choice = {"finish_reason": "stop", "token_ids": ids, "prompt_token_ids": [1]}
            answer = {"choices": [choice | {"logprobs": {"token_logprobs": [logprob] * len(ids)}}]}
            with pytest.raises(UserError, match=message):
                engine.read(asked, answer)


def test_a_stop_of_the_models_own_generation_config_is_seen(
    server: StandIn, opened: Rollouts, policy: Any, prompts: Any
) -> None:
    server.also_stops = set(range(6, 400))
    with opened.engine(policy, None) as engine, pytest.raises(UserError, match="--generation-config vllm"):
        engine.sample(prompts, CAP, seed=3)
