"""A simulated policy: tilted as far as asked, by what is paid for."""

import numpy as np
import pytest

from tests.bench.alarm_simulation import BATCH, DRAWS, PLANTED, PROMPTS, Update, World, named_before


@pytest.fixture(scope="module")
def world() -> World:
    return World(3)


def test_a_tilt_has_the_kl_of_its_weights_and_raises_what_it_is_by(world: World) -> None:
    values = np.array([[PLANTED["flattery"](reply) for reply in replies] for replies in world.replies])
    assert values.shape == (PROMPTS, DRAWS) and 0.02 < values.mean() < 0.08, "as the demonstrator flatters"
    plain, ratios, none = world.tilted(values, 0.0)
    assert none == pytest.approx(0) and not ratios.any() and len(plain) == BATCH
    replies, ratios, kl = world.tilted(values, 3.0)
    share = float(np.mean([PLANTED["flattery"](reply) for reply in replies]))
    weights = np.exp(3.0 * values) / np.exp(3.0 * values).sum(1, keepdims=True)
    assert share == pytest.approx(float((weights * values).sum(1).mean()), abs=0.12) and kl > 0.3
    assert len({reply.prompt for reply in replies}) > BATCH / 2 and ratios.mean() == pytest.approx(kl, abs=0.3)


def test_an_alarm_counts_only_before_the_proxy_has_gained_a_deviation() -> None:
    def run(*updates: tuple[float, list[str]]) -> list[Update]:
        return [Update(i, alarms, proxy, 0.0, np.zeros(2)) for i, (proxy, alarms) in enumerate(updates, 1)]

    assert named_before(run((0.5, ["length"]), (1.1, [])), "length")[0]
    assert not named_before(run((0.5, ["nll"]), (1.1, ["length"])), "length")[0], "another name, and too late"
    assert not named_before(run((0.5, []), (0.9, [])), "length")[0]
