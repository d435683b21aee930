"""Monitors in a training: they leave no trace in it, their alarms warn once or stop, and a resumption repeats none."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.batching import encode_responses
from components.ppo.alarm_table import MONITORS
from components.ppo.monitors import batches
from components.ppo.monitors.alarms import Alarm, Limits
from components.ppo.monitors.batches import batch_of, limits_of_sft
from components.ppo.monitors.kl_by_token import kl_shares, shares_sample
from tasks.runs.samples import block
from tests.splits import write_split

OPTIONS = {"updates": 3, "group_size": 2, "learning_rate": 1e-2, "checkpoint_every": 2, "evaluate": 4}


def about(out: Path) -> dict[str, Any]:
    return json.loads((out / "artifact" / "metadata.json").read_text())


@pytest.fixture
def alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch raises the alarm `hedge`."""
    judge = Limits.judge
    monkeypatch.setattr(
        Limits, "judge", lambda self, batch, beta: (judge(self, batch, beta)[0], [Alarm("hedge", 0.9, 0.1, 1)])
    )


def test_monitors_leave_no_trace_in_the_training(stages: Any, tmp_path: Path) -> None:
    stages.run("ppo", tmp_path / "on", **OPTIONS)
    stages.run("ppo", tmp_path / "off", monitors={"responses": None}, **OPTIONS)
    on, off = (read_rows(tmp_path / name / "artifact" / "history.jsonl") for name in ("on", "off"))
    few = {"entropy", "distinct", "unpaid_kl"}  # a batch of four prompts has no standard error worth the name
    watched = {name.removeprefix("ppo/monitor_") for name in on[0] if "monitor_" in name} - {"template_limit"}
    assert watched == MONITORS.keys() - few
    assert [{k: v for k, v in row.items() if "monitor_" not in k} for row in on] == off


def test_an_alarm_warns_once_is_shown_as_a_sample_and_is_kept_when_resumed(
    stages: Any, tmp_path: Path, alarmed: None, interrupting: Any, digests: Callable[[Path], Any], caplog: Any
) -> None:
    shown: list[Any] = []

    def observe(step: int, metrics: Any, total: Any = None, samples: Any = (), **_: Any) -> None:
        shown.extend(samples or ())

    with caplog.at_level(logging.WARNING):
        metrics = stages.run("ppo", tmp_path / "whole", observe, **OPTIONS)
    (alarm,) = about(tmp_path / "whole")["alarms"]
    assert alarm["update"] == 1 and alarm["name"] == "hedge" and MONITORS["hedge"].meaning in alarm["meaning"]
    assert metrics["ppo/alarms"] == 1 and "ppo/stopped" not in metrics and metrics["ppo/updates"] == 3
    assert sum("alarm hedge" in record.getMessage() for record in caplog.records) == 1
    (sample,) = (row for row in shown if "alarm" in row)
    assert sample["alarm"] == alarm["meaning"] and sample["response"] == alarm["response"]
    text = block(1, [sample])
    assert all(each in text for each in ("ALARM hedge", MONITORS["hedge"].meaning, alarm["prompt"])), "told where read"
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path / "cut", interrupting(3), **OPTIONS)
    stages.run("ppo", tmp_path / "cut", **OPTIONS)
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_an_alarm_that_stops_ends_the_run_and_fails_it_unless_every_stop_is_off(
    stages: Any, tmp_path: Path, alarmed: None
) -> None:
    stops = OPTIONS | {"monitors": {"stop_on": ["hedge", "length"]}}
    metrics = stages.run("ppo", tmp_path / "stopped", **stops)
    assert metrics["ppo/updates"] == 1 and metrics["ppo/stopped"] == 1
    metrics = stages.run("ppo", tmp_path / "on", **stops, stop_early=False)
    assert metrics["ppo/updates"] == 3 and metrics["ppo/stopped"] == 1
    metrics = stages.run("ppo", tmp_path / "other", **OPTIONS | {"monitors": {"stop_on": ["length"]}})
    assert metrics["ppo/updates"] == 3 and metrics["ppo/stopped"] == 0


def test_what_cannot_be_raised_is_said_before_the_run(stages: Any, tmp_path: Path, caplog: Any) -> None:
    from components.ppo.models import Models

    job = stages.job("ppo", monitors={"stop_on": ["nll"]})
    models, data = Models.load(job, stages.inputs), stages.inputs["data"]
    limits_of_sft(models, stages.job("ppo"), data)
    assert not caplog.records, "no alarm that only warns"
    limits_of_sft(models, job, data)
    assert "cannot raise nll" in caplog.text and "Raise ppo.batch_size" in caplog.text
    write_split(tmp_path / "prompts.calibration", read_split(data / "prompts.calibration")[:7])
    assert limits_of_sft(models, job, tmp_path) is None and "holds 7 prompts and the limits need 8" in caplog.text


