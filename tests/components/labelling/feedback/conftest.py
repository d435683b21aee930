"""An endpoint for each test."""

from collections.abc import Iterator

import pytest

from tests.components.rewards.scorer import Scorer


@pytest.fixture
def endpoint() -> Iterator[Scorer]:
    with Scorer() as made:
        made.url = made.url.replace("/score", "/v1")
        yield made
