"""What one rendering of a template may use: CPU time, bytes in total, and bytes of one value.

A value's size counts what it shares with itself each time, as printing and comparing it would: a
list that holds one list twice is twice as large. Templates cannot change containers, so each is
measured once per rendering.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from itertools import islice
from typing import Any

MAX_SECONDS = 5.0  # of CPU time
MAX_BYTES = 1 << 30  # of all strings and lists that a rendering makes
MAX_VALUE_BYTES = 1 << 29  # of one of them
NODE_BYTES = 64  # of an entry of a list or dict, roughly

_SHARED = (list, tuple, set, frozenset)
_VIEWS = (KeysView, ValuesView, ItemsView)
_MEASURED_AT_ONCE = 4096  # entries of a container between two looks at the clock

_shared = threading.local()  # its `deadline`: of all that this thread renders at present


class TemplateLimitError(Exception):
    """A rendering took too long or too much memory."""


class TemplateTimeError(TemplateLimitError):
    """A rendering took more time than it was given."""


@contextlib.contextmanager
def shared_limit() -> Iterator[None]:
    """All that this thread compiles and renders in the block together gets MAX_SECONDS."""
    _shared.deadline = time.thread_time() + MAX_SECONDS
    try:
        yield
    finally:
        del _shared.deadline


class Budget(threading.local):
    """What the rendering on this thread may still use."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._sizes: dict[int, tuple[object, int]] = {}  # by id; the object is kept alive with it
        self._max_seconds = 0.0
        self._cpu_deadline = 0.0
        self._wall_deadline = 0.0  # before it the CPU deadline cannot have passed

    def start(self, max_seconds: float | None = None) -> None:
        """Begins a rendering; `max_seconds` defaults to the limit."""
        self._max_seconds = MAX_SECONDS if max_seconds is None else max_seconds
        now = time.thread_time()
        self._cpu_deadline = now + self._max_seconds
        with contextlib.suppress(AttributeError):
            self._cpu_deadline = min(self._cpu_deadline, _shared.deadline)
        self._wall_deadline = time.monotonic() + self._cpu_deadline - now
        self._num_bytes = MAX_BYTES
        self._sizes.clear()

    def end(self) -> None:
        """Lets go of the values of the rendering."""
        self._sizes.clear()

    def tick(self) -> None:
        """Raises TemplateTimeError if the time is over."""
        now = time.monotonic()
        if now <= self._wall_deadline:
            return
        left = self._cpu_deadline - time.thread_time()
        if left <= 0:
            raise TemplateTimeError(f"it took more than {self._max_seconds:g} s")
        self._wall_deadline = now + left

    def charge(self, num_bytes: int) -> None:
        """For a value of this size that is about to be made, or for an operation on one."""
        self._num_bytes -= num_bytes
        if self._num_bytes < 0 or num_bytes > MAX_VALUE_BYTES:
            raise TemplateLimitError(f"it made more than {MAX_BYTES >> 20} MiB of text")
        self.tick()

    def check_size(self, num_bytes: int) -> None:
        """Raises TemplateLimitError if a value of this size is too large."""
        if num_bytes > MAX_VALUE_BYTES:
            raise TemplateLimitError(f"it made a value of more than {MAX_VALUE_BYTES >> 20} MiB")

    def measure(self, value: Any) -> int:
        """The size of a value, at least that of its text. Amortised O(1) for containers."""
        if isinstance(value, str | bytes):
            return sys.getsizeof(value)
        if isinstance(value, dict):
            parts: Any = (value, value.values())
        elif isinstance(value, _SHARED):
            parts = (value,)
        elif isinstance(value, _VIEWS):
            return self._measure_all(value)
        elif isinstance(value, int):
            return NODE_BYTES + value.bit_length() // 3
        else:
            return NODE_BYTES
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = sum(map(self._measure_all, parts))
        self.remember(value, size)
        return size

    def remember(self, value: object, size: int) -> None:
        """Spares measuring a container whose size is known. Raises TemplateLimitError."""
        self.check_size(size)
        self._sizes[id(value)] = (value, size)

    def _measure_all(self, values: Any) -> int:
        size = NODE_BYTES * (1 + len(values))
        if len(values) <= _MEASURED_AT_ONCE:
            self.tick()
            return size + sum(map(self.measure, values))
        rest = iter(values)
        while part := tuple(islice(rest, _MEASURED_AT_ONCE)):
            self.tick()
            size += sum(map(self.measure, part))
        return size


def shallow_size(value: Any) -> int:
    """What copying a value costs, its entries not included."""
    return sys.getsizeof(value) if isinstance(value, str | bytes | list | tuple) else 0
