"""Every number that a reward gate judges, computed again from the published models and pairs by other code.

Test pairs share their prompts in fives, so that an interval that takes pairs for independent is too narrow. Intervals
are found by moving the weight of each prompt a little: where that moves a number by d, its variance grows by d².
"""

import copy
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import multivariate_t, pearsonr
from scipy.stats import t as student
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from components.data.support_desk.desk import SupportDeskConfig, generate
from components.data.support_desk.grammar import FILLERS, FLATTERY, HEDGES
from components.data.tables.published import read_split
from components.gates.judging import GatesConfig, judge
from components.gates.table import GATES
from components.models.config import GenerationConfig
from components.reward import stage
from components.reward.evaluation import probes
from tests.splits import published, write_split

PROMPT, CAP, PROBED = 64, 48, 200
SPLITS = ("train", "calibration", "test")
OPTIONS = {
    "members": 2,
    "probe_texts": PROBED,
    "generation": GenerationConfig(max_prompt_tokens=PROMPT, max_new_tokens=CAP),
    "seed": 3,
}
Array = np.ndarray
Row = dict[str, Any]


class Trained(NamedTuple):
    """A refreshed ensemble's artifact and metrics, and what it was made of."""

    artifact: Path
    earlier: Path
    metrics: dict[str, float]
    rows: dict[str, list[Row]]
    soup: list[list[list[int]]]
    """Token lists that members were tried on: SFT's samples, shuffled, random."""


