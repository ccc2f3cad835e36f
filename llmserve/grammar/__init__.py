"""Grammars that outputs must follow: from what a request asks for to masks over the vocabulary."""

from llmserve.grammar.compiler import GrammarCompiler
from llmserve.grammar.spec import GrammarError, GrammarKind, GrammarSpec
from llmserve.grammar.to_lark import json_document

__all__ = ["GrammarCompiler", "GrammarError", "GrammarKind", "GrammarSpec", "json_document"]
