"""The training stages on two ranks against one process: the same weights to rounding, the same texts."""

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.base.errors import WorkerDied
from components.base.jsonl import read_rows
from components.distributed.launching import Stopped
from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm, save_model
from tests.components.conftest import RUNTIME
from tests.components.distributed.conftest import Launched, runtime_of, start
from tests.components.ppo.test_best_policy import CUT


def on_ranks(
    stages: Any, stage: str, out: Path, ranks: int = 2, sharding: str = "zero2", dtype: str = "float32", **options: Any
) -> Launched:
    """Compute a stage as `stages.run` does, on several ranks."""
    job = stages.job(stage, **options)
    job = job.model_copy(update={"runtime": runtime_of(ranks, sharding, dtype)})
    return start(f"components.{stage}.stage", job, stages.inputs_of(stage), out)


def difference(one: Path, other: Path) -> float:
    """The relative L2 distance of the weights of two artifacts, the largest of their files'."""
    found = []
    for file in sorted((one / "artifact").rglob("*.safetensors")):
        a, b = load_file(file), load_file(other / file.relative_to(one))
        assert a.keys() == b.keys()
        flat = [torch.cat([each[name].double().flatten() for name in sorted(each)]) for each in (a, b)]
        found.append(float((flat[0] - flat[1]).norm() / flat[0].norm()))
    assert found
    return max(found)


def compare_samples(one: Path, other: Path) -> None:
    """See that two artifacts hold the same texts."""
    a, b = (read_rows(each / "artifact" / "samples.jsonl") for each in (one, other))
    assert [row["response"] for row in a] == [row["response"] for row in b]


EVALUATED = ("evaluation.jsonl", "evaluation_samples.jsonl", "last.jsonl")
ROUNDED, ROUNDED_SUM = 3e-6, 1e-5
"""Of a metric (the end of an interval differed by 2.1e-6), and of a response's KL, which sums up to 40 differences of
log-probabilities in float32 (5.3e-6)."""


def compare_evaluations(one: Path, other: Path, growth: float = 1.0) -> None:
    """See that two artifacts of PPO hold the same final evaluation, metrics and rows, to rounding times `growth`."""

    def compare(a: Any, b: Any, where: str) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for name in a:
                compare(a[name], b[name], f"{where}: {name}")
        elif isinstance(a, float):
            most = growth * (ROUNDED_SUM if where.endswith(": kl") else ROUNDED)
            assert b == pytest.approx(a, rel=most, abs=most), where
        else:
            assert a == b, where

    metrics = [json.loads((each / "artifact" / "metrics.json").read_text()) for each in (one, other)]
    compare(*metrics, "metrics.json")
    names = [name for name in EVALUATED if (one / "artifact" / name).exists()]
    assert len(names) == 2 + ("policy/last_kl" in metrics[0])
    for name in names:
        for a, b in zip(*(read_rows(each / "artifact" / name) for each in (one, other)), strict=True):
            compare(a, b, name)


