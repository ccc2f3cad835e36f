"""From a specification to the text that llguidance compiles."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from llmserve.grammar.json_schema import guidance_schema
from llmserve.grammar.lark_text import quote
from llmserve.grammar.spec import GrammarError, GrammarKind, GrammarSpec

# Models put empty lines between their thoughts and the answer; JSON stays the same with them.
_LEADING_LINES = r"/\n{1,2}/?"


def guidance_grammar(spec: GrammarSpec) -> str:
    """Raises GrammarError for what cannot be expressed."""
    source = spec.source
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(spec)
        case GrammarKind.JSON_OBJECT:
            return _json_grammar(spec)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            return _choice_grammar(_parse_json(source, "the choices"))
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(source)
        case _:
            raise GrammarError(f"grammars of the kind {spec.kind.value} are not supported")


def json_document(spec: GrammarSpec) -> str:
    """The body of a Lark rule of the JSON that a specification allows. Raises GrammarError."""
    schema: object = {"type": "object"}
    if spec.kind is GrammarKind.JSON_SCHEMA:
        schema = _parse_json(spec.source, "the JSON schema")
    guided = guidance_schema(schema, spec.whitespace, closes_objects=spec.closes_objects)
    return "%json " + json.dumps(guided)


def _json_grammar(spec: GrammarSpec) -> str:
    lead = _LEADING_LINES if spec.starts_after else ""
    return f"start: {lead} document\ndocument: {json_document(spec)}\n"


def _choice_grammar(choices: object) -> str:
    """One terminal, so that a choice that begins another one does not hide it."""
    if not isinstance(choices, list) or not choices:
        raise GrammarError("the choices must be a list of at least one string")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("every choice must be a string that is not empty")
    return "start: CHOICE\nCHOICE: " + " | ".join(quote(choice) for choice in choices) + "\n"


def _parse_json(source: str, name: str) -> object:
    try:
        value: object = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is not valid JSON: {error}") from None
    return value
