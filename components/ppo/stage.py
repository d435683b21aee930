"""The PPO stage: the training loop in numbered steps, with its checks, checkpoints and final evaluation."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from components.base.errors import CheckFailed, Unreachable, UserError
from components.base.files import make_folder, replacing
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.base.text import counted
from components.data.tables.published import SplitColumn, has_split, read_split, rows_by_category
from components.distributed import ranks
from components.gates.self_checks import SelfChecks
from components.models.adapters import AdapterView, save_adapter
from components.models.batching import encode_prompts
from components.models.runtime import release_memory
from components.models.sampling import Samples
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.control import KLController, KLLimits, ReferenceRefresh
from components.ppo.evaluate import evaluate, evaluate_last, sft_responses
from components.ppo.experience import Experience, PpoUpdate, check_start, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models, weights_digest
from components.ppo.monitors.batches import Alarms
from components.ppo.monitors.boundaries import check_average, check_end, check_inputs
from components.ppo.monitors.by_the_book import UpdateChecks
from components.ppo.monitors.curves import curve_metrics
from components.ppo.monitors.kl_by_token import KLShares
from components.ppo.monitors.responses import ResponseMetrics, SampleTable, ScoreWarning
from components.reward.scoring import ScoreScale
from components.rewards.rules import Rules
from components.rewards.weighted import Rewards, check_waits
from components.rollouts.engine import Rollouts, check_server, open_rollouts
from components.training.checkpoint import Pace
from components.training.loop import Loop, balanced_passes, shuffled_passes, torch_seed
from components.training.trained_weights import WeightAverage, save_whole
from components.training.updates import History, Observer, PluggedObserver, Speed


def run(job: PpoJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train the policy of `inputs["sft"]` against `inputs["reward"]` on prompts of `inputs["data"]`.

    A judge, `inputs["judge"]`, is used only in evaluations: the trained policy is the same to the byte without it.

    Raises:
        UserError: too few prompts, a server that cannot sample the rollouts, or, for several ranks, a source that may
            take longer than `runtime.rank_timeout`. CheckFailed: a check during training failed.
    """
    if (rollout := job.ppo.rollout).by_server:
        ranks.result_of_first(lambda: check_server(rollout, job.generation))
    at_once = max(job.ppo.batch_size, ScoreScale.read(inputs["reward"]).responses)
    check_waits(job.ppo.asked, job.runtime, at_once)
    if job.ppo.epochs > 4:
        warnings.warn(f"ppo.epochs is {job.ppo.epochs}: more than 4 passes drift far off-policy.", stacklevel=1)
    data = inputs["data"]
    prompts = SplitColumn(read_split(data / "prompts.train"), "prompt")[: job.ppo.max_prompts]
    if not prompts:
        raise UserError("ppo: the data hold no training prompt. Raise data.split.train.")
    models, checks = Models.load(job, inputs), SelfChecks()
    check_inputs(checks, models, job, inputs)
    with with_rules(models, job, data), with_sources(models, job, inputs, out):
        metrics = _trained_and_evaluated(models, job, prompts, data, out, observe, checks)
    if ranks.is_first():
        check_end(checks, models, job, inputs, out, metrics)
        checks.write(out)
    return metrics


