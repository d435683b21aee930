"""The images, built once for all tests that run them."""

from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine, build_images, engine


@pytest.fixture(scope="session")
def containers() -> Iterator[Engine]:
    """An engine that has the images."""
    with engine() as made:
        build_images(made)
        yield made
