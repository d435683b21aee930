"""The gates of the final evaluation on policies that are known to be better, equal or worse than SFT."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from components.base.errors import CheckFailed
from components.base.jsonl import read_rows, write_json
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.gates.judging import GatesConfig, Verdict, judge
from components.models.config import GenerationConfig
from components.models.sampling import Samples
from components.ppo import evaluate, experience
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.models import FrozenPass, Models
from components.reward.scoring import ScoreScale
from components.stats.intervals import paired_gain
from flows.config.run_config import load_config
from tests.splits import write_split

PROMPTS = 256
SCALE = ScoreScale(shift=3.0, scale=2.0, missing_eos_score=-2.3, temperature=1.0, responses=64)
TEXTS = [" ".join(words) for words in np.random.default_rng(7).choice(list("abcdefghij"), (512, 6))]
Drawn = tuple[list[float], list[bool]]
Evaluate = Callable[..., tuple[dict[str, float], list[dict[str, Any]]]]


@pytest.fixture
def evaluated(language: Any, runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """`evaluated(policy, sft)`: metrics and rows of responses with these scaled scores and ends; models stand aside."""
    _, pairs = generate(5, SupportDeskConfig(demonstrations=100, pairs=PROMPTS))
    write_json(tmp_path / "task.json", {"name": "none"})
    write_split(tmp_path / "prompts.test", ({"prompt": row["prompt"]} for row in pairs))
    config = PpoConfig(evaluate=PROMPTS, repeats={"samples": 1})
    job = PpoJob(seed=0, runtime=runtime, generation=GenerationConfig(), ppo=config)
    models = Models("policy", "sft", None, None, language.tokenizer, SCALE)

    @contextmanager
    def engine(model: str, *_: Any) -> Iterator[Any]:
        yield SimpleNamespace(sample=lambda prompts, *_: drawn(model, len(prompts)))

    def drawn(model: str, count: int) -> Samples:
        ended = torch.tensor([next(ends[model]) for _ in range(count)])
        ids = torch.randint(6, 60, (count, 8), generator=torch.Generator().manual_seed(len(seen[model])))
        ids[ended, -1] = language.tokenizer.eos_token_id
        seen[model].append(count)
        whole = torch.ones_like(ids, dtype=torch.bool)
        return Samples(ids[:, :0], whole[:, :0], ids, whole, torch.zeros(ids.shape), ended)

    def frozen_pass(asked: Models, samples: Samples, _: PpoJob, by_judge: bool) -> FrozenPass:
        raw = torch.tensor([SCALE.shift + SCALE.scale * next(scores[asked.policy]) for _ in samples.ended])
        flat = torch.zeros(samples.response_ids.shape)
        return FrozenPass(flat, flat, flat, flat, flat, flat + 1, raw)

    ends: dict[str, Iterator[bool]] = {}
    scores: dict[str, Iterator[float]] = {}
    seen: dict[str, list[int]] = {"policy": [], "sft": []}
    monkeypatch.setattr(experience, "rollout_engine", engine)
    monkeypatch.setattr(experience, "frozen_pass", frozen_pass)
    monkeypatch.setattr(evaluate, "_forgetting", lambda *_: {"policy/demonstration_perplexity_ratio_high": 1.0})

    def run(policy: Drawn, sft: Drawn) -> tuple[dict[str, float], list[dict[str, Any]]]:
        for name, (scaled, ended) in {"policy": policy, "sft": sft}.items():
            scores[name], ends[name] = iter(scaled), iter(ended)
        metrics = evaluate.evaluate(models, job, tmp_path, tmp_path)
        return metrics, read_rows(tmp_path / "artifact" / "evaluation.jsonl")

    return run


def draw(rng: np.random.Generator, mean: float, ended: float) -> Drawn:
    return rng.normal(mean, 1, PROMPTS).tolist(), (rng.random(PROMPTS) < ended).tolist()


def verdict(gate: str, metrics: dict[str, float], gates: GatesConfig) -> Verdict:
    return next(each for each in judge("ppo", metrics, gates) if each.name == gate)


@pytest.mark.parametrize(("gain", "passes"), [(-0.6, False), (0.0, False), (0.3, True)])
def test_a_policy_that_only_learnt_to_end_gains_nothing(evaluated: Evaluate, gain: float, passes: bool) -> None:
    rng = np.random.default_rng(3)
    metrics, rows = evaluated(draw(rng, gain, 0.86), draw(rng, 0.0, 0.36))
    assert verdict("policy.reward_gain_low", metrics, load_config("hh-smollm2").effective_gates).passed is passes
    assert metrics["policy/reward_gain"] == pytest.approx(gain, abs=0.2)

    def gained(score: str, rows: list[dict[str, Any]]) -> Any:
        prompts = [str(row["prompt"]) for row in rows]
        return paired_gain([r["policy"][score] for r in rows], [r["sft"][score] for r in rows], prompts)

    assert gained("reward", rows).low > 0.1, "the score that training rewards says that each of them gained"
    assert gained("score", rows).metrics("g") == pytest.approx(
        {end: metrics[f"policy/reward_gain{end[1:]}"] for end in ("g", "g_low", "g_high")}
    )
    both = [row for row in rows if row["policy"]["ended"] and row["sft"]["ended"]]
    among = gained("score", both)
    found = [metrics[f"policy/reward_gain_ended{end}"] for end in ("", "_low", "_high")]
    assert found == pytest.approx(list(among)) and metrics["policy/both_ended"] == len(both) / PROMPTS
    assert metrics["policy/proxy_reward"] - metrics["policy/reward_gain"] == pytest.approx(
        np.mean([row["sft"]["score"] for row in rows])
    ), "the proxy reward is the score that the gain is of"


def test_where_no_pair_ended_the_gain_among_ended_is_unknown_and_all_else_is_known(evaluated: Evaluate) -> None:
    rng = np.random.default_rng(4)
    metrics, _ = evaluated(draw(rng, 0.3, 1.0), draw(rng, 0.0, 0.0))
    assert metrics["policy/both_ended"] == 0 and "policy/reward_gain_ended" not in metrics
    assert np.isfinite(list(metrics.values())).all()


def test_a_score_that_is_not_finite_in_the_evaluation_is_named_and_no_fault_of_an_interval(
    evaluated: Evaluate,
) -> None:
    scores, ended = draw(np.random.default_rng(5), 0.3, 1.0)
    with pytest.raises(CheckFailed, match="score of the reward model isn't finite"):
        evaluated(([*scores[:-1], float("nan")], ended), (scores, ended))


def rows_of(rng: np.random.Generator, rate: float, **fields: Any) -> list[evaluate.Answered]:
    plain: dict[str, Any] = {"score": 0.0, "reward": 0.0, "kl": 1.0, "tokens": 6, "entropy": 1.0, "ended": True}
    plain |= {"special_tokens": 0, "repetition": 0.0, "echo": 0.0} | fields
    return [
        evaluate.Answered(
            response=text, truth={"gold": 0.0, "violations": float(rng.random() < rate), "echoes": 0.0}, **plain
        )
        for text in TEXTS
    ]


def test_equal_policies_pass_the_gate_on_violations_and_one_that_breaks_the_margin_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Any
) -> None:
    write_split(tmp_path / "prompts.test", ({"prompt": [{"role": "user", "content": str(i)}]} for i in range(512)))
    job = PpoJob(seed=0, runtime=runtime, generation=GenerationConfig(), ppo=PpoConfig())
    demo, rng = load_config("demo").effective_gates, np.random.default_rng(0)
    monkeypatch.setattr(evaluate, "_forgetting", lambda *_: {})
    monkeypatch.setattr(evaluate, "_diversity", lambda *_: {})
    monkeypatch.setattr(evaluate, "_by_prompt", lambda *_: {})
    monkeypatch.setattr(evaluate, "_sampled_again", lambda *_: ([], [], [], []))
    monkeypatch.setattr(evaluate, "write_rows", lambda *_: None)

    def passes(rate: float) -> float:
        found = []
        for _ in range(100):
            sides = iter((rows_of(rng, rate), rows_of(rng, 0.05)))
            monkeypatch.setattr(evaluate, "respond", lambda *_, sides=sides, **__: next(sides))
            metrics = evaluate.evaluate(Models(*[None] * 6), job, tmp_path, tmp_path)  # type: ignore[arg-type]
            found.append(verdict("policy.violations_excess", metrics, demo).passed)
        return float(np.mean(found))

    assert passes(0.05) >= 0.9, "equal policies"
    assert passes(0.10) <= 0.06, "one that breaks the policy in one response of 20 more"


@pytest.mark.parametrize(
    ("gate", "worse", "share", "bound"),
    [
        ("policy.ended", {"ended": False}, 0.045, 0.95),
        ("policy.repetition", {"repetition": 1.0}, 0.095, 0.1),
        ("policy.echo", {"echo": 1.0}, 0.095, 0.1),
        ("policy.special_tokens", {"special_tokens": 3}, 0.018, 0.02),
        ("policy.length_ratio", {"tokens": 6 * 21}, 0.048, 2),
        ("policy.entropy_ratio", {"entropy": 0.0}, 0.74, 0.25),
        ("policy.kl", {"kl": 56.0}, 0.097, 6.5),
    ],
)
def test_a_point_estimate_within_its_threshold_fails_where_its_interval_crosses_it(
    gate: str, worse: dict[str, Any], share: float, bound: float
) -> None:
    """A `share` of worse responses so near to the demo's threshold that chance could hide the rest; a third passes."""
    gates, prompts = load_config("demo").effective_gates, list(map(str, range(512)))
    sft = rows_of(np.random.default_rng(0), 0.0)
    for worse_share, passes in ((share / 3, True), (share, False)):
        policy = [row._replace(**worse) if i < worse_share * 512 else row for i, row in enumerate(sft)]
        metrics = evaluate._by_response(policy, sft, prompts) | evaluate._diversity(policy, sft, prompts)
        metrics |= evaluate._kl(policy, prompts, "policy/kl") | evaluate._entropy(policy, sft, prompts)
        found = verdict(gate, metrics, gates)
        point = metrics[re.sub("_(low|high)$", "", found.metric)]
        assert point >= bound if found.op == ">=" else point <= bound
        assert found.passed is passes