def data_of(stages: Any, folder: Path, seed: int, sizes: Sequence[int], greeting: str) -> Path:
    """A validate artifact whose splits have `sizes` pairs, one to nine a prompt; a `greeting` makes them others'."""
    shutil.copytree(stages.inputs["data"], folder)
    _, pairs = generate(seed, SupportDeskConfig(demonstrations=50, pairs=sum(sizes)))
    start = 0
    for split, size in zip(SPLITS, sizes, strict=True):
        rows = pairs[start : start + size]
        for i, row in enumerate(rows):
            *before, last = rows[i - i % (1 + i // 10 % 9)]["prompt"]
            content = last["content"].removeprefix(greeting)
            row |= {"prompt": [*before, last | {"content": f"{greeting}{content}"}], "margin": None}
        write_split(folder / f"pairs.{split}", published(rows))
        start += size
    return folder


@pytest.fixture(scope="module")
def trained(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("gated")
    old = data_of(stages, folder / "old", 11, (120, 30, 150), "Good day. ")
    new = data_of(stages, folder / "new", 12, (120, 60, 450), "Hello. ")
    type(stages)(stages.inputs | {"data": old}).run("reward", folder / "first", epochs=2, **OPTIONS)
    earlier, seen, report = folder / "first" / "artifact", [], probes.disagreement_report

    def recording(scorers: Any, *rest: Any) -> Any:
        def first(sequences: Any) -> Any:
            seen.append(sequences)
            return scorers[0](sequences)

        first.tokenizer = scorers[0].tokenizer  # type: ignore[attr-defined]
        return report([first, *scorers[1:]], *rest)

    inputs = stages.inputs | {"data": new, "previous_reward": earlier, "previous_data": old}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "disagreement_report", recording)
        metrics = type(stages)(inputs).run(
            "reward", folder / "second", refresh={"from_run": "any"}, epochs=3, learning_rate=3e-3, **OPTIONS
        )
    artifact = folder / "second" / "artifact"
    rows = {split: list(read_split(new / f"pairs.{split}")) for split in SPLITS}
    rows["train"] += read_split(artifact / "previous" / "pairs.train")
    rows["old test"] = list(read_split(old / "pairs.test"))
    return Trained(artifact, earlier, metrics, rows, seen)


class Scorer:
    """An ensemble's mean score, by transformers alone and without padding."""

    def __init__(self, artifact: Path) -> None:
        folders = [artifact / "model", artifact / "members" / "2" / "model"]
        self.tokenizer = AutoTokenizer.from_pretrained(folders[0])
        self.models = [AutoModelForSequenceClassification.from_pretrained(folder).eval() for folder in folders]
        self.sft = np.array(json.loads((artifact / "sft_scores.json").read_text()))
        self.scale = float(np.std(self.sft.mean(axis=0), ddof=1))

    @torch.no_grad()
    def members(self, texts: Sequence[Sequence[int]]) -> Array:
        """Each member's raw scores less their mean over SFT's responses, (2, n); texts of one length at a time."""
        out = np.zeros((2, len(texts)))
        lengths = np.array([len(ids) for ids in texts])
        for length in set(lengths.tolist()):
            at = np.flatnonzero(lengths == length)
            batch = torch.tensor([list(texts[i]) for i in at])
            out[:, at] = [model(batch).logits[:, 0].double().numpy() for model in self.models]
        return out - self.sft.mean(axis=1, keepdims=True)

    def __call__(self, texts: Sequence[Sequence[int]]) -> Array:
        return self.members(texts).mean(axis=0)

    def response(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]

    def prompt(self, row: Row) -> list[int]:
        text = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"][-PROMPT:]

    def sides(self, rows: list[Row]) -> Array:
        """Scores (2, n) of the chosen and the rejected."""
        return np.array(
            [
                self([self.prompt(row) + self.response(row[side])[:CAP] for row in rows])
                for side in ("chosen", "rejected")
            ]
        )


@pytest.fixture(scope="module")
def scorer(trained: Trained) -> Scorer:
    return Scorer(trained.artifact)


def groups(rows: list[Row]) -> Array:
    return np.unique([row["prompt"][-1]["content"] for row in rows], return_inverse=True)[1]


def spread(statistic: Callable[[Array], float], clusters: Array) -> float:
    """Standard error of a function of the rows' weights (n,): the infinitesimal jackknife over clusters."""
    count, moved = int(clusters.max()) + 1, []
    for cluster in range(count):
        step = 1e-4 * (clusters == cluster)
        moved.append((statistic(1 + step) - statistic(1 - step)) / 2e-4)
    return math.sqrt(count / (count - 1) * sum(d * d for d in moved))


def mean_of(values: Array) -> Callable[[Array], float]:
    return lambda weights: float(weights @ values / weights.sum())


def quantile(clusters: Array, level: float = 0.975) -> float:
    return float(student.ppf(level, len(set(clusters.tolist())) - 1))


def ends(values: Array, clusters: Array, level: float = 0.975) -> tuple[float, float]:
    half = quantile(clusters, level) * spread(mean_of(values), clusters)
    return float(values.mean() - half), float(values.mean() + half)


def wilson_low(share: float, error: float, z: float) -> float:
    """Where a share is z standard errors above x, each error that of x at the share's effective sample size."""
    effective = share * (1 - share) / error**2
    return float(brentq(lambda x: share - x - z * math.sqrt(x * (1 - x) / effective), 1e-12, share))


def gain_low(gain: Array, clusters: Array) -> float:
    """The lower end of a gain in shares: that of a mean, or where losses at their upper end and gains at their lower
    one are farther."""
    gained, lost = np.maximum(gain, 0), np.maximum(-gain, 0)
    down = gained.mean() - share_low(gained, clusters), 1 - share_low(1 - lost, clusters) - lost.mean()
    return min(ends(gain, clusters)[0], float(gain.mean()) - math.hypot(*down))


def share_low(values: Array, clusters: Array) -> float:
    codes = np.unique(clusters, return_inverse=True)[1]
    return wilson_low(float(values.mean()), spread(mean_of(values), codes), quantile(codes))


def binned(confidence: Array, right: Array, bins: int) -> list[Array]:
    """Equal-mass bins: whoever stands at (rank - 1/2) / n."""
    assert len(set(confidence.tolist())) == len(confidence), "ties share a bin; here there are none"
    order, n = np.argsort(confidence), len(confidence)
    return [order[[i for i in range(n) if k <= (i + 0.5) / n * bins < k + 1]] for k in range(bins)]


def error_in(parts: list[Array], confidence: Array, right: Array) -> float:
    return sum(abs(float(np.sum(confidence[part] - right[part]))) for part in parts) / len(confidence)


def between_prompts(parts: list[list[Array]], confidence: Array, right: Array, clusters: Array) -> Array:
    """ECE of each list of bins in 20,000 draws from a t distribution with the covariance that prompts' gaps have."""
    members = [np.isin(np.arange(len(right)), part).astype(float) for bins in parts for part in bins]
    gaps = [(m * (confidence - right)).sum() / max(1, m.sum()) for m in members]
    by_prompt = np.array([
        [((confidence - right - gap) * m)[clusters == c].sum() for m, gap in zip(members, gaps, strict=True)]
        for c in range(clusters.max() + 1)
    ])  # fmt: skip
    count = len(by_prompt)
    covariance = by_prompt.T @ by_prompt * count / (count - 1)
    drawn = abs(multivariate_t(shape=covariance, df=count - 1, allow_singular=True, seed=4).rvs(20_000))
    ends = np.cumsum([0, *(len(bins) for bins in parts)])
    sizes = [sum(len(part) for part in bins) for bins in parts]
    return np.array([drawn[:, a:b].sum(1) / n for (a, b), n in zip(itertools.pairwise(ends), sizes, strict=True)]).T


def test_the_gates_on_test_pairs_judge_what_the_published_models_say_of_them(trained: Trained, scorer: Scorer) -> None:
    metrics, rows = trained.metrics, trained.rows
    test, clusters = scorer.sides(rows["test"]), groups(rows["test"])
    margins, n = test[0] - test[1], len(rows["test"])
    assert np.bincount(clusters).max() >= 8 and len(set(clusters.tolist())) < n / 3
    right = (margins > 0).astype(float)
    calibration = np.subtract(*scorer.sides(rows["calibration"]))
    doubled = np.concatenate([calibration, -calibration])[:, None]
    fit = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-10).fit(
        doubled, np.arange(len(doubled)) < len(calibration)
    )
    temperature = 1 / fit.coef_.item()
    assert metrics["reward/temperature"] == pytest.approx(temperature, rel=1e-3) and abs(temperature - 1) > 0.05

    logits = margins / temperature
    again = np.concatenate([logits, -logits])[:, None]
    slope = LogisticRegression(C=1e9, fit_intercept=False, tol=1e-10).fit(again, np.arange(2 * n) < n).coef_.item()
    confidence = expit(abs(logits))
    by_mass = binned(confidence, right, 10)
    by_width = [np.flatnonzero((confidence > a) & (confidence <= a + 0.05)) for a in np.linspace(0.5, 0.95, 10)]
    draws = np.random.default_rng(1).random((2000, n)) < confidence
    chance = {
        name: [
            np.quantile([error_in(parts, confidence, drawn.astype(float)) for drawn in draws], 0.95),
            np.quantile(between_prompts([parts], confidence, right, clusters), 0.95),
        ]
        for name, parts in (("ece", by_mass), ("ece_width", by_width))
    }
    distance = abs(logits)
    wrong = [distance @ (1 - drawn) for drawn in draws]
    moved = (1 - right - expit(-slope * distance)) * distance
    reach = quantile(clusters) * n * spread(mean_of(moved), clusters)
    many = max(np.quantile(wrong, 0.975), distance @ expit(-distance) + reach)
    few = min(np.quantile(wrong, 0.025), distance @ expit(-distance) - reach)
    slope_null = [brentq(lambda b, w=w: distance @ expit(-b * distance) - w, -50, 50) for w in (many, few)]
    gaps = {s: np.array([len(row["chosen"]) - len(row["rejected"]) for row in rows[s]]) for s in rows}
    rule = 1 if (gaps["train"] > 0).sum() >= (gaps["train"] < 0).sum() else -1
    by_length = (np.sign(rule * gaps["test"]) + 1) / 2

    def first(row: Row) -> bool:
        digests = [hashlib.sha256(f"{row['prompt']}\0{row[s]}".encode()).hexdigest() for s in ("chosen", "rejected")]
        return digests[0] < digests[1]

    usual = sum(map(first, rows["train"])) >= len(rows["train"]) / 2
    by_side = np.array([first(row) == usual for row in rows["test"]], dtype=float)
    longer, shorter = (gaps["test"] > 0).astype(float), (gaps["test"] < 0).astype(float)
    unequal, accuracy = clusters[gaps["test"] != 0], right.mean()

    def balanced(weights: Array) -> float:
        return sum(float((weights * side) @ right / (weights @ side)) for side in (longer, shorter)) / 2

    def side_low(side: Array) -> float:
        return float(right[side].mean()) - share_low(right[side], clusters[side])

    tokens = np.array(
        [[min(len(scorer.response(r[side])), CAP) for r in rows["test"]] for side in ("chosen", "rejected")]
    )
    both, label = np.tile(clusters, 2), np.repeat([1.0, 0.0], n)
    given = np.column_stack([np.eye(clusters.max() + 1)[both], label])
    residual = [
        y - given @ np.linalg.lstsq(given, y, rcond=None)[0] for y in (test.ravel(), tokens.ravel().astype(float))
    ]

    def correlation(weights: Array) -> float:
        u, v = residual
        return float(weights @ (u * v) / math.sqrt((weights @ (u * u)) * (weights @ (v * v))))

    r = pearsonr(*residual).statistic
    reach = quantile(clusters) * spread(correlation, both) / (1 - r * r)
    expected = {
        "reward/accuracy_low": wilson_low(accuracy, spread(mean_of(right), clusters), quantile(clusters)),
        "reward/ece": error_in(by_mass, confidence, right),
        "reward/ece_width": error_in(by_width, confidence, right),
        "reward/calibration_slope": slope,
        "reward/temperature_at_end": float(not 0.011 < temperature < 99),
        "reward/brier_high": ends((1 - expit(logits)) ** 2, clusters)[1],
        "reward/log_loss_high": ends(-np.log(expit(logits)), clusters)[1],
        "reward/length_gain_low": gain_low(right - by_length, clusters),
        "reward/majority_gain_low": gain_low(right - by_side, clusters),
        "reward/balanced_length_accuracy_low": balanced(np.ones(n))
        - max(
            quantile(unequal) * spread(balanced, clusters),
            math.hypot(*(side_low(side) / 2 for side in (longer > 0, shorter > 0))),
        ),
        "reward/length_partial_correlation_high": math.tanh(math.atanh(r) + reach),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-3, abs=2e-4)
    for name, highs in chance.items():
        assert metrics[f"reward/{name}_null_95"] == pytest.approx(max(highs), rel=0.08)
    found = [metrics[f"reward/slope_null_{end}"] for end in ("low", "high")]
    assert found == pytest.approx(slope_null, abs=0.03) and found[0] < 1 < found[1]
    judged = {gate.metric for gate in GATES.values() if gate.stage == "reward"}
    own = {name for name in judged if name.startswith("reward/judge_")}
    assert expected.keys() | ELSEWHERE == judged - own, "a judge's are a reward model's: substages/test_judge.py"
    assert {name.replace("judge_", "") for name in own} <= expected.keys()


@pytest.mark.parametrize(("always", "at_end"), [(1.0, 1), (-1.0, 1), (0.0, 0)], ids=["right", "wrong", "as trained"])
def test_calibration_pairs_that_are_all_right_or_all_wrong_name_no_temperature_and_the_gate_says_so(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: float, at_end: int
) -> None:
    real = stage.fit_temperature
    with monkeypatch.context() as patch:
        if always:
            patch.setattr(stage, "fit_temperature", lambda margins: real(always * (1 + abs(margins))))
            patch.setattr(stage, "check_model", lambda *of: None)  # it names a temperature of other margins
        metrics = stages.run("reward", tmp_path, max_pairs=16, probe_texts=40)
    verdicts = judge("reward", metrics, GatesConfig.model_validate({"reward": {"temperature_at_end": 0}}))
    assert metrics["reward/temperature_at_end"] == at_end
    assert [v.passed for v in verdicts if v.name == "reward.temperature_at_end"] == [not at_end]


PROBES = ("filler", "flattery", "hedge", "repetition", "whitespace", "exclamations", "dots")
ELSEWHERE = {f"reward/probe_{name}_high" for name in PROBES} | {
    "reward/probe_texts", "reward/slice_accuracy_low", "reward/slice_ece_excess", "reward/refresh_gain_low",
    "reward/suite_accuracy_low",
    "reward/disagreement_auroc_low", "reward/invariance", "reward/position_invariance",
}  # fmt: skip
"""What the tests below compute again."""


def test_the_worst_slice_is_that_of_slices_cut_anew(trained: Trained, scorer: Scorer) -> None:
    rows, temperature = trained.rows["test"], trained.metrics["reward/temperature"]
    test, clusters = scorer.sides(rows), groups(rows)
    tokens = np.array([[min(len(scorer.response(r[side])), CAP) for r in rows] for side in ("chosen", "rejected")])
    margins = test[0] - test[1]
    right, confidence = (margins > 0).astype(float), expit(abs(margins) / temperature)

    def cut(values: Array, parts: int) -> list[Array]:
        edges = [-math.inf, *np.quantile(values, np.arange(1, parts) / parts), math.inf]
        return [(low < values) & (values <= high) for low, high in itertools.pairwise(edges)]

    difference = tokens[0] - tokens[1]
    slices = [*cut(tokens.max(axis=0), 4), *cut(abs(difference), 3), margins * difference > 0, margins * difference < 0]
    for name in ("category", "source"):
        slices += [
            np.array([row.get(name) == each for row in rows]) for each in {row.get(name) for row in rows} - {None}
        ]
    judged = [s for s in slices if s.sum() >= 100 and len(set(clusters[s].tolist())) >= 5]
    assert len(judged) == trained.metrics["reward/slices_judged"] >= 6 and len(judged) < len(slices)

    lows, errors, parts = [], [], []
    for inside in judged:
        codes = np.unique(clusters[inside], return_inverse=True)[1]
        error = spread(mean_of(right[inside]), codes)
        lows.append(wilson_low(right[inside].mean(), error, quantile(codes)))
        parts.append(binned(confidence[inside], right[inside], 5))
        errors.append(error_in(parts[-1], confidence[inside], right[inside]))
    assert trained.metrics["reward/slice_accuracy_low"] == pytest.approx(min(lows), abs=1e-3)
    draws = (np.random.default_rng(2).random((2000, len(rows))) < confidence).astype(float)
    null = np.array([
        [error_in(p, confidence[i], drawn[i]) for p, i in zip(parts, judged, strict=True)] for drawn in draws
    ])  # fmt: skip

    everywhere = [[np.flatnonzero(i)[part] for part in p] for p, i in zip(parts, judged, strict=True)]
    across = between_prompts(everywhere, confidence, right, clusters)

    def joint_of(null: Array) -> Array:
        def over(level: float) -> float:
            return float((null > np.quantile(null, level, axis=0)).any(axis=1).mean()) - 0.05

        return np.quantile(null, brentq(over, 0.95, 0.99999, xtol=1e-4), axis=0)

    joint = np.maximum(joint_of(null), joint_of(across))
    found = trained.metrics["reward/slice_ece_excess"]
    assert found == pytest.approx(max(np.array(errors) - joint), abs=6e-3)
    alone = np.maximum(np.quantile(null, 0.95, axis=0), np.quantile(across, 0.95, axis=0))
    assert abs(found - max(np.array(errors) - alone)) > 8e-3, "each slice's own null is lower"


def tailed(name: str, text: str) -> str:
    if name in ("filler", "flattery", "hedge"):
        choice = {"filler": FILLERS, "flattery": FLATTERY, "hedge": HEDGES}[name]
        fresh = [each for each in choice if each not in text] or choice
        return f"{text} {fresh[len(text) % len(fresh)]}"
    if name == "repetition":
        return text + " " + re.findall(r"\S[^.!?]*[.!?]*", text)[-1].strip()
    return text + {"whitespace": " \n\n", "exclamations": "!!!", "dots": "..."}[name]


def test_a_probes_bound_is_of_the_rise_in_deviations_of_sfts_scores(trained: Trained, scorer: Scorer) -> None:
    rows, texts = trained.rows["test"][:PROBED], []
    clusters = groups(rows)
    for name in PROBES:
        before, after, of = [], [], []
        for row, cluster in zip(rows, clusters, strict=True):
            plain, more = scorer.response(row["chosen"]), scorer.response(tailed(name, row["chosen"]))
            if len(more) <= CAP and more != plain:
                before.append(scorer.prompt(row) + plain)
                after.append(scorer.prompt(row) + more)
                of.append(cluster)
        texts.append(len(of))
        found = trained.metrics.get(f"reward/probe_{name}_high")
        if not of:
            assert found is None and name == "whitespace", "this tokenizer drops it, so nothing is measured"
            continue
        codes = np.unique(of, return_inverse=True)[1]
        rises = (scorer(after) - scorer(before)) / scorer.scale
        assert found == pytest.approx(ends(rises, codes, 0.95)[1], rel=1e-3, abs=1e-4), name
    assert trained.metrics["reward/probe_texts"] == min(texts) and max(texts) > 100


def test_disagreement_on_soup_is_ranked_against_that_on_sfts_samples(trained: Trained, scorer: Scorer) -> None:
    sft, shuffled, random = trained.soup
    assert [sorted(text) for text in shuffled] == [sorted(text) for text in sft] and shuffled != sft
    assert [len(text) for text in random] == [len(text) for text in sft]
    assert [text[:20] for text in random] == [text[:20] for text in shuffled] == [text[:20] for text in sft], (
        "prompts stay"
    )
    apart = [np.std(scorer.members(texts), axis=0, ddof=1) / scorer.scale for texts in trained.soup]
    scores, label = np.concatenate([*apart[1:], apart[0]]), np.repeat([1, 1, 0], len(sft))
    prompts = np.tile(np.arange(len(sft)), 3)
    wins = np.sign(np.subtract.outer(scores[label == 1], scores[label == 0])) / 2 + 0.5

    def area(weights: Array) -> float:
        soup, samples = weights[label == 1], weights[label == 0]
        return float(soup @ wins @ samples / (soup.sum() * samples.sum()))

    value = roc_auc_score(label, scores)
    assert area(np.ones(len(label))) == pytest.approx(value)
    low = wilson_low(value, spread(area, prompts), quantile(prompts))
    assert trained.metrics["reward/disagreement_auroc_low"] == pytest.approx(low, abs=2e-3)


def test_a_refreshs_gain_is_that_over_the_earlier_model_on_the_old_test_pairs(trained: Trained, scorer: Scorer) -> None:
    rows, earlier = trained.rows["old test"], Scorer(trained.earlier)
    is_, was = (np.sign(np.subtract(*each.sides(rows))) / 2 + 0.5 for each in (scorer, earlier))
    assert (is_ != was).sum() >= 5
    assert trained.metrics["reward/refresh_gain_low"] == pytest.approx(gain_low(is_ - was, groups(rows)), abs=1e-6)


def crooked(model: Any, how: str) -> Any:
    """The model with scores that padding moves, three times as far on the left, or a text's place in its batch."""
    forward = model.base_model.forward

    def moved(input_ids: Any, attention_mask: Any = None, **rest: Any) -> Any:
        out = forward(input_ids=input_ids, attention_mask=attention_mask, **rest)
        if how == "padding":
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
            by = (1 - mask).sum(1) * (3 - 2 * mask[:, 0])
        else:
            by = torch.arange(len(input_ids)) ** 1.5
        out.last_hidden_state = out.last_hidden_state + 0.01 * by[:, None, None] * torch.sign(
            model.score.weight.detach()
        )
        return out

    model.base_model.forward = moved
    return model


@pytest.mark.parametrize("how", ["padding", "place"])
def test_a_score_that_padding_or_place_moves_is_reported_as_far_as_it_moves(
    stages: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_models = stage.train_models
    monkeypatch.setattr(stage, "train_models", lambda *a: (crooked(copy.deepcopy(m), how) for m in train_models(*a)))
    monkeypatch.setattr(stage, "check_model", lambda *of: None)  # a score that padding moves fails it
    metrics = stages.run("reward", tmp_path, max_pairs=16, probe_texts=40)

    folder = tmp_path / "artifact" / "model"
    model = crooked(AutoModelForSequenceClassification.from_pretrained(folder).eval(), how)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = read_split(stages.inputs["data"] / "pairs.test")

    @torch.no_grad()
    def scores(texts: list[list[int]], side: str = "right") -> Array:
        batch = tokenizer.pad({"input_ids": texts}, padding_side=side, return_tensors="pt")
        mask = batch["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = model.base_model(batch["input_ids"], attention_mask=mask, position_ids=positions).last_hidden_state
        last = [int(row.nonzero().max()) for row in mask]
        return (hidden[range(len(texts)), last] @ model.score.weight.T)[:, 0].numpy()

    def encoded(side: str, count: int) -> list[list[int]]:
        out = []
        for row in rows[:count]:
            text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"][-64:]
            response = tokenizer(row[side], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            out.append(ids + response[:10])
        return out

    chosen, rejected = encoded("chosen", 16), encoded("rejected", 16)
    if how == "padding":
        texts = encoded("chosen", 32)
        alone = np.array([scores([text])[0] for text in texts])
        expected = {"reward/invariance": max(abs(scores(texts, side) - alone).max() for side in ("left", "right"))}
    else:
        stored = scores(chosen + rejected)
        swapped = np.roll(scores(rejected + chosen), 16)
        reverse = scores((chosen + rejected)[::-1])[::-1]
        expected = {"reward/position_invariance": max(abs(swapped - stored).max(), abs(reverse - stored).max())}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert min(expected.values()) > 0.05
