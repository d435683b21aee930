"""The PPO stage: the training loop in numbered steps, with its checks, checkpoints and final evaluation."""

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from components.base.errors import CheckFailed, Unreachable, UserError
from components.base.files import make_folder, replacing
from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.support_desk.task import task_scores
from components.data.tables.published import SplitColumn, read_split
from components.distributed import ranks
from components.models.adapters import AdapterView, save_adapter
from components.models.batching import encode_prompts
from components.models.folders import save_model
from components.models.runtime import peak_memory_gb, release_memory
from components.models.sampling import Samples
from components.ppo.config import PpoJob
from components.ppo.control import KLController
from components.ppo.curves import curve_metrics
from components.ppo.evaluate import evaluate, evaluate_last, sft_responses
from components.ppo.experience import check_start, gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models, weights_digest
from components.ppo.monitors.batches import alarm_samples, batch_of, beta_in_deviations, limits_of_sft, new_alarms
from components.ppo.monitors.carriers import carriers_sample, kl_carriers
from components.ppo.watch import Watch, shown_samples
from components.reward.scoring import ScoreScale
from components.rewards.rules import Rules, rule_metrics
from components.rewards.weighted import Rewards, check_waits
from components.rollouts.engine import Rollouts, open_rollouts
from components.training.averaging import WeightAverage
from components.training.checkpoint import Pace
from components.training.loop import restore_state, save_state, shuffled_passes, torch_seed
from components.training.weights import put_weights

LEAST_KL = 0.5
"""Nats per response below which the reward gained per nat is mostly noise."""
SAMPLES_SHOWN = 8
MOSTLY_REPLACED = 0.5
"""Share of replaced scores in an update at which the log warns."""
logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """The history of a training so far, as its checkpoints store it."""

    history: list[dict[str, float]] = field(default_factory=list)
    """`update` (from 1) and the metrics of each update."""
    samples: list[dict[str, object]] = field(default_factory=list)
    """Some responses, with `update` (from 0)."""
    warned: bool = False
    """Whether the log has warned that scores hardly tell rollouts apart."""
    alarms: list[dict[str, object]] = field(default_factory=list)
    """The first alarm of each name: `update` (from 1), value, SFT's value, a sample, and what it means."""
    carriers: list[dict[str, object]] = field(default_factory=list)
    """The tokens and prompts that contributed most to KL, with `update` (from 1)."""
    broke: bool = False
    """Whether in some update KL was above the ceiling or certainly outside its band, or an alarm of `stop_on` rose."""
    limits: dict[str, float] = field(default_factory=dict)
    """The limits of the monitors whose limit is the same in every batch."""
    stopped: bool = False
    """Whether the training ends here, even if updates are left."""


