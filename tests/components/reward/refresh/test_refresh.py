"""Going on from an earlier reward model: same start, no leaks, an exact replay, and forgetting that is seen."""

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.base.errors import UserError
from components.data.support_desk.desk import SupportDeskConfig, generate
from components.data.tables.published import read_split
from components.gates.judging import GatesConfig, judge
from components.models.folders import load_reward_model
from components.models.runtime import Runtime
from components.reward import train
from components.reward.config import RefreshConfig
from components.reward.refresh import compare
from components.reward.refresh.compare import Refresh, replayed, without_leaks
from components.reward.refresh.previous import start_from
from components.reward.scoring import ScoreScale, head_scores, member_folder, score_sequences
from components.reward.training_pairs import encode_pairs
from components.stats.calibration.calibration_metrics import calibration
from tests.splits import published, write_split

LEARN = {"epochs": 12, "learning_rate": 1e-2, "checkpoint_every": 100}
REFRESH = {"refresh": {"from_run": "any"}}
SPLITS = ("train", "calibration", "test")


def copied(data: Path, target: Path, **splits: list[dict[str, Any]]) -> Path:
    """The data artifact `data` with the pairs of some splits replaced."""
    shutil.copytree(data, target)
    for split, rows in splits.items():
        write_split(target / f"pairs.{split}", rows)
    return target


def greeted(row: dict[str, Any], greeting: str) -> dict[str, Any]:
    """The pair with a `greeting` before its question: another prompt."""
    *before, last = row["prompt"]
    return row | {"prompt": [*before, last | {"content": f"{greeting} {last['content']}"}]}


def desk_pairs(seed: int, count: int, greeting: str) -> list[dict[str, Any]]:
    """The support desk's pairs; the `greeting` makes their prompts others than any that it asks."""
    _, pairs = generate(seed, SupportDeskConfig(demonstrations=50, pairs=count))
    return [greeted(row | {"margin": None}, greeting) for row in published(pairs)]


def flipped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def shouted(row: dict[str, Any]) -> dict[str, Any]:
    """The pair with a near-duplicate of its prompt."""
    return row | {"prompt": [m | {"content": m["content"].upper().replace(".", " !")} for m in row["prompt"]]}


def after(stages: Any, previous: Path, **inputs: Path) -> Any:
    """The stages of a run that refreshes the reward artifact `previous`, which was trained on `stages`' data."""
    given = {"previous_reward": previous, "previous_data": stages.inputs["data"]} | inputs
    return type(stages)(stages.inputs | given)


