"""The held-out evaluations of PPO: what they choose, what they stop, and that they leave no trace in the training."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.gates.gate_text import outcome
from components.gates.judging import GatesConfig, judge
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.config import PpoConfig
from components.ppo.monitors.alarms import Alarm, Limits
from components.ppo.monitors.measures import Batch
from components.training.loop import restore_state
from tests.splits import write_split

PROMPTS = [[{"role": "user", "content": str(i)}] for i in range(8)]
CUT = {
    "updates": 8, "batch_size": 16, "minibatch_size": 8, "micro_batch_size": 8, "learning_rate": 0.03,
    "stop_epochs_above": None, "stop_early": False, "evaluate_every": 2,
    "kl": {"control": "fixed", "coefficient": 0.0, "band": 2.5}, "watch": {"prompts": 16}, "checkpoint_every": 3,
}  # fmt: skip


class Ran(NamedTuple):
    """A run of the stage."""

    artifact: Path
    metrics: dict[str, float]
    samples: dict[int, list[dict[str, object]]]

    @property
    def about(self) -> dict[str, Any]:
        """Its `metadata.json`."""
        return json.loads((self.artifact / "metadata.json").read_text())


def run(stages: Any, out: Path, **options: Any) -> Ran:
    shown: dict[int, list[dict[str, object]]] = {}

    def observe(step: int, metrics: Any, total: Any = None, samples: Any = None, **_: Any) -> None:
        if samples:
            shown[step] = samples

    return Ran(out / "artifact", stages.run("ppo", out, observe, **CUT | options), shown)


@pytest.fixture(scope="module")
def cut(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Without a tether, over the end of the band."""
    return run(stages, tmp_path_factory.mktemp("cut"))


def test_the_highest_score_inside_the_band_is_published_and_the_last_policys_numbers_stand_beside_it(cut: Ran) -> None:
    looks = cut.about["evaluations"]
    assert [look["update"] for look in looks] == [2, 4, 6, 8]
    inside = [look for look in looks if look["kl_high"] <= 2.5]
    assert 1 <= len(inside) < 4 and looks[-1] not in inside, "else this tests nothing"
    best = max(inside, key=lambda look: look["score"])["update"]
    assert cut.metrics["ppo/published_update"] == cut.about["published_update"] == best < 8
    assert f"Update {best} is published" in cut.about["reason"] and "outside" in cut.about["reason"]
    assert cut.metrics["policy/last_kl"] > 2.5 > cut.metrics["policy/kl"]
    last = read_rows(cut.artifact / "last.jsonl")
    for name, column in (("kl", "kl"), ("gold", "gold"), ("proxy_reward", "score"), ("response_tokens", "tokens")):
        mean = sum(row[column] for row in last) / len(last)
        assert cut.metrics[f"policy/last_{name}"] == pytest.approx(mean, rel=1e-9)


def test_a_broken_tether_fails_the_gate_though_the_published_policy_is_inside_the_band(cut: Ran) -> None:
    assert cut.metrics["ppo/stopped"] == 1 and cut.metrics["ppo/updates"] == 8, "stop_early is off"
    gates = GatesConfig.model_validate({"policy": {"kl": 1.0}, "ppo": {"stopped": 0}})
    verdicts = {each.name: each for each in judge("ppo", {**cut.metrics, "policy/kl_high": 0.5}, gates, [])}
    assert verdicts["policy.kl"].passed and not verdicts["ppo.stopped"].passed and verdicts["ppo.stopped"].stops


def check_weights(ran: Ran, stages: Any, artifact: Path, update: int) -> None:
    """Evaluate the policy in a folder again, and compare with what is recorded of an update's policy."""
    from components.models.folders import load_causal_lm
    from components.ppo.evaluate import respond
    from components.ppo.models import Models

    job = stages.job("ppo", **CUT)
    models = Models.load(job, stages.inputs)
    models.policy, _ = load_causal_lm(artifact, job.runtime)
    data = stages.inputs["data"]
    prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")[:16]]
    rows = respond(models, models.policy, prompts, job, data, stream=models.answers)
    look = next(look for look in ran.about["evaluations"] if look["update"] == update)
    assert sum(row.score for row in rows) / 16 == pytest.approx(look["score"], abs=1e-5)
    assert sum(row.kl for row in rows) / 16 == pytest.approx(look["kl"], abs=1e-4)


