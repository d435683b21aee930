"""Compare the policy with the SFT policy on held-out prompts; the gates judge these metrics."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from components.base.errors import CheckFailed
from components.base.jsonl import write_rows
from components.base.observe import Observe, unobserved
from components.base.text import counted
from components.data.support_desk.task import task_scores
from components.data.tables.published import read_split
from components.distributed import ranks
from components.models.sampling import SftAnswers
from components.ppo.config import KLConfig, PpoJob
from components.ppo.experience import rewarded_scores, sampled_batches
from components.ppo.maths import kl_estimates
from components.ppo.models import Models
from components.ppo.monitors.text_statistics import dissimilarity, distinct_ngrams, echo, repetition
from components.rewards.rules import rule_metrics
from components.rewards.weighted import source_metrics
from components.sft.tokenized_demonstrations import choose_demonstrations, perplexity_ratio, response_losses
from components.stats.intervals import (
    Interval,
    cluster_codes,
    clustered_mean,
    clustered_proportion,
    clustered_ratio,
    gain_in_shares,
    jackknifed_ratio,
    paired_gain,
)

Row = dict[str, Any]
CEILING = KLConfig().response_ceiling
WORST = 8
"""Number of prompts with the largest falls, and with the largest KL, in `worst.jsonl`."""


class Answered(NamedTuple):  # long: a row of evaluation.jsonl
    """A response with its scores, its KL to SFT (k1 summed over its tokens, nats) and its text measures."""

    response: str
    """As `visible_text` shows it, special tokens included."""
    score: float
    """The reward model's score, only shifted and scaled: the one that gates judge."""
    reward: float
    """The score as training rewards it: clipped, and with the penalties for a missing EOS and for length."""
    kl: float
    tokens: int
    entropy: float
    """Mean entropy of the policy over its tokens, nats."""
    ended: bool
    special_tokens: int
    """Number of special tokens in it, without the final EOS."""
    repetition: float
    echo: float
    truth: dict[str, float]
    """The built-in task's true scores (`task_scores`); empty on other data."""
    rewards: dict[str, float] = {}  # noqa: RUF012 (never changed)
    """Scaled score from each source of `ppo.rewards`, by name; with those of judges if they were asked."""
    judge: float | None = None
    """The independent judge's score, shifted and scaled by its own SFT scores; None if it was not asked."""
    rules: dict[str, float] = {}  # noqa: RUF012 (never changed)
    """Violations by rule (`Rules.count`); empty without `ppo.rules`, and in evaluations during training."""

    def row(self) -> dict[str, object]:
        """Return the response as one JSON object."""
        columns = {name: value for name, value in self._asdict().items() if name not in ("truth", "rewards", "rules")}
        if self.judge is None:
            del columns["judge"]
        columns |= self.truth | {f"reward_{name}": score for name, score in self.rewards.items()}
        return columns | {f"rule_{name}": count for name, count in self.rules.items()}