def responses(scores: Any, nats: Any = 0.0) -> list[evaluate.Answered]:
    """Responses with these scores (prompts, samples) and KL, those to a prompt one after the other."""
    plain = rows_of(np.random.default_rng(0), 0.0)[0]
    scores, nats = np.asarray(scores).ravel(), np.broadcast_to(nats, np.shape(scores)).ravel()
    return [plain._replace(score=float(s), kl=float(k)) for s, k in zip(scores, nats, strict=True)]


GATED = [load_config(name).effective_gates for name in ("demo-long", "hh-smollm2", "gpu")]
"""The gates of each profile that judges single prompts and responses."""


def failing(policy: list[evaluate.Answered], sft: list[evaluate.Answered], samples: int) -> list[set[str]]:
    """Which gates on single prompts and responses, and on the gain, fail in each profile."""
    prompts = [str(i // samples) for i in range(len(policy))]
    metrics = evaluate._by_response(policy, sft, prompts) | evaluate._kl(policy, prompts, "policy/kl")
    names = ("policy.worse_prompts", "policy.kl_beyond_ceiling", "policy.reward_gain_low")
    return [{name for name in names if not verdict(name, metrics, gates).passed} for gates in GATED]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("share", "nats"), [(0.03, 30), (0.06, 60), (0.1, 100)])
def test_a_policy_that_abuses_a_few_prompts_fails(samples: int, share: float, nats: float) -> None:
    """The other prompts gain a deviation, so that the gates on means pass as long as `nats` hardly moves KL's."""
    rng, prompts = np.random.default_rng(2), round(512 / samples)
    abused = (np.arange(prompts) < share * prompts)[:, None]
    scores = rng.normal(1 + 13 * abused, 1, (prompts, samples))
    policy = responses(scores, np.where(abused, rng.normal(nats, 5, scores.shape), rng.normal(0.3, 0.5, scores.shape)))
    sft = responses(rng.normal(0, 1, scores.shape))
    assert failing(policy, sft, samples) == [{"policy.kl_beyond_ceiling"}] * 3


@pytest.mark.parametrize(("samples", "coupled"), [(1, True), (1, False), (4, False)])
@pytest.mark.parametrize("share", [0.6, 0.75, 0.8])
def test_a_policy_that_harms_most_prompts_a_little_fails(samples: int, coupled: bool, share: float) -> None:
    """`coupled`: the policy's responses are SFT's own with another score, as in the issue's case."""
    rng = np.random.default_rng(3)
    base = rng.normal(0, 1, (512, samples))
    shift = np.where(np.arange(512) < share * 512, -0.5, 7.0)[:, None]
    policy = responses((base if coupled else rng.normal(0, 1, base.shape)) + shift, 3.0)
    assert failing(policy, responses(base), samples) == [{"policy.worse_prompts"}] * 3


@pytest.mark.parametrize(("prompts", "samples", "gain"), [(512, 1, 1.0), (256, 4, 0.7)])
def test_a_policy_that_gains_on_every_prompt_passes(prompts: int, samples: int, gain: float) -> None:
    """Two responses to a prompt differ by a deviation or more: of 40 such policies none fails."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        mine, base = rng.normal(gain, 1, (prompts, samples)), rng.normal(0, 1, (prompts, samples))
        policy = responses(mine, rng.normal(3, 2.5, mine.shape))
        assert failing(policy, responses(base), samples) == [set()] * 3


def test_chance_is_what_two_draws_of_sft_give_however_often_they_tie() -> None:
    rng, means = np.random.default_rng(4), []
    for _ in range(40):
        draws = rng.exponential(1, (2, 256, 4))  # skewed, and a prompt in three has one response only
        draws[:, ::3] = 1.0
        metrics = evaluate._by_response(*map(responses, draws), [str(i // 4) for i in range(1024)])
        means.append(metrics["policy/worse_prompts_excess"])
        assert metrics["policy/worse_prompts"] == pytest.approx(1 / 3, abs=0.12)
    assert np.mean(means) == pytest.approx(0, abs=3 * 0.5 * np.sqrt(2 / 3 / 256 / 40))


def test_the_mean_of_a_prompts_samples_falls_and_not_each() -> None:
    policy, sft = responses([[0, 0, 0, 9], [1, 1, 1, -9]]), responses(np.zeros((2, 4)))
    metrics = evaluate._by_response(policy, sft, list("aaaabbbb"))
    assert (metrics["policy/worse_prompts"], metrics["policy/worse_prompts_excess"]) == (0.5, 0.0)


def test_a_policy_that_collapses_to_a_few_answers_fails_every_gate_on_diversity() -> None:
    rng, gates = np.random.default_rng(1), load_config("demo").effective_gates
    sft, prompts = rows_of(rng, 0.0), [str(i) for i in range(512)]
    names = ("policy.distinct", "policy.dissimilarity", "policy.entropy_ratio")
    for answers, passing in ((1, set()), (512, set(names))):
        policy = [sft[i % answers]._replace(entropy=1.0 if answers > 1 else 0.02) for i in range(512)]
        metrics = evaluate._diversity(policy, sft, prompts) | evaluate._entropy(policy, sft, prompts)
        assert {name for name in names if verdict(name, metrics, gates).passed} == passing


@pytest.mark.parametrize(
    ("profile", "failing"),
    [("demo", {"policy.dissimilarity"}), ("hh-smollm2", {"policy.distinct", "policy.dissimilarity"})],
)
def test_a_policy_that_fills_one_template_is_stopped_though_all_its_texts_differ(
    profile: str, failing: set[str]
) -> None:
    sft, prompts = rows_of(np.random.default_rng(1), 0.0), [str(i) for i in range(512)]
    template = "Thank you, customer {}, for your patience with our shop today."
    policy = [row._replace(response=template.format(i)) for i, row in enumerate(sft)]
    metrics = evaluate._diversity(policy, sft, prompts)
    assert metrics["policy/distinct"] == 1, "the share of distinct texts sees nothing"
    names = ("policy.distinct", "policy.dissimilarity")
    assert {name for name in names if verdict(name, metrics, load_config(profile).effective_gates).stops} == failing
