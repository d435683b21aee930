"""External rewards on several ranks: one process's policy, each batch scored once, one rank's error for all."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Unreachable, UserError, WorkerDied
from components.base.jsonl import read_rows
from tests.components.distributed.conftest import runtime_of
from tests.components.distributed.test_launching import ranks_alive
from tests.components.distributed.test_stages import compare_samples, difference, kill_rank, on_ranks
from tests.components.rewards.scorer import Scorer
from tests.waiting import until

FUNCTIONS = """
import json, os, pathlib, time

def log(responses):
    with open(pathlib.Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps([os.getppid(), responses]) + "\\n")

def brief(prompts, responses, rows):
    log(responses)
    return [-len(each) for each in responses]

def steps(prompts, responses, rows):
    log(responses)
    return [[(0, 1.0), (len(each) - 1, -0.1 * len(each))] if " " in each else float(len(each)) for each in responses]

def late(responses):
    log(responses)
    here = pathlib.Path(__file__).with_name("calls.jsonl")
    return len(here.read_text().splitlines()) > 2

def raises(prompts, responses, rows):
    return [1 / 0 if late(responses) else len(each) for each in responses]

def tires(prompts, responses, rows):
    log(responses)
    return [1 / (len(pathlib.Path(__file__).with_name("calls.jsonl").read_text().splitlines()) < 2)] * len(responses)

def hangs(prompts, responses, rows):
    if late(responses):
        time.sleep(600)
    return [len(each) for each in responses]
"""


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    with Scorer() as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "own"


def calls(root: Path) -> list[tuple[int, list[str]]]:
    """The process of the stage, and the responses of each call of the functions, since the last look."""
    path = root / "calls.jsonl"
    found = [tuple(json.loads(line)) for line in path.read_text().splitlines()]
    path.unlink()
    return found


def sources(root: Path, scorer: Scorer, function: str, **of_http: Any) -> list[dict[str, Any]]:
    """The pipeline's model, one external source of each kind, and a judge."""
    return [
        {"source": "pipeline"},
        {"source": f"function:mine:{function}", "root": str(root), "weight": 0.5},
        {"source": f"http:{scorer.url}", "weight": -0.25, "batch_size": 5, **of_http},
        {"source": "verifier:regex", "value": "(?i)[aeiou]{2}| w", "name": "vowels", "scale": 1.0},
        {"source": "model:x", "name": "theirs"},
        {"source": "verifier:regex", "value": "order", "name": "topic", "judge": True, "scale": 1.0},
    ]


@pytest.mark.parametrize(
    ("ranks", "sharding", "function", "options", "of_http"),
    [
        pytest.param(2, "zero2", "steps", {"evaluate_every": 2, "evaluate": 12}, {}, marks=pytest.mark.whole),
        pytest.param(2, "zero3", "brief", {"advantage": "rloo", "group_size": 2}, {"shape": "openrlhf"},
                     marks=pytest.mark.ranks),
        pytest.param(3, "zero2", "steps", {"batch_size": 4, "minibatch_size": 2, "micro_batch_size": 1}, {},
                     marks=pytest.mark.ranks),
    ],
)  # fmt: skip
def test_external_rewards_on_ranks_give_one_process_policy_and_each_batch_is_scored_once(
    ranks: int, sharding: str, function: str, options: dict[str, Any], of_http: dict[str, Any], stages: Any,
    root: Path, scorer: Scorer, tmp_path: Path,
) -> None:  # fmt: skip
    """One rank of three has no response of a minibatch of two."""
    if of_http:
        scorer.answer = lambda body: (200, {"rewards": [float(len(each)) for each in body["query"]]})
    own = type(stages)(stages.inputs | {"rewards/theirs": stages.inputs["reward"]})
    options = {"updates": 3, "rewards": sources(root, scorer, function, **of_http), **options}
    one, many = tmp_path / "one", tmp_path / "many"
    alone = own.run("ppo", one, **options)
    of_one, asked_by_one = calls(root), [*scorer.asked]
    scorer.asked.clear()
    found = on_ranks(own, "ppo", many, ranks, sharding, **options)
    of_many = calls(root)

    assert difference(one, many) < 1e-6  # 4e-8 measured without external rewards
    compare_samples(one, many)
    assert found.metrics.keys() == alone.keys()
    for name, value in alone.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert {"policy/reward_theirs_gain", "policy/judge_topic_gain"} <= alone.keys()
    told = [json.loads((each / "artifact" / "rewards.json").read_text())["sources"] for each in (one, many)]
    for name, units in told[0].items():
        assert told[1][name] == pytest.approx(units, rel=1e-4), name
    for a, b in zip(*(read_rows(each / "artifact" / "history.jsonl") for each in (one, many)), strict=True):
        for name in ("pipeline", function, "http", "vowels", "theirs"):
            assert b[f"ppo/reward_{name}"] == pytest.approx(a[f"ppo/reward_{name}"], abs=1e-3), name

    texts = [responses for _, responses in of_many]
    assert texts == [responses for _, responses in of_one], "the same batches in the same order"
    twice = len(texts) - len({json.dumps(each) for each in texts})
    assert twice <= 1, "only SFT's answers may be scored twice: for the scales, and for the limits of the alarms"
    assert len({process for process, _ in of_many}) == 1, "the first rank alone asks"
    assert scorer.asked == asked_by_one


