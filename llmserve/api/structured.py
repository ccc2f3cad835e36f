"""Constrained outputs: which grammar a request asks for, and compiling it away from the loop."""

from __future__ import annotations

import asyncio

from llmserve.api.context import ApiContext
from llmserve.api.grammar_fields import member_of, with_whitespace
from llmserve.api.schemas import GenerationFields
from llmserve.core.grammar import Grammar
from llmserve.errors import GrammarsBusyError, RequestError
from llmserve.grammar import GrammarBusyError, GrammarError, GrammarKind, GrammarSpec

GRAMMAR_FIELDS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


class NeedsThreadError(Exception):
    """The grammar is not compiled yet, and this is the event loop."""


def grammar_field(request: GenerationFields) -> str | None:
    """The field that asks for a grammar. Raises RequestError if several do."""
    asked = [name for name in GRAMMAR_FIELDS if getattr(request, name) is not None]
    if len(asked) > 1:
        raise RequestError(
            f"{asked[0]} and {asked[1]} both constrain the output; set one of them", param=asked[1]
        )
    return asked[0] if asked else None


def grammar_param(request: GenerationFields) -> str | None:
    """What an error of the grammar names: the field, of structured_outputs its member."""
    field = grammar_field(request)
    if field != "structured_outputs" or request.structured_outputs is None:
        return field
    return f"{field}.{member_of(request.structured_outputs)}"


def grammar_spec(request: GenerationFields) -> GrammarSpec | None:
    """What the request itself asks for; tools and reasoning aside. Raises RequestError."""
    field = grammar_field(request)
    pattern = request.guided_whitespace_pattern
    if field is None:
        return None
    spec: GrammarSpec = getattr(request, field)
    if pattern is not None and spec.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        return with_whitespace(spec, pattern, "guided_whitespace_pattern")
    return spec


def compile_grammar(context: ApiContext, spec: GrammarSpec, *, param: str | None = None) -> Grammar:
    """Blocks, unless the grammar is cached. Raises RequestError, `param` naming the field to blame,
    and GrammarsBusyError.

    On the event loop it raises NeedsThreadError instead of blocking; run_preparation then begins
    again in a thread.
    """
    try:
        grammar = context.grammars.cached(spec)
        if grammar is None:
            if _is_on_loop():
                raise NeedsThreadError
            grammar = context.grammars.compile(spec)
        return grammar
    except GrammarBusyError as error:
        raise GrammarsBusyError(str(error)) from None
    except GrammarError as error:
        where = param or spec.kind.value
        raise RequestError(f"{where} cannot be enforced: {error}", param=param) from None


def requested_grammar(request: GenerationFields, context: ApiContext) -> Grammar | None:
    """The compiled grammar of a request without tools and reasoning. Raises RequestError."""
    spec = grammar_spec(request)
    if spec is None:
        return None
    return compile_grammar(context, spec, param=grammar_param(request))


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
