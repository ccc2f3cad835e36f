"""Who comes first: the order of waiting sequences, and who gives way when blocks run out.

One total order decides both. The first sequence in it is never preempted for another, and fits
alone, so it advances in every step; therefore every sequence ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from llmserve.core import Request

Key = Callable[[Request], tuple[int, int]]


def fcfs_key(request: Request) -> tuple[int, int]:
    """First come, first served."""
    return (0, request.arrival_index)


def priority_key(request: Request) -> tuple[int, int]:
    """Lower priority value first, then first come, first served."""
    return (request.priority, request.arrival_index)


KEYS: dict[str, Key] = {"fcfs": fcfs_key, "priority": priority_key}


class RequestQueue:
    """Sequences in the order of a key. A preempted one thus returns to the place it came from:
    under fcfs, the head."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """ValueError if it is not here."""
        self._requests.remove(request)
