"""The RLHF pipeline from top to bottom: validate, sft, reward, ppo, evaluation (if configured), human_eval.

The `run` argument decides where a stage is computed: in this process, as a Prefect task, or on a worker.
It handles the whole life of the stage (build the key, look it up, compute, publish, record, judge the gates) and raises
GateFailed if a gate stops the pipeline, so no later stage starts. `components/gates/table.py` lists each stage's gates,
and the run's profile has their thresholds.
"""

from collections.abc import Callable

from components.data.inputs import values_of
from components.data.tables.published import read_split, rows_by_category
from components.gates.methods import is_used
from components.human_eval.sheet import SIMULATED
from flows.config.run_config import RunConfig
from flows.sources import Sources
from tasks.result import Input, StageResult, StageRunner


class _Reached(Exception):
    """Ends the pipeline after the stage named by `until`. The argument is that stage's result."""


def pipeline(config: RunConfig, sources: Sources, run: StageRunner, until: str = "") -> StageResult | None:
    """Run the stages in order, or the comparison if `sources.compared` names models.

    Args:
        config: the run's config, resolved for the machine that computes.
        sources: the external inputs.
        run: runs one stage and judges it by its gates.
        until: the last stage to run, as `PIPELINE` names it; empty to run all of them.

    Returns:
        The result of the last stage that ran; None if the run now waits for people's labels.

    Raises:
        GateFailed: a gate stopped the pipeline.
        UserError: an option or input is wrong. Other errors of a stage are passed on unchanged.
    """

    def stage(name: str, **inputs: StageResult | Input | None) -> StageResult:
        nonlocal config
        inputs_here = {label: value for label, value in inputs.items() if value is not None}
        chosen = config.stage(name)
        result = run(chosen, config.stage_job(chosen), inputs_here)
        if name == until:
            raise _Reached(result)
        if name == "validate":
            config = config.with_label_noise(result.record.metrics)
            if config.ppo.balance is not None and is_used(config.policy.method, "ppo.balance"):
                files = ", ".join(values_of(config.data.prompts or config.data.preferences)) or "the built-in task"
                prompts = read_split(result.path / "prompts.train")[: config.ppo.max_prompts]
                rows_by_category(prompts, f"ppo.balance: {files}")  # raises before models train
        return result

    try:
        return (_comparison if sources.compared else _stages)(config, sources, stage)
    except _Reached as reached:
        return reached.args[0]


def _stages(config: RunConfig, sources: Sources, stage: Callable[..., StageResult]) -> StageResult | None:
    """Run all stages in order and return the last result. `stage(name, **inputs)` runs one stage."""
    # 1. Validate: read preferences and demonstrations, quarantine bad rows, split by prompt. The config may ask for an
    # independent judge: a reward model of other labels, which is never used as a reward.
    # Gates: enough valid pairs, no prompt in two splits, annotators agree.
    with_judge = config.data.has_judge
    judge_data = stage("validate.judge", **sources.judge, **sources.contract, **sources.base) if with_judge else None
    data = stage("validate", **sources.data, **sources.base)

    # 2. SFT: imitate the demonstrations. The SFT model is PPO's initial policy, its reference and the baseline of human
    # evaluation. A later round keeps the first round's SFT model, and passes the data that it was trained on.
    # Gates: held-out loss, and responses end.
    sft = stage("sft", data=sources.taught or data, **sources.base)

    # 3. Reward: learn from pairs which of two responses people prefer, with calibrated probabilities.
    # Gates: accuracy on held-out pairs, calibration, and no gain from length, flattery or texts without an answer.
    judge = stage("reward.judge", data=data, sft=sft, judge_data=judge_data, **sources.previous) if with_judge else None
    reward = stage("reward", data=data, sft=sft, **sources.previous, **sources.suites)

    # 4. PPO: maximise the reward (the reward model's, or that of `ppo.rewards`), with a KL penalty towards SFT. Or, by
    # `policy.method`, learn from the preference pairs directly; the reward model then only measures. Only the
    # evaluations use the judge. Gates: KL to SFT, gain in reward, and no sign of reward hacking or lost capability.
    policy = stage("ppo", data=data, sft=sft, reward=reward, **sources.rewards, judge=judge)

    # 5. Evaluation: tasks and probes on SFT and on the policy, if the config names any. SFT's results are reused for
    # every policy. Gates: the policy keeps SFT's abilities and violates no probe more often, each within its margin.
    if config.has("evaluation"):
        _evaluation(sources, stage, {"sft": sft, "policy": policy})

    # 6. Human evaluation: compare the policy with SFT, blind. Only a policy that passes here is promoted.
    # Gates: raters agree with each other, prefer the policy to SFT, and agree with the reward model.
    sample = stage("human_eval.sample", data=data, sft=sft, ppo=policy, **sources.blinding)
    sheet = _ratings(config, sources, sample)
    if sheet is None:
        return None
    scores = stage("human_eval.reward", sample=sample, reward=reward)
    return stage("human_eval", sample=sample, scores=scores, sheet=sheet)


def _evaluation(sources: Sources, stage: Callable[..., StageResult], models: dict[str, StageResult]) -> StageResult:
    """Evaluate both models on the tasks and probes that there are, and compare them."""
    results = {
        f"{side}_{kind}s": stage(f"evaluation.{side}_{kind}s", model=model, **files)
        for kind, files in sources.evaluation.items()
        for side, model in models.items()
    }
    return stage("evaluation", **results)


def _comparison(config: RunConfig, sources: Sources, stage: Callable[..., StageResult]) -> StageResult | None:
    """Compare existing models, blind, without running the pipeline. Arguments and result as in `_stages`."""
    sample = stage("human_eval.compare", **sources.compared, **sources.blinding)
    sheet = _ratings(config, sources, sample)
    return None if sheet is None else stage("human_eval.compared", sample=sample, sheet=sheet)


def _ratings(config: RunConfig, sources: Sources, sample: StageResult) -> Input | None:
    """Return the filled rating sheet: people's if given, otherwise the simulated judges', or None if people must still
    rate."""
    if sources.sheet is None and config.human_eval.judges == "simulated":
        return Input.of(sample.path / SIMULATED)
    return sources.sheet
