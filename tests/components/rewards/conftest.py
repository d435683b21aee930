"""A scorer for each test."""

from collections.abc import Iterator

import pytest

from tests.components.rewards.scorer import Scorer


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    with Scorer() as made:
        yield made
