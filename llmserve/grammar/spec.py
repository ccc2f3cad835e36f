"""What a request may ask its output to be, as data that a cache can hold."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"  # source: the schema as JSON
    JSON_OBJECT = "json_object"  # source: ""
    REGEX = "regex"  # of the whole text
    CHOICE = "choice"  # source: a JSON list of strings
    LARK = "lark"  # source in llguidance's Lark dialect
    GBNF = "gbnf"
    STRUCTURAL_TAG = "structural_tag"  # source: the tag's definition as JSON


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One grammar. `starts_after`: free text up to and including this marker comes first.

    The marker is text ("</think>"); it may be one special token of the vocabulary or many
    ordinary ones. "" means that the grammar holds from the first output token. With
    `may_start_with` the free text comes only in output that begins with this text.

    `whitespace` is a regular expression of what may stand, at most once, wherever JSON allows
    whitespace; None: one space or newline, or nothing; "": nothing. Strings have no bounds but
    their schema's. With `closes_objects` all objects hold declared properties only.
    """

    kind: GrammarKind
    source: str
    starts_after: str = ""
    may_start_with: str = ""
    whitespace: str | None = None
    closes_objects: bool = False


class GrammarError(ValueError):
    """A grammar that cannot be used, and why."""


class GrammarBusyError(Exception):
    """The grammar may be good, but nothing is free to compile it; later it may be."""
