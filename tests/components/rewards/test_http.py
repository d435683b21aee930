"""A scorer behind HTTP, on loopback: both shapes, patience, versions, and scores that are kept."""

from pathlib import Path
from typing import Any

import pytest

from components.base.errors import Unreachable, UserError
from components.rewards.config import HttpReward
from components.rewards.http import NO_VERSION, HttpSource
from components.rewards.source import Replies
from components.rewards.stored_scores import StoredScores
from components.rollouts import asking

THREE = Replies([[{"role": "user", "content": "q"}]] * 3, ["a", "bb", "ccc"], [{"label": i} for i in range(3)])


def source(scorer: Any, **options: Any) -> HttpSource:
    return HttpSource(HttpReward(source=f"http:{scorer.url}", **options), lambda prompt: f"<{prompt[-1]['content']}>")


def test_the_published_shape_is_sent_in_batches(scorer: Any) -> None:
    assert source(scorer, batch_size=2).score(THREE) == [1.0, 2.0, 3.0]
    prompts = [[{"role": "user", "content": "q"}]]
    assert scorer.asked == [
        {"prompts": prompts * 2, "responses": ["a", "bb"], "rows": [{"label": 0}, {"label": 1}]},
        {"prompts": prompts, "responses": ["ccc"], "rows": [{"label": 2}]},
    ]


def test_openrlhfs_shape_is_sent_and_read(scorer: Any) -> None:
    scorer.answer = lambda body: (200, {"rewards": [len(each) for each in body["query"]]})
    assert source(scorer, shape="openrlhf").score(THREE) == [4.0, 5.0, 6.0]
    assert scorer.asked == [{"query": ["<q>a", "<q>bb", "<q>ccc"], "prompts": ["<q>"] * 3, "labels": [0, 1, 2]}]


def test_a_scorer_that_is_away_for_60_seconds_is_waited_for(scorer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's; the scorer answers 503 until 60 s have passed on it."""
    clock = [0.0]
    monkeypatch.setattr(asking.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asking.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    scorer.answer = lambda body: (503, {}) if clock[0] < 60 else (200, {"scores": [0.0] * 3})
    assert source(scorer).score(THREE) == [0.0] * 3
    assert 60 <= clock[0] < 80 and len(scorer.asked) == 8
    clock[0] = 0.0
    with pytest.raises(Unreachable, match="could not be reached"):
        source(scorer, patience=30).score(THREE)


def test_patience_is_for_all_requests_of_a_batch_together_and_an_answer_takes_nothing_of_it(
    scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of n requests waited for it anew, which no check of the ranks' time counted."""
    clock, slow = [0.0], [20.0]
    monkeypatch.setattr(asking.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asking.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    tried: dict[str, int] = {}

    def answer(body: Any) -> tuple[int, object]:
        text = body["responses"][0]
        tried[text] = tried.get(text, 0) + 1
        if tried[text] <= 3:  # 1 + 2 + 4 s of waiting
            return 503, {}
        clock[0] += slow[0]
        return 200, {"scores": [0.0]}

    scorer.answer = answer
    assert source(scorer, batch_size=1, patience=21).score(THREE) == [0.0] * 3
    assert clock[0] == 3 * 7 + 3 * 20
    tried.clear()
    with pytest.raises(Unreachable, match="could not be reached for 20 s"):
        source(scorer, batch_size=1, patience=20).score(THREE)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((422, {"detail": "no rows"}), "it refuses .422.*no rows"),
        ((200, {"rewards": [1, 2, 3]}), "with shape tether it must answer"),
        ((200, {"scores": [1, 2]}), "it gives 2 scores for 3 responses"),
        ((200, {"scores": [1, "x", 2]}), "it gives 'x' for response 2 of 3"),
        ((200, {"scores": [1, 2, float("nan")]}), "it gives nan for response 3 of 3"),
        ((200, {"scores": [10**400, 2, 3]}), "it gives 10+ for response 1 of 3"),
        ((200, {"scores": [1, 1e39, 3]}), r"it gives 1e\+39 for response 2 of 3 .*; a score must be a finite number"),
        ((200, {"scores": [1, 2, 3], "version": "2"}), "its version is 2 now, and was 1 when the run began"),
    ],
)
def test_a_wrong_answer_is_named(scorer: Any, answer: tuple[int, object], said: str) -> None:
    scorer.answer = lambda body: answer
    with pytest.raises(UserError, match=said):
        source(scorer, told="1").score(THREE)
    if "version" in said:
        with pytest.raises(UserError, match="its version is 2 now, and was 7 when"):
            source(scorer, version="7").score(THREE)


def test_its_version_is_asked_for_and_none_is_told_apart(scorer: Any) -> None:
    assert source(scorer).version() == NO_VERSION
    scorer.version = "7"
    assert source(scorer).version() == "7"


def test_a_response_that_was_scored_once_keeps_its_score_also_after_a_kill(scorer: Any, tmp_path: Path) -> None:
    path = tmp_path / "scores" / "own.jsonl"
    first = StoredScores(source(scorer), path)
    assert first.score(Replies(*(list(each)[:2] for each in THREE))) == [1.0, 2.0]
    first.close()
    with path.open("ab") as file:
        file.write(b'["cut off')  # killed in the midst of a line
    scorer.answer = lambda body: (200, {"scores": [9.0] * len(body["responses"])})
    again = StoredScores(source(scorer), path)
    assert again.score(THREE) == [1.0, 2.0, 9.0]
    assert [len(body["responses"]) for body in scorer.asked] == [2, 1]
    other = Replies(THREE.prompts, THREE.responses, [{"label": 5}] * 3)
    assert again.score(other) == [9.0] * 3, "another row is another question"
    again.close()