@pytest.fixture(scope="module")
def learned(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model that has learned its training pairs; greeted, they are its test pairs: it is right there."""
    folder = tmp_path_factory.mktemp("learned")
    rows = list(read_split(stages.inputs["data"] / "pairs.train"))
    data = copied(stages.inputs["data"], folder / "data", test=[greeted(row, "Hello.") for row in rows])
    type(stages)(stages.inputs | {"data": data}).run("reward", folder, **LEARN)
    return folder


@pytest.fixture(scope="module")
def fresh(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of prompts that the old data don't have."""
    rows = desk_pairs(7, 120, "Again.")
    folder = tmp_path_factory.mktemp("fresh") / "data"
    return copied(stages.inputs["data"], folder, train=rows[:60], calibration=rows[60:90], test=rows[90:])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"members": 2},
        {"lora": {"rank": 2}, "learning_rate": 1e-2, "objectives": {"longer": 2.0, "shorter": 0.5}, "members": 2},
    ],
    ids=["whole", "members", "lora-members-objectives"],
)
def test_before_its_first_step_it_scores_as_the_earlier_model_did(
    stages: Any, tmp_path: Path, runtime: Runtime, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = [row | {"objectives": {"longer": 1.0, "shorter": 0.25}}
             for row in list(read_split(stages.inputs["data"] / "pairs.train"))]  # fmt: skip
    old = type(stages)(stages.inputs | {"data": copied(stages.inputs["data"], tmp_path / "old", train=votes)})
    old.run("reward", tmp_path / "first", max_pairs=32, **options)
    earlier = tmp_path / "first" / "artifact"
    monkeypatch.setattr(train, "fit", lambda *a, **k: 0)
    metrics = after(old, earlier).run("reward", tmp_path / "second", **options, **REFRESH)

    job = stages.job("reward", **options, **REFRESH)
    ids = torch.tensor([[1, 5, 9, 4], [3, 8, 2, 0]])
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    for member in range(job.reward.members):
        start = start_from(job, stages.inputs["sft"], earlier, member)
        folders = [member_folder(tmp_path / run / "artifact", member) for run in ("first", "second")]
        models = [*(load_reward_model(folder, runtime)[0] for folder in folders), start]
        first, *others = (head_scores(model, ids, mask, runtime) for model in models)
        assert first.shape == (2, max(1, len(job.reward.objectives)))
        for scores in others:
            assert torch.equal(scores, first) if "lora" not in options else torch.allclose(scores, first, atol=1e-5)

    # A merged adapter rounds otherwise: one of the pairs that an untrained model scores alike may change sides.
    slack = 2 / len(list(read_split(stages.inputs["data"] / "pairs.test"))) if "lora" in options else 0
    for name in ("gain", "right_to_wrong", "wrong_to_right", "left_out"):
        assert metrics[f"reward/refresh_{name}"] == pytest.approx(0, abs=slack), name
    low, high = (metrics[f"reward/refresh_gain_{end}"] for end in ("low", "high"))
    assert -0.2 < low < -0.05 and 0.05 < high < 0.2, "30 pairs leave room for a difference even if none differs"
    close = 1e-4 if "lora" in options else 1e-7  # members are combined in float32
    for name in ("correlation", "scale_ratio"):
        assert metrics[f"reward/refresh_{name}"] == pytest.approx(1, abs=close)
    assert metrics["reward/refresh_shift_change"] == pytest.approx(0, abs=close)
    previous = metrics["reward/refresh_accuracy_previous"]
    assert metrics["reward/refresh_accuracy"] == pytest.approx(previous, abs=slack)
    assert metrics["reward/refresh_replayed"] == 0, "each old pair is among the new ones"


def test_forgetting_is_seen_and_fails_its_gate_and_replay_of_half_holds_it_back(
    stages: Any, learned: Path, fresh: Path, tmp_path: Path
) -> None:
    """The new pairs prefer what the old ones rejected, on other prompts: without replay it is learned and unlearned."""
    wrong = copied(fresh, tmp_path / "wrong", train=flipped(list(read_split(fresh / "pairs.train"))))
    run = after(stages, learned / "artifact", data=wrong, previous_data=learned / "data")
    lost = run.run("reward", tmp_path / "lost", **LEARN, refresh={"from_run": "any", "replay": 0})
    held = run.run("reward", tmp_path / "held", **LEARN, refresh={"from_run": "any", "replay": 0.5})

    assert lost["reward/refresh_accuracy_previous"] > 0.85
    assert lost["reward/refresh_gain_high"] < -0.1
    assert lost["reward/refresh_right_to_wrong"] > 0.1 > lost["reward/refresh_wrong_to_right"]
    assert lost["reward/refresh_right_to_wrong"] - lost["reward/refresh_wrong_to_right"] == pytest.approx(
        -lost["reward/refresh_gain"], abs=0.01
    )
    assert lost["reward/refresh_correlation"] < held["reward/refresh_correlation"] < 1
    assert held["reward/refresh_gain"] > lost["reward/refresh_gain"] + 0.1
    gates = GatesConfig.model_validate({"reward": {"refresh_gain_low": -0.03}})
    (failed,) = [v for v in judge("reward", lost, gates) if not v.passed]
    assert failed.name == "reward.refresh_gain_low" and failed.value == lost["reward/refresh_gain_low"]


def test_both_models_are_reported_on_the_old_test_pairs_and_not_on_the_new(
    stages: Any, fresh: Path, tmp_path: Path, runtime: Runtime
) -> None:
    run = after(stages, stages.inputs["reward"], data=fresh)
    metrics = run.run("reward", tmp_path, learning_rate=1e-2, **REFRESH)
    report = json.loads((tmp_path / "artifact" / "refresh.json").read_text())
    rows = list(read_split(stages.inputs["data"] / "pairs.test"))
    job = run.job("reward")
    for name, artifact, metric in (
        ("previous", stages.inputs["reward"], "accuracy_previous"), ("new", tmp_path / "artifact", "accuracy")
    ):  # fmt: skip
        model, tokenizer = load_reward_model(artifact, runtime)
        pairs = encode_pairs(tokenizer, rows, job.generation)
        raw = [score_sequences(model, tokenizer.pad_token_id, side, runtime).double().numpy()
               for side in ([p.chosen for p in pairs], [p.rejected for p in pairs])]  # fmt: skip
        wanted = calibration(raw[0] - raw[1], [str(r["prompt"]) for r in rows],
                                    ScoreScale.read(artifact).temperature, job.seed).document()  # fmt: skip
        assert report[name] == json.loads(json.dumps(wanted)), "at its own temperature"
        assert metrics[f"reward/refresh_{metric}"] == wanted["accuracy"]
    assert metrics["reward/refresh_gain"] == pytest.approx(report["new"]["accuracy"] - report["previous"]["accuracy"])
    assert metrics["reward/refresh_gain_low"] <= metrics["reward/refresh_gain"] <= metrics["reward/refresh_gain_high"]
    assert metrics["reward/refresh_test_pairs"] == 30 == metrics["reward/test_pairs"]
    scale = report["scale"]
    assert scale["then"]["scale"] == ScoreScale.read(stages.inputs["reward"]).scale
    assert scale["new"]["scale"] == metrics["reward/scale"] and scale["new"]["shift"] == metrics["reward/shift"]
    assert scale["ratio"] == scale["new"]["scale"] / scale["previous"]["scale"] == metrics["reward/refresh_scale_ratio"]
    assert scale["previous"] == pytest.approx(scale["then"]), "the same SFT model, the same prompts"


def test_the_share_of_old_pairs_is_exactly_the_one_asked_for(stages: Any, fresh: Path) -> None:
    new, old = (list(read_split(d / "pairs.train")) for d in (fresh, stages.inputs["data"]))
    for share, wanted in ((0, 0), (0.25, 20), (0.5, 60), (0.1, 7), (0.9, 100)):
        drawn = replayed(RefreshConfig(from_run="any", replay=share), 0, new, old)
        assert len(drawn) == wanted, "a share of 0.25 of 80 is 20; 0.9 would be 540, and there are 100"
        assert all(row in old for row in drawn) and len({json.dumps(r, sort_keys=True) for r in drawn}) == wanted
    config = RefreshConfig(from_run="any", replay=0.5)
    assert replayed(config, 0, new, old) == replayed(config, 0, new, old) != replayed(config, 1, new, old)


def test_a_pair_that_is_judged_anew_is_not_replayed_with_its_old_judgement(stages: Any, fresh: Path) -> None:
    new, old = (list(read_split(d / "pairs.train")) for d in (fresh, stages.inputs["data"]))
    anew = flipped(old[:10]) + old[10:15]
    drawn = replayed(RefreshConfig(from_run="any", replay=0.9), 0, new + anew, old)
    assert drawn == [row for row in old if row not in old[:15]]


def test_a_replayed_pair_keeps_its_sources_weight_in_the_run_that_it_comes_from_and_in_later_ones(
    stages: Any, fresh: Path, tmp_path: Path
) -> None:
    first = [row | {"source_weight": 2.5} for row in read_split(stages.inputs["data"] / "pairs.train")]
    data = copied(stages.inputs["data"], tmp_path / "first")
    write_split(data / "pairs.train", first, weighted=True)
    run = after(stages, stages.inputs["reward"], data=fresh, previous_data=data)
    run.run("reward", tmp_path / "second", refresh={"from_run": "any", "replay": 0.5})
    third = {split: read_split(stages.inputs["data"] / f"pairs.{split}") for split in SPLITS}
    third["train"] = [row | {"source_weight": 0.5} for row in (*first[:10], *desk_pairs(9, 50, "Third."))]
    again = after(stages, tmp_path / "second" / "artifact", previous_data=fresh)
    config = RefreshConfig(from_run="any", replay=0.9)
    found = Refresh.begin(again.job("reward"), config, again.inputs, third).splits["train"]
    _, tokenizer = load_reward_model(stages.inputs["reward"], Runtime().resolve())
    weights = [pair.source_weight for pair in encode_pairs(tokenizer, found, again.job("reward").generation)]
    places = {json.dumps([row["prompt"], row["chosen"]]): weight for row, weight in zip(found, weights, strict=True)}
    of_first = [places[key] for row in first[10:] if (key := json.dumps([row["prompt"], row["chosen"]])) in places]
    assert of_first and set(of_first) == {2.5}, "of the first run's pairs that the second one replayed"
    assert set(weights) == {0.5, 1.0, 2.5}, "this run's, also of a pair of both; the second run's; the first run's"
    assert weights.count(0.5) == 60


def test_pairs_of_prompts_that_stood_in_another_split_are_left_out_and_counted(
    stages: Any, fresh: Path, tmp_path: Path
) -> None:
    old = {split: list(read_split(stages.inputs["data"] / f"pairs.{split}")) for split in SPLITS}
    new = {split: list(read_split(fresh / f"pairs.{split}")) for split in SPLITS}

    leaking = {
        "train": [*new["train"], old["test"][0], shouted(old["test"][1]), old["calibration"][0]],
        "calibration": [*new["calibration"], old["train"][0], old["test"][2]],
        "test": [*new["test"], old["train"][1]],
    }
    assert without_leaks(leaking, old) == new
    staying = {split: [*rows, old[split][3]] for split, rows in new.items()}
    assert without_leaks(staying, old) == staying, "a prompt that stays in its split is no leak"
    run = after(stages, stages.inputs["reward"], data=copied(fresh, tmp_path / "leaking", **leaking))
    metrics = run.run("reward", tmp_path, **REFRESH)
    assert metrics["reward/refresh_left_out"] == 6 and metrics["reward/test_pairs"] == 30
    assert metrics["reward/refresh_replayed"] == 20, "a quarter of 80"
    with pytest.raises(UserError, match=r"pairs\.train: each of its 30 rows.*reward\.refresh.*data\.split"):
        without_leaks(new | {"train": old["test"]}, old)


def test_what_a_refresh_left_out_and_what_was_trained_on_before_it_are_known_to_all_later_ones(
    stages: Any, fresh: Path, tmp_path: Path
) -> None:
    """The second run replays nothing, so that it takes over no pair of the first run's training split."""
    first, second = ({s: list(read_split(d / f"pairs.{s}")) for s in SPLITS} for d in (stages.inputs["data"], fresh))
    leaking = copied(
        fresh, tmp_path / "leaking",
        train=[*second["train"], shouted(first["test"][0]), shouted(first["calibration"][0])],
        test=[*second["test"], shouted(first["train"][0])],
    )  # fmt: skip
    run = after(stages, stages.inputs["reward"], data=leaking)
    assert run.run("reward", tmp_path / "2", refresh={"from_run": "any", "replay": 0})["reward/refresh_left_out"] == 3

    rows, earlier = desk_pairs(9, 80, "Later."), leaking
    for number, share, own in ((3, 0.9, rows[:40]), (4, 0, rows[40:])):
        data = copied(
            fresh, tmp_path / f"data-{number}", calibration=own[20:35],
            train=[*own[:20], shouted(first["calibration"][1])], test=[*own[35:], shouted(first["train"][1])],
        )  # fmt: skip
        run = after(stages, tmp_path / str(number - 1) / "artifact", data=data, previous_data=earlier)
        metrics = run.run("reward", tmp_path / str(number), refresh={"from_run": "any", "replay": share})
        assert metrics["reward/refresh_left_out"] == 2 and metrics["reward/test_pairs"] == 5
        earlier = data
    kept = tmp_path / "3" / "artifact" / "previous"
    assert list(read_split(kept / "pairs.train")) == second["train"]
    assert list(read_split(kept / "pairs.test")) == second["test"] + first["test"]


def test_a_pair_is_not_replayed_where_its_prompt_is_compared_on_though_the_first_run_trained_on_it(
    stages: Any, fresh: Path, tmp_path: Path
) -> None:
    old, new = ({s: list(read_split(d / f"pairs.{s}")) for s in SPLITS} for d in (stages.inputs["data"], fresh))
    twice = [shouted(old["test"][0]), shouted(old["calibration"][0])]
    run = after(stages, stages.inputs["reward"],
                previous_data=copied(stages.inputs["data"], tmp_path / "data", train=twice + old["train"]))  # fmt: skip
    config = RefreshConfig(from_run="any", replay=0.9)
    assert list(Refresh.begin(run.job("reward"), config, run.inputs, new).replay) == old["train"]
    leaking = new | {"test": [*new["test"], old["test"][0]]}
    assert Refresh.begin(run.job("reward"), config, run.inputs, leaking).left_out == 1, "it was trained on all the same"


def test_the_rows_of_both_runs_are_read_on_access_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: Any
) -> None:
    """A row is 2 KB of text here; its keys and places are up to 100 bytes."""
    monkeypatch.setattr(compare, "check_previous", lambda *given: None)
    held = {}
    for count in (50, 250):
        inputs = {"sft": tmp_path, "previous_reward": tmp_path / "none", "previous_data": tmp_path / f"old-{count}"}
        for run in ("old", "new"):
            for split in SPLITS:
                write_split(tmp_path / f"{run}-{count}" / f"pairs.{split}", long_pairs(f"{run} {split}", count))
        new = {split: read_split(tmp_path / f"new-{count}" / f"pairs.{split}") for split in SPLITS}
        tracemalloc.start()
        found = Refresh.begin(stages.job("reward"), RefreshConfig(from_run="any", replay=0.5), inputs, new)
        gc.collect()
        held[count] = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(found.replay) == count and len(found.splits["train"]) == 2 * count
    assert held[250] - held[50] < 200 * 6 * 100, held


