"""Held-out evaluation during training: choose the best checkpoint inside the KL band, and decide when to stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from components.data.tables.published import read_split
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.evaluate import Answered, respond
from components.ppo.models import Models
from components.ppo.monitors.batches import beta_in_deviations
from components.stats.intervals import LEVEL, Interval, clustered_mean, clustered_ratio, paired_gain
from components.training.weights import kept_parameters, whole_tensors

STREAM = "watch"
"""The random stream of these evaluations. It is the same each time, so that checkpoints differ only by their
weights."""
LEAVES_AFTER = 2
"""The run stops after this many batches in a row whose KL is certainly above the band."""
SHOWN = 8
"""Number of prompts whose responses are shown to people."""


@dataclass
class Watch:
    """The results of a training's held-out evaluations. Checkpoints contain all of it."""

    config: PpoConfig
    prompts: list[Any]
    """Prompts of the calibration split, on which no gate judges."""
    sft: list[float] = field(default_factory=list)
    """SFT's scores on them, in SFT standard deviations; empty before the first evaluation."""
    sft_judge: list[float] = field(default_factory=list)
    """The independent judge's scores of the same SFT responses; empty without one."""
    looks: list[dict[str, float]] = field(default_factory=list)
    """For each evaluation `update` (from 1) and `score`, `gain` over SFT and `kl`, each with `_low` and `_high`; with
    an independent judge also `judge_gain`, which is not used to choose a checkpoint."""
    scores: dict[int, list[float]] = field(default_factory=dict)
    """Maps an update to each prompt's score, for the best evaluation inside the band and for the last one."""
    nats: dict[int, list[float]] = field(default_factory=dict)
    """The same for the KL (summed k1, nats) of each prompt's response."""
    best: int = 0
    """The update with the highest score of those that `is_eligible` accepts; 0 for none."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The policy's parameters at update `best`, complete and on the CPU."""
    outside: int = 0
    """How many of the latest batches in a row had a KL certainly above the band."""
    reached: float = 0.0
    """The highest KL of a batch, in `kl.unit`, after which the policy was evaluated."""
    alarmed: int = 0
    """The first update whose batch raised an alarm of `monitors.stop_on`; 0 for none."""

    @classmethod
    def start(cls, job: PpoJob, data: Path) -> "Watch":
        """Return a watch without evaluations."""
        rows = read_split(data / "prompts.calibration")[: job.ppo.watch.prompts] if job.ppo.evaluate_every else []
        return cls(job.ppo, [row["prompt"] for row in rows])

    def state(self) -> dict[str, Any]:
        """Return the JSON part of its state for a checkpoint; the tensors are `weights`."""
        by_update = {
            name: {str(update): each for update, each in getattr(self, name).items()} for name in ("scores", "nats")
        }
        named = ("sft", "sft_judge", "looks", "best", "outside", "reached", "alarmed")
        return {name: getattr(self, name) for name in named} | by_update

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Restore the state from a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)
        self.scores, self.nats = (
            {int(update): each for update, each in state[name].items()} for name in ("scores", "nats")
        )
        self.weights = dict(weights)

    def due(self, update: int, last: bool, kl: float) -> bool:
        """Return whether to evaluate after `update` updates; `kl` is the last batch's mean KL in `kl.unit`.

        The last update is evaluated only if an earlier one was, since otherwise there is nothing to compare it with.
        While the critic warms up the policy is still SFT, and an evaluation would only use up `watch.patience`. A
        diverging KL may cross the whole band between two regular evaluations. So an extra one is due each time that KL
        is an eighth of the band above every KL at which there was one: at most eight times within the band. These are
        the KL of evaluated policies and of the batches before them: an average of weights (`ppo.ema`) has a lower KL
        than the policy that samples the batches.
        """
        every, most = self.config.evaluate_every, self.config.watch.kl_high
        if every is None or len(self.prompts) < 2 or update <= self.config.critic.warmup:
            return False
        name = "kl" if self.config.kl.unit == "response" else "kl_per_token"
        reached = max([self.reached, *(look[name] for look in self.looks)])
        rose = most is not None and kl <= most and kl >= reached + most / 8
        due = update % every == 0 or rose or (last and bool(self.looks))
        self.reached = max(self.reached, kl) if due else self.reached
        return due

    def look(self, models: Models, job: PpoJob, data: Path, update: int) -> list[Answered]:
        """Evaluate the policy after `update` updates, and keep its weights if it is the best so far.

        Returns a response to each watched prompt.
        """
        clusters = [str(prompt) for prompt in self.prompts]
        if not self.sft:
            of_sft = respond(models, models.sft, self.prompts, job, data, stream=STREAM, judged=True)
            self.sft = [each.score for each in of_sft]
            self.sft_judge = [each.judge for each in of_sft if each.judge is not None]
        rows = respond(models, models.policy, self.prompts, job, data, stream=STREAM, judged=True)
        scores, kl = [row.score for row in rows], [row.kl for row in rows]
        a_response = clustered_mean(kl, clusters)
        a_token = clustered_ratio(kl, [row.tokens for row in rows], clusters)
        found: dict[str, float] = {"update": update}
        named = {"score": clustered_mean(scores, clusters), "gain": paired_gain(scores, self.sft, clusters),
                 "kl": a_response, "kl_per_token": a_token}  # fmt: skip
        if self.sft_judge:
            judged = [row.judge for row in rows if row.judge is not None]
            named["judge_gain"] = paired_gain(judged, self.sft_judge, clusters)
        for name, interval in named.items():
            found |= interval.metrics(name)
        for name in rows[0].truth:
            found[name] = sum(row.truth[name] for row in rows) / len(rows)
        self.looks.append(found)
        if self.is_eligible(found) and (not self.best or found["score"] > self._at(self.best)["score"]):
            self.best = update
            self.weights = whole_tensors(kept_parameters(models.policy))
        self.scores, self.nats = (
            {at: each for at, each in held.items() if at == self.best} | {update: own}
            for held, own in ((self.scores, scores), (self.nats, kl))
        )
        return rows

    def is_inside(self, look: Mapping[str, float]) -> bool:
        """Return whether the upper end of an evaluation's KL is in the band [0, `watch.kl_high`]."""
        most = self.config.watch.kl_high
        name = "kl_high" if self.config.kl.unit == "response" else "kl_per_token_high"
        return most is None or look.get(name, float("inf")) <= most

    def is_eligible(self, look: Mapping[str, float]) -> bool:
        """Return whether an evaluated policy may be the best: inside the band, and from before any alarm of
        `monitors.stop_on`. After such an alarm the score is what misleads."""
        return self.is_inside(look) and not 0 < self.alarmed <= look["update"]

    def leaves(self, low: float) -> bool:
        """Count a batch whose KL interval begins at `low` (in `kl.unit`); return whether KL has certainly left the
        band.

        By chance the lower end of a 95 % interval is above the true mean in 1 batch of 40, and in two batches in a row
        in 1 of 1,600.
        """
        most = self.config.watch.kl_high
        self.outside = self.outside + 1 if most is not None and low > most else 0
        return self.outside >= LEAVES_AFTER

    def out_of_patience(self) -> bool:
        """Return whether `watch.patience` evaluations in a row have not raised the highest score inside the band."""
        patience = self.config.watch.patience
        since = [look for look in self.looks if look["update"] > self.best]
        return patience is not None and bool(self.best) and len(since) >= patience

    def choose(self, last: int, beta: float) -> tuple[int, str]:
        """Return the update to publish, and the reason as a sentence.

        If the last update is outside the band, or an alarm of `monitors.stop_on` was raised, it is the one with the
        highest score inside the band and before the alarm. Otherwise the best is published only if it is certainly
        better in what PPO maximises, score - β KL with the last update's β; comparing scores alone would prefer
        policies with more KL. "Certainly" means by an interval paired over the prompts, at 95 % for all evaluations
        together (Bonferroni), since the best of many noisy means looks better than it is. Where β is no price of KL to
        SFT (`beta_in_deviations` is None), the best must have a certainly higher score and a mean KL that is no higher:
        whatever a nat costs, it is then better.
        """
        most = self.config.watch.kl_high
        wanted = [] if most is None else [f"inside the KL band [0, {most:g}]"]
        wanted += [f"before the alarm of update {self.alarmed}"] if self.alarmed else []
        band = f" {' and '.join(wanted)}" if wanted else ""
        if not self.looks:
            return last, f"Update {last} is published: it is the last, and no earlier checkpoint was evaluated."
        if not self.best:
            return last, f"Update {last}, the last, is published: no evaluated checkpoint is{band}."
        if self.best == last:
            return last, f"Update {last}, the last, is published: no evaluated checkpoint{band} scores higher."
        score = self._at(self.best)["score"]
        told = f"its score on {len(self.prompts)} held-out prompts is the highest{band}, {score:.2f} SFT deviations"
        end = self._at(last)
        if not self.is_eligible(end):
            kl = end["kl" if self.config.kl.unit == "response" else "kl_per_token"]
            outside = f"is outside (KL {kl:.3g} nats a {self.config.kl.unit})"
            why = "is not before it" if self.is_inside(end) else outside
            return self.best, f"Update {self.best} is published: {told}. The last, update {last}, {why}."
        price = beta_in_deviations(self.config, beta)
        gain = self._gain(self.best, last, price or 0.0)
        kl, kl_last = (sum(self.nats[at]) / len(self.nats[at]) for at in (self.best, last))
        by = f"by {gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}]"
        if price is None:
            better, compared = "has a certainly higher score at no more KL", f"score differs {by}"
            compared += f", KL is {kl:.3g} against {kl_last:.3g} nats a response, and β does not price KL to SFT here"
        else:
            better, compared = "is certainly better", f"score less β KL differs {by}"
        if gain.low > 0 and (price is not None or kl <= kl_last):
            return self.best, (
                f"Update {self.best} is published: {told}. It {better} than the last, update {last} ({compared})."
            )
        return last, (
            f"Update {last}, the last, is published: no earlier one{band} {better} (the highest score is "
            f"update {self.best}'s; {compared})."
        )

    def metrics(self) -> dict[str, float]:
        """Return the newest evaluation as metrics of its update."""
        return {f"ppo/watched_{name}": value for name, value in self.looks[-1].items() if name != "update"}

    def _at(self, update: int) -> dict[str, float]:
        return next(look for look in self.looks if look["update"] == update)

    def _gain(self, a: int, b: int, beta: float) -> Interval:
        """Return the gain in score - β KL from update `b` to `a`, with an interval corrected for all evaluations."""
        worth = {
            at: [score - beta * kl for score, kl in zip(self.scores[at], self.nats[at], strict=True)] for at in (a, b)
        }
        differences = [x - y for x, y in zip(worth[a], worth[b], strict=True)]
        level = 1 - (1 - LEVEL) / len(self.looks)
        return clustered_mean(differences, [str(prompt) for prompt in self.prompts], level)


def shown_samples(prompts: Sequence[Any], rows: Sequence[Answered]) -> list[dict[str, object]]:
    """Return the responses to the first watched prompts, for people to read while the policy trains."""
    pairs = zip(prompts[:SHOWN], rows[:SHOWN], strict=True)
    return [{"prompt": p, "response": r.response, "score": r.score, "kl": r.kl} | r.truth for p, r in pairs]
