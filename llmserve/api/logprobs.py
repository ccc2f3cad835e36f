"""Log-probabilities in the two shapes of the API, and prompt log-probabilities in vLLM's.

Values are clamped at -9999.0 because JSON has no minus infinity. The text of a sampled token is
what it added to the answer; alternatives are named by their own bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.core import FinishReason, OutputDelta, PromptLogprobs, TokenLogprobs
from llmserve.tokenizer import Tokenizer

_LOWEST = -9999.0


def clamp(logprob: float) -> float:
    return max(logprob, _LOWEST)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are written in answers."""

    tokenizer: Tokenizer
    as_ids: bool = False  # `token_id:17` instead of text
    skip_special_tokens: bool = True

    def name(self, token_id: int) -> str:
        """The token's own text; bytes that are no whole characters are written as OpenAI does."""
        if self.as_ids:
            return f"token_id:{token_id}"
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def sampled(self, token_id: int, text: str) -> str:
        """A sampled token: what it added to the text."""
        return f"token_id:{token_id}" if self.as_ids else text

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is left out of the text."""
        return self.skip_special_tokens and self.tokenizer.is_special(token_id)


class CompletionLogprobs:
    """Rows in the shape of /v1/completions: four parallel lists.

    `text_offset` counts characters from the start of the choice's text (the echoed prompt
    included), so it steps by the length of each token's text.
    """

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._clear()

    def add(
        self, token_id: int, text: str, row: TokenLogprobs | None, *, limit: int | None = None
    ) -> None:
        """One token; `row` is None for the first token of a prompt, `limit` cuts its top list."""
        self.tokens.append(self._names.sampled(token_id, text))
        self.text_offset.append(self._offset)
        self._offset += len(text)
        if row is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        self.token_logprobs.append(clamp(row.logprob))
        self.top_logprobs.append(self._top(row, limit))

    def add_delta(self, delta: OutputDelta) -> None:
        rows = zip(delta.token_ids, delta.token_texts, delta.logprobs, strict=True)
        for token_id, text, row in rows:
            self.add(token_id, text, row)

    def take(self) -> dict[str, Any] | None:
        """The rows since the last call, or None; offsets go on from there."""
        if not self.tokens:
            return None
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self._clear()
        return taken

    def _clear(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def _top(self, row: TokenLogprobs, limit: int | None) -> dict[str, float]:
        """The k best and the sampled one; tokens with equal names keep their entries apart."""
        top: dict[str, float] = {}
        top_ids = row.top_ids[:limit]
        pairs = list(zip(top_ids, row.top_logprobs[:limit], strict=True))
        if row.token_id not in top_ids:
            pairs.append((row.token_id, row.logprob))
        for token_id, logprob in pairs:
            name = self._names.name(token_id)
            if name in top:
                name = f"token_id:{token_id}"
            top[name] = clamp(logprob)
        return top


def chat_logprobs(delta: OutputDelta, names: TokenNames) -> list[dict[str, Any]]:
    """Rows in the shape of /v1/chat/completions. The rows' `bytes` joined are the content."""
    rows = []
    last = len(delta.token_ids) - 1
    ends_at_stop_token = delta.finish_reason is FinishReason.STOP and not isinstance(
        delta.stop_reason, str
    )
    for position, (token_id, row) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
        is_cut = position == last and ends_at_stop_token and not delta.token_texts[position]
        entry = _chat_entry(token_id, row.logprob, names)
        if is_cut or names.is_hidden(token_id):
            entry["bytes"] = []
        entry["top_logprobs"] = [
            _chat_entry(top_id, logprob, names)
            for top_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
        ]
        rows.append(entry)
    return rows


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.name(token_id),
        "logprob": clamp(logprob),
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    rows: PromptLogprobs, names: TokenNames, *, limit: int
) -> list[dict[str, Any] | None]:
    """One map per prompt token from token id to logprob, rank and text; the first is null."""
    return [None if row is None else _prompt_row(row, names, limit) for row in rows]


def _prompt_row(row: TokenLogprobs, names: TokenNames, limit: int) -> dict[str, Any]:
    entries = {str(row.token_id): _prompt_entry(row.token_id, row.logprob, row.rank, names)}
    top = zip(row.top_ids[:limit], row.top_logprobs[:limit], strict=True)
    for rank, (token_id, logprob) in enumerate(top, start=1):
        entries[str(token_id)] = _prompt_entry(token_id, logprob, rank, names)
    return entries


def _prompt_entry(token_id: int, logprob: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {"logprob": clamp(logprob), "rank": rank, "decoded_token": names.name(token_id)}


def prompt_token_texts(
    token_ids: Sequence[int], text: str | None, tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> list[str]:
    """What each prompt token adds to the echoed prompt.

    A prompt given as text may name special tokens, which belong to it; a BOS that the tokenizer
    put before it does not.
    """
    is_text = text is not None
    decoder = tokenizer.stream_decoder((), skip_special_tokens=skip_special_tokens and not is_text)
    texts = [decoder.step(token_id) for token_id in token_ids]
    texts[-1] += decoder.flush()
    if is_text and token_ids[0] == tokenizer.bos_token_id:
        texts[0] = ""
    return texts
