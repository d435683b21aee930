"""PPO on tasks small enough to enumerate: the optimum of E[r] - β KL(π || π_ref) is π_ref exp(r / β), normalised."""

import copy
import dataclasses
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification

from components.models import sampling
from components.models.adapters import AdapterView, Backbone
from components.models.config import AdapterConfig, GenerationConfig, ScratchModel
from components.models.folders import build_causal_lm, frozen
from components.models.runtime import Runtime
from components.models.sampling import Samples, sample
from components.models.tokenizers import train_tokenizer, visible_text
from components.ppo import models as ppo_models
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.experience import SAMPLER_TOLERANCE, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models, SeparateCritic, SharedCritic
from components.reward.scoring import ScoreScale, last_counted
from components.rewards.config import FunctionReward, HttpReward, VerifierReward
from components.rewards.function import FunctionSource
from components.rewards.http import HttpSource
from components.rewards.source import Source
from components.rewards.verifiers import Verifier
from components.rewards.weighted import Rewards

BETA = 0.5
TETHER = 0.3
"""β of the runs whose sampler is not the policy."""
FORMS = [(2, "reward"), (1, "k2")]
"""Tokens of a response, and the form of KL that is tried on them: k2 as a loss sees no later token."""
UNIT = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=-1.0, temperature=1.0, responses=16)


class Small:
    """A prompt, a vocabulary of thirteen, responses of one token or two, and a score that a table knows."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.tokenizer = train_tokenizer(["one two three four five six."], 100)
        self.policy: Any = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), self.tokenizer, 16, seed=5)
        self.reference: Any = frozen(copy.deepcopy(self.policy))
        self.prompt = self.tokenizer("one two")["input_ids"]
        size = len(self.tokenizer)
        self.table = torch.linspace(-1, 1, size)[torch.randperm(size, generator=torch.Generator().manual_seed(1))]

    def value_model(self) -> Any:
        """A scalar-head model, drawn anew."""
        torch.manual_seed(6)
        model: Any = LlamaForSequenceClassification(copy.deepcopy(self.policy.config))
        model.score = torch.nn.Linear(16, 1, bias=False)
        return model

    def score(self, model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Any = None) -> Tensor:
        """The last token's entry, and half the one of the response's first token."""
        last = self.table[ids[torch.arange(len(ids)), last_counted(mask)]]
        return last if self.tokens == 1 else last + 0.5 * self.table[ids[:, len(self.prompt)]]

    def responses(self) -> tuple[Tensor, Tensor]:
        """Every response: ids (N, tokens), and a mask."""
        ids = torch.cartesian_prod(*[torch.arange(len(self.tokenizer))] * self.tokens).reshape(-1, self.tokens)
        ends = (ids == self.tokenizer.eos_token_id).long()
        mask = (ends.cumsum(1) - ends) == 0
        once = mask.all(1) | (ids.masked_fill(mask, 0) == self.tokenizer.pad_token_id).all(1)
        ids, mask = ids[once], mask[once]
        sampled = (ids.masked_fill(~mask, -1) != self.tokenizer.pad_token_id).all(1)
        return ids[sampled], mask[sampled]

    @torch.no_grad()
    def distribution(self, model: Any) -> Tensor:
        """Log-probability of every response, float64."""
        ids, mask = self.responses()
        whole = torch.cat([torch.tensor([self.prompt] * len(ids)), ids], 1)
        model = model.merged() if isinstance(model, AdapterView) else model
        logits = model(whole).logits[:, len(self.prompt) - 1 : -1].double()
        logits = logits.index_fill(-1, torch.tensor([self.tokenizer.pad_token_id]), -1e9)
        found = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return (found * mask).sum(1)

    def scores(self) -> Tensor:
        """The score of every response, float64."""
        ids, mask = self.responses()
        whole = torch.cat([torch.tensor([self.prompt] * len(ids)), ids], 1)
        return self.score(
            None, whole, torch.cat([torch.ones_like(whole[:, : -self.tokens]).bool(), mask], 1), None
        ).double()


class OneBackbone(Small):
    """The same, with policy, reference and critic as views of one frozen model."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        with torch.no_grad():  # the output layer is frozen: its inputs have to be long enough to reach the optimum
            self.policy.model.norm.weight.fill_(8)
        self.backbone = Backbone(self.policy)
        self.policy, self.reference = self.backbone.add("policy", AdapterConfig(), seed=0), AdapterView(self.backbone)

    def value_model(self) -> Any:
        torch.manual_seed(6)
        return self.backbone.add("critic", AdapterConfig(rank=2), seed=1, score=torch.nn.Linear(16, 1, bias=False))


