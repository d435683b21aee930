"""A direct method's stage as a whole: its files, its metrics by other code, and that it resumes to the same bytes."""

import json
import os
import random
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.base.errors import CheckFailed, UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.direct import pair_training, stage, training
from components.direct.config import PolicyConfig
from components.direct.pair_training import PairBatch
from components.gates.judging import GatesConfig, judge
from components.models.batching import LengthBuckets, encode_prompt, encode_response
from components.models.folders import load_causal_lm
from components.ppo import models
from components.ppo.models import Models
from components.training.loop import TrainingExamples
from components.training.updates import Update
from tests.components.conftest import GENERATION, RUNTIME
from tests.faults.sample import SEED
from tests.forks import Forked
from tests.splits import write_split
from tests.waiting import PATIENCE

METHODS = ("dpo", "ipo", "kto")
SIDES = ("chosen", "rejected")
LORA = {"lora": {"rank": 4}, "learning_rate": 1e-2}

Undisturbed = tuple[Path, dict[str, float]]


@pytest.fixture(scope="module")
def undisturbed(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Undisturbed]:
    """The folder and the metrics of a method's run, computed once."""
    made: dict[str, Undisturbed] = {}

    def of(method: str) -> Undisturbed:
        if method not in made:
            out = tmp_path_factory.mktemp(method)
            made[method] = out, stages.run("direct", out, method=method)
        return made[method]

    return of


@pytest.fixture(scope="module")
def adapted(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stages with a reward model that is an adapter."""
    out = tmp_path_factory.mktemp("adapted")
    stages.run("reward", out, lora={"rank": 3}, learning_rate=1e-2)
    return stages._replace(inputs=stages.inputs | {"reward": out / "artifact"})


def logprob(model: Any, tokenizer: Any, row: Any, side: str) -> float:
    """log π of a response with EOS, cut at the cap, from the model's logits in float64."""
    prompt = encode_prompt(tokenizer, row["prompt"], GENERATION.max_prompt_tokens)
    response = encode_response(tokenizer, row[side], GENERATION.max_new_tokens)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, tokenizer.pad_token_id] = -torch.inf
    return float(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).sum())


def test_the_artifact_holds_what_ppos_does(undisturbed: Any) -> None:
    out, metrics = undisturbed("dpo")
    artifact = out / "artifact"
    files = {
        "model", "history.jsonl", "samples.jsonl", "evaluation.jsonl", "evaluation_samples.jsonl", "worst.jsonl",
        "metrics.json", "metadata.json",
    }  # fmt: skip
    assert {path.name for path in artifact.iterdir()} == files
    history = read_rows(artifact / "history.jsonl")
    assert [row["update"] for row in history] == list(range(1, 1 + len(history))) and len(history) == 7 - 1
    assert not any("second" in name for row in history for name in row), "timings have no place in a digest"
    assert history[0]["direct/loss"] == pytest.approx(0.693147, abs=1e-5), "no log-ratio before the first step"
    assert json.loads((artifact / "metrics.json").read_text()) == metrics
    about = json.loads((artifact / "metadata.json").read_text())
    assert about["published_update"] == 6 and about["reason"].endswith("Trained by dpo (policy.method).")
    assert [row["update"] for row in about["evaluations"]] == [3, 6]
    assert {row["update"] for row in read_rows(artifact / "samples.jsonl")} == {3, 6}


