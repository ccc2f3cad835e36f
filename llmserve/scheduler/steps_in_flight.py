"""Steps that were scheduled and have not ended: who is in them, and whose blocks they keep."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from llmserve.core import Request, StepPlan


@dataclass(slots=True)
class StepInFlight:
    """`requests[i]` belongs to `plan.request_ids[i]`; the first `num_decodes` are decodes."""

    plan: StepPlan
    requests: list[Request]
    num_decodes: int
    # Ended since they were scheduled. No later step has them; this one may write to their blocks.
    ended: list[Request] = field(default_factory=list)


class StepsInFlight:
    """Oldest first, in which order they end."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step: StepInFlight) -> None:
        self._steps.append(step)

    def pop(self, plan: StepPlan) -> StepInFlight:
        """The step has ended. RuntimeError if it is not the oldest one."""
        if not self._steps or self._steps[0].plan is not plan:
            raise RuntimeError("the step is not the oldest one in flight")
        return self._steps.popleft()

    def keep_blocks(self, request: Request) -> bool:
        """Notes a request that has ended with the last step that has it; False if none has."""
        for step in reversed(self._steps):
            if request in step.requests:
                step.ended.append(request)
                return True
        return False

    def keeps_blocks_of(self, request_id: str) -> bool:
        """Whether a request of this id has ended and still holds blocks."""
        return any(
            request.request_id == request_id for step in self._steps for request in step.ended
        )

    def have_computed_prompt(self, request: Request) -> bool:
        """Whether steps that have ended put a running sequence's whole prompt into the cache."""
        num_computed = request.num_computed_tokens
        for step in reversed(self._steps):
            if request in step.requests:
                num_computed = step.plan.num_computed_tokens[step.requests.index(request)]
        return num_computed >= request.num_prompt_tokens
