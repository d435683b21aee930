"""Held-out evaluation during training: choose the best policy inside the KL band, and decide when to stop."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from components.data.tables.published import read_split
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.evaluate import Answered, respond
from components.ppo.models import Models
from components.stats.intervals import Interval, clustered_mean, clustered_ratio, paired_gain
from components.training.heldout import BestCheckpoint, Row
from components.training.trained_weights import WeightAverage
from components.training.updates import Observer, Update

SHOWN = 8
"""Number of prompts whose responses are shown to people."""


@dataclass
class PolicyEvaluations(Observer[Update]):
    """The held-out evaluations of a policy's training. It comes after all observers that may stop the training.

    A row of `checkpoints.evaluations` has `update` (from 1) and `score`, `gain` over SFT, `kl` and `kl_per_token`, each
    with `_low` and `_high`; with an independent judge also `judge_gain`, which is not used to choose a checkpoint. By
    prompt there are `scores` and `nats`, the KL of its response (summed k1).
    """

    config: PpoConfig
    prompts: list[Any]
    """Prompts of the calibration split, on which no gate judges."""
    respond: Callable[[Any], list[Answered]]
    """Returns a response of a model to each prompt."""
    sft: Any = None
    """The SFT policy; None without evaluations."""
    average: WeightAverage | None = None
    """The moving average of the weights, which is evaluated instead of the policy; None without one."""
    alarm_update: Callable[[], int] = int
    """Returns the first update that raised an alarm of `monitors.stop_on`; 0 for none."""
    sft_scores: list[float] = field(default_factory=list)
    """SFT's scores, in SFT standard deviations; empty before the first evaluation."""
    sft_judge: list[float] = field(default_factory=list)
    """The independent judge's scores of the same SFT responses; empty without one."""
    group: str = "ppo"
    """Metric group."""
    reached: float = 0.0
    """The highest KL of a batch, in `kl.unit`, after which the policy was evaluated."""
    memory = ("sft_scores", "sft_judge", "reached", "checkpoints")

    def __post_init__(self) -> None:
        self.checkpoints = BestCheckpoint("update", lambda row, best: row["score"] > best["score"], self.is_eligible)

    @classmethod
    def start(
        cls, models: Models, job: PpoJob, data: Path, average: WeightAverage | None = None,
        alarm_update: Callable[[], int] = int, group: str = "ppo",
    ) -> "PolicyEvaluations":  # fmt: skip
        """Return the state before the first evaluation."""
        count = min(job.ppo.watch.prompts, len(models.answers.ids)) if job.ppo.evaluate_every else 0
        rows = read_split(data / "prompts.calibration")[:count]
        prompts = [row["prompt"] for row in rows]
        answer = partial(respond, models, prompts=prompts, job=job, data=data, stream=models.answers, by_judge=True)
        sft = models.sft if count else None  # so that a training without evaluations may free it
        return cls(job.ppo, prompts, answer, sft, average, alarm_update, group=group)

    def on_update(self, update: Update) -> Update:
        """Evaluate the policy if it is due, keep its weights if it is the best, and stop without further progress."""
        kl = update.metrics.get(f"{self.group}/{self.config.kl.measure}", 0.0)
        if not self.is_due(update.number, update.last, kl):
            return update
        began = time.perf_counter()
        if not self.sft_scores:
            of_sft = self.respond(self.sft)
            self.sft_scores = [row.score for row in of_sft]
            self.sft_judge = [row.judge for row in of_sft if row.judge is not None]
        with nullcontext() if self.average is None else self.average.instead(update.model):
            rows = self.respond(update.model)
            results = self._results(rows)
            by_prompt = {"scores": [row.score for row in rows], "nats": [row.kl for row in rows]}
            self.checkpoints.add({"update": update.number, **results}, by_prompt, update.model)
        update = update.with_metrics({f"{self.group}/watched_{name}": value for name, value in results.items()})
        update = update.with_timings({f"{self.group}/watched_seconds": time.perf_counter() - began})
        update = update.with_examples(shown_samples(self.prompts, rows))
        if self.checkpoints.is_stale(self.config.watch.patience):
            update = update.with_stop("the score has not risen for ppo.watch.patience evaluations", fails=False)
        return update

    def is_due(self, update: int, last: bool, kl: float) -> bool:
        """Return whether to evaluate after `update` updates; `kl` is the last batch's mean KL in `kl.unit`.

        The last update is evaluated only if an earlier one was, since otherwise there is nothing to compare it with.
        While the critic warms up the policy is still SFT, and an evaluation would only use up `watch.patience`. A
        diverging KL may cross the whole band between two regular evaluations. So an extra one is due each time that KL
        is an eighth of the band above every KL at which there was one: at most eight times within the band. These are
        the KL of evaluated policies and of the batches before them: an average of weights (`ppo.ema`) has a lower KL
        than the policy that samples the batches.
        """
        every, band = self.config.evaluate_every, self.config.kl.band
        if every is None or len(self.prompts) < 2 or update <= self.config.critic.warmup:
            return False
        rows = self.checkpoints.evaluations
        reached = max([self.reached, *(row[self.config.kl.measure] for row in rows)])
        rose = band is not None and kl <= band and kl >= reached + band / 8
        due = update % every == 0 or rose or (last and bool(rows))
        self.reached = max(self.reached, kl) if due else self.reached
        return due

    def _results(self, rows: Sequence[Answered]) -> Row:
        clusters = [str(prompt) for prompt in self.prompts]
        scores, kl = [row.score for row in rows], [row.kl for row in rows]
        intervals = {
            "score": clustered_mean(scores, clusters),
            "gain": paired_gain(scores, self.sft_scores, clusters),
            "kl": clustered_mean(kl, clusters),
            "kl_per_token": clustered_ratio(kl, [row.tokens for row in rows], clusters),
        }
        if self.sft_judge:
            judge = [row.judge for row in rows if row.judge is not None]
            intervals["judge_gain"] = paired_gain(judge, self.sft_judge, clusters)
        results = Row()
        for name, interval in intervals.items():
            results |= interval.metrics(name)
        return results | {name: sum(row.truth[name] for row in rows) / len(rows) for name in rows[0].truth}

    def is_inside(self, row: Row) -> bool:
        """Return whether the upper end of an evaluation's KL is in the band [0, `kl.band`]."""
        kl = self.config.kl
        return kl.band is None or row.get(f"{kl.measure}_high", float("inf")) <= kl.band

    def is_eligible(self, row: Row) -> bool:
        """Return whether an evaluated policy may be the best: inside the band, and from before any alarm of
        `monitors.stop_on`. After such an alarm the score is what misleads."""
        return self.is_inside(row) and not 0 < self.alarm_update() <= row["update"]

    def choose(self, last: int, beta: float | None) -> tuple[int, str]:
        """Return the update to publish, and the reason as a sentence.

        If the last update is outside the band, or an alarm of `monitors.stop_on` was raised, it is the one with the
        highest score inside the band and before the alarm. Otherwise the best is published only if it is certainly
        better in what PPO maximises, score - β KL with the last update's β; comparing scores alone would prefer
        policies with more KL. "Certainly" means by an interval paired over the prompts, at `BestCheckpoint.level`.
        Where β is no price of KL to SFT (`beta` or `PpoConfig.beta_in_deviations` is None), the best must have a
        certainly higher score and a mean KL that is no higher: whatever a nat costs, it is then better.
        """
        limit, alarm, best = self.config.kl.band, self.alarm_update(), self.checkpoints.number
        conditions = [] if limit is None else [f"inside the KL band [0, {limit:g}]"]
        conditions += [f"before the alarm of update {alarm}"] if alarm else []
        band = f" {' and '.join(conditions)}" if conditions else ""
        if not self.checkpoints.evaluations:
            return last, f"Update {last} is published: it is the last, and no earlier checkpoint was evaluated."
        if not best:
            return last, f"Update {last}, the last, is published: no evaluated checkpoint is{band}."
        if best == last:
            return last, f"Update {last}, the last, is published: no evaluated checkpoint{band} scores higher."
        score = self.checkpoints.best["score"]
        highest = f"its score on {len(self.prompts)} held-out prompts is the highest{band}, {score:.2f} SFT deviations"
        end = self.checkpoints.last
        if not self.is_eligible(end):
            outside = f"is outside (KL {end[self.config.kl.measure]:.3g} nats a {self.config.kl.unit})"
            why = "is not before it" if self.is_inside(end) else outside
            return best, f"Update {best} is published: {highest}. The last, update {last}, {why}."
        price = None if beta is None else self.config.beta_in_deviations(beta)
        gain = self._gain(price or 0.0)
        by_prompt = self.checkpoints.best_values, self.checkpoints.last_values
        kl, kl_last = (sum(values["nats"]) / len(values["nats"]) for values in by_prompt)
        by = f"by {gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}]"
        if price is None:
            better, compared = "has a certainly higher score at no more KL", f"score differs {by}"
            compared += f", KL is {kl:.3g} against {kl_last:.3g} nats a response, and β does not price KL to SFT here"
        else:
            better, compared = "is certainly better", f"score less β KL differs {by}"
        if gain.low > 0 and (price is not None or kl <= kl_last):
            return best, (
                f"Update {best} is published: {highest}. It {better} than the last, update {last} ({compared})."
            )
        return last, (
            f"Update {last}, the last, is published: no earlier one{band} {better} (the highest score is "
            f"update {best}'s; {compared})."
        )

    def _gain(self, beta: float) -> Interval:
        """Return the gain in score - β KL from the last to the best, with an interval corrected for all evaluations."""
        best, last = (
            [score - beta * kl for score, kl in zip(values["scores"], values["nats"], strict=True)]
            for values in (self.checkpoints.best_values, self.checkpoints.last_values)
        )
        differences = [x - y for x, y in zip(best, last, strict=True)]
        return clustered_mean(differences, [str(prompt) for prompt in self.prompts], self.checkpoints.level)


def shown_samples(prompts: Sequence[Any], rows: Sequence[Answered]) -> list[dict[str, object]]:
    """Return the responses to the first prompts, for people to read while the policy trains."""
    pairs = zip(prompts[:SHOWN], rows[:SHOWN], strict=True)
    return [{"prompt": p, "response": r.response, "score": r.score, "kl": r.kl} | r.truth for p, r in pairs]