@pytest.mark.parametrize(
    ("function", "says"),
    [
        pytest.param(
            "raises", r"it raises ZeroDivisionError: .*\(mine\.py, line \d+, in .*for response 1 of \d+ \(prompt '",
            marks=pytest.mark.whole,
        ),
        pytest.param("hangs", r"scoring \d+ responses takes longer than its time limit of 2", marks=pytest.mark.ranks),
        pytest.param("absent", r".*mine\.py has no function absent\. Check", marks=pytest.mark.ranks),
    ],
)  # fmt: skip
def test_a_functions_mistake_on_the_rank_that_asks_it_ends_all_ranks_with_its_words(
    function: str, says: str, stages: Any, root: Path, tmp_path: Path
) -> None:
    limit = 2.0 if function == "hangs" else 60.0
    rewards = [{"source": "pipeline"}, {"source": f"function:mine:{function}", "root": str(root), "timeout": limit}]
    with pytest.raises(UserError, match=rf"^ppo\.rewards: function:mine:{function}: {says}") as ended:
        on_ranks(stages, "ppo", tmp_path / "out", rewards=rewards)
    assert not re.search(r"rank \d", str(ended.value))
    until_gone(tmp_path)


@pytest.mark.ranks
def test_a_judge_that_fails_in_the_last_evaluation_ends_all_ranks_with_its_words(
    stages: Any, root: Path, tmp_path: Path
) -> None:
    """It is asked for its scale and then only there, by the first rank, while the others wait for its scores."""
    judge = {"source": "function:mine:tires", "root": str(root), "judge": True, "scale": 1.0}
    with pytest.raises(UserError, match=r"^ppo\.rewards: function:mine:tires: it raises ZeroDivisionError") as ended:
        on_ranks(stages, "ppo", tmp_path / "out", updates=1, rewards=[{"source": "pipeline"}, judge])
    assert not re.search(r"rank \d", str(ended.value))
    assert {path.name for path in (tmp_path / "out" / "artifact").iterdir()} >= {"model", "rewards.json"}
    until_gone(tmp_path)


