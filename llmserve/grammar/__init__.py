"""Grammars that outputs must follow: from what a request asks for to masks over the vocabulary."""

from llmserve.grammar.spec import GrammarKind, GrammarSpec

__all__ = ["GrammarKind", "GrammarSpec"]
