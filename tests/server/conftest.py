"""A server per test; calls that block the event loop from our code fail the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Served]:
    """One server for a module of many small cases; needs `loop_scope="module"`."""
    async with serving() as server:
        yield server
