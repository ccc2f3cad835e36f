"""Grammars that outputs must follow: from what a request asks for to masks over the vocabulary."""

from llmserve.grammar.compiler import GrammarCompiler
from llmserve.grammar.spec import GrammarBusyError, GrammarError, GrammarKind, GrammarSpec
from llmserve.grammar.to_lark import json_document

__all__ = [
    "GrammarBusyError",
    "GrammarCompiler",
    "GrammarError",
    "GrammarKind",
    "GrammarSpec",
    "json_document",
]
