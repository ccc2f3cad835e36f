"""Requests made from the API's description, good and bad ones: no 5xx, and no answer that the
description does not have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from llmserve.api.description.document import build_document
from llmserve.api.description.routes import ROUTES
from tests.server.harness import serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a thread, as schemathesis' client blocks."""
    started = threading.Event()
    parts: dict[str, Any] = {}

    async def serve() -> None:
        async with serving() as served:
            parts["url"] = served.url
            parts["stop"] = asyncio.Event()
            parts["loop"] = asyncio.get_running_loop()
            started.set()
            await parts["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    yield parts["url"]
    parts["loop"].call_soon_threadsafe(parts["stop"].set)
    thread.join(30)


schema = schemathesis.openapi.from_dict(build_document(ROUTES, has_keys=False))


@schema.parametrize()
@settings(
    max_examples=5,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_answers_are_as_described(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, timeout=30)

    case.validate_response(response, checks=CHECKS)
