"""Spells text in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import regex_to_lark

from llmserve.grammar.spec import GrammarError

# JSON leaves them as they are, the dialect's lexer does not take them.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029]")


def quote(text: str) -> str:
    """A string literal."""
    literal = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", literal)


def regex_lark(pattern: str) -> str:
    """A regular expression, in which \\d, \\w and \\s stand for ASCII characters.

    Raises GrammarError for a backslash at the end, which llguidance would leave out.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError("the regular expression ends with a backslash that escapes nothing")
    return f"/{regex_to_lark(pattern, 'dws')}/"


def json_lark(schema: dict[str, Any]) -> str:
    """A document of a schema that guidance_schema made."""
    return "%json " + json.dumps(schema)


def parse_json(source: str, name: str) -> object:
    """Raises GrammarError."""
    try:
        value: object = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is not valid JSON: {error}") from None
    return value
