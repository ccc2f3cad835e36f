"""One sequence to generate. Written by the scheduler only; every other layer holds its id."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from llmserve.core.outputs import FinishReason
from llmserve.core.sampling import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # lost its blocks, waits again at the head of the queue
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: prompt, output so far, and how much of both is in the KV cache.

    Invariants: `token_ids` is prompt + output as far as it is known; block tables (owned by the
    KVCacheManager) cover `num_computed_tokens` slots. These count what steps in flight compute,
    among it perhaps a token behind `token_ids` that only the runner knows.
    A request with n > 1 becomes n sequences; the second and later ones name the first in
    `parent_id` and share its prompt blocks when they start while the first is running.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float  # time.monotonic(), seconds
    priority: int = 0  # lower first
    cache_salt: str | None = None
    parent_id: str | None = None

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave at first schedule
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    arrival_index: int = 0  # order of arrival at the scheduler
    max_num_tokens: int = 0  # ends with LENGTH here: max_tokens or the context, what comes first

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)