def evaluate(models: Models, job: PpoJob, data: Path, out: Path, observe: Observe = unobserved) -> dict[str, float]:
    """Sample a response of each policy to held-out prompts, write `evaluation.jsonl`, and return the stage's metrics.

    All ranks call it and share sampling and scoring; then the first goes on alone (`ranks.go_on_alone`). If
    `evaluate_temperature` differs from the temperature of training, KL and entropy are measured on further responses at
    that of training. `policy/worse_prompts` and `policy/kl_beyond_ceiling` take several to a prompt (`repeats`).
    """
    prompts = [row["prompt"] for row in read_split(data / "prompts.test")[: job.ppo.evaluate]]
    count = counted(len(prompts), "held-out prompt")
    (policy, drawn), (sft, its_drawn) = (
        _answers(models, model, prompts, job, data, partial(observe, doing=f"evaluating {name} on {count}"), True, True)
        for name, model in (("the policy", models.policy), ("SFT", models.sft))
    )
    is_1 = job.generation.temperature == 1
    kl = _mean(r.kl for r in drawn) if is_1 else kl_at_1(models, prompts, job, data, observe)
    observe(0, {}, doing="measuring the perplexity of demonstrations")
    metrics = _forgetting(models, job, data) | {"policy/kl_at_temperature_1": kl}
    again, more, more_drawn, more_sft = _sampled_again(models, job, data, prompts, observe)
    if job.ppo.best_of:
        metrics |= best_of(models, prompts, job, data, job.ppo.best_of, observe)
    ranks.go_on_alone()
    write_rows(out / "artifact" / "evaluation.jsonl", _rows(prompts, policy, sft))
    clusters = [str(p) for p in prompts]
    observe(0, {}, doing="measuring diversity")
    metrics |= {
        "policy/evaluated": float(len(prompts)),
        **_kl(drawn, clusters, "policy/kl"),
        **_by_response(policy, sft, clusters),
        **_diversity(policy, sft, clusters),
        **_entropy(drawn, its_drawn, clusters),
        "policy/proxy_reward": _mean(r.score for r in policy),
        "policy/rewarded_score": _mean(r.reward for r in policy),
        "policy/response_tokens": _mean(r.tokens for r in policy),
        "policy/sft_special_tokens": _mean(r.special_tokens > 0 for r in sft),
        **_by_source(models, policy, sft, clusters),
        **_by_prompt(
            job, out, len(prompts), [*prompts, *again], [*policy, *more], [*sft, *more_sft], [*drawn, *more_drawn]
        ),
    }
    if policy[0].truth:
        gold, violations = (
            _above([a.truth for a in policy], [b.truth for b in sft], clusters, name) for name in ("gold", "violations")
        )
        mine, its = ({k: _mean(r.truth[k] for r in rows) for k in rows[0].truth} for rows in (policy, sft))
        metrics |= {
            "policy/gold": mine["gold"],
            "policy/sft_gold": its["gold"],
            "policy/gold_gain_low": gold.low,
            "policy/gold_gain_high": gold.high,
            "policy/violations": mine["violations"],
            "policy/sft_violations": its["violations"],
            **violations.metrics("policy/violations_excess"),
            "policy/echoes": mine["echoes"],
        }
    if policy[0].rules:
        of_policy, of_sft = ([row.rules for row in rows] for rows in (policy, sft))
        metrics |= rule_metrics(of_policy, "policy/") | rule_metrics(of_sft, "policy/sft_")
        metrics |= _above(of_policy, of_sft, clusters, "violations").metrics("policy/rule_violations_excess")
    return metrics


def _rows(prompts: Sequence[Any], policy: Sequence[Answered], sft: Sequence[Answered]) -> Iterator[Row]:
    return ({"prompt": p, "policy": a.row(), "sft": b.row()} for p, a, b in zip(prompts, policy, sft, strict=True))


def _sampled_again(
    models: Models, job: PpoJob, data: Path, prompts: Sequence[Any], observe: Observe
) -> tuple[list[Any], list[Answered], list[Answered], list[Answered]]:
    """Return the prompts that `ppo.repeats` asks again, and responses of the policy (as `_answers`) and of SFT."""
    again = [p for p in prompts[: job.ppo.repeats.prompts] for _ in range(job.ppo.repeats.samples - 1)]
    (policy, drawn), (sft, _) = (
        _answers(models, model, again, job, data, partial(observe, doing=doing), stream="evaluation samples")
        for model, doing in ((models.policy, "sampling the policy again"), (models.sft, "sampling SFT again"))
    )
    return again, policy, drawn, sft


def _by_prompt(
    job: PpoJob, out: Path, count: int, prompts: Sequence[Any],
    policy: Sequence[Answered], sft: Sequence[Answered], drawn: Sequence[Answered],
) -> dict[str, float]:  # fmt: skip
    """Return what a mean over all prompts hides. Of the `prompts`, all after the first `count` are asked again.

    Writes the further responses to `evaluation_samples.jsonl`, and the worst prompts to `worst.jsonl`.
    """
    write_rows(out / "artifact" / "evaluation_samples.jsonl", _rows(prompts[count:], policy[count:], sft[count:]))
    first = min(count, job.ppo.repeats.prompts)
    repeated, mine, its = ([*rows[:first], *rows[count:]] for rows in (prompts, policy, sft))
    falls = _worst("fall", fmean, lambda r: r["sft"]["score"] - r["policy"]["score"], _rows(repeated, mine, its))
    nats = _worst("kl", max, lambda r: r["policy"]["kl"], _rows(prompts, drawn, sft))
    write_rows(out / "artifact" / "worst.jsonl", [*falls, *nats])
    beyond = _beyond_ceiling(drawn, [str(p) for p in prompts], "policy/kl", job.ppo.kl.response_ceiling)
    return beyond | _worse_prompts(mine, its, [str(p) for p in repeated])