def trained(
    task: Small,
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    critic: str | None,
    form: str,
    updates: int,
    beta: float = BETA,
    rewards: Rewards | None = None,
    **options: Any,
) -> Tensor:
    """Log-probabilities of every response after PPO at a fixed β; `rewards` score in the place of the task's table."""
    monkeypatch.setattr(ppo_models, "score_tokens", task.score)
    config = PpoConfig(
        updates=updates, batch_size=256, minibatch_size=256, micro_batch_size=256, epochs=2, learning_rate=5e-3,
        kl={"control": "fixed", "coefficient": beta, "form": form}, score={"missing_eos": "keep"},
        critic={"kind": critic or "shared", "learning_rate": 5e-3}, **options,
    )  # fmt: skip
    generation = GenerationConfig(max_new_tokens=task.tokens)
    job = PpoJob(seed=0, runtime=runtime, generation=generation, ppo=config)
    head: Any = SharedCritic(16) if critic else None
    if critic == "separate":
        head = SeparateCritic(task.value_model(), UNIT)
    models = Models(task.policy, task.reference, None, head, task.tokenizer, UNIT, rewards=rewards)
    learner, asked = Learner.start(models, job), [[{"role": "user", "content": "one two"}]] * 256
    for update in range(updates):
        numbers = range(256 * update, 256 * (update + 1))
        samples = sample(task.policy, task.tokenizer, [task.prompt] * 256, job.generation, 2, numbers)
        learner.update(gather_experience(learner.models, samples, job, beta, asked), update)
    return task.distribution(task.policy)


def distance(found: Tensor, optimum: Tensor) -> float:
    """KL(found || optimum), nats."""
    return float((found.exp() * (found - optimum)).sum())


@pytest.mark.parametrize("critic", ["shared", "separate"])
@pytest.mark.parametrize(("tokens", "form"), FORMS)
def test_the_policy_approaches_the_exact_optimum(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, critic: str, tokens: int, form: str
) -> None:
    """k2 as a loss sees no later token, so it shares the optimum where there is none."""
    task = Small(tokens)
    start = task.distribution(task.policy)
    assert start.exp().sum().item() == pytest.approx(1), "every response is counted, once"
    optimum = (start + task.scores() / BETA).log_softmax(-1)
    assert distance(start, optimum) > 0.15
    assert distance(trained(task, runtime, monkeypatch, critic, form, 60 if tokens == 1 else 120), optimum) < 0.05


@pytest.mark.parametrize(
    ("critic", "within", "options"),
    [
        pytest.param("shared", 0.05, {"advantage": "sequence"}, id="one advantage a response"),
        pytest.param(None, 0.02, {"advantage": "reinforce++"}, id="reinforce++"),
        pytest.param(None, 0.02, {"advantage": "rloo", "group_size": 2, "pair_labels": "soft"}, id="online dpo"),
    ],
)
@pytest.mark.parametrize(("tokens", "form"), FORMS)
def test_other_ways_to_learn_lead_to_the_same_optimum(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, critic: str | None, within: float, options: dict[str, Any],
    tokens: int, form: str,
) -> None:  # fmt: skip
    """RLOO is below, on scores of 0 and 1. Online DPO has no use for the form of KL."""
    task = Small(tokens)
    start = task.distribution(task.policy)
    optimum = (start + task.scores() / BETA).log_softmax(-1)
    form = "reward" if "pair_labels" in options else form
    found = trained(task, runtime, monkeypatch, critic, form, 60 if tokens == 1 else 120, **options)
    assert distance(start, optimum) > 0.15
    assert distance(found, optimum) < within