def check_published(ran: Ran, stages: Any) -> None:
    check_weights(ran, stages, ran.artifact, ran.about["published_update"])


def test_the_published_weights_are_those_that_were_evaluated_and_the_last_ones_are_kept_beside_them(
    cut: Ran, stages: Any
) -> None:
    check_published(cut, stages)
    check_weights(cut, stages, cut.artifact / "last", 8)


def test_with_an_average_it_is_the_average_that_is_evaluated(stages: Any, tmp_path: Path) -> None:
    ran = run(stages, tmp_path, updates=2, evaluate_every=1, ema=0.5)
    assert ran.about["published_update"] == 2, "an earlier checkpoint would hold what was evaluated, whatever it was"
    assert ran.metrics["policy/kl"] < read_rows(ran.artifact / "history.jsonl")[-1]["ppo/kl"], "they must differ"
    check_published(ran, stages)


def test_evaluations_leave_no_trace_in_the_training_and_without_them_the_last_policy_is_published(
    cut: Ran, stages: Any, tmp_path: Path
) -> None:
    plain = run(stages, tmp_path, evaluate_every=None)
    own = [{k: v for k, v in row.items() if "watched" not in k} for row in read_rows(cut.artifact / "history.jsonl")]
    assert own == read_rows(plain.artifact / "history.jsonl")
    assert plain.about["published_update"] == 8 and not plain.samples and "policy/last_kl" not in plain.metrics
    assert plain.metrics["policy/kl"] == pytest.approx(cut.metrics["policy/last_kl"]), "the same last policy"


