"""Rates where nobody names one: what the table says, falling with the size, ten times as much for an adapter."""

import itertools

import pytest

from components.training.optim import ENDS, OptimizerConfig, build_optimizer, default_rate, learning_rate_at


@pytest.mark.parametrize(
    ("trained", "rates"),  # by hand: small (large / small)^(log10(n / 1e6) / 3), to two digits
    [
        ("sft", [1e-3, 1e-3, 1.6e-4, 6.2e-5, 2e-5, 2e-5]),
        ("reward", [5e-4, 5e-4, 8.1e-5, 3.1e-5, 1e-5, 1e-5]),
        ("ppo", [3e-4, 3e-4, 2.1e-5, 5.2e-6, 1e-6, 1e-6]),
        ("ppo.critic", [1e-3, 1e-3, 1.2e-4, 3.8e-5, 1e-5, 1e-5]),
    ],
)
def test_a_rate_falls_as_a_power_of_the_size_between_a_million_and_a_billion(trained, rates) -> None:
    sizes = (3_000, 1_000_000, 25_000_000, 134_515_008, 1_000_000_000, 70_000_000_000)
    assert [default_rate(trained, size) for size in sizes] == rates
    adapters = [default_rate(trained, size, lora=True) for size in sizes]
    assert adapters == pytest.approx([10 * rate for rate in rates], rel=0.05)


def test_no_size_gives_a_rate_that_an_option_refuses() -> None:
    for trained, lora in itertools.product(ENDS, (False, True)):
        falling = [default_rate(trained, 10**power, lora) for power in range(1, 14)]
        assert falling == sorted(falling, reverse=True)
        assert all(OptimizerConfig(learning_rate=rate).peak == rate for rate in falling)


def test_a_rate_that_was_not_chosen_trains_nothing() -> None:
    import torch

    for use in (lambda c: learning_rate_at(0, 10, c), lambda c: build_optimizer(torch.nn.Linear(2, 2), c)):
        with pytest.raises(ValueError, match="learning_rate is null"):
            use(OptimizerConfig())
