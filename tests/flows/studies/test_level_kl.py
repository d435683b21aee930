"""The search for equal KL: how many runs it takes, where it ends, and what it says where a method can't get there."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.reports.run_facts import StageFacts
from flows.studies.level_kl import MOST_RUNS, Band, Search, Trial, calibration_kl

BAND = (2.4, 3.6)


def tried(*trials: Trial, band: Band = BAND, rises: bool = True) -> Search:
    return Search("x", 1.0, band, rises, trials=[*trials])


def ended(search: Search, kl: Callable[[float], float]) -> Search:
    while (value := search.next()) is not None:
        search.trials.append(Trial(value, kl(value)))
    return search


@given(
    power=st.floats(0.5, 2), start=st.floats(0.05, 20), rises=st.booleans(),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=MOST_RUNS, max_size=MOST_RUNS),
)  # fmt: skip
def test_a_power_law_with_noise_lands_in_the_band(power: float, start: float, rises: bool, noise: list[float]) -> None:
    """KL is 3 at strength 1, up to 20 times away from the start, measured with an error of 5 %."""
    errors = iter(noise)
    exponent = power if rises else -power
    search = ended(Search("x", start, BAND, rises), lambda s: 3 * s**exponent * (1 + next(errors)))
    assert BAND[0] <= search.trials[-1].kl <= BAND[1]
    assert search.best() == search.trials[-1]


@given(
    start=st.floats(1e-3, 1e3), noise=st.lists(st.floats(-0.5, 0.5), min_size=MOST_RUNS, max_size=MOST_RUNS),
    low=st.floats(0.01, 10), wide=st.floats(1.05, 3), rises=st.booleans(), level=st.floats(-1, 1),
)  # fmt: skip
def test_every_search_ends_within_four_runs(
    start: float, noise: list[float], low: float, wide: float, rises: bool, level: float
) -> None:
    errors = iter(noise)
    search = Search("x", start, (low, low * wide), rises)
    trials = ended(search, lambda s: level * s / (1 + s) + next(errors)).trials
    assert 1 <= len(trials) <= MOST_RUNS
    assert len({trial.strength for trial in trials}) == len(trials)
    assert all(math.isfinite(trial.strength) and trial.strength > 0 for trial in trials)


def test_between_two_trials_it_takes_the_secant_in_logs() -> None:
    """KL 1 at 1 and 9 at 9; the middle of 2 to 4.5 is 3 in logs, and so is the strength."""
    assert tried(Trial(1, 1), Trial(9, 9), band=(2, 4.5)).next() == 3
    assert tried(Trial(1, 9), Trial(9, 1), band=(2, 4.5), rises=False).next() == 3


def test_a_steep_step_is_approached_from_inside_the_bracket() -> None:
    """The secant would end at the upper trial: the inner 80 % ends before it."""
    search = tried(Trial(1, 2.9), Trial(10, 1e6), band=(3, 3.1))
    assert search.next() == pytest.approx(10**0.1, rel=0.01)


def test_best_of_eight_is_the_limit_and_the_sentence_says_so() -> None:
    """KL of best of n is log n - (n - 1) / n (Stiennon et al. 2020, G.3): 1.2 nats at 8, below the band."""
    config = load_config("tiny", [parse_override("policy.method=best_of_n"), parse_override("policy.n=4")])
    search = ended(Search.of(config, BAND), lambda n: math.log(n) - (n - 1) / n)
    assert [trial.strength for trial in search.trials] == [4, 8]
    assert search.best().strength == 8
    text = search.sentence()
    assert text.startswith("KL 1.2 on calibration prompts, outside the band 2.4 to 3.6")
    assert "policy.n 4 (KL 0.636), 8 (KL 1.2)" in text


def test_a_search_in_the_band_stops_at_once_and_states_its_cost() -> None:
    search = tried(Trial(3, 3.1, "a", 120.0))
    assert search.next() is None
    assert search.sentence() == (
        "KL 3.1 on calibration prompts, inside the band 2.4 to 3.6; the search tried x 3 (KL 3.1) and took 120 s of "
        "training"
    )


def test_a_kl_below_zero_is_as_far_as_zero_and_the_larger_is_best() -> None:
    """The estimate of a KL near 0 may be negative; nothing is ever inside, so four runs are made."""
    assert [trial.strength for trial in ended(tried(), lambda s: -0.03).trials] == [1, 8, 64, 512]
    assert tried(Trial(1, -0.03), Trial(8, -0.01)).best().strength == 8


CHOICES = [("ppo.kl.target=3", "ppo.kl.coefficient"), ("ppo.kl.control=adaptive", "ppo.kl.target")]


@pytest.mark.parametrize(("change", "option"), CHOICES)
def test_the_strength_of_ppo_is_its_target_or_its_fixed_beta(change: str, option: str) -> None:
    """The profile tiny keeps β."""
    config = load_config("tiny", [parse_override(change), parse_override("ppo.updates=100")])
    assert Search.of(config, None).option == option


def evaluated(published: int, *evaluations: dict[str, float]) -> StageFacts:
    about: dict[str, Any] = {"published_update": published, "evaluations": evaluations}
    return cast("StageFacts", SimpleNamespace(document=lambda name: about))


def test_where_kl_left_the_band_the_last_kl_steers() -> None:
    """KTO on the demo, whose band ends at 6.5 nats, with a smaller β in each run: its last KL was 8.42 to 18.2, and the
    policy of update 25 was published each time, at 1.38 to 1.79."""
    early = {"update": 25, "kl": 1.4867, "kl_high": 1.81, "kl_per_token": 0.08, "kl_per_token_high": 0.09}
    last = {"update": 121, "kl": 8.4248, "kl_high": 10.688, "kl_per_token": 0.4, "kl_per_token_high": 0.5}
    demo, free, per_token, in_tokens = (load_config("demo", [parse_override(text)]).ppo.kl for text in (
        "ppo.kl.band=6.5", "ppo.kl.band=null", "ppo.kl={unit: token, target: 0.2, band: 0.45, ceiling: 0.7}",
        "ppo.kl={unit: token, target: 0.2, band: 0.6, ceiling: 0.7}",
    ))  # fmt: skip
    policy = evaluated(25, early, last)
    assert [calibration_kl(policy, kl) for kl in (demo, free, per_token, in_tokens)] == [8.4248, 1.4867, 0.4, 0.08]
    inside = last | {"kl": 5.2, "kl_high": 6.4}
    assert calibration_kl(evaluated(25, early, inside), demo) == 1.4867, "the early one was published as the better"
    above = last | {"kl": 5.2, "kl_high": 6.6}
    assert calibration_kl(evaluated(25, early, above), demo) == 5.2, "the upper end decides what is published"
    assert calibration_kl(evaluated(0), demo) is None
