"""A server per test; calls that block the event loop from our code fail the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from tests.server.harness import Served, serving


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    with blockbuster_ctx("llmserve") as detector:
        yield detector


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as server:
        yield server