@pytest.mark.parametrize("at", [5, 8])
def test_interrupted_between_an_evaluation_and_a_checkpoint_it_ends_with_the_same_bytes(
    stages: Any, cut: Ran, tmp_path: Path, at: int, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        stages.run("ppo", tmp_path, interrupting(at), **CUT)  # evaluations at 2, 4, 6, 8; checkpoints at 3, 6, 8
    restored = restore_state(tmp_path / "checkpoint" / "ppo", {}, {})
    assert restored is not None
    best = restored[1]["parts"]["evaluations"]["checkpoints"]
    assert best["number"] == cut.about["published_update"]
    weights = best["weights"]
    published = load_file(cut.artifact / "model" / "model.safetensors")
    held = published.keys() & weights.keys()
    assert len(held) >= len(weights) - 1 and all((published[name] == weights[name]).all() for name in held)
    assert run(stages, tmp_path).metrics == cut.metrics
    assert digests(tmp_path / "artifact") == digests(cut.artifact)


def test_no_prompt_that_a_gate_judges_takes_part_in_the_choice(stages: Any, cut: Ran, tmp_path: Path) -> None:
    data = Path(shutil.copytree(stages.inputs["data"], tmp_path / "data"))
    write_split(data / "prompts.test", read_split(data / "prompts.test")[:3])
    other = run(type(stages)(stages.inputs | {"data": data}), tmp_path / "test")
    assert other.about == cut.about and other.metrics["policy/kl"] != cut.metrics["policy/kl"]
    write_split(data / "prompts.calibration", read_split(data / "prompts.calibration")[16:])
    another = run(type(stages)(stages.inputs | {"data": data}), tmp_path / "calibration", updates=2)
    assert another.about["evaluations"][0]["score"] != cut.about["evaluations"][0]["score"]


def test_samples_of_watched_prompts_are_shown_at_each_evaluation(stages: Any, cut: Ran) -> None:
    prompts = [row["prompt"] for row in read_split(stages.inputs["data"] / "prompts.calibration")[:8]]
    assert list(cut.samples) == [2, 4, 6, 8]
    shown = [*prompts, "What carries KL in this batch"]
    assert all([row["prompt"] for row in rows] == shown for rows in cut.samples.values())
    assert {"prompt", "response", "score", "kl", "gold"} <= cut.samples[2][0].keys()


def test_a_run_stops_once_kl_has_left_the_band_for_certain(stages: Any, cut: Ran, tmp_path: Path) -> None:
    stopped = run(stages, tmp_path, stop_early=True)
    lows = [row["ppo/kl_low"] for row in read_rows(cut.artifact / "history.jsonl")]
    certain = next(i for i, pair in enumerate(itertools.pairwise(lows), 2) if min(pair) > 2.5)
    assert stopped.metrics["ppo/updates"] == certain < 8 and stopped.metrics["ppo/stopped"] == 1
    assert [look["update"] for look in stopped.about["evaluations"]][-1] == certain, "the last is compared"


def unasked(model: Any) -> list[Any]:
    raise AssertionError("no model answers here")


def seen(
    looks: Sequence[tuple[int, float, float]], spread: float = 0.1, ppo: dict[str, Any] | None = None, alarmed: int = 0,
    **options: Any,
) -> PolicyEvaluations:  # fmt: skip
    """The state after evaluations of (update, score, upper end of KL)."""
    given: dict[str, Any] = {"evaluate_every": 1, "kl": {"target": 3, "band": 5.0}, "watch": options}
    found = PolicyEvaluations(PpoConfig(**given | (ppo or {})), PROMPTS, unasked, alarm_update=lambda: alarmed)
    for update, score, high in looks:
        row = {"update": update, "score": score, "kl": high - 1, "kl_high": high}
        # (update - 4) alternates from prompt to prompt, so that two updates differ by chance as well
        scores = [score + spread * (update - 4) * (-1) ** i for i in range(8)]
        found.checkpoints.add(row, {"scores": scores, "nats": [high - 1] * 8}, torch.nn.Linear(1, 1))
    return found


@pytest.mark.parametrize(
    ("looks", "published", "words"),
    [
        ([], 9, "no earlier checkpoint was evaluated"),
        ([(3, 1.0, 4.0), (9, 1.5, 4.5)], 9, "scores higher"),
        ([(3, 1.0, 4.0), (9, 0.9, 4.5)], 9, "no earlier one inside the KL band [0, 5] is certainly better"),
        ([(3, 3.0, 4.0), (9, 0.5, 4.5)], 3, "certainly better than the last, update 9"),
        ([(3, 1.0, 4.0), (6, 0.9, 4.9), (9, 9.0, 5.1)], 3, "is outside"),
        ([(3, 1.0, 5.1), (9, 2.0, 6.0)], 9, "no evaluated checkpoint is inside the KL band"),
    ],
)
def test_the_choice_and_its_reason(looks: list[tuple[int, float, float]], published: int, words: str) -> None:
    found, reason = seen(looks).choose(9, 0.0)
    assert found == published and words in reason


@pytest.mark.parametrize(
    ("looks", "alarmed", "published", "words"),
    [
        ([(3, 1.0, 4.0), (6, 2.0, 4.5), (9, 9.0, 4.5)], 7, 6, "and before the alarm of update 7, 2.00 SFT deviations."),
        ([(3, 1.0, 4.0), (6, 2.0, 4.5), (9, 9.0, 4.5)], 6, 3, "The last, update 9, is not before it"),
        ([(3, 1.0, 4.0), (9, 9.0, 5.5)], 7, 3, "The last, update 9, is outside"),
        ([(3, 1.0, 5.5), (9, 9.0, 4.5)], 7, 9, "is inside the KL band [0, 5] and before the alarm of update 7"),
    ],
)
def test_a_policy_that_raised_an_alarm_that_stops_is_not_published_for_the_score_that_the_alarm_is_about(
    looks: list[tuple[int, float, float]], alarmed: int, published: int, words: str
) -> None:
    found, reason = seen(looks, alarmed=alarmed).choose(9, 0.0)
    assert found == published and words in reason


def test_a_score_that_more_kl_paid_for_does_not_displace_the_last() -> None:
    watch = seen([(3, 2.0, 4.9), (9, 1.0, 2.9)], spread=0.01)  # 1 more of score for 2 nats
    assert watch.choose(9, 0.4)[0] == 3 and watch.choose(9, 0.6)[0] == 9


UNPRICED = pytest.mark.parametrize(
    "ppo",
    [
        {"advantage": "grpo", "group_size": 2},
        {"kl": {"control": "fixed", "refresh_every": 2}},
        {"kl": {"control": "fixed", "form": "k3"}},  # a loss on KL(SFT || policy), and `nats` are of KL(policy || SFT)
    ],
    ids=["grpo", "refresh", "k3"],
)


@UNPRICED
@pytest.mark.parametrize(
    ("looks", "published"),
    [
        ([(3, 2.0, 4.9), (9, 1.0, 2.9)], 9),  # more score for more KL
        ([(3, 2.0, 2.9), (9, 1.9, 4.9)], 3),  # more score for less KL
        ([(3, 2.0, 2.9), (9, 1.999, 4.9)], 9),  # less KL alone is no reason
    ],
)
def test_where_beta_is_no_price_of_kl_to_sft_it_weighs_no_kl_in_the_choice(
    ppo: dict[str, Any], looks: list[tuple[int, float, float]], published: int
) -> None:
    chosen = {seen(looks, spread=0.01, ppo=ppo).choose(9, beta) for beta in (0.0, 0.4, 10.0)}
    assert len(chosen) == 1, "β changes nothing"
    found, reason = chosen.pop()
    assert found == published and "β does not price KL to SFT here" in reason and "less β KL" not in reason


def test_the_best_of_many_evaluations_must_be_better_than_chance_makes_the_best_of_so_many() -> None:
    few = seen([(3, 1.0, 4.0), (9, 0.9, 4.0)], spread=0.01)
    assert few.choose(9, 0.0)[0] == 3
    many = seen([(3, 1.0, 4.0), *((3 + n / 1000, 0.5, 4.0) for n in range(1, 400)), (9, 0.9, 4.0)], spread=0.01)
    low, high = few._gain(0.0), many._gain(0.0)
    assert high.low < low.low < low.value == pytest.approx(0.1)


STOPPING = {
    "band": {"stop_early": True},
    "alarm": {"stop_early": True, "kl": {"control": "fixed", "coefficient": 0.0}, "evaluate_every": 1,
              "monitors": {"stop_on": ["hedge"]}},
}  # fmt: skip


@pytest.mark.parametrize("why", STOPPING)
def test_a_run_that_stops_ends_with_the_same_bytes_wherever_it_was_interrupted(
    stages: Any, tmp_path: Path, interrupting: Any, digests: Any, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A resumption that forgets the batch outside the band, or the stop itself, would train on."""
    judged = Limits.judge

    def judge(self: Limits, batch: Batch, beta: float | None) -> tuple[dict[str, float], list[Alarm]]:
        far = why == "alarm" and batch.kl.mean() > 1
        return judged(self, batch, beta)[0], [Alarm("hedge", 0.9, 0.1, 1)] if far else []

    monkeypatch.setattr(Limits, "judge", judge)
    options = STOPPING[why] | {"checkpoint_every": 1}
    whole = run(stages, tmp_path / "whole", **options)
    end = int(whole.metrics["ppo/updates"])
    assert 2 < end < 8 and whole.metrics["ppo/stopped"] == 1
    if why == "alarm":
        best = max(whole.about["evaluations"][:-1], key=lambda look: look["score"])["update"]
        assert whole.about["evaluations"][-1]["score"] > whole.about["evaluations"][-2]["score"], "the last scores more"
        assert whole.metrics["ppo/published_update"] == best < end and "policy/last_kl" in whole.metrics
        assert f"before the alarm of update {end}" in whole.about["reason"]
    for at in (end - 1, end):
        with pytest.raises(KeyboardInterrupt):
            stages.run("ppo", tmp_path / str(at), interrupting(at), **CUT | options)
        run(stages, tmp_path / str(at), **options)
        assert digests(tmp_path / str(at) / "artifact") == digests(tmp_path / "whole" / "artifact"), at


@pytest.mark.parametrize(
    ("options", "judged"),
    [
        ({"kl": {"control": "fixed"}}, False),
        ({"kl": {"control": "fixed", "band": 2.5}}, True),
        ({"kl": {"control": "fixed", "ceiling": 99.0}}, True),
        ({"kl": {"control": "fixed"}, "monitors": {"stop_on": ["length"]}}, True),
        ({"kl": {"control": "fixed", "band": 2.5}, "batch_size": 4, "minibatch_size": 4,
          "micro_batch_size": 4, "group_size": 4, "advantage": "rloo"}, False),  # a single prompt has no interval
    ],
    ids=["nothing", "band", "ceiling", "alarm", "band-of-one-prompt"],
)  # fmt: skip
def test_a_tether_that_nothing_can_break_passes_no_gate(
    options: dict[str, Any], judged: bool, stages: Any, tmp_path: Path
) -> None:
    kl = {"kl": {"control": "fixed", "coefficient": 0.1}}
    few = kl | {"updates": 1, "learning_rate": 1e-9, "evaluate_every": None, **options}
    metrics = run(stages, tmp_path, **few).metrics
    gates = GatesConfig.model_validate({"ppo": {"stopped": 0}})
    (verdict,) = (each for each in judge("ppo", metrics, gates) if each.name == "ppo.stopped")
    assert verdict.passed and (outcome(verdict) == "PASS") is judged and (outcome(verdict) == "OFF") is not judged


def test_an_alarm_that_is_not_measured_cannot_be_one_that_stops() -> None:
    stops = {"monitors": {"stop_on": ["unpaid_kl"]}}
    assert PpoConfig(**stops).can_break
    assert PpoConfig(**stops | {"kl": {"form": "k2"}}).can_break
    fixed = {"control": "fixed"}
    for other in (
        {"advantage": "grpo", "group_size": 2}, {"kl": fixed | {"refresh_every": 2}}, {"kl": fixed | {"form": "k3"}}
    ):  # fmt: skip
        with pytest.raises(ValueError, match="unpaid_kl, which is not measured"):
            PpoConfig(**stops | other)


def test_patience_ends_after_so_many_evaluations_that_raised_nothing() -> None:
    better, level = (3, 1.0, 4.0), [(n, 0.9, 4.0) for n in range(4, 7)]
    assert not seen([better, *level[:2]]).checkpoints.is_stale(3)
    assert seen([better, *level]).checkpoints.is_stale(3)
    assert not seen([better, *level, (7, 1.1, 4.0)]).checkpoints.is_stale(3)
    assert not seen([better, *level]).checkpoints.is_stale(None), "null: never"
    assert not seen([(n, 1.0, 9.0) for n in range(1, 9)]).checkpoints.is_stale(3), "nothing was inside the band"


def test_a_policy_that_does_not_train_yet_uses_up_no_patience(stages: Any, tmp_path: Path) -> None:
    warming = {"critic": {"warmup": 4}, "evaluate_every": 1, "watch": {"patience": 2, "prompts": 8}}
    ended = run(stages, tmp_path, **warming, stop_early=True)
    assert ended.metrics["ppo/updates"] > 4
    assert ended.about["evaluations"][0]["update"] == 5, "until then it is SFT"


def test_an_average_whose_kl_lags_behind_is_evaluated_no_more_often_than_the_policy() -> None:
    config = PpoConfig(evaluate_every=100, kl={"target": 3, "band": 8.0}, ema=0.99)
    found, met = PolicyEvaluations(config, PROMPTS, unasked), []
    for update in range(1, 61):
        if found.is_due(update, False, update / 10):
            met.append(update)
            found.checkpoints.evaluations.append({"update": update, "kl": update / 100})
            resumed = PolicyEvaluations(config, PROMPTS, unasked)
            resumed.restore(json.loads(json.dumps(found.state())))
            found = resumed
    assert met == [10, 20, 30, 40, 50, 60], "each eighth of the band, as of a policy without an average"


def test_a_run_out_of_patience_ends_and_does_not_fail(stages: Any, tmp_path: Path) -> None:
    level = {"learning_rate": 1e-9, "evaluate_every": 1, "stop_early": True}
    level["watch"] = {"patience": 2, "prompts": 8}
    ended = run(stages, tmp_path, **level)
    assert ended.metrics["ppo/updates"] == 3 and ended.metrics["ppo/stopped"] == 0
