"""Token events -> text -> stop strings -> OutputDelta, one ChoiceState per sequence.

Owns the detokenizer state and the timestamps of a sequence. Lives on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from llmserve.core import FinishReason, OutputDelta, PromptLogprobs, Request, TokenEvent
from llmserve.engine.stop_strings import StopStringMatcher
from llmserve.tokenizer import StreamDecoder, Tokenizer


@dataclass(slots=True)
class Timing:
    """Moments of a sequence's output; time.monotonic(), seconds."""

    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class ChoiceState:
    """Detokenizes one sequence and decides where its text ends.

    Invariant: the texts of all deltas joined are the choice's text, whatever the step sizes.
    """

    index: int
    request: Request  # read only here; the scheduler writes it
    decoder: StreamDecoder
    matcher: StopStringMatcher
    timing: Timing = field(default_factory=Timing)
    num_output_tokens: int = 0
    prompt_logprobs: PromptLogprobs = field(default_factory=list)

    @classmethod
    def create(cls, index: int, request: Request, tokenizer: Tokenizer) -> ChoiceState:
        sampling = request.sampling
        return cls(
            index=index,
            request=request,
            decoder=tokenizer.stream_decoder(
                request.prompt_token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            ),
            matcher=StopStringMatcher(
                sampling.stop, include_stop=sampling.include_stop_str_in_output
            ),
        )

    def end(self, reason: FinishReason) -> OutputDelta:
        """The last delta of a choice that is cut off from outside."""
        delta = OutputDelta(self.index, text=self.matcher.flush(), finish_reason=reason)
        self._count(delta)
        return delta

    def process(self, event: TokenEvent) -> OutputDelta:
        """Turns one step's tokens into a delta.

        When a stop string completes, the delta has finish_reason STOP although the event has
        none: the caller then finishes the sequence. Tokens after that one are dropped.
        """
        delta = OutputDelta(self.index)
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if event.token_ids and self.prompt_logprobs:
            delta.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, []
        matched = self._append_tokens(event, delta)
        if matched is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, matched
        elif event.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = event.finish_reason, event.stop_reason
            matched = self._flush_decoder(delta)
            if matched is not None:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, matched
            else:
                delta.text += self.matcher.flush()
        self._count(delta)
        return delta

    def _count(self, delta: OutputDelta) -> None:
        delta.num_prompt_tokens = self.request.num_prompt_tokens
        delta.num_cached_tokens = self.request.num_cached_tokens
        delta.num_output_tokens = self.num_output_tokens

    def _append_tokens(self, event: TokenEvent, delta: OutputDelta) -> str | None:
        """Decodes the event's tokens into `delta`; returns the stop string that completed."""
        sampling = self.request.sampling
        num_tokens = len(event.token_ids)
        ends_at_stop_token = event.finish_reason is FinishReason.STOP
        for position, token_id in enumerate(event.token_ids):
            self.num_output_tokens += 1
            is_stop_token = ends_at_stop_token and position == num_tokens - 1
            if is_stop_token and not sampling.include_stop_str_in_output:
                text = ""
            else:
                text = self.decoder.step(token_id)
            delta.token_ids.append(token_id)
            delta.token_texts.append(text)
            if event.logprobs:
                delta.logprobs.append(event.logprobs[position])
            is_exempt = self.num_output_tokens <= sampling.min_tokens
            emitted, matched = self.matcher.feed(text, is_exempt=is_exempt)
            delta.text += emitted
            if matched is not None:
                return matched
        return None

    def _flush_decoder(self, delta: OutputDelta) -> str | None:
        """Bytes of a character that will not complete become text now."""
        rest = self.decoder.flush()
        if not rest:
            return None
        if delta.token_texts:
            delta.token_texts[-1] += rest
        emitted, matched = self.matcher.feed(rest)
        delta.text += emitted
        return matched
