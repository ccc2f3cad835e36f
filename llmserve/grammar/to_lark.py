"""From a specification to the text that llguidance compiles."""

from __future__ import annotations

from llmserve.grammar.gbnf_lark import gbnf_to_lark
from llmserve.grammar.json_schema import guidance_schema
from llmserve.grammar.lark_text import json_lark, parse_json, quote, regex_lark
from llmserve.grammar.schema_numbers import ANY_OBJECT
from llmserve.grammar.spec import GrammarError, GrammarKind, GrammarSpec
from llmserve.grammar.structural_tag import structural_tag_lark
from llmserve.grammar.vocabulary import Vocabulary

# Models put empty lines between their thoughts and the answer; JSON stays the same with them.
_LEADING_LINES = r"/\n{1,2}/?"


def guidance_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Raises GrammarError for what cannot be expressed."""
    source = spec.source
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_grammar(spec)
        case GrammarKind.JSON_OBJECT:
            return _json_grammar(spec)
        case GrammarKind.REGEX:
            return f"start: {regex_lark(source)}\n"
        case GrammarKind.CHOICE:
            return _choice_grammar(parse_json(source, "the choices"))
        case GrammarKind.LARK:
            if source.lstrip().startswith("{"):  # llguidance would take it for JSON
                raise GrammarError("a Lark grammar cannot begin with a brace")
            return source
        case GrammarKind.GBNF:
            return gbnf_to_lark(source)
        case GrammarKind.STRUCTURAL_TAG:
            return structural_tag_lark(parse_json(source, "the structural tag"), vocabulary)


def json_document(spec: GrammarSpec) -> str:
    """The body of a Lark rule of the JSON that a specification allows. Raises GrammarError."""
    schema: object = ANY_OBJECT
    if spec.kind is GrammarKind.JSON_SCHEMA:
        schema = parse_json(spec.source, "the JSON schema")
    return json_lark(guidance_schema(schema, spec.whitespace, closes_objects=spec.closes_objects))


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
