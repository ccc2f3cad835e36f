"""Where every sequence is: waiting, held back, running; and in which order they come.

The only writer of a sequence's status; owns what the runner must be told of those that no longer
run. Knows no blocks and no steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from llmserve.core import FinishReason, Request, RequestStatus
from llmserve.scheduler.policy import Key, RequestQueue


class Sequences:
    """Invariants:

    * a sequence is in exactly one of `waiting`, `_held`, `prefilling`, `decoding`;
    * one in `prefilling` has known tokens that no step computes yet; one in `decoding` has none
      but its last, and that one only while no step is in flight with it;
    * `num_dependent` counts the running ones whose sampling depends on their output.
    """

    def __init__(self, key: Key) -> None:
        self.waiting = RequestQueue(key)
        self.prefilling = RequestQueue(key)
        self.decoding: list[Request] = []
        self.num_dependent = 0
        self.num_preemptions = 0
        self._key = key
        self._held: dict[str, list[Request]] = {}  # children, by the parent they wait for
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._released: dict[str, None] = {}  # ids, in order

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self._held.values()))

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def last_running(self) -> Request:
        """The one that gives way when blocks run out."""
        return max(chain(self.decoding, self.prefilling), key=self._key)

    def count_waiting_tokens(self, limit: int) -> int:
        """Known tokens that are still to be computed, but those of decodes; `limit` at most."""
        num_tokens = 0
        for request in chain(self.prefilling, self.waiting):
            num_tokens += request.num_tokens - request.num_computed_tokens
            if num_tokens >= limit:
                return limit
        return num_tokens

    def get(self, request_id: str | None) -> Request | None:
        return self._requests.get(request_id) if request_id else None

    def add(self, request: Request, *, is_held: bool) -> None:
        """A new one. A held one waits until release_children() of its parent."""
        request.arrival_index = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        if is_held and request.parent_id:
            self._held.setdefault(request.parent_id, []).append(request)
        else:
            self.waiting.add(request)

    def start(self, request: Request) -> None:
        """From waiting to prefilling."""
        self.waiting.remove(request)
        self.prefilling.add(request)
        self.num_dependent += request.sampling.depends_on_output
        request.status = RequestStatus.RUNNING

    def start_decoding(self, request: Request) -> None:
        """All its known tokens are computed, or will be by the steps in flight."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    def preempt(self, request: Request) -> None:
        """From running to waiting."""
        self._remove_running(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._remove_running(request)
        elif request in self._held.get(request.parent_id or "", ()):
            self._held[request.parent_id or ""].remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]

    def release_children(self, parent: Request) -> None:
        """The children of a sequence that has its prompt computed, or is gone, may start."""
        for child in self._held.pop(parent.request_id, ()):
            self.waiting.add(child)

    def take_released(self) -> list[str]:
        """Ids of those that ran and do not any more, since the last call."""
        released = list(self._released)
        self._released.clear()
        return released

    def release_again(self, request_ids: Iterable[str]) -> None:
        """The runner may not have heard of these."""
        self._released |= dict.fromkeys(request_ids)

    def _remove_running(self, request: Request) -> None:
        self._released[request.request_id] = None
        self.num_dependent -= request.sampling.depends_on_output
        if request in self.decoding:
            self.decoding.remove(request)
        else:
            self.prefilling.remove(request)
