"""Grammars that outputs must follow: from what a request asks for to masks over the vocabulary."""

from llmserve.grammar.compiler import GrammarCompiler
from llmserve.grammar.spec import GrammarError, GrammarKind, GrammarSpec

__all__ = ["GrammarCompiler", "GrammarError", "GrammarKind", "GrammarSpec"]
