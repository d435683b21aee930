"""Options of PPO that could not work are refused before anything runs."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from components.base.settings import keyed_values
from components.models.config import GenerationConfig
from components.ppo.config import KLConfig, PpoConfig


def test_an_adaptive_tether_that_cannot_move_tenfold_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValidationError, match=r"over 20 updates .* factor of 2\.7 only.* lower kl\.horizon \(now 4 batch"
    ):
        PpoConfig(updates=20, kl=KLConfig(control="adaptive", horizon=4))
    assert PpoConfig(updates=20, kl=KLConfig(control="adaptive", horizon=1)).kl.reach(20) == pytest.approx(1.2**20)
    assert PpoConfig(updates=1, kl=KLConfig(control="fixed")).updates == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_range": -0.2}, "clip_range"),
        ({"clip_range": 1.0}, "clip_range"),
        ({"gae_lambda": 1.1}, "gae_lambda"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"batch_size": 100, "minibatch_size": 64}, r"batch_size \(100\) must be a multiple of minibatch_size \(64\)"),
        (
            {"minibatch_size": 64, "micro_batch_size": 48},
            r"minibatch_size \(64\) must be a multiple of micro_batch_size",
        ),
        ({"evaluate": 1}, "evaluate"),
        ({"clip": 0.2}, "Extra inputs"),
        ({"kl": {"control": "adaptive", "coefficient": 0}}, "starts at 0"),
        ({"kl": {"control": "adaptive", "horizon": 0.2}}, r"(?s)kl\.horizon.*greater than 0\.2"),
        ({"kl": {"control": "loose"}}, "control"),
        ({"kl": {"coefficient": -1}}, "coefficient"),
        ({"critic": {"kind": "none"}}, "critic"),
        ({"score": {"clip": 0}}, "clip"),
        ({"advantage": "grpo"}, r"advantage=grpo compares responses .* set group_size"),
        ({"advantage": "rloo", "group_size": 3}, r"batch_size \(128\) must be a multiple of group_size \(3\)"),
        ({"advantage": "sequence", "discount": 0.9}, "advantage=sequence has no discount"),
        *(
            (
                {"advantage": name, "group_size": 2, "gae_lambda": 1},
                rf"gae_lambda \(1\) is for .*={re.escape(name)} ignores it",
            )
            for name in ("sequence", "rloo", "grpo", "reinforce++")
        ),
        ({"kl": {"control": "adaptive", "refresh_every": 2}}, "adaptive coefficient controls KL to SFT"),
        ({"best_of": 1}, "best_of"),
        ({"dual_clip": 1}, r"(?s)dual_clip.*greater than 1"),
        ({"advantage": "rloo", "group_size": 2, "critic": {"warmup": 1}}, "critic.warmup needs a critic, and adv"),
        ({"updates": 60, "critic": {"warmup": 60}}, r"critic\.warmup \(60\) leaves none of the 60 updates"),
        ({"score": {"missing_eos_penalty": 2}}, r"missing_eos_penalty \(2\) .* only with missing_eos=subtract"),
        ({"aggregation": "mean"}, "aggregation"),
        ({"ema": 1}, "ema"),
        ({"monitors": {"responses": None, "stop_on": ["length"]}}, r"stop_on names alarms.*set monitors\.responses"),
        ({"evaluate_temperature": -0.1}, "evaluate_temperature"),
    ],
)
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PpoConfig.model_validate(options)


def test_a_long_run_does_not_overflow_the_reach() -> None:
    assert KLConfig().reach(10**7) == float("inf")


def test_unless_asked_the_objective_is_score_and_kl_alone_of_samples_of_the_policy_itself() -> None:
    """docs/decisions.md, "Usual advice": each of these has a reason there."""
    config = PpoConfig()
    assert (config.entropy_coefficient, config.discount, config.epochs, config.critic.kind) == (0, 1, 2, "separate")
    assert GenerationConfig().temperature == 1


def test_what_stops_a_run_or_chooses_its_checkpoint_is_in_the_key_and_how_often_it_is_saved_is_not() -> None:
    """Else a stored policy of a run that an alarm did not stop would be taken for one that it would have stopped."""
    plain = keyed_values(PpoConfig())
    options: list[dict[str, Any]] = [
        {"monitors": {"stop_on": ["length"]}}, {"stop_early": False}, {"watch": {"patience": 3}},
        {"kl": {"band": 9.0}}, {"watch": {"prompts": 9}}, {"evaluate_every": 3}, {"ema": 0.5},
    ]  # fmt: skip
    assert all(keyed_values(PpoConfig(**each)) != plain for each in options)
    assert keyed_values(PpoConfig(checkpoint_every=3, checkpoint_minutes=None)) == plain