def _worst(
    reason: str, summary: Callable[[list[float]], float], measure: Callable[[Row], float], rows: Iterable[Row]
) -> list[Row]:
    """Return the row with the largest `measure` of each of the `WORST` prompts whose `summary` of it is largest."""
    by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        by_prompt.setdefault(str(row["prompt"]), []).append(row)
    worst = [(summary([measure(r) for r in samples]), max(samples, key=measure)) for samples in by_prompt.values()]
    worst = sorted(worst, key=lambda entry: -entry[0])[:WORST]
    return [{"reason": reason, "value": value} | row for value, row in worst if value > 0]


def _above(
    policy: Sequence[Mapping[str, float]], sft: Sequence[Mapping[str, float]], clusters: Sequence[str], name: str
) -> Interval:
    """Return the mean difference in `name` between the policy's and SFT's responses to the same prompts, with
    interval."""
    return paired_gain([a[name] for a in policy], [b[name] for b in sft], clusters)


def evaluate_last(
    models: Models, job: PpoJob, data: Path, out: Path, observe: Observe = unobserved
) -> dict[str, float]:
    """Evaluate the last policy on the prompts of `evaluate`, if an earlier checkpoint is published.

    Writes `last.jsonl`. The metrics are called `policy/last_kl`, `policy/last_proxy_reward` and so on; no gate judges
    them. The only judge that is asked is the one that Tether trained, for `policy/last_judge_gain`.
    """
    prompts = [row["prompt"] for row in read_split(data / "prompts.test")[: job.ppo.evaluate]]
    prompts_text = counted(len(prompts), "held-out prompt")
    progress = partial(observe, doing=f"evaluating the last policy on {prompts_text}")
    rows, drawn = _answers(models, models.policy, prompts, job, data, progress, by_judge=True)
    if ranks.is_first():
        by_prompt = zip(prompts, rows, strict=True)
        write_rows(out / "artifact" / "last.jsonl", ({"prompt": p} | r.row() for p, r in by_prompt))
    clusters = [str(p) for p in prompts]
    last_metrics = _kl(drawn, clusters, "policy/last_kl", job.ppo.kl.response_ceiling)
    last_metrics |= {"policy/last_entropy": _mean(r.entropy for r in drawn)}
    if models.judge is not None:
        progress = partial(observe, doing=f"evaluating SFT on {prompts_text}")
        sft, _ = _answers(models, models.sft, prompts, job, data, progress, by_judge=True)
        last_metrics |= judge_gain(rows, sft, clusters).metrics("policy/last_judge_gain")
    for name in ("repetition", "echo", "ended"):
        last_metrics[f"policy/last_{name}"] = _mean(getattr(r, name) for r in rows)
    return last_metrics | {
        "policy/last_proxy_reward": _mean(r.score for r in rows),
        "policy/last_response_tokens": _mean(r.tokens for r in rows),
        **{f"policy/last_{name}": _mean(r.truth[name] for r in rows) for name in rows[0].truth},
    }


def _answers(
    models: Models, model: Any, prompts: Sequence[Any], job: PpoJob, data: Path, progress: Observe,
    judging: bool = False, by_judge: bool = False, stream: str = "evaluation",
) -> tuple[list[Answered], list[Answered]]:  # fmt: skip
    """Return responses of `model` at the evaluation's temperature, and at the temperature of training."""
    at = job.ppo.evaluate_temperature
    sampled = partial(respond, models, model, prompts, job, data, stream, progress=progress)
    if at is None or at == job.generation.temperature:
        drawn = sampled(judging=judging, by_judge=by_judge)
        return drawn, drawn
    drawn = sampled()
    return sampled(judging=judging, by_judge=by_judge, temperature=at), drawn


def _kl(rows: Sequence[Answered], clusters: Sequence[str], name: str, ceiling: float = CEILING) -> dict[str, float]:
    """Return KL to SFT in nats per response and nats per token, and the share beyond `ceiling`, with intervals."""
    a_response = clustered_mean([r.kl for r in rows], clusters)
    a_token = clustered_ratio([r.kl for r in rows], [r.tokens for r in rows], clusters)
    beyond = _beyond_ceiling(rows, clusters, name, ceiling)
    return a_response.metrics(name) | a_token.metrics(f"{name}_per_token") | beyond


