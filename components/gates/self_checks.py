"""Self-checks: numbers that a stage computes a second way at its boundaries. A failed one may be a fault in the code.

A gate judges a result, an alarm watches a training, and a self-check judges the code: it compares what a stage is about
to trust with a plain computation of the same thing. The checks draw no random numbers, and no result depends on them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from components.base.errors import CheckFailed
from components.base.jsonl import write_json

logger = logging.getLogger(__name__)

FILE = "self_checks.json"
"""Name of the file with the results, among a stage's attachments: it is not in the digest of the artifact."""
Verdict = Literal["held", "doubtful", "not judged"]


class SelfCheck(NamedTuple):
    """What a check compares, what a failure usually means, and where to look."""

    compares: str
    suspect: str
    look_at: str


SELF_CHECKS: Mapping[str, SelfCheck] = {
    "validate.splits": SelfCheck(
        "The prompts of the held-out files, read from disk, with those of the training files; rows with the metrics.",
        "rows are written to another split than the one that was chosen and counted",
        "`data_contracts/published_splits.py` and the folders `pairs.*` of the artifact",
    ),
    "validate.shares": SelfCheck(
        "The share of the distinct prompts in each split, with that of the config; it warns beyond 5 standard errors.",
        "prompts are not split by their hash, or the rows that `data.sources` leaves out are of certain splits",
        "`split_of` in `components/data/splits.py`",
    ),
    "validate.direction": SelfCheck(
        "Chosen and rejected of published pairs, with the first rows of the source files that name them.",
        "chosen and rejected are exchanged between the file and the published pair",
        "`components/data/formats` and `data_contracts/published_splits.py`",
    ),
    "training.resumed": SelfCheck(
        "After an interruption, the steps that each optimiser counts, with those of the history; moments are not 0.",
        "the checkpoint lacks a model or the optimisers' state, or it was not loaded",
        "`restore_state` in `components/training/loop.py`, and the files `checkpoint/*/step-*`",
    ),
    "training.passes": SelfCheck(
        "The batches of the first pass, with the examples; the order of the second pass's batches, with the first's.",
        "some examples are never seen and others repeat, or are never shuffled", "`components/training/loop.py`"),
    "training.gradients": SelfCheck(
        "The gradients that are left before a step's first backward pass: there must be none.",
        "the gradients of earlier steps are not cleared and add up", "`components/training/loop.py`"),
    "sft.heldout": SelfCheck(
        "The prompts of the training demonstrations, with the file of held-out ones.",
        "the held-out demonstrations, on which the loss is measured, are trained on", "`components/sft/stage.py`"),
    "sft.encoding": SelfCheck(
        "The tokens of a few demonstrations, with the whole prompt in the tokenizer's template, the response and EOS.",
        "EOS, a part of the prompt or the template's generation prompt is missing", "`choose_demonstrations`"),
    "sft.loss": SelfCheck(
        "The losses of a few held-out demonstrations, with those of a plain forward pass, one at a time.",
        "the model reads the token that it predicts: outputs are shifted", "`components/models/logprobs.py`"),
    "sft.prompt_use": SelfCheck(
        "The losses of held-out demonstrations under their own prompt and under another; it warns on your own data.",
        "responses were read or trained under another prompt than their own", "the demonstrations of validate"),
    "reward.encoding": SelfCheck(
        "The tokens of a few training pairs, with the whole prompt in the tokenizer's template, the response and EOS.",
        "EOS, the system message or another part of the prompt is missing", "`components/reward/training_pairs.py`"),
    "reward.prompt_use": SelfCheck(
        "The margins of test pairs under their own prompt and under another pair's; it warns on data of your own.",
        "pairs were read or trained under other prompts than their own",
        "the prompts in `pairs.*` of the artifact of validate, and `components/reward/training_pairs.py`",
    ),
    "reward.direction": SelfCheck(
        "The log loss of the training pairs with labels exchanged, with ln 2, that of a model that knows nothing.",
        "the loss or a margin has the other sign, so that rejected responses are preferred to chosen ones",
        "`components/reward/losses.py`, and a pair's order in `components/reward/training_pairs.py`"),
    "reward.test_pairs": SelfCheck(
        "The margins of test pairs, with some read from disk and scored alone; what is reported, with sums over them.",
        "other pairs than pairs.test are reported, as training pairs, or at another temperature than the published one",
        "`run` and `_calibrate` in `components/reward/stage.py`"),
    "reward.calibration": SelfCheck(
        "The margins of calibration pairs, with some scored alone; the slope of their log loss at the temperature.",
        "the temperature was fitted on other pairs than pairs.calibration, or is not the best one for them",
        "`_calibrate` in `components/reward/stage.py`, and `fit_temperature`"),
    "reward.sft_scores": SelfCheck(
        "SFT's stored answers to the calibration prompts, scored again, with their stored scores and the scale.",
        "SFT answered other prompts than those of prompts.calibration, or the scale is not that of its scores",
        "`sample_sft` in `components/reward/stage.py`, and `ScoreScale` in `components/reward/scoring.py`"),
    "ppo.reference": SelfCheck(
        "The weights of SFT, reference and policy before the first update, with the files of the artifact of sft.",
        "KL would be measured to another model, or the policy starts from another one",
        "`Models.load` in `components/ppo/models.py`, and the artifact of sft",
    ),
    "ppo.tokenizers": SelfCheck(
        "Prompts, texts, EOS, pad token and padding side of the tokenizers of sft, reward, judge and policy.",
        "one model reads other tokens or another chat template than the others",
        "`model/tokenizer_config.json` and `model/chat_template.jinja` of the artifacts",
    ),
    "ppo.sft_loss": SelfCheck(
        "SFT's loss on held-out demonstrations, encoded as PPO encodes prompts, with the loss that sft recorded.",
        "PPO samples from prompts in another form than the one that SFT was trained on, or SFT's weights are others",
        "the chat template, `components/models/chat/rendering.py` and `components/models/batching.py`",
    ),
    "ppo.scale": SelfCheck(
        "Shift and scale of the scores, with the mean and deviation of SFT's scores in the artifact of reward.",
        "PPO rewards scores in another unit than the one that the reward stage measured",
        "`ScoreScale` in `components/reward/scoring.py`, and `sft_scores.json` of the artifact of reward",
    ),
    "ppo.reward_scores": SelfCheck(
        "The scores that the loaded reward model gives SFT's stored answers, with those that the reward stage stored.",
        "its head or an adapter was not loaded, or it reads the responses in another form than in its own stage",
        "`load_judges` in `components/ppo/models.py`, and the encoding of prompts and endings",
    ),
    "ppo.prompts": SelfCheck(
        "The prompts that the first update asks, with the file of training prompts in the tokenizer's chat template.",
        "prompts change on their way from the file to the sampler",
        "`sample` in `components/ppo/stage.py` and `components/models/batching.py`",
    ),
    "ppo.endings": SelfCheck(
        "Which token each response of a batch has last, with what ends a response.",
        "the mask of the responses is too short or too long",
        "`_responses` in `components/models/sampling.py`, or the rollout server",
    ),
    "ppo.scores": SelfCheck(
        "The scores of some responses of the first update, with those of each response alone.",
        "scores belong to other responses, or padding changes them",
        "`frozen_pass` in `components/ppo/models.py`",
    ),
    "ppo.first_scores": SelfCheck(
        "Mean and deviation of the first update's scores, in which the policy is still SFT, with 0 and 1.",
        "responses or scores are not in the frame in which the scale was measured",
        "the sampler, the encoding of prompts and endings, and the scale in the artifact of reward",
    ),
    "ppo.sampled": SelfCheck(
        "Log-probabilities of the sampled tokens, with their expectation under the policy; responses with each other.",
        "the sampler has another temperature, leaves out a tail, or gives responses the same random numbers",
        "`sample` in `components/models/sampling.py`, or the rollout server",
    ),
    "ppo.rewarded": SelfCheck(
        "The rewarded scores of a batch, with the raw ones shifted, scaled, clipped and penalised one by one.",
        "the scale or a penalty is left out, or is in another order",
        "`rewarded_scores` in `components/ppo/experience.py`",
    ),
    "ppo.beta": SelfCheck(
        "β of an update, with the controller's formula over the KL of all updates before it.",
        "the controller moves the coefficient the other way, or lost its state on a resume",
        "`KLController` in `components/ppo/control.py`",
    ),
    "ppo.advantages": SelfCheck(
        "Advantages and returns of a batch, with loops over -β times the log-ratio, plus the score at the last token.",
        "the score lies on another token, KL has another sign, or advantages are not those of the method",
        "`components/ppo/maths.py` and `gather_experience` in `components/ppo/experience.py`",
    ),
    "ppo.gradient": SelfCheck(
        "The gradients of policy and critic on some responses of the first update, with PPO's loss by the book.",
        "the loss has another sign, mask, ratio or clip, the critic reads later tokens, or micro-batches lack weights",
        "`components/ppo/objective.py` and `Learner.backward` in `components/ppo/learner.py`",
    ),
    "ppo.learned": SelfCheck(
        "Which rows an update took, and what it has changed: the weights of policy and critic.",
        "a model is not trained, or some rows are never learnt from",
        "`Learner.update` in `components/ppo/learner.py`",
    ),
    "ppo.fresh": SelfCheck(
        "The prompts and responses of the second update, with those of the first.",
        "each update asks the same prompts, or draws the same random numbers",
        "`prompts_of` and `sample` in `components/ppo/stage.py`",
    ),
    "ppo.evaluation_prompts": SelfCheck(
        "The prompts of evaluation.jsonl, with the file of held-out prompts.",
        "the policy was judged on prompts on which it trained",
        "`evaluate` in `components/ppo/evaluate.py`",
    ),
    "ppo.published": SelfCheck(
        "The published weights, with those of the policy that was judged.",
        "another policy than the judged one was written",
        "`put_and_save` in `components/ppo/stage.py`",
    ),
    "ppo.gain": SelfCheck(
        "The gain in score, with what KL allows: 2 sqrt(2 KL) deviations and 0.3; it warns.",
        "KL or the gain is not measured on the responses of the policy",
        "`components/ppo/evaluate.py`",
    ),
    "ppo.sft_evaluation": SelfCheck(
        "SFT's KL to itself in the evaluation, with 0; its responses' length, with that in its own stage (it warns).",
        "SFT is sampled otherwise, or is another model, where the policy is compared with it",
        "`respond` in `components/ppo/evaluate.py`",
    ),
    "ppo.evaluation": SelfCheck(
        "Some responses of the evaluation, their KL and score, with ones computed response by response.",
        "KL or scores are those of another model, or the judged texts are not the policy's",
        "`respond` in `components/ppo/evaluate.py`",
    ),
    "human_eval.authors": SelfCheck(
        "The log-probabilities of a few replies by the two models that reply.",
        "both replies are SFT's, not the policy's: one model was loaded for both",
        "`SIDES` in `components/human_eval/respond.py`, and the published policy",
    ),
    "human_eval.prompts": SelfCheck(
        "The prompts on the sheet, with the file of held-out prompts.",
        "people judge replies to prompts on which the policy trained, not to held-out ones",
        "`held_out_prompts` in `components/human_eval/blinded_sample.py`",
    ),
    "human_eval.sheet": SelfCheck(
        "The texts on the written sheet, with each model's whole reply to the same prompt.",
        "a reply of SFT or of the policy was cut, belongs to another prompt, or is on the other author's side",
        "`run` and `write_sheet` in `components/human_eval/blinded_sample.py`",
    ),
    "human_eval.sides": SelfCheck(
        "How often the policy's reply is on either side.",
        "the policy is always on one side, so raters are not blind",
        "`blind` in `components/human_eval/blinding.py`",
    ),
    "human_eval.scores": SelfCheck(
        "The reward model's scores of some items, with those of each prompt and reply alone; the temperature.",
        "scores of the two sides are exchanged, are without the prompt, or have another temperature than the model's",
        "`components/reward/substages/sheet_scores.py`",
    ),
    "human_eval.unblinding": SelfCheck(
        "The win rates by planted raters who always prefer the policy's text, SFT's, or neither, with 1, 0 and 1/2.",
        "unblinding exchanges the sides, or ties do not count a half",
        "`rating_score` in `components/human_eval/results/summary.py`, and `key.json`",
    ),
}  # fmt: skip
"""All self-checks by name, `stage.check`, in the order of the pipeline."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    verdict: Verdict
    numbers: str
    """The numbers that were compared, or why nothing was, in one clause."""


class SelfChecks:
    """The results of a stage's self-checks."""

    def __init__(self) -> None:
        self.results: dict[str, CheckResult] = {}

    def judge(self, name: str, holds: bool, numbers: str, *, fails: bool = True) -> None:
        """Keep that check `name` holds, or stop the stage.

        Args:
            numbers: what was compared, in one clause.
            fails: whether it stops the stage. If unusual data alone could break it, a warning says so instead.

        Raises:
            CheckFailed: it does not hold.
        """
        check = SELF_CHECKS[name]
        if not holds:
            message = (
                f"the self-check {name} failed, perhaps because {check.suspect}: {numbers}. This may be a fault in the "
                f"code, which no option corrects. Look at {check.look_at}."
            )
            if fails:
                raise CheckFailed(message)
            logger.warning("%s", message.replace("failed", "is in doubt", 1))
        elif name in self.results and self.results[name].verdict == "doubtful":
            return
        self.results[name] = CheckResult("held" if holds else "doubtful", numbers)

    def skip(self, name: str, reason: str) -> None:
        """Keep why check `name` is not judged, unless it was judged before."""
        assert name in SELF_CHECKS
        self.results.setdefault(name, CheckResult("not judged", reason))

    def write(self, out: Path) -> None:
        """Write the results to the attachments of the stage's folder `out`, with those that were written before."""
        folder = out / "attachments"
        folder.mkdir(parents=True, exist_ok=True)
        earlier = json.loads((folder / FILE).read_text(encoding="utf-8")) if (folder / FILE).is_file() else []
        rows = {row["name"]: row for row in earlier} | {
            name: {"name": name, **vars(result), "compares": SELF_CHECKS[name].compares}
            for name, result in self.results.items()
        }
        write_json(folder / FILE, [rows[name] for name in SELF_CHECKS if name in rows])
