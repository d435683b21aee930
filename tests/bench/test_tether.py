"""What the table of the tether calls held."""

import math

import pytest

from tests.bench.tether import held, table


def history(late_kl, step=0.0, early_kl=3.0):
    """30 updates: 20 at `early_kl`, then `late_kl` in turn; log β steps by ± 0.02 around `step`."""
    kl = [early_kl] * 20 + [late_kl[i % len(late_kl)] for i in range(10)]
    beta = [0.1 * math.exp(step * i + 0.01 * (-1) ** i) for i in range(30)]
    return [{"ppo/kl": k, "ppo/beta": b} for k, b in zip(kl, beta, strict=True)]


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        (history([2.7, 3.3]), []),
        (history([2.5, 2.4]), ["mean KL"]),
        (history([3.5, 3.6]), ["mean KL"]),
        (history([4.6, 2.6, 2.6]), ["a late batch"]),
        (history([2.7, 3.3], step=0.06), ["β"]),
        (history([2.7, 3.3], early_kl=6.1), ["an earlier batch"]),
    ],
)
def test_a_tether_that_does_not_hold_is_named(rows, faults):
    assert held(rows, 3.0).faults == faults


def test_a_policy_below_sft_does_not_count_as_held():
    run = {"seed": 4, "target": 3.0, "history": history([2.7, 3.3])}
    metrics = {"ppo/reward_gain": 1.2, "ppo/gold": 0.3, "ppo/sft_gold": -0.8}
    assert "1 of 1" in table([run | {"metrics": metrics}])
    worse = table([run | {"metrics": metrics | {"ppo/gold": -0.9}}])
    assert "gold is not above SFT's" in worse and "0 of 1" in worse
