"""The interface of tool parsers: from the text of a model to content and tool calls."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(slots=True)
class CallDelta:
    """A piece of a call. `id` and `name` come with the first piece of it only."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # the next piece of a JSON object's text


@dataclass(slots=True)
class ParsedDelta:
    """What a piece of text added."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


class ToolParser(abc.ABC):
    """Splits one choice's text as it arrives.

    The joined result depends on the whole text alone, never on how it was cut into pieces. A call
    is given out once nothing can make it malformed any more; with `is_constrained` (a grammar
    made by `lark` forces the text to be well-formed) its name and arguments are given out as they
    arrive. Text that only looks like a call comes back as content.
    """

    # The format's markers are special tokens, which must not be left out of the text.
    needs_special_tokens: ClassVar[bool] = False
    # The format knows thinking too, so its grammars allow it before calls.
    covers_thinking: ClassVar[bool] = False

    # A call whose name was read turned out to be malformed or cut off.
    is_broken: bool = False
    # Calls of other names are content. None: there are no others.
    allowed_names: frozenset[str] | None = None

    def __init__(self, tools: list[Tool], *, is_constrained: bool = False) -> None:
        self.tools = tools
        self.is_constrained = is_constrained

    @abc.abstractmethod
    def feed(self, text: str) -> ParsedDelta:
        """Adds text; returns what it decided."""

    @abc.abstractmethod
    def flush(self) -> ParsedDelta:
        """The text has ended; returns what was held back."""

    @classmethod
    @abc.abstractmethod
    def lark(
        cls,
        tools: list[Tool],
        *,
        is_required: bool,
        is_parallel: bool,
        special_tokens: Mapping[str, int],
    ) -> str:
        """A grammar (llguidance's Lark dialect, rule `start`) of answers in this format.

        is_required: nothing but calls, at least one, with arguments valid for the tool's schema;
        else free text with any number of calls, in which a call, once begun, must be well-formed,
        and its arguments valid for a strict tool's schema (any JSON object for others).
        is_parallel: more than one call is allowed. special_tokens: text and id of each special
        token of the vocabulary; a marker that is one is asked for by its id.
        """