def _trained_and_evaluated(
    models: Models, job: PpoJob, prompts: Sequence[Any], data: Path, out: Path, observe: Observe, checks: SelfChecks
) -> dict[str, float]:
    """Train, check that the frozen models are unchanged, evaluate, write the artifact, and return the final metrics."""
    with frozen_unchanged(models):
        observers = train(models, job, prompts, data, out, observe, checks)
        if observers.average is not None:
            check_average(checks, observers.average, models.policy)
        models.critic = None  # the evaluation needs no critic
        release_memory(job.runtime.device)
    models.policy.eval()
    artifact, history = out / "artifact", observers.history.rows
    last = history[-1]
    updates = len(history)
    number, reason = observers.evaluations.choose(updates, last["ppo/beta"])
    if job.ppo.ema is not None:
        reason += f" Its weights are the moving average with decay {job.ppo.ema:g} (ppo.ema), not those that sampled."
    reason += ignored_labels(data)
    metrics = put_and_save(models, job, data, out, observe, observers.evaluations, number, updates)
    metrics |= evaluate(models, job, data, out, observe)  # from here on only the first rank
    write_rows(artifact / "history.jsonl", history)
    write_rows(artifact / "samples.jsonl", observers.samples.rows)
    write_rows(artifact / "kl_carriers.jsonl", observers.shares.rows)
    about = {"published_update": number, "reason": reason, "last_update": updates}
    about |= {"evaluations": observers.evaluations.checkpoints.evaluations}
    about |= {"alarms": observers.alarms.rows, "limits": observers.alarms.fixed_limits}
    write_json(artifact / "metadata.json", about)
    names = ("ppo/beta", "ppo/explained_variance", "ppo/clip_fraction", "ppo/approx_kl", "ppo/kl_to_reference")
    metrics |= {name: last[name] for name in names if name in last}
    metrics |= curve_metrics(history, job.ppo.kl)
    metrics |= {
        "ppo/updates": float(updates),
        "ppo/published_update": float(number),
        "ppo/alarms": float(len(observers.alarms.rows)),
    }
    if job.ppo.can_break:
        metrics["ppo/stopped"] = float(observers.history.failed)
    if job.ppo.rollout.by_server:
        metrics["ppo/rollouts_bit_exact"] = float(job.ppo.rollout.bit_exact)
    write_json(artifact / "metrics.json", metrics)
    return metrics


def ignored_labels(data: Path) -> str:
    """Return a sentence about the single labels of `data`, on which only KTO trains; empty if it has none."""
    labels = read_split(data / "single_labels.train") if has_split(data / "single_labels.train") else ()
    return f" It ignored {counted(len(labels), 'single label')}, which policy.method=kto trains on." if labels else ""


def put_and_save(
    models: Models, job: PpoJob, data: Path, out: Path, observe: Observe, evaluations: PolicyEvaluations, number: int,
    last: int,
) -> dict[str, float]:  # fmt: skip
    """Write the policy of update `number`, on all ranks the number of the first; of another than the `last` one load
    its weights, and return the last one's metrics. All ranks call it."""
    metrics, checkpoints = dict[str, float](), evaluations.checkpoints
    if int(ranks.values_of_first([number])[0]) != last:
        metrics = evaluate_last(models, job, data, out, observe)
        checkpoints.publish(models.policy, partial(save_policy, models, out / "artifact" / "last"))
    checkpoints.weights = {}
    save_policy(models, out / "artifact")
    return metrics


def save_policy(models: Models, folder: Path) -> None:
    """Write the policy's model, and its adapter if it has one, on the first rank. All ranks must call it."""
    save_whole(models.policy, models.tokenizer, folder / "model")
    if isinstance(models.policy, AdapterView) and ranks.is_first():
        save_adapter(models.policy, folder / "adapter")


@contextmanager
def with_rules(models: Models, job: PpoJob, data: Path) -> Iterator[None]:
    """Start counting violations of `ppo.rules`, on the first rank only."""
    if job.ppo.rules is None or not ranks.is_first():
        yield
        return
    with Rules(job.ppo.rules, data) as models.rules:
        yield


@contextmanager
def with_sources(models: Models, job: PpoJob, inputs: Mapping[str, Path], out: Path) -> Iterator[None]:
    """Open the sources of `ppo.rewards`, if any, and measure their scales on SFT responses.

    The responses are to prompts of the calibration split, as many as the pipeline's own scale was measured on. The
    scales are written to `rewards.json`.
    """
    if job.ppo.rewards is None:
        yield
        return
    rows = read_split(inputs["data"] / "prompts.calibration")[: models.scale.responses]
    scores_folder = out / "checkpoint" / "scores"
    with Rewards.open(job.ppo.rewards, inputs, job.runtime, models.tokenizer, scores_folder) as rewards:
        prompts = [row["prompt"] for row in rows]
        texts, ended, pipeline = sft_responses(models, prompts, job)
        models.scale = rewards.measure(pipeline, prompts, texts, models.scale, ended)
        models.rewards = rewards
        units = {name: {"shift": shift, "scale": scale} for name, (shift, scale) in rewards.units.items()}
        written = {"sources": units, "sum": models.scale.model_dump(exclude_defaults=True)}
        write_json(out / "artifact" / "rewards.json", written)
        yield


