"""Self-checks of human_eval: the sheet has the models' texts, and unblinding gives back a preference that is known."""

import filecmp
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from components.base.hashing import canonical_json
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from components.human_eval.batch.returned_texts import plain
from components.human_eval.config import SampleJob
from components.human_eval.results.checks import OTHER_SIDE, TIES
from components.human_eval.results.summary import item_score
from components.human_eval.returned_labels import Sample

TEXTS = 8
"""Responses of SFT whose log-probabilities tell the two models apart."""


class Authors:
    """Judges that the two models that respond are two models."""

    def __init__(self, checks: SelfChecks, job: SampleJob, prompts: Sequence[Any], inputs: Mapping[str, Path]) -> None:
        self._checks, self._job, self._prompts = checks, job, prompts[:TEXTS]
        self._files = [sorted((inputs[name] / "model").glob("*.safetensors")) for name in ("sft", "ppo")]
        self._texts: list[str] | None = None
        self._logprobs = list[list[float]]()

    def __call__(self, model: Any, tokenizer: Any, responses: Sequence[Mapping[str, Any]]) -> None:
        """Measure the log-probability of the same few responses, by the model that gave the `responses`.

        Raises:
            CheckFailed: for the second model, if it gives all of them exactly the probabilities of the first one in
                float32, and its files are others.
        """
        import torch

        from components.models.batching import encode_prompt, encode_response
        from components.models.runtime import autocast

        self._texts = self._texts or [row["text"] for row in responses[:TEXTS]]
        limits, logprobs = self._job.generation, list[float]()
        for prompt, text in zip(self._prompts, self._texts, strict=True):
            before = encode_prompt(tokenizer, prompt, limits.max_prompt_tokens)
            ids = torch.tensor([before + encode_response(tokenizer, text, limits.max_new_tokens)], device=model.device)
            with torch.no_grad(), autocast(self._job.runtime):
                logits = model(input_ids=ids, use_cache=False).logits[0, len(before) - 1 : -1]
            of_tokens = logits.float().log_softmax(-1).gather(1, ids[0, len(before) :].unsqueeze(1))
            logprobs.append(float(of_tokens.sum()))
        self._logprobs.append(logprobs)
        if len(self._logprobs) == 2:
            one, other = self._logprobs
            numbers = (
                f"{len(one)} replies have {fmean(one):.3f} and {fmean(other):.3f} nats by the two models on average"
            )
            pairs = zip(*self._files, strict=False)
            if one == other and all(filecmp.cmp(sft, policy, shallow=False) for sft, policy in pairs):
                self._checks.skip("human_eval.authors", "the policy's weights are SFT's")
            else:
                exact = self._job.runtime.dtype == "float32"  # a small difference of weights may vanish in bfloat16
                self._checks.judge("human_eval.authors", one != other, numbers, fails=exact)


def check_sheet(
    checks: SelfChecks, artifact: Path, data: Path, prompts: Sequence[Any], responses: Mapping[str, Sequence[Any]]
) -> None:
    """Judge the written sheet: its prompts are held-out ones, and each side has the whole text of its author.

    Args:
        prompts: those that the models answered.
        responses: for `sft` and `policy`, a row with the `text` for each prompt.

    Raises:
        CheckFailed: one of them is not.
    """
    heldout = {canonical_json(row["prompt"]) for row in read_split(data / "prompts.test")}
    others = sum(canonical_json(prompt) not in heldout for prompt in prompts)
    numbers = f"{others} of the {len(prompts)} prompts on the sheet are not those of prompts.test"
    checks.judge("human_eval.prompts", not others, numbers)
    replies: dict[str, set[tuple[str, str]]] = {}
    for prompt, sft, policy in zip(prompts, responses["sft"], responses["policy"], strict=True):
        replies.setdefault(canonical_json(prompt), set()).add((plain(sft["text"]), plain(policy["text"])))
    sample, wrong = Sample.open(artifact), 0
    given_out = {item.split("-")[0]: texts for item, texts in sample.texts.items()}
    for item, side in sample.policy_side.items():
        texts, written = given_out[item], replies[canonical_json(sample.responses[item]["prompt"])]
        a, b = texts.response_a, texts.response_b
        wrong += ((b, a) if side == "a" else (a, b)) not in written
    first = [side for item, side in sample.policy_side.items() if item not in sample.repeat_of]
    numbers = f"{wrong} of {len(sample.policy_side)} items have another text than their author's reply to the prompt"
    checks.judge("human_eval.sheet", not wrong, numbers)
    on_a = first.count("a")
    numbers = f"the policy's reply is side A of {on_a} of the {len(first)} items"
    checks.judge("human_eval.sides", abs(2 * on_a - len(first)) <= 1, numbers)


def check_unblinding(sample: Sample) -> SelfChecks:
    """Return the judgement on how ratings are scored: raters who prefer the policy, SFT or neither are planted.

    Raises:
        CheckFailed: their win rates are not 1, 0 and 1/2.
    """
    given_out, checks = {item.split("-")[0]: texts for item, texts in sample.texts.items()}, SelfChecks()
    planted: dict[str, list[float]] = {"the policy": [], "SFT": [], "neither": []}
    for item, row in sample.responses.items():
        of_policy = [text == plain(row["policy"]) for text in given_out[item][1:]]
        if item in sample.policy_side and sum(of_policy) == 1:
            side = "ab"[of_policy.index(True)]
            for whom, rating in {"the policy": side, "SFT": OTHER_SIDE[side], "neither": TIES[0]}.items():
                planted[whom].append(item_score([rating], sample.policy_side[item]))
    if not planted["neither"]:
        checks.skip("human_eval.unblinding", "the two replies to each prompt are the same")
        return checks
    rates = {whom: fmean(scores) for whom, scores in planted.items()}
    shares = ", ".join(f"{rate:.2f} by raters who prefer {whom}" for whom, rate in rates.items())
    numbers = f"the win rates are {shares} (1, 0 and 0.5 with ties as a half; unblinding exchanges no side)"
    checks.judge("human_eval.unblinding", [*rates.values()] == [1.0, 0.0, 0.5], numbers)
    return checks
