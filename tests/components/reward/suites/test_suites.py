"""Reward models on suites of RewardBench's, LLMBar's and MT-Bench's shape, against numbers computed apart from them."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.tables.published import read_split
from components.gates.judging import GatesConfig, judge
from components.models.folders import save_model
from components.models.runtime import Runtime
from components.reward import stage as reward_stage
from components.reward.suites.report import suite_report
from components.reward.suites.scorer import RewardScorer
from components.reward.suites.suite_formats import read_suite
from components.stats.intervals import clustered_proportion

WORDS = "my parcel is late and I want a refund now".split()


def text(seed: int, words: int) -> str:
    """A text of so many words."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


def suite_rows(shape: str, n: int = 24) -> list[dict[str, Any]]:
    """Rows as the suite's authors publish them; three rows share a question."""
    rows: list[dict[str, Any]] = []
    for i in range(n):
        question, better, worse = text(i // 3, 6), text(100 + i, 3 + i % 5), text(200 + i, 3 + i % 4)
        if shape == "RewardBench":
            row = {"prompt": question, "chosen": better, "rejected": worse, "chosen_model": "x", "rejected_model": "y"}
            rows.append({"id": i, **row, "subset": ("alpacaeval-easy", "refusals")[i % 2]})
        elif shape == "LLMBar":
            first, second = (better, worse) if i % 2 else (worse, better)
            rows.append({"input": question, "output_1": first, "output_2": second, "label": 1 if i % 2 else 2})
        else:
            row = {"question_id": i, "model_a": "m", "model_b": "n", "judge": "e", "turn": 1 + i % 2}
            for model, answer in (("a", better), ("b", worse)):
                said = answer if row["turn"] == 1 else f"{model} {question}"
                row[f"conversation_{model}"] = [
                    {"role": "user", "content": question}, {"role": "assistant", "content": said},
                    {"role": "user", "content": "and then"}, {"role": "assistant", "content": answer},
                ]  # fmt: skip
            rows.append({**row, "winner": ("model_a", "model_b", "tie")[i % 3]})
    return rows


def expected_pairs(shape: str, rows: list[dict[str, Any]]) -> list[tuple[Any, Any, str, str]]:
    """Chosen and rejected conversation, subset and question of each row with a winner, written down apart."""
    found = []
    for row in rows:
        if shape == "MT-Bench":
            a, b = (row[f"conversation_{side}"][: 2 * row["turn"]] for side in "ab")
            won = {"model_a": (a, b), "model_b": (b, a), "tie": None}[row["winner"]]
            if won:
                found.append((*won, f"turn {row['turn']}", a[0]["content"]))
            continue
        if shape == "RewardBench":
            question, good, bad, subset = row["prompt"], row["chosen"], row["rejected"], row["subset"]
        else:
            question, subset = row["input"], "all"
            good, bad = (row[f"output_{row['label']}"], row[f"output_{3 - row['label']}"])
        sides = ([{"role": "user", "content": question}, {"role": "assistant", "content": a}] for a in (good, bad))
        found.append((*sides, subset, question))
    return found


@pytest.fixture(scope="module")
def classifier(language: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sequence classifier with one label, as anybody's transformers saves it."""
    torch.manual_seed(5)
    tokenizer = language.tokenizer
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("classifier")
    save_model(LlamaForSequenceClassification(shape).eval(), tokenizer, folder)
    return folder


def clustered(values: list[float], clusters: list[str]) -> tuple[float, float, float]:
    """A mean and its interval by the sandwich over clusters, with Student's t."""
    mean, moved = sum(values) / len(values), defaultdict[str, float](float)
    for value, cluster in zip(values, clusters, strict=True):
        moved[cluster] += value - mean
    k = len(moved)
    error = math.sqrt(k / (k - 1) * sum(each**2 for each in moved.values())) / len(values)
    half = float(student.ppf(0.975, k - 1)) * error
    return mean, mean - half, mean + half


@pytest.mark.parametrize("shape", ["RewardBench", "LLMBar", "MT-Bench"])
def test_each_suite_gives_the_numbers_of_a_reference_computed_apart(
    classifier: Path, tmp_path: Path, runtime: Runtime, shape: str
) -> None:
    rows = suite_rows(shape)
    file = tmp_path / ("suite.json" if shape == "LLMBar" else "suite.jsonl")
    if shape == "LLMBar":
        file.write_text(json.dumps(rows))
    else:
        write_rows(file, rows)
    suite, wanted = read_suite(file), expected_pairs(shape, rows)
    assert suite.shape == ("pairs" if shape == "RewardBench" else shape) and suite.ties == len(rows) - len(wanted)
    assert [tuple(pair) for pair in suite.pairs] == wanted

    tokenizer = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()

    def direct(conversation: Any) -> float:
        told = tokenizer.apply_chat_template(conversation, tokenize=False)
        with torch.no_grad():
            return float(model(torch.tensor([tokenizer(told, add_special_tokens=False)["input_ids"]])).logits)

    scorer = RewardScorer.load(classifier, runtime, "eval")
    chosen, rejected = (scorer.score([getattr(p, side) for p in suite.pairs]) for side in ("chosen", "rejected"))
    scores = np.stack([chosen.scores.double().numpy(), rejected.scores.double().numpy()])
    reference = np.array([[direct(pair[side]) for pair in wanted] for side in (0, 1)])
    assert np.abs(scores - reference).max() <= 1e-4

    tokens = np.array([chosen.tokens, rejected.tokens])
    subsets, clusters = [pair.subset for pair in suite.pairs], [pair.cluster for pair in suite.pairs]
    found = suite_report(scores, tokens, subsets, clusters, temperature=2.0)
    for name, of in {"overall": found["overall"], **found["subsets"]}.items():
        inside = [i for i, subset in enumerate(subsets) if name in ("overall", subset)]
        gaps, own = [float(reference[0, i] - reference[1, i]) for i in inside], [clusters[i] for i in inside]
        assert of["pairs"] == len(inside) and of["prompts"] == len(set(own))
        assert of["accuracy"] == pytest.approx(sum(gap > 0 for gap in gaps) / len(gaps))
        assert of["accuracy_low"] < of["accuracy"] < of["accuracy_high"]
        loss = clustered([math.log1p(math.exp(-gap / 2)) for gap in gaps], own)
        brier = clustered([(1 - 1 / (1 + math.exp(-gap / 2))) ** 2 for gap in gaps], own)
        for metric, ends in (("log_loss", loss), ("brier", brier)):
            assert [of[metric], of[f"{metric}_low"], of[f"{metric}_high"]] == pytest.approx(ends, abs=1e-4), metric
        lengths = [len(tokenizer(wanted[i][0][-1]["content"], add_special_tokens=False)["input_ids"]) for i in inside]
        assert of["chosen_tokens"] == pytest.approx(sum(lengths) / len(lengths))
        assert "ece" not in of, "so few pairs have no calibration error"
    means = [of["accuracy"] for of in found["subsets"].values()]
    assert found["mean_of_subsets"] == pytest.approx(sum(means) / len(means))


def test_the_reward_stage_evaluates_its_suites_and_the_gate_judges_the_lowest_lower_end(
    stages: Any, tmp_path: Path, runtime: Runtime
) -> None:
    """Accuracies are counted again from the published model's scores, its pairs of a subset apart."""
    files = {f"suites/{name}": tmp_path / f"{name}.jsonl" for name in ("desk", "bench")}
    pairs = read_split(stages.inputs["data"] / "pairs.test")
    sides = ("chosen", "rejected")
    desk = [{k: row[k] for k in ("prompt", *sides)} | {"subset": f"a/{i % 2} b"} for i, row in enumerate(pairs)]
    write_rows(files["suites/desk"], desk)
    write_rows(files["suites/bench"], suite_rows("MT-Bench"))
    job = stages.job("reward", max_pairs=16, probe_texts=2, epochs=1, members=2)
    inputs = {name: stages.inputs[name] for name in ("data", "sft")}
    metrics = reward_stage.run(job, {**inputs, **files}, tmp_path / "out", lambda *_, **__: None)

    artifact = tmp_path / "out" / "artifact"
    scorer = RewardScorer.load(artifact, runtime, "eval")
    lows = []
    for name, file in files.items():
        suite = read_suite(file)
        chosen, rejected = (scorer.score([getattr(p, side) for p in suite.pairs]).scores for side in sides)
        right = (chosen > rejected).double() + (chosen == rejected).double() / 2
        whole = clustered_proportion(right.tolist(), [pair.cluster for pair in suite.pairs])
        key = f"reward/suite_{name.partition('/')[2]}"
        found = [metrics[f"{key}{end}"] for end in ("", "_low", "_high")]
        assert found == pytest.approx(list(whole), abs=1e-6)
        lows.append(whole.low)
        for subset in {pair.subset for pair in suite.pairs}:
            inside = torch.tensor([pair.subset == subset for pair in suite.pairs])
            named = f"{key}/{subset.replace('/', '_').replace(' ', '_')}"
            assert metrics[named] == pytest.approx(right[inside].mean().item())
    assert metrics["reward/suite_accuracy_low"] == pytest.approx(min(lows), abs=1e-6)
    told = json.loads((artifact / "suites.json").read_text())
    assert {name: each["overall"]["pairs"] for name, each in told.items()} == {"desk": 30, "bench": 16}
    assert (artifact / "suites.json").read_bytes() == (tmp_path / "out" / "attachments" / "suites.json").read_bytes()
    (judged,) = [v for v in judge("reward", metrics, GatesConfig(reward={"suite_accuracy_low": 0.999}))
                 if v.name == "reward.suite_accuracy_low"]  # fmt: skip
    assert judged.stops and judged.value == metrics["reward/suite_accuracy_low"]


def test_our_reward_model_scores_the_same_as_an_external_one(stages: Any, runtime: Runtime) -> None:
    artifact = stages.inputs["reward"]
    rows = read_split(stages.inputs["data"] / "pairs.test")
    conversations = [[*row["prompt"], {"role": "assistant", "content": row["chosen"]}] for row in rows]
    ours, external = (RewardScorer.load(folder, runtime, "eval") for folder in (artifact, artifact / "model"))
    assert ours.ours and not external.ours and external.temperature == 1
    assert ours.temperature == json.loads((artifact / "reward.json").read_text())["temperature"]
    one, other = ours.score(conversations), external.score(conversations)
    assert (one.scores - other.scores).abs().max() <= 1e-4 and one.scores.std() > 0


def test_calibration_is_said_where_there_are_pairs_enough_and_a_length_rule_is_seen() -> None:
    gaps = np.random.default_rng(0).normal(0, 1, 400)
    lengths = np.stack([10 + (gaps > 0), np.full(400, 10)]).astype(np.int64)
    scores, clusters = np.stack([gaps, np.zeros(400)]), [str(i // 2) for i in range(400)]
    found = suite_report(scores, lengths, ["a"] * 400, clusters, 1.0)["overall"]
    assert found["ece"] >= 0 and found["ece_null_95"] > 0 and found["calibration_slope"] is not None
    assert found["accuracy"] == pytest.approx(np.mean(gaps > 0)) and found["accuracy_chosen_longer"] == 1
    assert found["accuracy_chosen_shorter"] is None and found["balanced_length_accuracy"] is None
    assert found["length_accuracy"] == pytest.approx((1 + np.mean(gaps > 0)) / 2), "a tie in length counts a half"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input": "q", "output_1": "a", "output_2": "b", "label": 3}, r"row 1: `label` is 3, and has to be 1 or 2"),
        ({"input": "q", "output_1": "", "output_2": "b", "label": 1}, r"row 1: .* have to be texts"),
        ({"winner": "both", "conversation_a": [], "conversation_b": []}, r"row 1: `winner` is 'both', and has to be"),
        ({"winner": "model_a", "turn": 2, "conversation_a": [{"role": "user", "content": "q"}], "conversation_b": []},
         r"row 1: `conversation_a` has no answer in turn 2"),
        ({"winner": "tie", "conversation_a": [], "conversation_b": []}, r"1 row, and all are ties"),
        ({"prompt": "q", "chosen": "a", "rejected": 5}, r"row 1: .*rejected"),
        ({"question": "q"}, r"its rows are not preference pairs"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_judged_pair_is_named(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    write_rows(tmp_path / "suite.jsonl", [row])
    with pytest.raises(UserError, match=problem):
        read_suite(tmp_path / "suite.jsonl")


def test_a_classifier_of_several_labels_or_without_a_template_is_no_reward_model(
    classifier: Path, language: Any, runtime: Runtime, tmp_path: Path
) -> None:
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_labels": 3}
    three = LlamaForSequenceClassification(LlamaConfig(num_attention_heads=2, **shape))
    save_model(three, language.tokenizer, tmp_path / "three")
    with pytest.raises(UserError, match="holds a classifier with 3 labels, and a reward model has one score"):
        RewardScorer.load(tmp_path / "three", runtime, "eval x")
    bare = tmp_path / "bare"
    save_model(AutoModelForSequenceClassification.from_pretrained(classifier), language.tokenizer, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"eval x: the tokenizer in .* has no chat template"):
        RewardScorer.load(bare, runtime, "eval x")