@pytest.mark.parametrize("method", METHODS)
def test_what_pairs_gates_judge_is_computed_again(method: str, undisturbed: Any, stages: Any) -> None:
    out, metrics = undisturbed(method)
    policy, tokenizer = load_causal_lm(out / "artifact", RUNTIME)
    sft, _ = load_causal_lm(stages.inputs["sft"], RUNTIME)
    ratios, gaps = [], []
    for row in read_split(stages.inputs["data"] / "pairs.test")[:8]:
        sides = [encode_response(tokenizer, row[side], GENERATION.max_new_tokens) for side in ("chosen", "rejected")]
        if sides[0] != sides[1]:
            names = ("chosen", "rejected")
            ratios.append([logprob(policy, tokenizer, row, s) - logprob(sft, tokenizer, row, s) for s in names])
            gaps.append(len(sides[0]) - len(sides[1]))
    chosen, rejected = torch.tensor(ratios, dtype=torch.float64).T
    right = (chosen > rejected).double()
    assert metrics["policy/chosen_log_ratio"] == pytest.approx(float(chosen.mean()), abs=1e-4)
    assert metrics["policy/rejected_log_ratio"] == pytest.approx(float(rejected.mean()), abs=1e-4)
    assert metrics["policy/pair_accuracy"] == pytest.approx(float(right.mean()))
    sides = [[r for r, gap in zip(right.tolist(), gaps, strict=True) if gap * sign > 0] for sign in (1, -1)]
    assert all(sides)
    balanced = sum(sum(side) / len(side) for side in sides) / 2
    assert metrics["policy/balanced_length_accuracy"] == pytest.approx(balanced)
    assert metrics["policy/chosen_log_ratio_low"] <= metrics["policy/chosen_log_ratio"]


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_learns_the_training_pairs(method: str, stages: Any, tmp_path: Path) -> None:
    beta = 0.5 if method == "ipo" else 0.1
    options = {"learning_rate": 5e-3, "epochs": 6, "evaluate_every": None, "beta": beta}
    stages.run("direct", tmp_path, method=method, **options)
    rows = read_rows(tmp_path / "artifact" / "history.jsonl")
    first, last = ([row["direct/accuracy"] for row in part] for part in (rows[:6], rows[-6:]))
    assert sum(last) / len(last) > max(0.75, sum(first) / len(first) + 0.1)
    assert rows[-1]["direct/chosen_log_ratio"] > rows[-1]["direct/rejected_log_ratio"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [1, 5])