def _beyond_ceiling(rows: Sequence[Answered], clusters: Sequence[str], name: str, ceiling: float) -> dict[str, float]:
    """Return the share of responses whose KL to SFT (k1 summed over tokens, nats) exceeds `ceiling`, with interval."""
    return clustered_proportion([r.kl > ceiling for r in rows], clusters).metrics(f"{name}_beyond_ceiling")


def _worse_prompts(policy: Sequence[Answered], sft: Sequence[Answered], clusters: Sequence[str]) -> dict[str, float]:
    """Return the share of prompts on which the policy's mean score is below SFT's, and that share less chance.

    Both lists hold the same number of responses to a prompt. Two draws of SFT of that size are exchangeable: a mean
    falls as often as it rises. So of the prompts whose mean changes half fall by chance, and the excess is
    (falls - rises) / 2: 0 for SFT itself, -1/2 if every prompt rises (the sign test: Dixon and Mood 1946, JASA 41:557).
    """
    codes = cluster_codes(clusters)
    change = np.bincount(codes, [a.score - b.score for a, b in zip(policy, sft, strict=True)])
    share = clustered_proportion(change < 0, range(len(change)))
    excess = Interval(*(end / 2 for end in gain_in_shares(change < 0, change > 0, range(len(change)))))
    return share.metrics("policy/worse_prompts") | excess.metrics("policy/worse_prompts_excess")


def _by_response(policy: Sequence[Answered], sft: Sequence[Answered], clusters: Sequence[str]) -> dict[str, float]:
    """Return the metrics that are means over single responses, each with the ends of its interval."""

    def share(values: Iterable[float]) -> Interval:
        return clustered_proportion(list(values), clusters)

    gain = [a.score - b.score for a, b in zip(policy, sft, strict=True)]
    both = [a.ended and b.ended for a, b in zip(policy, sft, strict=True)]
    metrics = {
        **clustered_mean(gain, clusters).metrics("policy/reward_gain"),
        "policy/both_ended": _mean(both),
        **clustered_ratio([r.tokens for r in policy], [r.tokens for r in sft], clusters).metrics("policy/length_ratio"),
        **share(r.ended for r in policy).metrics("policy/ended"),
        **share(r.repetition for r in policy).metrics("policy/repetition"),
        **share(r.echo for r in policy).metrics("policy/echo"),
        **share(r.special_tokens > 0 for r in policy).metrics("policy/special_tokens"),
    }
    if any(both):
        ended = clustered_mean(list(compress(gain, both)), compress(clusters, both))
        metrics |= ended.metrics("policy/reward_gain_ended")
    return metrics | _worse_prompts(policy, sft, clusters)


def _by_source(
    models: Models, policy: Sequence[Answered], sft: Sequence[Answered], clusters: Sequence[str]
) -> dict[str, float]:
    """Return each source's gain over SFT with its interval (in SDs of its SFT scores), and the sources' agreement.

    `policy/judge_gain` is that of the judge with the lowest lower end, so that its gate passes only if every judge
    finds a gain.
    """
    metrics: dict[str, float] = {}
    judge_gains: list[Interval] = []
    for config in models.rewards.configs if models.rewards is not None else ():
        gain = [a.rewards[config.name] - b.rewards[config.name] for a, b in zip(policy, sft, strict=True)]
        what, gained = "judge" if config.judge else "reward", clustered_mean(gain, clusters)
        metrics |= gained.metrics(f"policy/{what}_{config.name}_gain")
        judge_gains += [gained] if config.judge else []
    if models.judge is not None:
        judge_gains.append(judge_gain(policy, sft, clusters))
        metrics |= judge_gains[-1].metrics(f"policy/judge_{TRAINED}_gain")
    if judge_gains:
        metrics |= min(judge_gains, key=lambda interval: interval.low).metrics("policy/judge_gain")
    if models.rewards is not None:
        names = [config.name for config in models.rewards.rewarding]
        metrics |= source_metrics(
            {name: torch.tensor([row.rewards[name] for row in policy]) for name in names}, "policy"
        )
    return metrics