class Verified(Small):
    """The same with a verifier's score: 1 where the last token is one of half the vocabulary, 0 elsewhere."""

    def score(self, model: Any, ids: Tensor, mask: Tensor, runtime: Runtime, side: Any = None) -> Tensor:
        return (self.table[ids[torch.arange(len(ids)), last_counted(mask)]] > 0).float()


def own_source(kind: str, right: Sequence[str], folder: Path) -> tuple[Any, Source]:
    """A source that gives the responses `right` 1 and any other 0, and its config."""
    unit: dict[str, Any] = {"shift": 0.0, "scale": 1.0, "name": "own"}
    if kind == "function":
        (folder / "mine.py").write_text(
            f"RIGHT = {list(right)!r}\ndef score(prompts, responses, rows):\n"
            "    return [each in RIGHT for each in responses]\n"
        )
        function = FunctionReward(source="function:mine:score", root=str(folder), **unit)
        return function, FunctionSource(function)
    if kind == "http":
        http = HttpReward(source=f"http:{folder.joinpath('url').read_text()}", batch_size=256, **unit)
        return http, HttpSource(http)
    pattern = "|".join(re.escape(each) for each in right)
    verifier = VerifierReward(source="verifier:regex", value=rf"\A(?:{pattern})\Z", **unit)
    return verifier, Verifier(verifier)