def test_interrupted_and_started_again_it_ends_the_same(
    method: str, at: int, stages: Any, undisturbed: Any, tmp_path: Path, interrupting: Any,
    digests: Callable[[Path], Any],
) -> None:  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        stages.run("direct", tmp_path, interrupting(at), method=method)
    out, metrics = undisturbed(method)
    assert stages.run("direct", tmp_path, method=method) == metrics
    assert digests(tmp_path / "artifact") == digests(out / "artifact")


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("nth", range(5))
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_a_random_step_it_ends_the_same(
    method: str, nth: int, stages: Any, undisturbed: Any, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    at = random.Random(f"{SEED} {method} {nth}").randrange(7)

    def observe(step: int, *_: Any, **__: Any) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    process = Forked(target=lambda: stages.run("direct", tmp_path, observe, method=method))
    process.start()
    process.join(PATIENCE * 200)
    assert process.exitcode == -signal.SIGKILL
    out, metrics = undisturbed(method)
    assert stages.run("direct", tmp_path, method=method) == metrics
    assert digests(tmp_path / "artifact") == digests(out / "artifact")


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_change_no_step(method: str, stages: Any, undisturbed: Any, tmp_path: Path) -> None:
    stages.run("direct", tmp_path, method=method, micro_batch_size=3)
    folders = tmp_path, undisturbed(method)[0]
    for row, same in zip(*(read_rows(out / "artifact" / "history.jsonl") for out in folders), strict=True):
        for name in ("loss", "accuracy", "chosen_log_ratio", "balanced_length_accuracy"):
            assert row.get(f"direct/{name}", 0) == pytest.approx(same.get(f"direct/{name}", 0), abs=2e-5)


def test_an_adapters_reference_is_the_backbone_without_it(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    seen: list[list[float]] = []

    def kept(*arguments: Any) -> Any:
        seen.append(original(*arguments))
        return seen[-1]

    original = pair_training.reference_logprobs
    monkeypatch.setattr(pair_training, "reference_logprobs", kept)
    metrics = adapted.run("direct", tmp_path / "whole", **LORA)
    sft, tokenizer = load_causal_lm(adapted.inputs["sft"], RUNTIME)
    rows = read_split(adapted.inputs["data"] / "pairs.train")[:1]
    expected = [logprob(sft, tokenizer, rows[0], side) for side in ("chosen", "rejected")]
    assert seen[0][:2] == pytest.approx(expected, abs=1e-4)
    assert metrics["policy/kl"] != 0 and (tmp_path / "whole/artifact/adapter/adapter_model.safetensors").is_file()
    with pytest.raises(KeyboardInterrupt):
        adapted.run("direct", tmp_path / "cut", interrupting(3), **LORA)
    adapted.run("direct", tmp_path / "cut", **LORA)
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


@pytest.fixture(scope="module")
def with_labels(labelled: Any, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder and the metrics of KTO's run on pairs and single labels."""
    out = tmp_path_factory.mktemp("labels")
    return out, labelled.run("direct", out, method="kto")


def test_kto_trains_on_single_labels_beside_pairs(with_labels: Undisturbed, undisturbed: Any) -> None:
    out, metrics = with_labels
    _, alone = undisturbed("kto")
    assert metrics["direct/single_labels"] == 40 and metrics["direct/pairs"] == alone["direct/pairs"]
    pairs = metrics["direct/pairs"]
    assert metrics["direct/desirable_ratio"] == pytest.approx((pairs + 30) / (pairs + 10))
    assert alone["direct/desirable_ratio"] == 1 and "direct/single_labels" not in alone
    history = read_rows(out / "artifact" / "history.jsonl")
    assert len(history) == -(-int(pairs + 40) // 16) and history[0]["direct/loss"] == pytest.approx(0.5)
    assert not any(name.endswith("_share") for row in history for name in row)
    about = json.loads((out / "artifact/metadata.json").read_text())
    assert about["reason"].endswith("Trained by kto (policy.method).")


def test_kto_learns_single_labels(labelled: Any, tmp_path: Path) -> None:
    """Of one pair and 40 labels, desirable responses become likelier than undesirable ones."""
    data = tmp_path / "data"
    shutil.copytree(labelled.inputs["data"], data)
    write_split(data / "pairs.train", list(read_split(labelled.inputs["data"] / "pairs.train"))[:1])
    options = {"method": "kto", "learning_rate": 5e-3, "epochs": 6, "evaluate_every": None, "desirable_weight": 0.4}
    one = labelled._replace(inputs=labelled.inputs | {"data": data})
    one.run("direct", tmp_path / "out", **options)
    rows = read_rows(tmp_path / "out/artifact/history.jsonl")
    assert rows[-1]["direct/chosen_log_ratio"] - rows[-1]["direct/rejected_log_ratio"] > 1
    assert sum("direct/accuracy" in row for row in rows) == 6, "only the batches with the pair have an accuracy"


def test_every_response_weighs_the_same_in_an_epoch(
    labelled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derivatives of the batches' losses by each pair's own, in batches of similar length: half as much of a
    single label as of a pair, which has two responses."""
    weights, expected, losses = list[float](), list[float](), list[Any]()

    def fit(_: Any, examples: TrainingExamples, config: PolicyConfig, **rest: Any) -> int:
        batches = LengthBuckets(examples.lengths, config.batch_size, random.Random(0))
        whole = [batch for batch in batches if len(batch) == 16]
        given = np.asarray(examples.weights)
        assert len(whole) == 4 and len({given[batch].mean() for batch in whole}) > 2
        for batch in whole:
            assert examples.prepare is not None
            examples.prepare(batch)
            for micro in (batch[:3], batch[3:]):
                loss, metrics = examples.loss(micro)
                assert metrics["direct/loss"] == 1
                (loss * (given[micro].sum() / given[batch].sum())).backward()
                weights.extend(losses[-1].grad.tolist())
                expected.extend(given[micro] / given.mean() / 16)
        raise KeyboardInterrupt

    def leaf(_: PolicyConfig, batch: PairBatch) -> torch.Tensor:
        losses.append(torch.ones_like(batch.chosen, requires_grad=True))
        return losses[-1]

    monkeypatch.setitem(pair_training.LOSSES, "kto", leaf)
    monkeypatch.setattr(training, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        labelled.run("direct", tmp_path, method="kto", max_pairs=40, desirable_weight=0.8)
    assert weights == pytest.approx(expected) and len({round(weight, 6) for weight in expected}) == 2


def test_log_ratios_weigh_a_label_as_a_pairs_response(
    labelled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means over 3 pairs' log-ratios of 1 and 4 labels' of 0, of which one label is undesirable."""
    ratios: dict[str, float] = {}

    def fit(_: Any, examples: TrainingExamples, *rest: Any, observers: Any, **more: Any) -> int:
        weights = np.asarray(examples.weights)
        pairs, labels = np.flatnonzero(weights == 1)[:3].tolist(), np.flatnonzero(weights < 1)[1:5].tolist()
        _, metrics = examples.loss(pairs + labels)
        numbers = {name: float(value) for name, value in metrics.items()}
        update = Update(number=1, total=1, model=None, metrics=numbers, tokens=0)
        ratios.update(observers["parts"].on_update(update).metrics)
        raise KeyboardInterrupt

    def logprobs(model: Any, pad_id: int, batch: Any, runtime: Any) -> torch.Tensor:
        """Those of the pairs' responses are 1."""
        count = len(batch) // 2
        return torch.tensor(([1.0] * 3 + [0.0] * (count - 3)) * 2)

    monkeypatch.setattr(pair_training, "response_logprobs", logprobs)
    monkeypatch.setattr(pair_training, "reference_logprobs", lambda _, __, examples, *rest: [0.0] * len(examples))
    monkeypatch.setattr(training, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        labelled.run("direct", tmp_path, method="kto")
    assert ratios["direct/chosen_log_ratio"] == pytest.approx(3 / 6)
    assert ratios["direct/rejected_log_ratio"] == pytest.approx(3 / 4)


def test_labels_out_of_balance_are_warned_of(labelled: Any, tmp_path: Path, interrupting: Any) -> None:
    warns = pytest.warns(UserWarning, match=r"advise 1 to 1.33. Set policy.desirable_weight=\d")
    with warns, pytest.raises(KeyboardInterrupt):  # before the first step ends, not after hours
        labelled.run("direct", tmp_path, interrupting(1), method="kto", undesirable_weight=3.0)


def test_micro_batches_change_no_step_of_single_labels(
    labelled: Any, with_labels: Undisturbed, tmp_path: Path
) -> None:
    labelled.run("direct", tmp_path, method="kto", micro_batch_size=3)
    histories = (read_rows(out / "artifact/history.jsonl") for out in (tmp_path, with_labels[0]))
    for row, same in zip(*histories, strict=True):
        assert row.keys() == same.keys()
        for name in ("loss", "accuracy", "margin", "chosen_log_ratio", "rejected_log_ratio", "baseline"):
            assert row.get(f"direct/{name}", 0) == pytest.approx(same.get(f"direct/{name}", 0), abs=2e-5)


def test_single_labels_interrupted_end_the_same(
    labelled: Any, with_labels: Undisturbed, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        labelled.run("direct", tmp_path, interrupting(5), method="kto")
    assert labelled.run("direct", tmp_path, method="kto") == with_labels[1]
    assert digests(tmp_path / "artifact") == digests(with_labels[0] / "artifact")


def test_an_adapter_learns_single_labels(
    adapted: Any, labelled: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    both = adapted._replace(inputs=adapted.inputs | {"data": labelled.inputs["data"]})
    whole = both.run("direct", tmp_path / "whole", method="kto", **LORA)
    with pytest.raises(KeyboardInterrupt):
        both.run("direct", tmp_path / "cut", interrupting(3), method="kto", **LORA)
    assert both.run("direct", tmp_path / "cut", method="kto", **LORA) == whole and whole["direct/single_labels"] == 40
    assert digests(tmp_path / "cut/artifact") == digests(tmp_path / "whole/artifact")


@pytest.mark.parametrize("method", ["dpo", "ppo"])
def test_another_method_says_that_it_ignores_labels(
    method: str, labelled: Any, undisturbed: Any, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    labelled.run("ppo", tmp_path, updates=1) if method == "ppo" else labelled.run("direct", tmp_path, method=method)
    about = json.loads((tmp_path / "artifact/metadata.json").read_text())
    assert about["reason"].endswith("It ignored 40 single labels, which policy.method=kto trains on.")
    if method == "dpo":
        assert digests(tmp_path / "artifact/model") == digests(undisturbed("dpo")[0] / "artifact/model")


def test_gradient_checkpointing_changes_no_weight(
    stages: Any, undisturbed: Any, tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    stages.run("direct", tmp_path, gradient_checkpointing=True)
    assert digests(tmp_path / "artifact") == digests(undisturbed("dpo")[0] / "artifact")


@pytest.mark.parametrize(("method", "loads"), [("dpo", 3), ("kto", 2)])
def test_no_model_that_stays_is_loaded_again(
    method: str, loads: int, stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy, SFT, and SFT again where it was freed."""
    calls, load = [], models.load_causal_lm

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(models, "load_causal_lm", counted)
    stages.run("direct", tmp_path, method=method, evaluate_every=None, max_pairs=16)
    assert len(calls) == loads


@pytest.mark.parametrize(
    ("method", "every", "freed"),
    [("dpo", None, {"sft", "reward_model"}), ("kto", None, {"reward_model"}), ("dpo", 3, set())],
)
def test_a_frozen_model_that_no_step_uses_is_freed(
    method: str, every: int | None, freed: set[str], stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reference to a model that stays anywhere would keep it in memory."""
    loaded, collected = dict[str, Any](), set[str]()
    load, fit = Models.load, training.fit

    def kept(*inputs: Any) -> Models:
        models = load(*inputs)
        loaded.update({name: weakref.ref(getattr(models, name)) for name in ("sft", "reward_model")})
        return models

    def watched(*arguments: Any, **options: Any) -> int:
        collected.update(name for name, model in loaded.items() if model() is None)
        return fit(*arguments, **options)

    monkeypatch.setattr(Models, "load", kept)
    monkeypatch.setattr(training, "fit", watched)
    stages.run("direct", tmp_path, method=method, evaluate_every=every)
    assert collected == freed


def test_freeing_the_frozen_models_changes_no_byte(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: Callable[[Path], Any]
) -> None:
    stages.run("direct", tmp_path / "freed", evaluate_every=None)
    monkeypatch.setattr(PolicyConfig, "unused", ())
    stages.run("direct", tmp_path / "kept", evaluate_every=None)
    assert digests(tmp_path / "freed" / "artifact") == digests(tmp_path / "kept" / "artifact")


def test_the_band_is_judged_at_any_micro_batch_size(stages: Any, tmp_path: Path) -> None:
    options = {"max_pairs": 16, "evaluate_every": 1, "micro_batch_size": 1}
    assert stages.run("direct", tmp_path, **options, ppo={"kl": {"band": 5.0}})["ppo/stopped"] == 0


def test_kl_above_its_ceiling_stops_the_training(stages: Any, tmp_path: Path) -> None:
    options = {"learning_rate": 2e-2, "epochs": 6, "evaluate_every": 2, "beta": 0.01}
    metrics = stages.run("direct", tmp_path, **options, ppo={"kl": {"ceiling": 0.05}})
    assert metrics["ppo/stopped"] == 1 and metrics["direct/updates"] < 36


def test_pairs_far_from_sft_are_warned_of(
    stages: Any, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupting: Any
) -> None:
    _, metrics = undisturbed("dpo")
    sft, tokenizer = load_causal_lm(stages.inputs["sft"], RUNTIME)
    rows = read_split(stages.inputs["data"] / "pairs.train")
    cap = GENERATION.max_new_tokens
    pairs = [row for row in rows if len({tuple(encode_response(tokenizer, row[s], cap)) for s in SIDES}) == 2]
    assert len(pairs) == metrics["direct/pairs"]
    for side in SIDES:
        tokens = sum(len(encode_response(tokenizer, row[side], cap)) for row in pairs)
        expected = sum(logprob(sft, tokenizer, row, side) for row in pairs) / tokens
        assert metrics[f"direct/sft_logprob_of_{side}"] == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(pair_training, "FAR", -10.0)
    warns = pytest.warns(UserWarning, match="the pairs are far from what SFT says")
    with warns, pytest.raises(KeyboardInterrupt):  # before the first step ends, not after hours
        stages.run("direct", tmp_path, interrupting(1), evaluate_every=None, max_pairs=16)


def test_a_fall_of_both_is_reported_and_fails_its_gate(stages: Any, tmp_path: Path) -> None:
    metrics = stages.run("direct", tmp_path, learning_rate=2e-2, epochs=8, beta=0.01, evaluate_every=None)
    assert metrics["policy/rejected_log_ratio"] < 0 > metrics["policy/chosen_log_ratio"]
    gates = GatesConfig.model_validate({"policy": {"chosen_log_ratio": -5}})
    failed = {verdict.name for verdict in judge("ppo", metrics, gates) if not verdict.passed}
    assert failed == {"policy.chosen_log_ratio"}


FALLING = {"learning_rate": 5e-2, "epochs": 6, "beta": 0.01, "evaluate_every": 3}


def alarm_update(history: list[Any], limit: float) -> int:
    """The first update after which the mean of the last 8 batches' log-ratios of chosen responses is below `limit`."""
    ratios = [row["direct/chosen_log_ratio"] for row in history]
    means = [sum(ratios[max(0, end - 8) : end]) / min(8, end) for end in range(1, 1 + len(ratios))]
    return next(update for update, mean in enumerate(means, 1) if mean < limit)


def test_falling_chosen_responses_raise_an_alarm_that_changes_no_byte(
    stages: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, digests: Callable[[Path], Any]
) -> None:
    metrics = stages.run("direct", tmp_path / "quiet", **FALLING)
    assert not [text for text in caplog.messages if "alarm" in text] and "ppo/stopped" not in metrics
    history = list(read_rows(tmp_path / "quiet" / "artifact" / "history.jsonl"))
    at = alarm_update(history, -6.0)
    assert 4 < at < len(history) and min(row["direct/chosen_log_ratio"] for row in history[: at - 1]) < -6.0
    assert stages.run("direct", tmp_path / "warned", **FALLING, chosen_limit=-6.0) == metrics
    (text,) = (text for text in caplog.messages if "alarm" in text)
    assert text.startswith(f"update {at}: alarm chosen: the log-ratio to SFT of the chosen responses is -")
    assert digests(tmp_path / "warned" / "artifact") == digests(tmp_path / "quiet" / "artifact")


def test_an_alarm_that_stops_ends_the_same_after_an_interruption(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], caplog: pytest.LogCaptureFixture
) -> None:
    stops = {**FALLING, "chosen_limit": -6.0, "stop_on_alarm": True}
    metrics = stages.run("direct", tmp_path / "whole", **stops)
    artifact = tmp_path / "whole" / "artifact"
    at = alarm_update(list(read_rows(artifact / "history.jsonl")), -6.0)
    assert metrics["ppo/stopped"] == 1 and metrics["direct/updates"] == at
    assert metrics["direct/published_update"] in range(3, at, 3), "the best evaluated one before the alarm"
    assert f"before the alarm of update {at}" in json.loads((artifact / "metadata.json").read_text())["reason"]
    with pytest.raises(KeyboardInterrupt):
        stages.run("direct", tmp_path / "cut", interrupting(at - 1), **stops)
    assert stages.run("direct", tmp_path / "cut", **stops) == metrics
    assert digests(tmp_path / "cut" / "artifact") == digests(artifact)
    assert len([text for text in caplog.messages if "alarm chosen: " in text]) == 2, "once a training"


def test_votes_that_no_pair_has_are_refused(stages: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"policy.margin: no training pair has a margin"):
        stages.run("direct", tmp_path, margin=1.0)


def test_a_frozen_model_that_changes_is_refused(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(models: Any, *rest: Any) -> Any:
        trained = pair_training.train_on_pairs(models, *rest)
        next(models.sft.parameters()).data.add_(1)
        return trained

    monkeypatch.setattr(stage, "train_on_pairs", train)
    with pytest.raises(CheckFailed, match="the SFT policy changed during training"):
        stages.run("direct", tmp_path, evaluate_every=None)


def test_a_loss_is_added_as_contributing_says(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hinge (SLiC-HF, Zhao et al. 2023), in the place of DPO's: its slope is 0 beyond a difference of 1."""

    def hinge(config: PolicyConfig, batch: PairBatch) -> torch.Tensor:
        return torch.relu(1 - config.beta * (batch.chosen - batch.rejected))

    monkeypatch.setitem(pair_training.LOSSES, "dpo", hinge)
    stages.run("direct", tmp_path, evaluate_every=None)
    rows = read_rows(tmp_path / "artifact" / "history.jsonl")
    assert rows[0]["direct/loss"] == pytest.approx(1.0) and rows[-1]["direct/loss"] != 1.0
