"""A Prefect server that looks at its automations every half second."""

from collections.abc import Iterator

import pytest

from tests.servers import PrefectServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    folder = tmp_path_factory.mktemp("prefect")
    server = PrefectServer(folder, PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY="PT0.5S").start()
    try:
        yield server
    finally:
        server.stop()