def run(job: PpoJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Train the policy of `inputs["sft"]` against `inputs["reward"]` on prompts of `inputs["data"]`.

    A judge, `inputs["judge"]`, is used only in evaluations: the trained policy is the same to the byte without it.

    Raises:
        UserError: too few prompts, or, for several ranks, rollouts by a server or a source that may take longer than
            `runtime.rank_timeout`. CheckFailed: a check during training failed.
    """
    if job.ppo.rollout.by_server and ranks.size() > 1:
        raise UserError(
            f"ppo.rollout: a server samples for one process, and runtime.ranks is {ranks.size()}. Set runtime.ranks=1, "
            "or let the ranks sample (ppo.rollout.engine=local)."
        )
    at_once = max(job.ppo.batch_size, ScoreScale.read(inputs["reward"]).responses)
    check_waits(job.ppo.rewards or (), job.runtime, at_once)
    if job.ppo.epochs > 4:
        warnings.warn(f"ppo.epochs is {job.ppo.epochs}: more than 4 passes drift far off-policy.", stacklevel=1)
    data = inputs["data"]
    prompts = SplitColumn(read_split(data / "prompts.train"), "prompt")[: job.ppo.max_prompts]
    if not prompts:
        raise UserError("ppo: the data hold no training prompt. Raise data.split.train.")
    models = Models.load(job, inputs)
    with with_rules(models, job, data), with_sources(models, job, inputs, out):
        return _trained_and_judged(models, job, prompts, data, out, observe)


def _trained_and_judged(
    models: Models, job: PpoJob, prompts: Sequence[Any], data: Path, out: Path, observe: Observe
) -> dict[str, float]:
    """Train, check that the frozen models are unchanged, write the artifact, and return the final metrics."""
    held = {name: weights_digest(m) for name, m in _held(models).items()}
    models.spread(job.runtime.sharding)
    trained, watch = train(models, job, prompts, data, out, observe)
    release_memory(job.runtime.device)
    models.gather()
    ranks.go_on_alone()
    for name, model in _held(models).items():
        if weights_digest(model) != held[name]:
            raise CheckFailed(f"the {name} changed during PPO: it must be the artifact it was loaded from.")
    models.policy.eval()
    updates = len(trained.history)
    published, reason = watch.choose(updates, trained.history[-1]["ppo/beta"])
    if job.ppo.ema is not None:
        reason += f" Its weights are the moving average with decay {job.ppo.ema:g} (ppo.ema), not those that sampled."
    metrics = {} if published == updates else evaluate_last(models, job, data, out, observe)
    if published != updates:
        _save_policy(models, out / "artifact" / "last")
        put_weights(models.policy, watch.weights)
    _save_policy(models, out / "artifact")
    write_rows(out / "artifact" / "history.jsonl", trained.history)
    write_rows(out / "artifact" / "samples.jsonl", trained.samples)
    write_rows(out / "artifact" / "kl_carriers.jsonl", trained.carriers)
    about = {"published_update": published, "reason": reason, "last_update": updates, "evaluations": watch.looks}
    about |= {"alarms": trained.alarms, "limits": trained.limits}
    write_json(out / "artifact" / "metadata.json", about)
    metrics |= evaluate(models, job, data, out, observe)
    last = trained.history[-1]
    kept = ("ppo/beta", "ppo/explained_variance", "ppo/clip_fraction", "ppo/approx_kl", "ppo/kl_to_reference")
    metrics |= {name: last[name] for name in kept if name in last}
    metrics |= curve_metrics(trained.history, job.ppo.kl)
    metrics |= {
        "ppo/updates": float(updates),
        "ppo/published_update": float(published),
        "ppo/alarms": float(len(trained.alarms)),
    }
    if job.ppo.can_break:
        metrics["ppo/stopped"] = float(trained.broke)
    if job.ppo.rollout.by_server:
        metrics["ppo/rollouts_bit_exact"] = float(job.ppo.rollout.bit_exact)
    write_json(out / "artifact" / "metrics.json", metrics)
    return metrics


def _save_policy(models: Models, folder: Path) -> None:
    save_model(models.policy, models.tokenizer, folder / "model")
    if isinstance(models.policy, AdapterView):
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
    kept = out / "checkpoint" / "scores"
    with Rewards.open(job.ppo.rewards, inputs, job.runtime, models.tokenizer, kept) as rewards:
        prompts = [row["prompt"] for row in rows]
        texts, ended, pipeline = sft_responses(models, prompts, job)
        models.scale = rewards.measure(pipeline, prompts, texts, models.scale, ended)
        models.rewards = rewards
        units = {name: {"shift": shift, "scale": scale} for name, (shift, scale) in rewards.units.items()}
        written = {"sources": units, "sum": models.scale.model_dump(exclude_defaults=True)}
        write_json(out / "artifact" / "rewards.json", written)
        yield


def warn_of_scores(update: int, metrics: Mapping[str, float]) -> bool:
    """Warn if the scores of an update hardly distinguish its rollouts; return whether it warned."""
    if metrics["ppo/score_spread"] == 0:
        logger.warning("update %d: all rollouts have the same score, so nothing is learnt from it.", update)
    elif metrics.get("ppo/replaced", 0.0) >= MOSTLY_REPLACED:
        logger.warning(
            "update %d: %.0f %% of the responses have no EOS, and their scores are replaced by the missing-EOS score "
            "(ppo.score.missing_eos). Raise generation.max_new_tokens, or train sft on responses that fit.",
            update, 100 * metrics["ppo/replaced"],
        )  # fmt: skip
    else:
        return False
    return True


def _held(models: Models) -> dict[str, nn.Module]:
    judge = {} if models.judge is None else {"judge": models.judge}
    return {"SFT policy": models.sft, "reward model": models.reward_model} | judge


def train(
    models: Models, job: PpoJob, prompts: Sequence[Any], data: Path, out: Path, observe: Observe
) -> tuple[Progress, Watch]:
    """Train the policy; return its history and held-out evaluations. Resumes from `out/checkpoint/ppo`."""
    config, folder = job.ppo, out / "checkpoint" / "ppo"
    learner, controller = Learner.start(models, job, data, out), KLController.start(config.kl)
    refresh_every = config.kl.refresh_every
    modules = models.trained() | ({"reference": models.reference} if refresh_every else {})
    average = None if config.ema is None else WeightAverage(models.policy, config.ema)
    modules |= {} if average is None else {"average": average}
    seen, watch, weights = Progress(), Watch.start(job, data), dict[str, Tensor]()
    if resumed := restore_state(folder, modules, learner.optimizers, weights):
        watch.restore(resumed[1]["watch"], weights)
        seen, controller = Progress(**resumed[1]["state"]), KLController(config.kl, **resumed[1]["tether"])
        for row in seen.history:
            observe(int(row["update"]), {k: v for k, v in row.items() if k != "update"}, total=config.updates)
        observe(resumed[0], {}, total=config.updates, resumed=True)
    models.policy.eval()  # no dropout anywhere in PPO: the ratio must be 1 before the first step

    def save(step: int) -> None:
        kept = {"state": asdict(seen), "tether": controller.state(), "watch": watch.state()}
        save_state(folder, step, modules, learner.optimizers, kept, watch.weights, config.checkpoint_whole)

    limits = limits_of_sft(models, job, data)
    seen.limits = {} if limits is None else limits.fixed(config.batch_size // config.group_size)
    sampled = open_rollouts(config.rollout, models.tokenizer, job.runtime, job.generation, out / "sent")
    with sampled as rollouts, Pace(config.checkpoint_every, config.checkpoint_minutes) as pace:
        while len(seen.history) < config.updates and not seen.stopped:
            update, began = len(seen.history), time.perf_counter()
            # 1. sample responses to the prompts of the batch; those to one prompt are consecutive
            asked = prompt_batch(len(prompts), config.batch_size // config.group_size, update, job.seed)
            asked_of = [prompt for i in asked for prompt in [prompts[i]] * config.group_size]
            encoded = encode_prompts(models.tokenizer, asked_of, job.generation.max_prompt_tokens)
            try:
                samples = _sample(models, encoded, job, update, rollouts)
            except Unreachable:  # the sampling server is down: save, to resume when it is back
                if update:
                    save(update)
                raise
            with _kept_if_stopped(out, update, samples) as batch:
                # 2. score them, and compute rewards (score - β KL) and advantages
                experience = gather_experience(models, samples, job, controller.beta, asked_of)
                batch.append(experience)
                if update == 0:
                    check_start(experience, job)
                # 3. update policy and critic
                metrics = experience.metrics | learner.update(experience, update)
            if average is not None:
                average.update(models.policy)
            seen.warned = seen.warned or warn_of_scores(update + 1, metrics)
            texts = samples.texts(models.tokenizer)
            raised = list[dict[str, object]]()
            if limits is not None:
                measured = batch_of(
                    samples, asked_of, texts, experience.frozen, experience.judged, models.tokenizer, config.group_size
                )
                values, alarms = limits.judge(measured, beta_in_deviations(config, controller.beta))
                metrics |= {f"ppo/monitor_{name}": value for name, value in values.items()}
                raised = new_alarms(alarms, measured, seen.alarms, update + 1)
                seen.alarms += raised
            if metrics["ppo/kl"] >= LEAST_KL:
                metrics["ppo/reward_per_nat"] = metrics["ppo/proxy_reward"] / metrics["ppo/kl"]
            # 4. adapt β to the KL
            held = "ppo/kl" if config.kl.unit == "response" else "ppo/kl_per_token"
            low = metrics.get(f"{held}_low", -math.inf)
            alarmed = any(row["name"] in config.monitors.stop_on for row in raised)
            watch.alarmed = watch.alarmed or (update + 1 if alarmed else 0)
            stops = [controller.stops(metrics[held], low), watch.leaves(low), alarmed]
            seen.broke = seen.broke or any(stops)
            seen.stopped = config.stop_early and seen.broke
            controller.update(metrics[held])
            if refresh_every and (update + 1) % refresh_every == 0:
                models.refresh_reference()
            # 5. record metrics and samples
            truths = [task_scores(data, prompt, text) for prompt, text in zip(asked_of, texts, strict=True)]
            metrics |= {f"ppo/{name}": sum(each[name] for each in truths) / len(truths) for name in truths[0]}
            if models.rules is not None:
                metrics |= rule_metrics(models.rules.count(asked_of, texts))
            last = update + 1 == config.updates or seen.stopped
            watched: dict[str, Any] = {}
            speed: dict[str, float] = {}
            if watch.due(update + 1, last, metrics[held]):
                looking = time.perf_counter()
                with nullcontext() if average is None else average.instead(models.policy):
                    answers = watch.look(models, job, data, update + 1)
                metrics |= watch.metrics()
                watched["samples"] = shown_samples(watch.prompts, answers)
                speed["ppo/watched_seconds"] = time.perf_counter() - looking
                seen.stopped = seen.stopped or (config.stop_early and watch.out_of_patience())
                last = last or seen.stopped
            if watched or update % config.sample_every == 0 or last:
                found = kl_carriers(samples, experience.logprobs, experience.frozen["sft"], asked_of, models.tokenizer)
                seen.carriers.append({"update": update + 1} | found)
                if watched:
                    watched["samples"] = [*watched["samples"], carriers_sample(found)]
            if raised:
                watched["samples"] = [*watched.get("samples", ()), *alarm_samples(raised)]
            seen.history.append({"update": update + 1, **metrics})
            if update % config.sample_every == 0 or last:
                scores = experience.judged.tolist(), experience.scores.tolist()
                shown = islice(zip(asked_of, texts, *scores, truths, strict=True), SAMPLES_SHOWN)
                rows = ({"prompt": p, "response": r, "score": s, "reward": w} | t for p, r, s, w, t in shown)
                seen.samples += [{"update": update} | row for row in rows]
            if pace.due(update + 1, last):
                save(update + 1)
            seconds, tokens = time.perf_counter() - began, float(sum(samples.response_lengths))
            seconds -= speed.get("ppo/watched_seconds", 0.0)
            speed |= {"ppo/samples_per_second": len(texts) / seconds, "ppo/tokens_per_second": tokens / seconds}
            speed["ppo/peak_memory_gb"] = peak_memory_gb(job.runtime.device)
            observe(update + 1, metrics | speed, total=config.updates, tokens=tokens, **watched)
            pace.stop_if_told()
    if average is not None:
        average.replace(models.policy)
    return seen, watch


def _sample(models: Models, prompts: list[list[int]], job: PpoJob, update: int, rollouts: Rollouts) -> Samples:
    """Sample a response to each prompt. The seed depends on the update alone, so resuming needs no generator state."""
    seed = torch_seed(job.seed, "ppo", "sampling", update)
    with rollouts.engine(models.policy, models.value_head()) as engine:
        return engine.sample(prompts, job.generation, seed)


@contextmanager
def _kept_if_stopped(out: Path, update: int, samples: Samples) -> Iterator[list[Any]]:
    """If a check stops the run, write the batch beside its checkpoint: the samples, and what is put into the list."""
    batch: list[Any] = [samples]
    try:
        yield batch
    except CheckFailed as error:
        path = out / "checkpoint" / f"stopped-{update + 1}.safetensors"
        make_folder(path.parent)
        tensors = {name: value for part in batch for name, value in vars(part).items() if isinstance(value, Tensor)}
        with replacing(path) as temporary:
            save_file({name: value.cpu().clone() for name, value in tensors.items()}, temporary)
        raise CheckFailed(f"{str(error).rstrip('.')}. The batch of update {update + 1} is kept in {path}.") from error


def prompt_batch(count: int, batch_size: int, update: int, seed: int) -> list[int]:
    """Return the indices of the `batch_size` prompts of update `update` (from 0), from endless shuffled passes."""
    return shuffled_passes(count, batch_size, update, seed, "ppo", "prompts")