TRAINED = "trained"
"""The name of the judge of `data.judge_preferences` in metrics."""


def judge_gain(policy: Sequence[Answered], sft: Sequence[Answered], clusters: Sequence[str]) -> Interval:
    """Return the policy's mean gain over SFT on the same prompts by the independent judge, with its interval."""
    mine, its = ([row.judge for row in rows if row.judge is not None] for rows in (policy, sft))
    return paired_gain(mine, its, clusters)


def _diversity(policy: Sequence[Answered], sft: Sequence[Answered], prompts: Sequence[str]) -> dict[str, float]:
    """Return the diversity of the responses relative to that of as many SFT responses; 1 means that none is lost."""
    metrics: dict[str, float] = {}
    for name, ratio, measure in (
        ("distinct_4", "distinct_ratio", distinct_ngrams),
        ("dissimilarity", "dissimilarity_ratio", dissimilarity),
    ):
        mine, its = (measure([r.response for r in rows], prompts) for rows in (policy, sft))
        metrics |= {f"policy/{name}": mine.value, f"policy/sft_{name}": its.value}
        metrics |= jackknifed_ratio(mine.value, its.value, mine.without, its.without).metrics(f"policy/{ratio}")
    return {
        **metrics,
        "policy/distinct": len({r.response for r in policy}) / len(policy),
        "policy/sft_distinct": len({r.response for r in sft}) / len(sft),
    }


def _entropy(policy: Sequence[Answered], sft: Sequence[Answered], clusters: Sequence[str]) -> dict[str, float]:
    """Return the policy's mean entropy per token in nats, and relative to SFT's."""
    mine, its = ([r.entropy for r in rows] for rows in (policy, sft))
    ratio = clustered_ratio(mine, its, clusters).metrics("policy/entropy_ratio")
    return {"policy/entropy": _mean(mine), "policy/sft_entropy": _mean(its), **ratio}


def kl_at_1(models: Models, prompts: Sequence[Any], job: PpoJob, data: Path, observe: Observe = unobserved) -> float:
    """Return KL at temperature 1 in nats per response: E[Σ_t log π_1(a_t|s_t) - log π_ref,1(a_t|s_t)], a ~ π_1.

    It samples responses at temperature 1 for this. Responses of another temperature T would need the importance weights
    Π_t π_1 / π_T, whose variance grows exponentially with the length.
    """
    plain = job.model_copy(update={"generation": job.generation.model_copy(update={"temperature": 1.0})})
    progress = partial(observe, doing="measuring KL at temperature 1")
    rows = respond(models, models.policy, prompts, plain, data, stream="temperature 1", progress=progress)
    return _mean(row.kl for row in rows)