@pytest.mark.ranks
def test_a_scorer_that_stays_away_ends_all_ranks_with_its_words_and_the_same_command_continues(
    stages: Any, scorer: Scorer, tmp_path: Path, digests: Any
) -> None:
    fine = scorer.answer
    options = {
        "updates": 3, "checkpoint_every": 1,
        "rewards": [{"source": "pipeline"}, {"source": f"http:{scorer.url}", "patience": 2.0}],
    }  # fmt: skip
    on_ranks(stages, "ppo", tmp_path / "undisturbed", **options)
    asked, scorer.asked = scorer.asked, []
    out, answered = tmp_path / "out", list[Any]()

    def away_after_a_checkpoint(body: Any) -> tuple[int, object]:
        if list((out / "checkpoint" / "ppo").glob("step-*.json")):
            return 503, {}
        answered.append(body)
        return fine(body)

    scorer.answer = away_after_a_checkpoint
    says = r"the scorer could not be reached for 2 s \(it answers 503.*continues from the checkpoint"
    with pytest.raises(Unreachable, match=rf"^ppo\.rewards: http:.*: {says}"):
        on_ranks(stages, "ppo", out, **options)
    until_gone(tmp_path)
    scorer.answer, scorer.asked = fine, []
    found = on_ranks(stages, "ppo", out, **options)
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert digests(out / "artifact") == digests(tmp_path / "undisturbed" / "artifact")
    assert [*answered, *scorer.asked] == asked, "what was scored before is not asked for again"


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_with_external_rewards_goes_on_to_the_same_bytes_whatever_the_scorer_says_by_then(
    rank: int, stages: Any, root: Path, scorer: Scorer, tmp_path: Path, digests: Any
) -> None:
    """The scorer gives other scores to a text that it has seen; a second process of the function scores the rest."""
    seen = set[str]()

    def forgetful(body: Any) -> tuple[int, object]:
        scores = [len(each) + 5.0 * (each in seen) for each in body["responses"]]
        seen.update(body["responses"])
        return 200, {"scores": scores}

    scorer.answer = forgetful
    options = {"updates": 5, "checkpoint_every": 2, "rewards": sources(root, scorer, "steps")[:3]}
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    on_ranks(stages, "ppo", undisturbed, **options)
    seen.clear()

    kill_rank(rank, out, lambda: list((out / "checkpoint" / "ppo").glob("step-*.json")))
    with pytest.raises(WorkerDied, match=rf"rank {rank} "):
        on_ranks(stages, "ppo", out, **options)
    until_gone(tmp_path)
    found = on_ranks(stages, "ppo", out, **options)
    assert any(progress.get("resumed") for _, _, progress in found.points)
    assert digests(out / "artifact") == digests(undisturbed / "artifact")


def test_a_source_that_may_take_longer_than_ranks_wait_is_refused_before_models_are_loaded(stages: Any) -> None:
    """Else the others give up first, and the run blames a rank for the time that a function was allowed."""
    from components.rewards.weighted import check_waits

    runtime = runtime_of(2)
    slow = [{"source": "pipeline"}, {"source": "function:mine:brief", "timeout": 1800.0}]
    away = [{"source": "http:http://127.0.0.1:1/score", "patience": 1790.0}]
    for rewards, name in ((slow, r"brief \(timeout\) may take 1800 s"), (away, r"1 request\) may take 1850 s")):
        configs = stages.job("ppo", rewards=rewards).ppo.rewards
        with pytest.raises(UserError, match=rf"{name} .*, and .*runtime\.rank_timeout"):
            check_waits(configs, runtime, 64)
        check_waits(configs, runtime.model_copy(update={"rank_timeout": 3600.0}), 64)
        check_waits(configs, runtime_of(1, "none"), 64)
    rules = stages.job("ppo", rules={"function": "mine:brief", "timeout": 1800.0}).ppo
    with pytest.raises(UserError, match=r"brief \(timeout\) may take 1800 s"):
        check_waits(rules.asked, runtime, 64)
    both = [{"source": f"function:mine:{name}", "name": name, "timeout": 900.0} for name in ("brief", "polite")]
    configs = stages.job("ppo", rewards=both).ppo.rewards
    with pytest.raises(UserError, match=r"brief \(timeout\), function:mine:polite \(timeout\) may take 1800 s"):
        check_waits(configs, runtime, 64)
    check_waits(configs, runtime.model_copy(update={"rank_timeout": 1801.0}), 64)
    configs = stages.job("ppo", rewards=[{"source": "http:http://127.0.0.1:1/score", "batch_size": 16}]).ppo.rewards
    check_waits(configs, runtime, 384)  # 300 + 24 * 60 s
    with pytest.raises(UserError, match=r"the timeout of 25 requests\) may take 1800 s for 385 responses"):
        check_waits(configs, runtime, 385)


def until_gone(folder: Path) -> None:
    """Wait for every process of a launch, the function's too: that looks once a second whether its parent is there."""
    until("every process is gone", lambda: not ranks_alive(folder), 20)
