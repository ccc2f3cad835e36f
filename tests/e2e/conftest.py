"""One server process on the demo model for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server_process import ServerProcess, running_server


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    with running_server("--max-model-len", "2048", "--allowed-origins", '["*"]') as server:
        yield server