@contextmanager
def frozen_unchanged(models: Models) -> Iterator[None]:
    """Check after a training that it has not changed the frozen models. Raises CheckFailed if it has."""
    judge = {} if models.judge is None else {"judge": "judge"}
    frozen = {"SFT policy": "sft", "reward model": "reward_model"} | judge
    digests = {name: weights_digest(getattr(models, field)) for name, field in frozen.items()}
    yield
    for name, field in frozen.items():
        if weights_digest(getattr(models, field)) != digests[name]:
            raise CheckFailed(f"the {name} changed during training: it must be the artifact it was loaded from.")


@dataclass(frozen=True)
class Observers:
    """The observers of a training."""

    alarms: Alarms
    evaluations: PolicyEvaluations
    history: History
    samples: SampleTable
    shares: KLShares
    average: WeightAverage | None
    in_order: dict[str, Observer[Any]]
    """All of them, and further ones, by name, in the order in which they are called."""

    @classmethod
    def start(cls, models: Models, job: PpoJob, data: Path) -> "Observers":
        """Return the observers before the first update. SFT answers prompts for the limits of the alarms."""
        config = job.ppo
        average = None if config.ema is None else WeightAverage(models.policy, config.ema)
        plugged: dict[str, Observer[Any]] = {
            f"plugin {plugin.plugin}": PluggedObserver(plugin, "ppo.observers") for plugin in config.observers
        }
        alarms = Alarms.start(models, job, data)
        evaluations = PolicyEvaluations.start(models, job, data, average, alarms.first_stop)
        history, samples = History(), SampleTable(every=config.sample_every, data=data)
        shares = KLShares(every=config.sample_every, tokenizer=models.tokenizer)
        every = config.kl.refresh_every
        refresh = None if every is None else ReferenceRefresh(every, models.reference, models.refresh_reference)
        in_order: dict[str, Observer[Any] | None] = {
            "average": average, "reference": refresh, "score warning": ScoreWarning(), "alarms": alarms,
            "limits": KLLimits(config), "responses": ResponseMetrics(data), **plugged,
            "evaluations": evaluations, "shares": shares, "samples": samples, "history": history,
            "speed": Speed("ppo", job.runtime.device, config.batch_size),
        }  # fmt: skip
        chosen = {name: observer for name, observer in in_order.items() if observer is not None}
        return cls(alarms, evaluations, history, samples, shares, average, chosen)