@contextmanager
def scorer(right: Sequence[str], folder: Path) -> Iterator[None]:
    """An HTTP scorer on loopback, whose address is in the file `url` of `folder`."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"scores": [float(each in right) for each in asked["responses"]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        (folder / "url").write_text(f"http://127.0.0.1:{server.server_port}/score")
        yield
        server.shutdown()


def test_rloo_reaches_the_optimum_of_a_source_of_ppo_rewards_and_takes_the_same_steps_with_each_kind(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = Small(1)
    said = [row[row != task.tokenizer.eos_token_id].tolist() for row in task.responses()[0]]
    texts = [visible_text(task.tokenizer, row) for row in said]
    right = sorted(set(texts))[::2]
    scores = torch.tensor([float(each in right) for each in texts], dtype=torch.float64)
    start = task.distribution(task.policy)
    optimum = (start + scores / 0.3).log_softmax(-1)
    assert distance(start, optimum) > 0.15

    def learnt(kind: str, updates: int) -> Tensor:
        config, source = own_source(kind, right, tmp_path)
        rewards = Rewards([config], {"own": source}, units={"own": (0.0, 1.0)})
        try:
            return trained(
                Small(1), runtime, monkeypatch, None, "reward", updates, beta=0.3, rewards=rewards, advantage="rloo",
                group_size=4,
            )  # fmt: skip
        finally:
            source.close()

    with scorer(right, tmp_path):
        steps = [learnt(kind, 4) for kind in ("function", "http", "verifier")]
        assert torch.equal(steps[0], steps[1]) and torch.equal(steps[0], steps[2])
        assert not torch.equal(steps[0], start)
        assert distance(learnt("function", 70), optimum) < 0.02


def grpo_fixed_point(reference: Tensor, scores: Tensor, group_size: int, beta: float) -> Tensor:
    """Log-probabilities (N,) at which GRPO's expected update is 0, for scores (N,) of 0 and 1.

    π = π_ref exp(u / β), normalised, with u(y) = E[advantage | y], the rest of the group drawn from π: binomial sums
    over how many of them score 1. Both classes keep π_ref's shape, so one number is sought: P(score 1).
    """
    from scipy.optimize import brentq
    from scipy.special import expit, logit
    from scipy.stats import binom

    def advantage(score: int, ones: int) -> float:
        group = torch.tensor([1.0] * ones + [0.0] * (group_size - ones), dtype=torch.float64)
        return 0.0 if ones in (0, group_size) else float((score - group.mean()) / (group.std() + 1e-4))

    def tilt(p: float) -> float:
        others = [(k, binom.pmf(k, group_size - 1, p)) for k in range(group_size)]
        return sum(w * (advantage(1, k + 1) - advantage(0, k)) for k, w in others) / beta

    start = logit(float(reference.exp()[scores == 1].sum()))
    end = brentq(lambda x: x - start - tilt(expit(x)), -20, 20)
    return (reference + scores * (end - start)).log_softmax(-1)


@pytest.mark.parametrize(("tokens", "form"), FORMS)
def test_rloo_reaches_the_optimum_of_a_verifiers_0_and_1_though_most_groups_end_tied(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tokens: int, form: str
) -> None:
    task = Verified(tokens)
    start = task.distribution(task.policy)
    optimum = (start + task.scores() / 0.3).log_softmax(-1)
    assert distance(start, optimum) > 0.15
    right = float(optimum.exp()[task.scores() == 1].sum())
    assert right**4 + (1 - right) ** 4 > 0.75, "groups of four are tied"
    updates = 70 if tokens == 1 else 120
    found = trained(task, runtime, monkeypatch, None, form, updates, beta=0.3, advantage="rloo", group_size=4)
    assert distance(found, optimum) < 0.02


@pytest.mark.parametrize(("tokens", "form"), FORMS)
def test_grpo_reaches_a_fixed_point_of_its_own_which_is_not_the_tilt(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, tokens: int, form: str
) -> None:
    task = Verified(tokens)
    start, scores = task.distribution(task.policy), task.scores()
    fixed = grpo_fixed_point(start, scores, group_size=16, beta=0.8)
    updates = 70 if tokens == 1 else 120
    found = trained(task, runtime, monkeypatch, None, form, updates, beta=0.8, advantage="grpo", group_size=16)
    tilt = (start + scores / 0.8).log_softmax(-1)
    assert distance(found, fixed) < 0.02
    assert distance(found, tilt) > 0.1


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_through_adapters_of_one_backbone_it_approaches_the_optimum_too(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, critic: str
) -> None:
    task = OneBackbone(1)
    start = task.distribution(task.policy)
    optimum = (start + task.scores() / BETA).log_softmax(-1)
    assert distance(start, optimum) > 0.15
    assert distance(trained(task, runtime, monkeypatch, critic, "reward", 60), optimum) < 0.05
    assert torch.equal(task.distribution(task.reference), start)


def test_k3_as_a_loss_has_a_fixed_point_of_its_own(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """E[r] - β KL(π_ref || π) is highest at π = β π_ref / (λ - r), λ such that it sums to 1."""
    from scipy.optimize import brentq

    task = Small(1)
    reference, scores = task.distribution(task.policy), task.scores()

    def own(level: float) -> Tensor:
        return BETA * reference.exp() / (level - scores)

    level = brentq(lambda x: own(x).sum().item() - 1, scores.max().item() + 1e-6, 10)
    fixed = own(level).log()
    found = trained(task, runtime, monkeypatch, "shared", "k3", 60)
    assert distance(found, fixed) < 0.05
    assert distance(found, (reference + scores / BETA).log_softmax(-1)) > 2 * distance(found, fixed)


class Perturbed:
    """An engine whose logits are off the policy's by `error` (V,), nats; its log-probabilities are its own."""

    def __init__(self, task: Small, error: Tensor) -> None:
        self.task, self.error = task, error

    def sample(self, prompts: Sequence[Any], generation: GenerationConfig, seed: int, numbers: Any = None) -> Samples:
        sampler, size = copy.deepcopy(self.task.policy), len(self.task.tokenizer)
        layer = nn.Linear(16, size).requires_grad_(False)
        layer.weight.copy_(self.task.policy.get_output_embeddings().weight)
        layer.bias.copy_(self.error)
        sampler.lm_head = layer
        drawn = sample(sampler, self.task.tokenizer, prompts, generation, seed, numbers)
        return dataclasses.replace(drawn, stats=None)


