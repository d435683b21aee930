"""Every number that a PPO gate judges, computed again from the published texts and models by other code.

Prompts stand in the data several times, so that an interval that takes responses for independent is too narrow.
"""

import itertools
import json
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from components.base.jsonl import read_rows
from components.data.support_desk import desk
from components.data.tables.published import read_split
from components.gates.table import GATES
from components.models.config import GenerationConfig
from components.ppo import evaluate, experience
from components.ppo.models import Models
from components.ppo.stage import Observers
from components.reward.scoring import read_sft_scores
from tests.splits import write_split

CAP, TEMPERATURE, CEILING = 32, 0.25, 1.5


class Evaluated(NamedTuple):
    """A PPO stage's artifact, its metrics, and its rows: prompt, policy, sft."""

    artifact: Path
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    further: list[dict[str, Any]]
    """The responses of `evaluation_samples.jsonl`, in the same form."""


@pytest.fixture(scope="module")
def ppo(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """A run whose policy has moved, evaluated three times on some prompts, twice and once on others."""
    folder = tmp_path_factory.mktemp("evaluate")
    data = Path(shutil.copytree(stages.inputs["data"], folder / "data"))
    prompts = read_split(data / "prompts.test")
    write_split(data / "prompts.test", [*prompts, *prompts[:12], *prompts[:6]])
    several = type(stages)({**stages.inputs, "data": data})
    score = {"missing_eos": "replace", "clip": 2.0, "length_penalty": 0.01}
    options = {"updates": 8, "learning_rate": 1e-2, "score": score, "batch_size": 16, "evaluate": 512,
               "rules": {"patterns": {"letter": "a", "digit": "[0-9]"}}, "repeats": {"prompts": 40, "samples": 3},
               "kl": {"control": "fixed", "coefficient": 0.1, "response_ceiling": CEILING}}  # fmt: skip
    generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=CAP, temperature=TEMPERATURE)
    metrics = several.run("ppo", folder / "out", generation=generation, **options)
    artifact = folder / "out" / "artifact"
    files = ("evaluation.jsonl", "evaluation_samples.jsonl")
    return Evaluated(artifact, metrics, *(read_rows(artifact / name) for name in files))


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def ends(values: list[float], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """A mean's 95 % interval where rows of one prompt depend on each other: the sandwich of a regression on 1."""
    residuals: dict[str, float] = defaultdict(float)
    for value, row in zip(values, rows, strict=True):
        residuals[row["prompt"][-1]["content"]] += value - mean(values)
    clusters = len(residuals)
    variance = clusters / (clusters - 1) * sum(r**2 for r in residuals.values()) / len(values) ** 2
    half = student.ppf(0.975, clusters - 1) * math.sqrt(variance)
    return mean(values) - half, mean(values) + half


def wilson(values: list[float], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """A share's 95 % interval: where the share is as far from what is tested as its own spread allows."""
    low, high = ends(values, rows)
    share, clusters = mean(values), len({row["prompt"][-1]["content"] for row in rows})
    quantile = student.ppf(0.975, clusters - 1)
    worth = share * (1 - share) / ((high - low) / (2 * quantile)) ** 2 if 0 < share < 1 else clusters
    roots = np.roots([1 + quantile**2 / worth, -(2 * share + quantile**2 / worth), share**2])
    return tuple(sorted(float(root) for root in np.real(roots)))


def ratio_ends(above: list[float], below: list[float], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """A ratio's 95 % interval: the mean's, of what each row adds to the ratio beyond its own share."""
    ratio = sum(above) / sum(below)
    low, high = ends([(a - ratio * b) / mean(below) for a, b in zip(above, below, strict=True)], rows)
    return ratio + low, ratio + high


def jackknife_low(statistic: Callable[[list[dict[str, Any]]], float], rows: list[dict[str, Any]]) -> float:
    """A statistic's lower end, from its logarithm without each prompt."""
    prompts = list(dict.fromkeys(row["prompt"][-1]["content"] for row in rows))
    without = [math.log(statistic([r for r in rows if r["prompt"][-1]["content"] != left])) for left in prompts]
    spread = math.sqrt((len(prompts) - 1) * float(np.var(without)))
    return statistic(rows) * math.exp(-student.ppf(0.975, len(prompts) - 1) * spread)


def distinct_ratio(rows: list[dict[str, Any]]) -> float:
    shares = []
    for side in ("policy", "sft"):
        grams = [gram for row in rows for gram in fourgrams(row[side]["response"]) or [row[side]["response"].lower()]]
        shares.append(len(set(grams)) / len(grams))
    return shares[0] / shares[1]


def dissimilarity_ratio(rows: list[dict[str, Any]]) -> float:
    apart = []
    for side in ("policy", "sft"):
        said = [(r["prompt"], fourgrams(r[side]["response"]) or [r[side]["response"].lower()]) for r in rows]
        sets = [set(grams) for _, grams in said]
        apart.append(mean(
            sum(gram not in sets[j] for gram in said[i][1]) / len(said[i][1])
            for i, j in itertools.permutations(range(len(said)), 2) if said[i][0] != said[j][0]
        ))  # fmt: skip
    return apart[0] / apart[1]


def ratio_high(above: list[float], below: list[float], rows: list[dict[str, Any]]) -> float:
    """Upper end of sum(above) / sum(below), by how far it moves as each prompt's weight moves a little."""
    prompts = np.array([row["prompt"][-1]["content"] for row in rows])

    def ratio(weights: np.ndarray) -> float:
        return float(weights @ np.array(above) / (weights @ np.array(below)))

    moved = [(ratio(1 + 1e-5 * (prompts == p)) - ratio(1 - 1e-5 * (prompts == p))) / 2e-5 for p in set(prompts)]
    clusters = len(moved)
    error = math.sqrt(clusters / (clusters - 1) * math.fsum(d * d for d in moved))
    return ratio(np.ones(len(rows))) + float(student.ppf(0.975, clusters - 1)) * error


def fourgrams(text: str) -> list[str]:
    words = re.sub(r"([^\w\s])", r" \1 ", text.lower()).split()
    return [" ".join(words[i : i + 4]) for i in range(len(words) - 3)]


@torch.no_grad()
def logprobs(folder: Path, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """(T,) log-probability of each token of a response, by transformers alone; the pad token can't be sampled."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / temperature
    logits[:, model.config.pad_token_id] = -math.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def gated(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the gates on rows judge."""

    def of(side: str, name: str) -> list[float]:
        return [row[side][name] for row in rows]

    gain = [row["policy"]["score"] - row["sft"]["score"] for row in rows]
    excess = [row["policy"]["violations"] - row["sft"]["violations"] for row in rows]
    ruled = [row["policy"]["rule_violations"] - row["sft"]["rule_violations"] for row in rows]
    return {
        "policy/evaluated": float(len(rows)),
        "policy/kl_low": ends(of("policy", "kl"), rows)[0],
        "policy/kl_high": ends(of("policy", "kl"), rows)[1],
        "policy/kl_per_token_high": ratio_high(of("policy", "kl"), of("policy", "tokens"), rows),
        "policy/reward_gain_low": ends(gain, rows)[0],
        "policy/repetition_high": wilson(of("policy", "repetition"), rows)[1],
        "policy/echo_high": wilson(of("policy", "echo"), rows)[1],
        "policy/distinct_ratio_low": jackknife_low(distinct_ratio, rows),
        "policy/dissimilarity_ratio_low": jackknife_low(dissimilarity_ratio, rows),
        "policy/entropy_ratio_low": ratio_ends(of("policy", "entropy"), of("sft", "entropy"), rows)[0],
        "policy/length_ratio": sum(of("policy", "tokens")) / sum(of("sft", "tokens")),
        "policy/ended_low": wilson(of("policy", "ended"), rows)[0],
        "policy/special_tokens_high": wilson([float(n > 0) for n in of("policy", "special_tokens")], rows)[1],
        "policy/violations_excess_high": ends(excess, rows)[1],
        "policy/rule_violations_excess_high": ends(ruled, rows)[1],
    }


def hidden_by_means(rows: list[dict[str, Any]], further: list[dict[str, Any]], first: int) -> dict[str, float]:
    """What the gates on single prompts and responses judge, if the first `first` prompts were sampled again."""
    gains: dict[str, list[float]] = defaultdict(list)
    for row in [*rows[:first], *further]:
        gains[row["prompt"][-1]["content"]].append(row["policy"]["score"] - row["sft"]["score"])
    prompts = [{"prompt": [{"content": prompt}]} for prompt in gains]
    falls, rises = ([float(sign * mean(gain) > 0) for gain in gains.values()] for sign in (-1, 1))
    excess = [(a - b) / 2 for a, b in zip(falls, rises, strict=True)]
    widest = math.hypot(wilson(falls, prompts)[1] - mean(falls), mean(rises) - wilson(rises, prompts)[0]) / 2
    everyone = [*rows, *further]
    beyond = [float(row["policy"]["kl"] > CEILING) for row in everyone]
    assert 0 < mean(beyond) < 1 and 0 < mean(falls) < 1, "else these shares tell nothing apart"
    return {
        "policy/worse_prompts_excess_high": max(ends(excess, prompts)[1], mean(excess) + widest),
        "policy/kl_beyond_ceiling_high": wilson(beyond, everyone)[1],
    }


def beside(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What stands beside the gated numbers: both ends of a ratio, and the gain where both responses ended."""
    tokens = [[row[side]["tokens"] for row in rows] for side in ("policy", "sft")]
    both = [row for row in rows if row["policy"]["ended"] and row["sft"]["ended"]]
    gain = mean(row["policy"]["score"] - row["sft"]["score"] for row in both)
    low, high = ratio_ends(*tokens, rows)
    ratio = {"policy/length_ratio_low": low, "policy/length_ratio_high": high}
    return ratio | {"policy/both_ended": len(both) / len(rows), "policy/reward_gain_ended": gain}


def test_the_rows_gated_numbers_are_those_of_the_policy_and_not_of_sft(ppo: Evaluated) -> None:
    assert max(Counter(row["prompt"][-1]["content"] for row in ppo.rows).values()) == 3
    expected = gated(ppo.rows) | hidden_by_means(ppo.rows, ppo.further, 40)
    assert {name: ppo.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert {name: ppo.metrics[name] for name in beside(ppo.rows)} == pytest.approx(beside(ppo.rows), rel=1e-9)
    elsewhere = {"ppo/stopped", "policy/demonstration_perplexity_ratio_high"}
    elsewhere |= {
        f"ppo/{name}" for name in ("ratio_max", "clip_fraction_max", "replaced_max", "score_spread_min")
    }  # these and the next in test_curves.py
    elsewhere |= {"policy/judge_gain_low"}  # test_judges.py
    elsewhere |= {"policy/balanced_length_accuracy_low", "policy/chosen_log_ratio_low"}  # direct/test_stage.py
    elsewhere |= {f"ppo/{name}" for name in ("beta_drift_below_target", "proxy_rise_at_level_kl")}
    assert {gate.metric for gate in GATES.values() if gate.stage == "ppo"} == expected.keys() | elsewhere


@pytest.mark.parametrize(("reason", "summary"), [("fall", mean), ("kl", max)])
def test_the_worst_prompts_are_found_among_all_samples(
    ppo: Evaluated, reason: str, summary: Callable[[list[float]], float]
) -> None:
    rows = [*(ppo.rows[:40] if reason == "fall" else ppo.rows), *ppo.further]
    measured: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        value = row["policy"]["kl"] if reason == "kl" else row["sft"]["score"] - row["policy"]["score"]
        measured[row["prompt"][-1]["content"]].append(value)
    expected = sorted((summary(values) for values in measured.values()), reverse=True)[:8]
    worst = [row for row in read_rows(ppo.artifact / "worst.jsonl") if row["reason"] == reason]
    assert [row["value"] for row in worst] == pytest.approx([value for value in expected if value > 0]) and worst
    for row in worst:
        shown = {name: row[name] for name in ("prompt", "policy", "sft")}
        values = measured[row["prompt"][-1]["content"]]
        assert summary(values) == pytest.approx(row["value"])
        own = row["policy"]["kl"] if reason == "kl" else row["sft"]["score"] - row["policy"]["score"]
        assert own == max(values) and shown in rows


def test_rows_in_which_every_number_differs_between_the_policies_are_judged_alike(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, sides = np.random.default_rng(0), itertools.cycle((1.0, 2.0))
    data = Path(shutil.copytree(stages.inputs["data"], tmp_path / "data"))
    prompts = read_split(data / "prompts.test")
    write_split(data / "prompts.test", [*prompts, *prompts[:12], *prompts[:6]])

    def respond(_: Any, __: Any, asked: list[Any], *___: Any, **____: Any) -> list[evaluate.Answered]:
        high = next(sides)
        numbers = high * chance.random((len(asked), 8))
        return [
            evaluate.Answered(
                response=" ".join(str(int(high + 9 * x)) for x in n[: 2 + int(4 * n[0])]), score=n[1], reward=n[7],
                kl=2 * n[2], tokens=int(high + 10 * n[3]), entropy=n[4], ended=bool(n[5] > 0.7),
                special_tokens=int(n[6] > 0.8), repetition=n[5] / 2, echo=n[6] / 2,
                truth={"gold": n[0], "violations": n[4], "echoes": n[5]},
                rules={"violations": n[2]},
            )
            for n in numbers
        ]  # fmt: skip

    monkeypatch.setattr(evaluate, "respond", respond)
    monkeypatch.setattr(evaluate, "_forgetting", lambda *_: {"policy/demonstration_perplexity_ratio": 1.25})
    neither = Models(None, None, None, None, None, None)  # type: ignore[arg-type]
    kl = {"control": "fixed", "response_ceiling": CEILING}
    job = stages.job("ppo", evaluate=512, kl=kl, repeats={"prompts": 40})
    metrics = evaluate.evaluate(neither, job, data, tmp_path)
    rows, further = (read_rows(tmp_path / "artifact" / f"evaluation{name}.jsonl") for name in ("", "_samples"))
    expected = gated(rows) | beside(rows) | hidden_by_means(rows, further, 40)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert metrics["policy/demonstration_perplexity_ratio"] == 1.25


@pytest.mark.parametrize("side", ["policy", "sft"])
def test_a_rows_texture_is_its_texts(ppo: Evaluated, side: str) -> None:
    repeated = copied = 0
    for row in ppo.rows:
        found, text = row[side], row[side]["response"]
        grams, source = fourgrams(text), fourgrams(row["prompt"][-1]["content"])
        again = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert found["repetition"] == pytest.approx(again / len(grams) if grams else 0)
        taken = sum(gram in source for gram in grams)
        assert found["echo"] == pytest.approx(taken / len(grams) if grams else 0)
        assert {name: found[name] for name in ("gold", "violations")} == {
            name: desk.scores(row["prompt"], text)[name] for name in ("gold", "violations")
        }
        repeated, copied = repeated + again, copied + taken
        letters, digits = text.count("a"), sum(text.count(digit) for digit in "0123456789")
        assert (found["rule_letter"], found["rule_digit"]) == (letters, digits)
        assert found["rule_violations"] == letters + digits
    assert repeated or side == "sft"


def test_violations_of_rules_are_counted_in_every_batch_and_of_sft(ppo: Evaluated) -> None:
    history = read_rows(ppo.artifact / "history.jsonl")
    assert all(row["ppo/rule_violations"] == pytest.approx(row["ppo/rule_letter"] + row["ppo/rule_digit"])
               for row in history)  # fmt: skip
    for side, name in (("policy", "policy/rule_violations"), ("sft", "policy/sft_rule_violations")):
        found = mean(row[side]["rule_violations"] for row in ppo.rows)
        assert ppo.metrics[name] == pytest.approx(found) and found > 0


def test_a_rows_kl_and_score_are_the_models_own(ppo: Evaluated, stages: Any) -> None:
    sft, reward = stages.inputs["sft"] / "model", stages.inputs["reward"]
    tokenizer = AutoTokenizer.from_pretrained(sft)
    scorer = AutoModelForSequenceClassification.from_pretrained(reward / "model").eval()
    scale = json.loads((reward / "reward.json").read_text())
    compared, special = Counter[bool](), 0
    for row, side in itertools.product(ppo.rows, ("policy", "sft")):
        found = row[side]
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"][-64:]
        said = found["response"].replace("⟨", "<").replace("⟩", ">")
        response = tokenizer(said, add_special_tokens=False)["input_ids"]
        marked = sum(token in tokenizer.all_special_ids for token in response)
        response += [tokenizer.eos_token_id] if found["ended"] else []
        if len(response) != found["tokens"]:
            continue  # white space between special tokens is read as an unknown one
        assert found["special_tokens"] == marked
        compared[found["ended"]] += 1
        special += found["special_tokens"] > 0
        model = ppo.artifact / "model" if side == "policy" else sft
        ours, reference = (logprobs(each, prompt, response, TEMPERATURE) for each in (model, sft))
        assert found["kl"] == pytest.approx(float((ours - reference).sum()), abs=2e-4)
        with torch.no_grad():
            raw = float(scorer(torch.tensor([prompt + response])).logits)
        score = (raw - scale["shift"]) / scale["scale"]
        assert found["score"] == pytest.approx(score, abs=1e-4), "judged before clip, EOS and length"
        reward = min(max(score, -2.0), 2.0) if found["ended"] else scale["missing_eos_score"]
        assert found["reward"] == pytest.approx(reward - 0.01 * len(response), abs=1e-4)
    assert compared[True] >= 5 and compared[False] >= 5 and special, (compared, special)


def test_kl_at_temperature_1_is_of_responses_drawn_at_1_and_not_at_the_runs_temperature(
    ppo: Evaluated, stages: Any
) -> None:
    """Of responses that transformers draws itself, from the same models; a log-ratio of cold samples is another."""
    models = [AutoModelForCausalLM.from_pretrained(f / "model").eval() for f in (ppo.artifact, stages.inputs["sft"])]
    tokenizer = AutoTokenizer.from_pretrained(stages.inputs["sft"] / "model")
    torch.manual_seed(5)
    found: dict[float, list[float]] = {1.0: [], TEMPERATURE: []}
    for row, temperature in itertools.product(ppo.rows, found):
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"][-64:]
        drawn = models[0].generate(
            torch.tensor([prompt] * 12), do_sample=True, temperature=temperature, top_k=0, max_new_tokens=CAP,
            bad_words_ids=[[tokenizer.pad_token_id]], pad_token_id=tokenizer.pad_token_id,
        )[:, len(prompt) :]  # fmt: skip
        ends = (drawn == tokenizer.eos_token_id).long()
        mask = (ends.cumsum(1) - ends) == 0
        whole = torch.cat([torch.tensor([prompt] * 12), drawn], 1)
        nats = []
        for model in models:
            with torch.no_grad():
                logits = model(whole).logits[:, len(prompt) - 1 : -1].double()
            logits[..., tokenizer.pad_token_id] = -math.inf
            nats.append(logits.log_softmax(-1).gather(2, drawn.unsqueeze(2)).squeeze(2).masked_fill(~mask, 0).sum(1))
        found[temperature] += (nats[0] - nats[1]).tolist()
    error = np.std(found[1.0]) / math.sqrt(len(ppo.rows))  # of the metric: a response to each prompt
    assert ppo.metrics["policy/kl_at_temperature_1"] == pytest.approx(mean(found[1.0]), abs=3 * error)
    assert abs(mean(found[TEMPERATURE]) - mean(found[1.0])) > 4 * error, "else this tells nothing apart"


def test_forgetting_is_the_perplexity_of_held_out_demonstrations_over_sfts(ppo: Evaluated, stages: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stages.inputs["sft"] / "model")
    nats, tokens = defaultdict[str, list[float]](list), list[int]()
    rows = read_split(stages.inputs["data"] / "demonstrations.heldout")
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"][-64:]
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        response = response[:CAP]
        tokens.append(len(response))
        for name, folder in (("policy", ppo.artifact), ("sft", stages.inputs["sft"])):
            nats[name].append(-float(logprobs(folder / "model", prompt, response, 1.0).sum()))
    excess = [mine - its for mine, its in zip(nats["policy"], nats["sft"], strict=True)]
    ratio, high = math.exp(sum(excess) / sum(tokens)), math.exp(ratio_ends(excess, tokens, rows)[1])
    assert ppo.metrics["policy/demonstration_perplexity_ratio"] == pytest.approx(ratio, rel=1e-4) and ratio > 1.001
    assert ppo.metrics["policy/demonstration_perplexity_ratio_high"] == pytest.approx(high, rel=1e-3)

def test_sft_answers_once_and_every_use_has_the_same_texts(stages: Any, tmp_path: Path) -> None:
    """What the reward stage stored is what SFT samples again; a policy that is still SFT gives the same answers; and a
    reward artifact of release 0.1.0, which has none, leads to the same ones."""
    job, data = stages.job("ppo"), stages.inputs["data"]
    prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")]
    models = Models.load(job, stages.inputs)
    answers = models.answers
    assert len(answers.ids) == models.scale.responses <= len(prompts)
    prompts = prompts[: len(answers.ids)]
    old = tmp_path / "reward"
    shutil.copytree(stages.inputs["reward"], old)
    (old / "sft_answers.jsonl").unlink()
    assert Models.load(job, {**stages.inputs, "reward": old}).answers == answers
    stored = [row.response for row in evaluate.respond(models, models.sft, prompts, job, data, answers)]
    sampled = [row.response for row in evaluate.respond(models, models.policy, prompts, job, data, answers)]
    assert stored == sampled and len(set(stored)) > len(stored) / 2
    texts, ended, raw = evaluate.sft_responses(models, prompts, job)
    assert texts == stored and ended == list(answers.ended)
    assert raw.numpy() == pytest.approx(read_sft_scores(stages.inputs["reward"])[0].numpy(), abs=1e-4)


def test_ppo_does_not_sample_sft_while_it_trains(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[bool] = []
    original = experience.rollout_engine

    def engine(model: Any, *args: Any) -> Any:
        sampled.append(model is models.sft)
        return original(model, *args)

    monkeypatch.setattr(experience, "rollout_engine", engine)
    job = stages.job("ppo", evaluate_every=1, watch={"prompts": 8}, monitors={"responses": 16})
    models = Models.load(job, stages.inputs)
    observers = Observers.start(models, job, stages.inputs["data"])
    assert observers.alarms.limits is not None
    for model in (models.sft, models.policy):
        assert len(observers.evaluations.respond(model)) == 8
    assert sampled == [False]
