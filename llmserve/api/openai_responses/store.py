"""Responses that clients may come back to: those that run, and the latest of those that ended.

Lives in memory, on the event loop. Bounded in number and in bytes; what was not used for longest
goes first. A response that continues another one needs it, so a use of the former is also a use
of the latter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from llmserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that ended. `response` and both lists of items are JSON."""

    response: bytes
    input_items: bytes
    output_items: bytes
    previous_id: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.output_items)


@dataclass(frozen=True, slots=True)
class RunningResponse:
    """A response that has not ended."""

    snapshot: Callable[[], dict[str, Any]]
    cancel: Callable[[], dict[str, Any]]  # returns the response as it stands then


class ResponseStore:
    """Invariants: at most `max_count` ended responses of `max_bytes` together."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.running: dict[str, RunningResponse] = {}
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_enabled(self) -> bool:
        return self._max_count > 0

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response unless it alone is over the limit."""
        if not self.is_enabled or stored.num_bytes > self._max_bytes:
            return
        self._stored[response_id] = stored
        self._num_bytes += stored.num_bytes
        self._use(response_id)
        while len(self._stored) > self._max_count or self._num_bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> StoredResponse:
        """Raises RequestError (404)."""
        stored = self._stored.get(response_id)
        if stored is None:
            raise not_found(response_id, self.is_enabled)
        self._use(response_id)
        return stored

    def delete(self, response_id: str) -> None:
        """Raises RequestError (404)."""
        self.get(response_id)
        self._num_bytes -= self._stored.pop(response_id).num_bytes

    def history(self, response_id: str | None) -> list[bytes]:
        """The items of a conversation that ends with this response, oldest first, as JSON lists.

        Raises RequestError if this response or one that it continues is not stored.
        """
        lists: list[bytes] = []
        while response_id is not None:
            stored = self._stored.get(response_id)
            if stored is None:
                raise not_found(response_id, self.is_enabled, param="previous_response_id")
            lists += (stored.output_items, stored.input_items)
            self._stored.move_to_end(response_id)
            response_id = stored.previous_id
        lists.reverse()
        return lists

    def _use(self, response_id: str) -> None:
        """Makes it the newest but for those that it continues."""
        current: str | None = response_id
        while current is not None and current in self._stored:
            self._stored.move_to_end(current)
            current = self._stored[current].previous_id


def not_found(response_id: str, is_enabled: bool, *, param: str = "id") -> RequestError:
    reason = "it was never stored, was deleted, or had to make room for newer ones"
    if not is_enabled:
        reason = "this server stores none (--response-store-size is 0)"
    return RequestError(
        f"there is no response {response_id[:100]!r} here: {reason}", param=param, status=404
    )


STORE: web.AppKey[ResponseStore] = web.AppKey("response_store", ResponseStore)
