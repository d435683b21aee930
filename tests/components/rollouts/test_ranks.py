"""PPO on several ranks with one server: one process's policy, one rank's error for all, and the same bytes again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Unreachable, UserError, WorkerDied
from components.base.jsonl import read_rows
from components.rollouts.config import RolloutConfig
from components.training.checkpoint import load_latest
from tests.components.distributed.conftest import runtime_of, start
from tests.components.distributed.test_launching import ranks_alive
from tests.components.distributed.test_stages import compare_ppo, kill_rank, on_ranks
from tests.components.rollouts.sending import SendingJob
from tests.components.rollouts.standin import StandIn
from tests.waiting import until

Asking = Callable[..., RolloutConfig]


def ends(out: Path) -> bool:
    """Whether no rank of a stage is left."""
    until("every rank is gone", lambda: not ranks_alive(out), 20)
    return list((out / "sent").glob("*")) == []


@pytest.mark.parametrize(
    ("ranks", "sharding", "options"),
    [
        pytest.param(2, "zero2", {}, marks=pytest.mark.whole),
        pytest.param(3, "zero3", {"batch_size": 4, "minibatch_size": 2, "micro_batch_size": 1},
                     marks=pytest.mark.ranks),
        pytest.param(2, "zero3", {"critic": {"kind": "shared"}}, marks=pytest.mark.ranks),
        pytest.param(2, "replicas", {}, marks=pytest.mark.ranks),
    ],
)  # fmt: skip
def test_ranks_with_one_server_give_one_processs_policy(
    ranks: int, sharding: str, options: dict[str, Any], stages: Any, server: StandIn, asking: Asking, tmp_path: Path
) -> None:
    """Rank 0 alone asks, and no more often than one process does."""
    options = {"updates": 3, "rollout": asking(server), **options}
    stages.run("ppo", tmp_path / "asked", **options)
    asked, server.requests = server.requests, []
    compare_ppo(stages, tmp_path, ranks, sharding, **options)
    key = lambda body: (body["seed"], body["prompt"], body["max_tokens"])  # noqa: E731
    assert sorted(map(key, server.requests)) == sorted(map(key, asked * 2))
    one, many = (read_rows(tmp_path / name / "artifact" / "history.jsonl") for name in ("one", "two"))
    for a, b in zip(one, many, strict=True):
        assert b["ppo/sampler_kl"] == pytest.approx(a["ppo/sampler_kl"], abs=1e-8)
        assert b["ppo/importance_max"] == pytest.approx(a["ppo/importance_max"], abs=1e-4)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_weights_are_gathered_one_by_one_for_the_first_rank(sharding: str, stages: Any, tmp_path: Path) -> None:
    """Also after a pass that left them gathered: no rank has more than its part and one whole parameter."""
    job = SendingJob(runtime=runtime_of(2, sharding))
    found = start("tests.components.rollouts.sending", job, {"sft": stages.inputs["sft"]}, tmp_path / "out")
    assert found.metrics == {"most": 1, "differing": 0, "rank 0": 1, "rank 1": 0}


@pytest.mark.ranks
def test_adapters_on_two_ranks_with_a_server_give_one_processs_policy(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path
) -> None:
    stages.run("reward", tmp_path / "reward", lora={"rank": 2})
    adapted = type(stages)(stages.inputs | {"reward": tmp_path / "reward" / "artifact"})
    compare_ppo(adapted, tmp_path, 2, "zero2", lora={"rank": 2}, updates=3, rollout=asking(server))


@pytest.mark.ranks
def test_a_server_away_ends_all_ranks_with_a_checkpoint(
    stages: Any, server: StandIn, asking: Asking, tmp_path: Path, digests: Any
) -> None:
    options = {"updates": 4, "rollout": asking(server, retries=0), "checkpoint_every": 3}
    on_ranks(stages, "ppo", tmp_path / "undisturbed", **options)
    out, spoiled = tmp_path / "out", server.spoil

    def dying(choice: dict[str, Any]) -> dict[str, Any]:
        if server.weights.endswith("-1") and server.dying_after < 0:
            server.dying_after = 4  # among the completions of the second update
        return choice

    server.spoil = dying
    with pytest.raises(Unreachable, match=r"^http://.*the vLLM server can't be reached .*continues from the check"):
        on_ranks(stages, "ppo", out, **options)
    assert ends(out)
    saved = load_latest(out / "checkpoint" / "ppo")
    assert saved is not None and saved.step == 1
    server.spoil, server.dying_after = spoiled, -1
    found = on_ranks(stages, "ppo", out, **options)
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert digests(out / "artifact") == digests(tmp_path / "undisturbed" / "artifact")


@pytest.mark.ranks
def test_a_refusal_ends_all_ranks_with_its_words(stages: Any, server: StandIn, asking: Asking, tmp_path: Path) -> None:
    server.keeps_output_layer = True
    with pytest.raises(UserError, match=r"^http://.* does not sample from the weights that were sent") as error:
        on_ranks(stages, "ppo", tmp_path / "out", rollout=asking(server))
    assert type(error.value) is UserError and ends(tmp_path / "out")


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_a_server_samples_resumes_to_the_same_bytes(
    rank: int, stages: Any, server: StandIn, asking: Asking, tmp_path: Path, digests: Any
) -> None:
    options = {"updates": 4, "rollout": asking(server), "checkpoint_every": 1, "sharding": "zero3"}
    on_ranks(stages, "ppo", tmp_path / "undisturbed", **options)
    out = tmp_path / "out"
    server.delay = 0.05
    before = len(server.requests)
    kill_rank(rank, out, lambda: server.weights.endswith("-2") and len(server.requests) > before + 38)
    with pytest.raises(WorkerDied):
        on_ranks(stages, "ppo", out, **options)
    server.delay = 0.0
    on_ranks(stages, "ppo", out, **options)
    assert digests(out / "artifact") == digests(tmp_path / "undisturbed" / "artifact") and ends(out)