def best_of(
    models: Models, prompts: Sequence[Any], job: PpoJob, data: Path, n: int, observe: Observe = unobserved
) -> dict[str, float]:
    """Evaluate the best-of-n baseline: of `n` SFT responses to each prompt, take the one with the highest score.

    Its KL to SFT is at most log n - (n - 1) / n nats per response (Stiennon et al. 2020, G.3; Beirami et al. 2024).
    """
    progress = partial(observe, doing=f"evaluating the best of {n} SFT responses to a prompt")
    repeated = [prompt for prompt in prompts for _ in range(n)]
    rows = respond(models, models.sft, repeated, job, data, stream="best of n", progress=progress)
    best = [max(rows[i : i + n], key=lambda row: row.score) for i in range(0, len(rows), n)]
    metrics = {
        "policy/best_of_kl_bound": math.log(n) - (n - 1) / n,
        "policy/best_of_proxy_reward": _mean(r.score for r in best),
        "policy/best_of_response_tokens": _mean(r.tokens for r in best),
    }
    return metrics | ({"policy/best_of_gold": _mean(r.truth["gold"] for r in best)} if best[0].truth else {})


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def respond(
    models: Models, model: Any, prompts: Sequence[Any], job: PpoJob, data: Path,
    stream: str | SftAnswers = "evaluation",
    judging: bool = False, temperature: float | None = None, by_judge: bool = False, progress: Observe = unobserved,
) -> list[Answered]:  # fmt: skip
    """Sample and score one response of `model` to each prompt. Models with the same `stream` get the same randomness.

    Args:
        stream: as for `sampled_batches`.
        judging: also ask the sources of `ppo.rewards` that only judge.
        temperature: of sampling, 0 for greedy; None takes the job's. Log-probabilities are always at the job's
            temperature; if the two differ, `kl` is a log-ratio but not an estimate of KL.
        by_judge: also ask the independent judge, if there is one.
        progress: called with the number of responses so far, and of all.

    Raises:
        CheckFailed: a score or a log-probability is not finite.
    """
    drawn = {} if temperature is None else {"temperature": temperature}
    generation, rows = job.generation.model_copy(update=drawn), list[Answered]()
    progress(0, {}, total=len(prompts))
    for batch, samples, passes in sampled_batches(models, model, prompts, job, stream, generation, by_judge):
        mask = samples.response_mask
        kl = kl_estimates(passes.policy, passes.sft, mask).k1.sum(1)
        texts, raw, of_sources = samples.texts(models.tokenizer), passes.raw_scores, dict[str, torch.Tensor]()
        if models.rewards is not None:
            raw, of_sources, _ = models.rewards.score(raw, batch, texts, judging, ended=samples.ended.tolist())
        counts = models.rules.count(batch, texts) if judging and models.rules is not None else None
        by_source = {name: value.tolist() for name, value in of_sources.items()}
        scores = models.scale(raw)
        rewards = rewarded_scores(raw, samples, models.scale, job.ppo.score)
        lengths, special = samples.response_lengths, samples.special_tokens(models.tokenizer)
        entropy, ended = passes.entropy.cpu(), samples.ended.tolist()  # one transfer per batch
        of_judge = [None] * len(texts) if passes.judge_scores is None else _scaled(models, passes.judge_scores)
        score, reward, divergence = torch.stack([scores, rewards, kl]).tolist()
        read = {"log-probability": divergence, "score of the reward model": score, "score of the judge": of_judge}
        for name, numbers in read.items():
            if not all(value is None or math.isfinite(value) for value in numbers):
                raise CheckFailed(f"the evaluation of PPO: a {name} isn't finite, so no gate could judge the policy.")
        for i, (prompt, text) in enumerate(zip(batch, texts, strict=True)):
            rows.append(Answered(
                text, score[i], reward[i], divergence[i], lengths[i],
                entropy=entropy[i].sum().item() / lengths[i], ended=ended[i],
                special_tokens=special[i], repetition=repetition(text), echo=echo(prompt[-1]["content"], text),
                truth=task_scores(data, prompt, text),
                rewards={name: value[i] for name, value in by_source.items()}, judge=of_judge[i],
                rules={} if counts is None else counts[i],
            ))  # fmt: skip
        progress(len(rows), {}, total=len(prompts))
    return rows


def _scaled(models: Models, raw: torch.Tensor) -> list[float | None]:
    """Return the judge's raw scores (B,) in standard deviations of its own SFT scores."""
    assert models.judge_scale is not None
    return list(models.judge_scale(raw).tolist())


def sft_responses(models: Models, prompts: Sequence[Any], job: PpoJob) -> tuple[list[str], list[bool], torch.Tensor]:
    """Return the texts of SFT's answers to the calibration prompts, whether each ended, and the pipeline's own raw
    scores (n,) of them."""
    texts, ended, raw = list[str](), list[bool](), list[torch.Tensor]()
    for _, samples, passes in sampled_batches(models, models.sft, prompts, job, models.answers):
        raw.append(passes.raw_scores)
        texts += samples.texts(models.tokenizer)
        ended += samples.ended.tolist()
    return texts, ended, torch.cat(raw)


def _forgetting(models: Models, job: PpoJob, data: Path) -> dict[str, float]:
    """Return the perplexity of held-out demonstrations under the policy divided by that under SFT; 1 means no loss.

    Overlong demonstrations count up to the cap: their text can be forgotten, though neither model learned their end.
    """
    rows = read_split(data / "demonstrations.heldout")
    examples = choose_demonstrations(models.tokenizer, rows, job.generation, "cut", job.ppo.evaluate).examples
    pad_id = models.tokenizer.pad_token_id
    mine, its = (response_losses(m, pad_id, examples, job.runtime) for m in (models.policy, models.sft))
    return perplexity_ratio(mine, its, examples).metrics("policy/demonstration_perplexity_ratio")
