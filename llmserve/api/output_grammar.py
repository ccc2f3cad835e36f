"""The grammar of a chat request's output: what tools, response_format and reasoning make of it."""

from __future__ import annotations

import dataclasses

import orjson

from llmserve.api.call_repeats import UnrepeatingGrammar
from llmserve.api.context import ApiContext
from llmserve.api.output_plan import OutputPlan
from llmserve.api.schemas import ChatRequest
from llmserve.api.structured import compile_grammar, grammar_param, grammar_spec
from llmserve.core import ThinkingBudget
from llmserve.core.grammar import Grammar
from llmserve.errors import RequestError
from llmserve.grammar import GrammarError, GrammarKind, GrammarSpec, json_document
from llmserve.reasoning_parsers import ReasoningParser, Thinking

_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
# Models put empty lines between their thoughts and what follows.
_LEADING_LINES = r"/\n{1,2}/?"


def output_grammar(request: ChatRequest, plan: OutputPlan, context: ApiContext) -> Grammar | None:
    """Blocks while it compiles. Raises RequestError.

    A forced call leaves no content that response_format could hold for. Where calls are up to the
    model, an answer in JSON is its alternative to them. A grammar that is not for text around
    calls begins behind the thinking.
    """
    try:
        return _compiled(request, plan, context)
    except RequestError as error:
        if plan.tools is None:
            raise
        raise _of_tool(error, request, plan, context) from None


def _compiled(request: ChatRequest, plan: OutputPlan, context: ApiContext) -> Grammar | None:
    spec, param = grammar_spec(request), grammar_param(request)
    if plan.choice.is_forced:
        calls = GrammarSpec(GrammarKind.LARK, _calls(plan, context, is_required=True))
        spec, param = _calls_behind_thinking(calls, plan), "tools"
    elif spec is not None:
        if plan.tools is not None and spec.kind in _JSON_KINDS:
            spec = _calls_or_document(_calls(plan, context, is_required=True), spec, param)
        spec = _behind_thinking(spec, plan)
    elif plan.is_constrained:
        calls = GrammarSpec(GrammarKind.LARK, _calls(plan, context, is_required=False))
        spec, param = calls, "tools"
        # Free text around calls may hold thoughts, unless special tokens begin and end them.
        if plan.reasoning is not None and (
            plan.has_special_thinking or not plan.reasoning.may_call_while_thinking
        ):
            spec = _calls_behind_thinking(calls, plan)
    if spec is None:
        return None
    grammar = compile_grammar(context, spec, param=param)
    if plan.choice.is_forced and plan.is_parallel:
        return UnrepeatingGrammar(grammar, plan, context.eos_token_ids)
    return grammar


def thinking_budget(
    request: ChatRequest, plan: OutputPlan, context: ApiContext
) -> ThinkingBudget | None:
    """Raises RequestError where the server cannot tell thinking from content."""
    max_tokens = request.thinking_token_budget
    if max_tokens is None:
        return None
    reasoning = plan.reasoning
    if reasoning is None:
        raise RequestError(
            "thinking_token_budget needs a server with --reasoning-parser",
            param="thinking_token_budget",
        )
    if plan.thinking is Thinking.OFF:
        return None
    ends = context.tokenizer.encode(reasoning.end_marker, add_special_tokens=False)
    return ThinkingBudget(
        max_tokens=max_tokens,
        is_open=plan.thinking is Thinking.OPEN,
        start=reasoning.start_marker.encode(),
        ends=tuple(text.encode() for text in reasoning.thinking_ends),
        end_token_ids=tuple(ends),
        token_bytes=context.tokenizer.token_bytes,
    )


def _of_tool(
    error: RequestError, request: ChatRequest, plan: OutputPlan, context: ApiContext
) -> RequestError:
    """What is wrong with the first tool whose schema cannot be enforced alone, else the error."""
    places = {tool["function"]["name"]: place for place, tool in enumerate(request.tools)}
    is_each_held = grammar_param(request) is not None
    for tool in plan.choice.tools:
        if not tool.is_strict and not is_each_held:
            continue
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, orjson.dumps(tool.parameters).decode())
        try:
            compile_grammar(context, spec, param=f"tools[{places[tool.name]}].function.parameters")
        except RequestError as own:
            return own
    return error


def _calls(plan: OutputPlan, context: ApiContext, *, is_required: bool) -> str:
    """Raises RequestError for a tool's schema that no grammar can hold to."""
    assert plan.tools is not None
    try:
        return plan.tools.lark(
            list(plan.choice.tools),
            is_required=is_required,
            is_parallel=plan.is_parallel,
            special_tokens=context.formats.special_tokens,
        )
    except GrammarError as error:
        raise RequestError(f"tools cannot be enforced: {error}", param="tools") from None


def _calls_or_document(calls: str, spec: GrammarSpec, param: str | None) -> GrammarSpec:
    try:
        document = json_document(spec)
    except GrammarError as error:
        raise RequestError(f"{param} cannot be enforced: {error}", param=param) from None
    source = f"start: calls | document\n{_renamed_start(calls, 'calls')}\ndocument: {document}\n"
    return GrammarSpec(GrammarKind.LARK, source)


def _calls_behind_thinking(calls: GrammarSpec, plan: OutputPlan) -> GrammarSpec:
    is_covered = plan.tools is not None and plan.tools.covers_thinking
    return calls if is_covered else _behind_thinking(calls, plan)


def _behind_thinking(spec: GrammarSpec, plan: OutputPlan) -> GrammarSpec:
    reasoning = plan.reasoning
    if reasoning is None or plan.thinking is Thinking.OFF:
        return spec
    if spec.kind is GrammarKind.LARK:
        source = f"start: {_LEADING_LINES} body\n{_renamed_start(spec.source, 'body')}"
        spec = dataclasses.replace(spec, source=source)
    return dataclasses.replace(
        spec,
        starts_after=_end_of_thinking(reasoning, plan),
        may_start_with=reasoning.start_marker if plan.thinking is Thinking.OPTIONAL else "",
    )


def _end_of_thinking(reasoning: type[ReasoningParser], plan: OutputPlan) -> str:
    return reasoning.marker_before_calls if plan.choice.is_forced else reasoning.end_marker


def _renamed_start(lark: str, name: str) -> str:
    """A grammar whose rule `start` has another name, to be part of another grammar."""
    return "\n".join(
        f"{name}:" + line.removeprefix("start:") if line.startswith("start:") else line
        for line in lark.split("\n")
    )