def kill_rank(rank: int, out: Path, due: Callable[[], object]) -> None:
    """Kill a rank of the stage in `out` as soon as `due` says so."""

    def kill() -> None:
        while not due():
            time.sleep(0.01)
        os.kill(json.loads((out / "ranks" / f"process-{rank}.json").read_text())["pid"], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


@pytest.mark.whole
def test_sft_on_two_ranks_gives_one_process_weights_curve_and_texts(stages: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    points = []
    stages.run("sft", one, lambda step, metrics, total=None, **told: points.append((step, metrics, told)))
    found = on_ranks(stages, "sft", two)
    assert difference(one, two) < 1e-5  # 5.3e-8 measured
    compare_samples(one, two)
    assert [(step, told.get("doing")) for step, _, told in found.points] == [(s, t.get("doing")) for s, _, t in points]
    for (_, alone, told), (_, both, *_) in zip(points, found.points, strict=True):
        if "doing" in told:
            continue
        memory = {"sft/peak_memory_gb"}
        assert both.keys() == alone.keys() >= memory
        assert {n: v for n, v in both.items() if n not in memory} == pytest.approx(
            {n: v for n, v in alone.items() if n not in memory}, rel=1e-5
        )
    left = {path.name for path in two.iterdir()}
    assert left == {"artifact", "attachments", "checkpoint", "ranks"}


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero3", "replicas"])
def test_sft_is_the_same_however_it_is_sharded(sharding: str, stages: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = stages.run("sft", one)
    found = on_ranks(stages, "sft", two, sharding=sharding)
    assert difference(one, two) < 1e-5
    compare_samples(one, two)
    assert found.metrics == pytest.approx(alone, rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks, sharding", [(2, "zero2"), (3, "zero3")])
def test_sft_of_a_base_in_bfloat16_on_ranks(ranks: int, sharding: str, stages: Any, tmp_path: Path) -> None:
    """The base is converted to float32 by one rank after the other, and evaluated by all before its training."""
    model, tokenizer = load_causal_lm(stages.inputs["sft"], RUNTIME)
    save_model(model.to(torch.bfloat16), tokenizer, tmp_path / "base")
    with_base = type(stages)(stages.inputs | {"base": tmp_path / "base"})
    one, two = tmp_path / "one", tmp_path / "two"
    options = {"learning_rate": 1e-3, "packing": 150}
    alone = with_base.run("sft", one, **options)
    measured = on_ranks(with_base, "sft", two, ranks, sharding, **options).metrics
    assert difference(one, two) < 1e-6
    compare_samples(one, two)
    assert measured["sft/base_perplexity"] == pytest.approx(alone["sft/base_perplexity"], rel=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks, sharding", [(2, "zero2"), (3, "zero3")])
def test_packed_sft_on_ranks_is_unpacked_sft_in_one_process(
    ranks: int, sharding: str, stages: Any, tmp_path: Path
) -> None:
    """Rows of 150 tokens hold a few demonstrations; batches of 199 leave one, which two of three ranks lack."""
    one, two = tmp_path / "one", tmp_path / "two"
    stages.run("sft", one, batch_size=199, micro_batch_size=199)
    on_ranks(stages, "sft", two, ranks, sharding, batch_size=199, micro_batch_size=199, packing=150)
    assert difference(one, two) < 1e-5
    compare_samples(one, two)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3", "replicas"])
@pytest.mark.parametrize("batch_size, micro_batch_size", [(67, 9), (199, 67)])
def test_sft_with_ragged_and_empty_shares(
    batch_size: int, micro_batch_size: int, sharding: str, stages: Any, tmp_path: Path
) -> None:
    """200 examples in batches of 67 leave 66; of 199 leave one, and on three ranks two have none of it."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = {"batch_size": batch_size, "micro_batch_size": micro_batch_size}
    stages.run("sft", one, **options)
    on_ranks(stages, "sft", two, ranks=3, sharding=sharding, **options)
    assert difference(one, two) < 1e-5
    compare_samples(one, two)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3", "replicas"])
@pytest.mark.parametrize(
    "options",
    [
        {"members": 2},
        {"shared_prompts": False},
        {"lora": {"rank": 2}, "members": 2},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_reward_on_two_ranks_gives_one_process_models(
    options: dict[str, Any], sharding: str, stages: Any, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = stages.run("reward", one, **options)
    found = on_ranks(stages, "reward", two, sharding=sharding, **options)
    assert difference(one, two) < 1e-5  # 9.8e-6 measured of a second member, 5.7e-7 of the first
    assert found.metrics["reward/accuracy"] == alone["reward/accuracy"]
    assert found.metrics["reward/scale"] == pytest.approx(alone["reward/scale"], rel=1e-4)


WATCHED: list[tuple[str, str, dict[str, Any]]] = [
    ("sft", "zero3", {"epochs": 20, "evaluate_every": 5, "max_demonstrations": 32, "batch_size": 8, "decay": "none",
                      "learning_rate": 0.05, "watch": {"patience": 2}}),
    ("reward", "zero2", {"members": 2, "epochs": 12, "evaluate_every": 4, "max_pairs": 16, "decay": "none",
                         "learning_rate": 0.02, "watch": {"examples": 30, "patience": 2}, "probe_texts": 8}),
]  # fmt: skip
"""SFT is out of patience at step 35 of 80, both reward models at step 12 of 12. Of the second one step 4 is
published."""


@pytest.mark.ranks
@pytest.mark.parametrize("stage, sharding, options", WATCHED, ids=["sft", "reward"])
def test_held_out_evaluations_on_two_ranks_stop_and_publish_what_one_process_does_also_after_an_interruption(
    stage: str, sharding: str, options: dict[str, Any], stages: Any, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    alone = stages.run(stage, one, **options)
    job = stages.job(stage, **options).model_copy(update={"runtime": runtime_of(2, sharding)})
    passed = two / "checkpoint" / {"sft": "sft", "reward": "reward-1"}[stage] / "step-000000006.json"
    begin = functools.partial(start, f"components.{stage}.stage", job, stages.inputs_of(stage), two)
    with pytest.raises(Stopped):
        begin(check=lambda: signal.SIGTERM if passed.exists() else None)
    assert not (two / "artifact" / "metadata.json").exists()
    found = begin()
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert difference(one, two) < 1e-5
    about, expected = (json.loads((each / "artifact" / "metadata.json").read_text()) for each in (two, one))
    for own, its in zip(about.get("models", [about]), expected.get("models", [expected]), strict=True):
        assert (own["published_step"], own["last_step"]) == (its["published_step"], its["last_step"])
        assert [look["step"] for look in own["evaluations"]] == [look["step"] for look in its["evaluations"]]
        for look, its_look in zip(own["evaluations"], its["evaluations"], strict=True):
            assert look["loss"] == pytest.approx(its_look["loss"], rel=1e-5)
    watched = {name for name in alone if name.endswith(("watched_loss", "_step"))}
    assert len(watched) == 4
    assert {n: found.metrics[n] for n in watched} == pytest.approx({n: alone[n] for n in watched}, rel=1e-5)
    stopped = {"sft": [35], "reward": [12, 12]}[stage]
    published = {"sft": [35], "reward": [12, 4]}[stage]
    models = about.get("models", [about])
    assert ([each["last_step"] for each in models], [each["published_step"] for each in models]) == (stopped, published)


PPO_OPTIONS: list[dict[str, Any]] = [
    {},
    {"critic": {"kind": "shared"}},
    {"advantage": "rloo", "group_size": 2},
    {
        "batch_size": 6,
        "minibatch_size": 3,
        "micro_batch_size": 3,
        "kl": {"control": "fixed", "coefficient": 0.1, "refresh_every": 2},
    },
    {"advantage": "grpo", "group_size": 4, "kl": {"control": "fixed", "coefficient": 0.1, "form": "k2"}},
    {"advantage": "rloo", "group_size": 2, "pair_labels": "soft", "score": {"missing_eos": "keep"}},  # no ties
    {
        "balance": "category",
        "rules": {"patterns": {"word": "refund|post|allow", "nine": "9"}, "drop": ["word"], "penalty": {"nine": 0.5}},
    },
    {
        "generation": {"max_prompt_tokens": 64, "max_new_tokens": 40},
        "critic": {"warmup": 1},
        "ema": 0.5,
        "ptx": {"coefficient": 0.5, "batch_size": 3},
        "aggregation": "sequence",
        "micro_batch_tokens": 200,
        "evaluate_every": 2,
        "evaluate": 8,
    },
    {
        "generation": {"max_prompt_tokens": 64, "max_new_tokens": 40, "temperature": 0.7},
        "evaluate_temperature": 0.3,
        "evaluate": 9,
        "best_of": 2,
        "repeats": {"prompts": 3, "samples": 2},
        "rules": {"patterns": {"letter": "a"}},
    },
]


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3", "replicas"])
@pytest.mark.parametrize("options", PPO_OPTIONS, ids=str)
def test_ppo_on_two_ranks_gives_one_process_policy_and_texts(
    options: dict[str, Any], sharding: str, stages: Any, tmp_path: Path
) -> None:
    compare_ppo(stages, tmp_path, 2, sharding, **options)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_ppo_with_ragged_and_empty_shares(sharding: str, stages: Any, tmp_path: Path) -> None:
    """Minibatches of two responses on three ranks: one has none, and of the batch of four another has two."""
    compare_ppo(stages, tmp_path, 3, sharding, batch_size=4, minibatch_size=2, micro_batch_size=1)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_ppo_with_adapters_on_two_ranks(kind: str, stages: Any, tmp_path: Path) -> None:
    reward = tmp_path / "reward"
    stages.run("reward", reward, lora={"rank": 2})
    with_adapter = type(stages)(stages.inputs | {"reward": reward / "artifact"})
    compare_ppo(with_adapter, tmp_path, 2, "zero2", lora={"rank": 2}, critic={"kind": kind})


@pytest.mark.ranks
def test_on_three_ranks_a_minibatch_may_have_fewer_responses_than_ranks(stages: Any, tmp_path: Path) -> None:
    """Nearly all words are dropped: some batches have one or two responses left, and some none."""
    rules = {"patterns": {"digit": "[1-6]"}, "drop": ["digit"]}
    compare_ppo(stages, tmp_path, 3, "zero2", rules=rules, updates=6)
    left = [8 * (1 - row["ppo/left_out"]) for row in read_rows(tmp_path / "one" / "artifact" / "history.jsonl")]
    assert any(0 < count < 3 for count in left), left


def compare_ppo(stages: Any, folder: Path, ranks: int, sharding: str, **options: Any) -> None:
    """See that PPO on ranks ends with one process's policy, texts and final metrics."""
    one, two = folder / "one", folder / "two"
    alone = stages.run("ppo", one, **options)
    found = on_ranks(stages, "ppo", two, ranks, sharding, **options)
    assert difference(one, two) < 1e-6  # 4e-8 measured
    compare_samples(one, two)
    compare_evaluations(one, two)
    assert found.metrics == json.loads((two / "artifact" / "metrics.json").read_text())
    assert found.metrics.keys() == alone.keys()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks, sharding", [(2, "zero3"), (3, "zero2"), (2, "replicas")])
def test_ppo_on_ranks_publishes_its_best_update_also_after_a_kill(
    ranks: int, sharding: str, stages: Any, tmp_path: Path
) -> None:
    """The last of eight updates is outside the band. A rank is killed once that policy is evaluated."""
    one, many = tmp_path / "one", tmp_path / "many"
    options = CUT | {"evaluate": 8}
    alone = stages.run("ppo", one, **options)
    assert alone["ppo/published_update"] < alone["ppo/updates"]
    kill_rank(1, many, lambda: (many / "artifact" / "last.jsonl").exists())
    with pytest.raises(WorkerDied):
        on_ranks(stages, "ppo", many, ranks, sharding, **options)
    found = on_ranks(stages, "ppo", many, ranks, sharding, **options)
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert difference(one, many) < 1e-4  # 1.4e-5 measured of the last, after eight updates at a rate of 0.03
    compare_evaluations(one, many, growth=20)


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", ["zero2", "zero3", "replicas"])
@pytest.mark.parametrize("method", ["dpo", "ipo", "kto", "best_of_n"])
def test_a_direct_method_on_two_ranks_is_that_of_one(method: str, sharding: str, stages: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    options: dict[str, Any] = {"method": method, "micro_batch_size": 3}
    if sharding == "zero3":  # the frozen models are freed while it trains
        options["evaluate_every"] = None
    if method == "best_of_n":
        longer = GenerationConfig(max_prompt_tokens=64, max_new_tokens=40)  # at which some responses end
        options |= {"n": 3, "rounds": 2, "max_prompts": 24, "batch_size": 6, "generation": longer,
                    "epsilon": 1e-4}  # fmt: skip
    metrics = stages.run("direct", one, **options)
    found = on_ranks(stages, "direct", two, sharding=sharding, **options)
    assert difference(one, two) < 1e-6
    compare_samples(one, two)
    assert found.metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.ranks
def test_an_alarm_stops_all_ranks_after_the_same_update(stages: Any, tmp_path: Path) -> None:
    options = {"learning_rate": 5e-2, "epochs": 6, "beta": 0.01, "chosen_limit": -6.0, "stop_on_alarm": True}
    metrics = stages.run("direct", tmp_path / "one", **options)
    found = on_ranks(stages, "direct", tmp_path / "two", **options)
    assert metrics["ppo/stopped"] == 1 and 3 < metrics["direct/updates"] < 36
    for name in ("ppo/stopped", "direct/updates", "direct/published_update"):
        assert found.metrics[name] == metrics[name]


@pytest.mark.parametrize("sharding", ["zero3", "replicas"])
def test_single_labels_on_two_ranks_train_as_on_one(sharding: str, labelled: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    options: dict[str, Any] = {"method": "kto", "micro_batch_size": 3}
    metrics = labelled.run("direct", one, **options)
    found = on_ranks(labelled, "direct", two, sharding=sharding, **options)
    assert difference(one, two) < 1e-6 and metrics["direct/single_labels"] == 40
    assert found.metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("stage, sharding, options", [
    ("sft", "zero2", {"checkpoint_every": 1}),
    ("ppo", "zero3", {"checkpoint_every": 1, "updates": 4, "ema": 0.5, "evaluate_every": 1, "evaluate": 8,
                      "kl": {"control": "fixed", "coefficient": 0.1, "refresh_every": 2}}),
])  # fmt: skip
def test_a_stage_killed_beside_checkpoints_of_parts_ends_with_the_bytes_of_one_with_whole_checkpoints(
    stage: str, sharding: str, options: dict[str, Any], stages: Any, tmp_path: Path, digests: Any
) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "out"
    on_ranks(stages, stage, undisturbed, sharding=sharding, **options)
    assert not list(undisturbed.rglob("*.shares"))
    folder = out / "checkpoint" / stage

    kill_rank(1, out, lambda: (folder / "step-000000002.json").exists())
    with pytest.raises(WorkerDied):
        on_ranks(stages, stage, out, sharding=sharding, checkpoint_whole=0, **options)
    newest = max(folder.glob("step-*.json")).with_suffix(".shares")
    assert {path.name for path in newest.iterdir()} == {f"rank-0000{rank}-00000.safetensors" for rank in (0, 1)}
    found = on_ranks(stages, stage, out, sharding=sharding, checkpoint_whole=0, **options)
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert digests(out / "artifact") == digests(undisturbed / "artifact")
