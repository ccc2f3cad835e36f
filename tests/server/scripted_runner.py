"""A runner whose output can be read off the prompt: it writes the prompt's bytes over and over.

Output token i is byte `(i + seed) % length` of the prompt (greedy: seed 0), so a test chooses the
text by choosing the prompt. The control character END ends a text. Log-probabilities are made
up, but finite, ordered and the same for prompt and output: the token itself is the likeliest.
"""

from __future__ import annotations

import threading
import time

from llmserve.core import (
    FinishedStep,
    PendingStep,
    SamplingParams,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

END = "\x04"
EOS_ID = 256
BOS_ID = 257
VOCAB_SIZE = 258
LOGPROB = -0.25


def logprobs_of(token_id: int, k: int) -> TokenLogprobs:
    """The token first, its successors after it, each less likely; the last of 5 impossible."""
    ids = tuple((token_id + i) % 256 if i else token_id for i in range(k))
    values = tuple(LOGPROB - i if i < 4 else float("-inf") for i in range(k))
    return TokenLogprobs(token_id, LOGPROB, 1, ids, values)


class _Row:
    def __init__(self, tokens: list[int], num_prompt_tokens: int, sampling: SamplingParams):
        self.tokens = list(tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling

    def next_token(self) -> int:
        sampling = self.sampling
        if sampling.allowed_token_ids is not None:
            return sampling.allowed_token_ids[0]
        forced = [token_id for token_id, bias in sampling.logit_bias if bias == 100.0]
        if forced:
            return forced[0]
        prompt = [t for t in self.tokens[: self.num_prompt_tokens] if t < 256]
        num_outputs = len(self.tokens) - self.num_prompt_tokens
        offset = 0 if sampling.is_greedy else sampling.seed
        token = prompt[(num_outputs + offset) % len(prompt)] if prompt else ord("x")
        is_ended = token == ord(END) and num_outputs >= sampling.min_tokens
        return EOS_ID if is_ended else token


class ScriptedRunner:
    """Executor for tests. `hold` makes steps wait until `release`; `fail_next` makes one raise."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._gate = threading.Event()
        self._gate.set()
        self.delay_s = 0.0
        self.fail_next = False
        self.sampling_seen: list[SamplingParams] = []

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def launch(self, plan: StepPlan) -> PendingStep:
        self._gate.wait(30)
        time.sleep(self.delay_s)
        for request_id in plan.released_ids:
            self._rows.pop(request_id, None)
        for new in plan.new:
            self._rows[new.request_id] = _Row(new.token_ids, new.num_prompt_tokens, new.sampling)
            self.sampling_seen.append(new.sampling)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("scripted failure")
        return FinishedStep(StepResult([self._run(plan, i) for i in range(len(plan.request_ids))]))

    def probe(self) -> None:
        """Always works."""

    def _run(self, plan: StepPlan, i: int) -> SeqResult:
        row = self._rows[plan.request_ids[i]]
        sampling = row.sampling
        start = plan.num_computed_tokens[i]
        end = start + plan.num_scheduled_tokens[i]
        prompt_logprobs = None
        if sampling.num_prompt_logprobs is not None and start < row.num_prompt_tokens:
            k = sampling.num_prompt_logprobs
            prompt_logprobs = [
                logprobs_of(row.tokens[p], k) if p else None
                for p in range(start, min(end, row.num_prompt_tokens))
            ]
        if not plan.is_sampling[i]:
            return SeqResult(prompt_logprobs=prompt_logprobs)
        token = row.next_token()
        row.tokens.append(token)
        rows = ()
        if sampling.num_logprobs is not None:
            rows = (logprobs_of(token, sampling.num_logprobs),)
        return SeqResult((token,), rows, prompt_logprobs)