def long_pairs(named: str, count: int) -> list[dict[str, Any]]:
    known = dict.fromkeys(("category", "margin", "objectives", "soft_label", "votes", "votes_chosen"))
    return [
        known
        | {"prompt": [{"role": "user", "content": f"{named} {i} " * 50}], "chosen": "a" * 700, "rejected": "b" * 600}
        | {"weight": 1.0, "source": "s", "row": i + 1}
        for i in range(count)
    ]


def test_what_people_judged_trains_though_it_was_held_out_and_leaves_the_old_test_pairs(
    stages: Any, fresh: Path, tmp_path: Path
) -> None:
    old = {split: list(read_split(stages.inputs["data"] / f"pairs.{split}")) for split in SPLITS}
    voted = [flipped([shouted(row)])[0] | {"judged_in": "0a1b2c3d"} for row in old["test"][:12]]
    held = [row | {"judged_in": "0a1b2c3d"} for row in desk_pairs(11, 80, "Judged.")[:9]]
    new = {"train": [*old["train"], *voted], "calibration": old["calibration"], "test": [*old["test"][12:], *held]}
    run = after(stages, stages.inputs["reward"])
    found = Refresh.begin(run.job("reward"), RefreshConfig(from_run="any", replay=0.5), run.inputs, new)
    assert found.left_out == 0 and list(found.old["test"]) == old["test"][12:], "the new model is not compared on them"
    assert list(found.splits["train"][:12]) == voted and len(found.replay) == 12, "the earlier pairs are replayed only"
    assert all(row in old["train"] for row in found.replay)
    metrics = after(stages, stages.inputs["reward"], data=copied(fresh, tmp_path / "data", **new)).run(
        "reward", tmp_path, **REFRESH
    )
    assert metrics["reward/judged_pairs"] == 9
    gain = metrics["reward/judged"] - metrics["reward/judged_previous"]
    assert metrics["reward/judged_gain"] == pytest.approx(gain)


