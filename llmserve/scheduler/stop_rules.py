"""Whether a sequence ends with its last token. Stop strings are found above, where text is."""

from __future__ import annotations

from llmserve.core import FinishReason, Request

Stop = tuple[FinishReason | None, int | None]


def find_stop(request: Request) -> Stop:
    """Why the sequence ends here, and the stop token that the request asked for."""
    sampling, token_id = request.sampling, request.token_ids[-1]
    may_stop = request.num_output_tokens >= sampling.min_tokens
    if may_stop and token_id in sampling.eos_token_ids:
        return FinishReason.STOP, None
    if may_stop and token_id in sampling.stop_token_ids:
        return FinishReason.STOP, token_id
    if request.num_tokens >= request.max_num_tokens:
        return FinishReason.LENGTH, None
    return None, None
