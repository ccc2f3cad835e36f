"""Spells text in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re

# JSON leaves them as they are, the dialect's lexer does not take them.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029]")


def quote(text: str) -> str:
    """A string literal."""
    literal = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", literal)
