"""What every tokenizer offers, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from llmserve.errors import RequestError


class StreamDecoder(Protocol):
    """Turns the tokens of one output into text while they arrive.

    Invariant: the texts of all steps and the flush, joined, are what `Tokenizer.decode` makes of
    the same ids (for an output that continues a prompt: of both, less the prompt's text).
    """

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" while a character lacks bytes."""
        ...

    def flush(self) -> str:
        """The output has ended: bytes of an incomplete character become U+FFFD."""
        ...


class Tokenizer(Protocol):
    """Ids are 0..vocab_size-1; any other id decodes to nothing.

    Encoding releases the GIL, so that long texts can be encoded in worker threads. All methods
    may be called from several threads at once.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text or a turn."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Named tokens as chat templates see them: "bos_token", "eos_token", "unk_token", ..."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens that are written in the text become their ids.

        `add_special_tokens` adds what the model expects around a text, as a BOS. Raises
        RequestError if the text has a lone surrogate, which no encoding can express.
        """
        ...

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Bytes that are not UTF-8 become U+FFFD.

        `spaces_between_special_tokens` matters only to tokenizers that put spaces between words.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name."""
        ...

    def token_str(self, token_id: int) -> str:
        """The token as the vocabulary spells it, "▁the" or "Ġthe"."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        ...

    def stream_decoder(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> StreamDecoder:
        """A decoder for an output that continues `prompt_ids`."""
        ...


def check_encodable(text: str) -> None:
    """Raises RequestError for a lone surrogate (JSON can express one, UTF-8 cannot)."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; send valid Unicode"
        ) from None