@pytest.mark.parametrize(
    "options",
    [{}, {"members": 2, "lora": {"rank": 2}, "learning_rate": 1e-2}],
    ids=["whole", "lora-members"],
)
def test_a_refresh_that_was_interrupted_ends_with_the_same_bytes(
    stages: Any, fresh: Path, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], options: dict[str, Any]
) -> None:
    stages.run("reward", tmp_path / "first", max_pairs=32, **options)
    run = after(stages, tmp_path / "first" / "artifact", data=fresh)
    metrics = run.run("reward", tmp_path / "whole", **options, **REFRESH)
    with pytest.raises(KeyboardInterrupt):
        run.run("reward", tmp_path / "cut", interrupting(4), **options, **REFRESH)
    again = interrupting(-1)
    assert run.run("reward", tmp_path / "cut", again, **options, **REFRESH) == metrics
    assert again.steps[0] == 5
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")
    assert np.isfinite(list(metrics.values())).all()


@pytest.fixture(scope="module")
def adapted(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("adapted")
    stages.run("reward", out, max_pairs=16, lora={"rank": 2, "alpha": 4})
    return out / "artifact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 2}, r"reward\.members of the earlier .* is 1, and 2 in this run\. Set reward\.members as it was"),
        ({"objectives": {"longer": 1}}, r"reward\.objectives of the earlier reward model is null, and \['longer'\]"),
        ({"lora": {"rank": 2}}, r"reward\.lora of the earlier reward model is null"),
    ],
)
def test_a_model_of_another_make_is_refused_with_what_to_do(
    stages: Any, fresh: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    votes = [row | {"objectives": {"longer": 1.0}} for row in list(read_split(fresh / "pairs.train"))]
    run = after(stages, stages.inputs["reward"], data=copied(fresh, tmp_path / "data", train=votes))
    with pytest.raises(UserError, match=message):
        run.run("reward", tmp_path, **options, **REFRESH)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 4, "alpha": 4}, r"reward\.lora\.rank of the earlier reward model is 2, and 4 in this run"),
        ({"rank": 2, "alpha": 4, "targets": ["q_proj"]}, r"reward\.lora\.targets .*, and \['q_proj'\] in this run"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    stages: Any, fresh: Path, adapted: Path, tmp_path: Path, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        after(stages, adapted, data=fresh).run("reward", tmp_path, lora=lora, **REFRESH)


def test_another_sft_model_is_refused_where_it_does_not_fit(
    stages: Any, fresh: Path, adapted: Path, tmp_path: Path
) -> None:
    def run(earlier: Path, sft: str, **options: Any) -> None:
        inputs = {"data": fresh, "sft": tmp_path / sft / "artifact"}
        after(stages, earlier, **inputs).run("reward", tmp_path / "out", max_pairs=16, **options, **REFRESH)

    stages.run("sft", tmp_path / "seed", seed=1)
    stages.run("sft", tmp_path / "wider", scratch={"hidden_size": 24, "layers": 1, "heads": 2})
    stages.run("sft", tmp_path / "words", max_demonstrations=10)
    with pytest.raises(UserError, match=r"adapter of another SFT model.*reward\.lora=null"):
        run(adapted, "seed", lora={"rank": 2, "alpha": 4})
    run(stages.inputs["reward"], "seed")  # a whole model needs no backbone
    with pytest.raises(UserError, match=r"embed_tokens\.weight .* is \(\d+, 16\), and \(\d+, 24\) in.*sft\.scratch"):
        run(stages.inputs["reward"], "wider")
    with pytest.raises(UserError, match=r"refresh: tokenizer of .*data\.demonstrations"):
        run(stages.inputs["reward"], "words")
