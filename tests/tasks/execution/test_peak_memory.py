"""The peak of a process's memory, of which a stage reports its own part."""

import numpy as np

from components.models.runtime import peak_memory_gb
from tasks.execution.computing import _reset_peak_memory


def test_the_peak_of_an_earlier_stage_is_not_the_next_ones() -> None:
    earlier = np.ones(100_000_000)
    assert peak_memory_gb("cpu") > earlier.nbytes / 1e9 == 0.8
    before = peak_memory_gb("cpu")
    del earlier
    _reset_peak_memory()
    assert peak_memory_gb("cpu") < before - 0.5
