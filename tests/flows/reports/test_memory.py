"""The options that `tether plan` advises save what they say, and fit where they say so."""

from collections.abc import Sequence

import pytest

from components.planning.shape import KNOWN
from flows.config.profiles import parse_override
from flows.reports.memory import MemoryPlan


def plan(shape: str, gpus: int, memory: int, options: Sequence[str] = ()) -> MemoryPlan:
    return MemoryPlan.of("gpu", list(map(parse_override, options)), KNOWN[shape], gpus, memory)


@pytest.mark.parametrize(("shape", "gpus", "gigabytes"), [("llama-3.2-1b", 1, 24), ("llama-3.1-8b", 8, 80)])
def test_advice_saves_what_it_says(shape: str, gpus: int, gigabytes: int) -> None:
    memory = gigabytes * 10**9
    stages = plan(shape, gpus, memory).stages
    assert any(stage.fits is False and stage.advice for stage in stages)
    for stage in stages:
        assert stage.fits == (stage.worst.bytes <= memory) and bool(stage.advice) <= (stage.fits is False)
        for advice in stage.advice:
            assert advice.bytes < stage.worst.bytes and advice.fits == (advice.bytes <= memory)
            changed = {again.stage: again for again in plan(shape, gpus, memory, advice.options).stages}
            assert changed[stage.stage].worst.bytes == advice.bytes, advice.options


def test_where_no_single_option_is_enough_several_are_advised() -> None:
    *alone, together = plan("llama-3.1-8b", 1, 50 * 10**9).stages[-1].advice
    assert len(alone) > 3 and not any(advice.fits for advice in alone)
    assert together.fits and len(together.options) > len(alone[0].options)