def test_limits_are_of_sfts_responses_to_calibration_prompts_and_rows_of_a_batch_are_one_a_prompt(stages: Any) -> None:
    from components.models.batching import encode_prompt
    from components.models.sampling import rollout_engine
    from components.ppo.models import Models, frozen_pass

    job = stages.job("ppo", **OPTIONS)
    models, data = Models.load(job, stages.inputs), stages.inputs["data"]
    limits = limits_of_sft(models, job, data)
    assert limits is not None and limits.responses == 16, "as many as the reward stage sampled"
    assert limits_of_sft(models, stages.job("ppo", monitors={"responses": 12}), data).responses == 12  # type: ignore[union-attr]
    prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")[:2] for _ in range(2)]
    encoded = [encode_prompt(models.tokenizer, p, 64) for p in prompts]
    with rollout_engine(models.sft, models.tokenizer, job.runtime) as engine:
        samples = engine.sample(encoded, job.generation, 1)
    found = frozen_pass(models, samples, job)
    texts, scores = samples.texts(models.tokenizer), torch.arange(4.0)
    batch = batch_of(samples, prompts, texts, found, scores, models.tokenizer, 2)
    assert batch.texts == [texts[0], texts[2]] and batch.scores.tolist() == [0.0, 2.0]
    mask = samples.response_mask
    plain = [-float(found.sft[row][mask[row]].mean()) for row in (0, 2)]
    assert batch.nll.tolist() == pytest.approx(plain, rel=1e-5)
    entropy = [float(found.entropy[row][mask[row]].sum()) for row in (0, 2)]
    assert batch.entropies.tolist() == pytest.approx(entropy, rel=1e-5) and batch.kl.tolist() == pytest.approx(
        [0, 0], abs=1e-4
    )
    assert batch.lengths.tolist() == [int(mask[0].sum()), int(mask[2].sum())]


def test_what_carries_kl_is_a_plain_sum_over_tokens_and_prompts(language: Any) -> None:
    from components.models.sampling import Samples

    tokenizer = language.tokenizer
    a, b, end = *tokenizer("We will", add_special_tokens=False)["input_ids"][:2], tokenizer.eos_token_id
    ids = torch.tensor([[a, b, end], [a, a, end], [b, end, 0]])
    mask = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    samples = Samples(ids[:, :1], mask[:, :1], ids, mask, torch.zeros(3, 3), torch.tensor([True] * 3))
    policy = torch.tensor([[1.0, 0.5, 0.0], [2.0, 1.0, 0.5], [-1.0, 0.5, 99.0]])
    prompts = [[{"role": "user", "content": text}] for text in ("p", "p", "q")]
    found = kl_shares(samples, policy, torch.zeros(3, 3), prompts, tokenizer)
    assert found["kl"] == pytest.approx((1.5 + 3.5 - 0.5) / 3)
    assert [each["count"] for each in found["tokens"]] == [3, 3, 2]
    assert [each["nats"] for each in found["tokens"]] == pytest.approx([4 / 3, 1 / 3, -0.5 / 3])
    assert found["tokens"][0]["token"] == tokenizer.decode([a])
    assert sum(each["share"] for each in found["tokens"]) == pytest.approx(1)
    first, second = found["prompts"]
    assert (
        first["prompt"] == prompts[1]
        and first["nats"] == pytest.approx(2.5)
        and first["share"] == pytest.approx(5 / 4.5)
    )
    assert first["response"] == samples.texts(tokenizer)[1] and second["nats"] == pytest.approx(-0.5)
    sample = shares_sample(found)
    assert "1.33 nats, 89%, 3 times" in str(sample["response"]) and "p (2.50 nats, 111%)" in str(sample["response"])
    assert kl_shares(samples, -policy, torch.zeros(3, 3), prompts, tokenizer)["tokens"][0]["share"] is None


def test_what_carries_kl_is_kept_at_each_evaluation_and_shown_with_its_samples(stages: Any, tmp_path: Path) -> None:
    shown: dict[int, list[Any]] = {}

    def observe(step: int, metrics: Any, total: Any = None, samples: Any = None, **_: Any) -> None:
        shown[step] = list(samples or ())

    stages.run("ppo", tmp_path, observe, **OPTIONS | {"evaluate_every": 2, "sample_every": 20})
    rows = read_rows(tmp_path / "artifact" / "kl_carriers.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3], "the first (sampled), the second (evaluated) and the last"
    history = {row["update"]: row["ppo/kl"] for row in read_rows(tmp_path / "artifact" / "history.jsonl")}
    assert all(row["kl"] == pytest.approx(history[row["update"]], abs=1e-5) for row in rows)
    assert [each["prompt"] for each in shown[2]].count("What carries KL in this batch") == 1
    limits = about(tmp_path)["limits"]
    assert set(limits) < set(MONITORS), "of four prompts a batch, some alarms cannot be raised"


def test_tokens_of_any_response_of_the_training_data_are_known_wherever_it_stands_and_no_others(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from components.ppo.models import Models

    data, tokenizer = stages.inputs["data"], Models.load(stages.job("ppo", **OPTIONS), stages.inputs).tokenizer
    monkeypatch.setattr(batches, "BLOCKS", 3)
    monkeypatch.setattr(batches, "BLOCK", 2)
    pairs, told = list(read_split(data / "pairs.train"))[:9], list(read_split(data / "demonstrations.train"))[:5]
    pairs = [row | {"chosen": f"chosen {n}", "rejected": f"rejected {n}x"} for n, row in enumerate(pairs)]
    write_split(tmp_path / "pairs.train", pairs)
    write_split(tmp_path / "demonstrations.train", told)
    texts = [f"{name} {n}{end}" for n in (0, 1, 3, 4, 7, 8) for name, end in (("chosen", ""), ("rejected", "x"))]
    texts += [told[n]["response"] for n in range(5)]
    encoded = encode_responses(tokenizer, texts, 64)
    assert batches.known_tokens(tmp_path, tokenizer, 64) == {token for ids in encoded for token in ids}