def train(
    models: Models, job: PpoJob, prompts: Sequence[Any], data: Path, out: Path, observe: Observe,
    checks: SelfChecks | None = None,
) -> Observers:  # fmt: skip
    """Train the policy by PPO; return the observers with what they saw. Resumes from `out/checkpoint/ppo`.

    This is PPO with clipped ratios (Schulman et al. 2017) on whole responses, with KL to SFT in the reward of each
    token and an adaptive β (Ziegler et al. 2019, Stiennon et al. 2020): one batch of responses an update, a few epochs
    over it, no reuse afterwards. Where it differs from usual advice (docs/decisions/usual-advice.md has the reasons):
    scores have one scale for the whole run, measured on SFT, and are not whitened by batch; γ is 1; no entropy bonus
    unless asked for; sampling at temperature 1 from the whole distribution; two epochs, which end early on their KL; a
    critic that is a model of its own and starts as the reward model.
    """
    config = job.ppo
    models.policy.eval()  # no dropout anywhere in PPO: the ratio must be 1 before the first step
    learner, tether = Learner.start(models, job, data, out), KLController.start(config.kl)
    observers = Observers.start(models, job, data)
    rows = read_split(data / "prompts.train")[: config.max_prompts]
    categories = None if config.balance is None else rows_by_category(rows, "ppo.balance")
    loop = Loop[PpoUpdate](
        out / "checkpoint" / "ppo", config.updates, Pace(config.checkpoint_every, config.checkpoint_minutes), observe,
        observers.in_order, models.trained(), learner.optimizers, {"tether": tether}, config.checkpoint_whole,
    )  # fmt: skip
    learner.check_resumed(observers.history.rows)
    self_checks = UpdateChecks(checks or SelfChecks(), learner, len(prompts), data)
    loop.report_resumed(observers.history.rows)
    with open_rollouts(config.rollout, models.tokenizer, job.runtime, out / "sent") as rollouts, loop:
        for number in loop:
            # 1. sample responses to the prompts of the batch; those to one prompt are consecutive
            batch = prompts_of(prompts, config, number, job.seed, categories)
            with loop.saved_on(Unreachable):
                samples = sample(models, batch, job, number, rollouts)
            with written_if_stopped(out, number, samples) as parts:
                # 2. score them, and compute rewards (score - β KL) and advantages
                first = observers.history.rows[0].get("ppo/sampler_drift") if observers.history.rows else None
                parts.append(experience := gather_experience(models, samples, job, tether.beta, batch, first))
                if number == 1:
                    check_start(experience, job)
                self_checks.before(number, experience, tether.beta, batch, observers.history.rows)
                # 3. learn: update policy and critic
                metrics = experience.metrics | learner.update(experience, number - 1)
                self_checks.after(number, metrics)
            # 4. adapt β to the KL
            tether.update(metrics[f"ppo/{config.kl.measure}"])
            # 5. look at the update, which may stop the training
            update = loop.run_observers(PpoUpdate(
                number=number, total=config.updates, model=models.policy, metrics=metrics, prompts=batch,
                tokens=float(sum(samples.response_lengths)), texts=samples.texts(models.tokenizer),
                experience=experience, stops_early=config.stop_early,
            ))  # fmt: skip
            # 6. save and report it
            loop.finish(update)
    if observers.average is not None:
        observers.average.replace(models.policy)
    return observers


def sample(models: Models, prompts: Sequence[Any], job: PpoJob, number: int, rollouts: Rollouts) -> Samples:
    """Sample a response to each prompt. The seed depends on the update's number alone, so resuming needs no state."""
    encoded = encode_prompts(models.tokenizer, prompts, job.generation.max_prompt_tokens)
    with rollouts.engine(models.policy, models.value_head()) as engine:
        return engine.sample(encoded, job.generation, torch_seed(job.seed, "ppo", "sampling", number - 1))


@contextmanager
def written_if_stopped(out: Path, number: int, samples: Samples) -> Iterator[list[Any]]:
    """If a check stops the run, write the batch beside its checkpoint: the samples, and what is put into the list."""
    parts: list[Any] = [samples]
    try:
        yield parts
    except CheckFailed as error:
        path = out / "checkpoint" / f"stopped-{number}.safetensors"
        make_folder(path.parent)
        parts += [part.passes._asdict() for part in parts if isinstance(part, Experience)]
        named = (item for part in parts for item in (part if isinstance(part, dict) else vars(part)).items())
        tensors = {name: value for name, value in named if isinstance(value, Tensor)}
        with replacing(path) as temporary:
            save_file({name: value.cpu().clone() for name, value in tensors.items()}, temporary)
        raise CheckFailed(f"{str(error).rstrip('.')}. The batch of update {number} is kept in {path}.") from error


def prompts_of(
    prompts: Sequence[Any], config: PpoConfig, number: int, seed: int, groups: Mapping[str, Sequence[int]] | None = None
) -> list[Any]:
    """Return the prompt (B,) of each response of update `number` (from 1), from endless shuffled passes; with
    `groups`, the rows of each category, over each of them in turn."""
    batch = config.batch_size // config.group_size, number - 1, seed, "ppo", "prompts"
    rows = shuffled_passes(len(prompts), *batch) if groups is None else balanced_passes(groups, *batch)
    return [prompts[row] for row in rows for _ in range(config.group_size)]