def systematic(seed: int, numbers: Sequence[int], cap: int) -> Tensor:
    """Uniforms (B, cap) that are evenly spread over a batch, from a random start and in a random order: frequencies are
    then the probabilities to within 1 / B, so that what a bias does is seen in 80 updates, not thousands."""
    generator, count = torch.Generator().manual_seed(seed + numbers[0]), len(numbers)
    columns = [
        (torch.randperm(count, generator=generator) + torch.rand((), generator=generator)) / count for _ in range(cap)
    ]
    return torch.stack(columns, 1).clamp(max=1 - 1e-7)


def trained_on_another_sampler(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, error: Tensor, level: str
) -> tuple[Small, Tensor]:
    """The task, and log-probabilities of every response after PPO (RLOO, KL as a k2 loss) on samples of `Perturbed`."""
    task, batch, updates = Small(1), 256, 80
    monkeypatch.setattr(ppo_models, "score_tokens", task.score)
    monkeypatch.setattr(sampling, "response_uniforms", systematic)
    config = PpoConfig(
        updates=updates, batch_size=batch, minibatch_size=batch, micro_batch_size=batch, epochs=1, learning_rate=2e-2,
        kl={"control": "fixed", "coefficient": TETHER, "form": "k2"}, score={"missing_eos": "keep"}, advantage="rloo",
        group_size=batch, importance={"level": level},
    )  # fmt: skip
    monkeypatch.setitem(SAMPLER_TOLERANCE, "float32", 1.0)
    job = PpoJob(seed=0, runtime=runtime, generation=GenerationConfig(max_new_tokens=1), ppo=config)
    learner = Learner.start(Models(task.policy, task.reference, None, None, task.tokenizer, UNIT), job)
    engine = Perturbed(task, error)
    for update in range(updates):
        numbers = range(batch * update, batch * (update + 1))
        samples = engine.sample([task.prompt] * batch, job.generation, 7, numbers)
        learner.update(gather_experience(learner.models, samples, job, TETHER), update)
    return task, task.distribution(task.policy)


def biased_fixed_point(start: Tensor, scores: Tensor, error: Tensor) -> Tensor:
    """Log-probabilities (N,) at which the unweighed update is 0 on samples of μ ∝ π e^error.

    Σ_y μ(y) (A(y) - β l(y)) (1_y - π) = 0 with A = s - E_μ s and l = log π / π_ref: A - βl is -β E_μ[l] · π / μ, and no
    constant as at the optimum.
    """
    found = (start + scores / TETHER).log_softmax(-1)
    for _ in range(2000):
        sampler = (found + error).log_softmax(-1).exp()
        mean = -TETHER * (sampler * (found - start)).sum()
        target = start + (scores - (sampler * scores).sum() - mean * found.exp() / sampler) / TETHER
        found = (0.9 * found + 0.1 * target).log_softmax(-1)
    return found


def test_with_a_sampler_that_is_off_by_a_tenth_of_a_nat_weights_halve_the_kl_to_the_optimum_at_least(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With KL as a loss the error moves the fixed point, and unweighed PPO goes there. (With KL in the reward it does
    not: at the optimum every advantage is 0, whoever samples.)"""
    error = 0.1 * torch.randn(13, generator=torch.Generator().manual_seed(3))
    task, unweighed = trained_on_another_sampler(runtime, monkeypatch, error, "off")
    _, weighed = trained_on_another_sampler(runtime, monkeypatch, error, "token")
    start = task.distribution(task.reference)
    optimum = (start + task.scores() / TETHER).log_softmax(-1)
    sampled = error[task.responses()[0][:, 0]].double()
    fixed = biased_fixed_point(start, task.scores(), sampled)
    assert distance(start, optimum) > 0.5
    assert distance(unweighed, optimum) == pytest.approx(distance(fixed, optimum), rel=0.4)
    assert distance(weighed, optimum) < 0.5 * distance(unweighed, optimum)
