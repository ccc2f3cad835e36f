"""How the output of a chat request is read: where reasoning ends, whether calls are looked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmserve.api.context import ApiContext
from llmserve.api.schemas import ChatRequest
from llmserve.api.tool_choice import ToolChoice, ToolMode, read_tool_choice
from llmserve.api.visible_text import VisibleText
from llmserve.reasoning_parsers import ReasoningParser, Thinking
from llmserve.tokenizer import Tokenizer
from llmserve.tool_parsers import ToolParser


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The same for all choices of a request; each gets parsers of its own."""

    tokenizer: Tokenizer
    choice: ToolChoice
    tools: type[ToolParser] | None  # None: the text is not searched for calls
    reasoning: type[ReasoningParser] | None
    prompt: str
    continued: str  # text of the message that the output goes on with
    is_constrained: bool  # a grammar holds calls to their format
    is_parallel: bool
    includes_reasoning: bool
    skips_special_tokens: bool  # as the request asks
    marker_ids: frozenset[int]  # special tokens that parsers need to see
    has_special_thinking: bool  # some of them are the reasoning parser's
    count_parsing: Callable[[str, str], None]  # of (mode, outcome), once per choice

    @property
    def engine_skips_special_tokens(self) -> bool:
        return self.skips_special_tokens and not self.marker_ids

    @property
    def thinking(self) -> Thinking:
        if self.reasoning is None:
            return Thinking.OFF
        return self.reasoning.find_thinking(self.prompt, self.continued)

    def visible_text(self) -> VisibleText | None:
        """None where the engine's text is what the parsers read, and no token is counted."""
        if self.reasoning is None and not self.marker_ids:
            return None
        return VisibleText(self.tokenizer, self.is_hidden)

    def reasoning_parser(self) -> ReasoningParser | None:
        if self.reasoning is None:
            return None
        return self.reasoning(
            self.prompt,
            continued=self.continued,
            hides_markers=self.skips_special_tokens and self.has_special_thinking,
        )

    def tool_parser(self) -> ToolParser | None:
        if self.tools is None:
            return None
        parser = self.tools(list(self.choice.tools), is_constrained=self.is_constrained)
        if self.choice.is_restricted:
            parser.allowed_names = frozenset(tool.name for tool in self.choice.tools)
        return parser

    def is_hidden(self, token_id: int) -> bool:
        """Whether the token is neither text nor marker."""
        if not self.skips_special_tokens or not self.marker_ids:
            return False
        return token_id not in self.marker_ids and self.tokenizer.is_special(token_id)


def plan_output(request: ChatRequest, prompt: str, context: ApiContext) -> OutputPlan:
    """`prompt`: the rendered conversation. Raises RequestError for a malformed tool_choice."""
    formats = context.formats
    choice = read_tool_choice(request.tool_choice, request.tools)
    tools: type[ToolParser] | None = None
    if choice.is_forced:
        tools = formats.forced_tools
    elif choice.mode is ToolMode.AUTO and context.config.enable_auto_tool_choice:
        tools = formats.tools
    counters = context.engine.stats.tool_call_parser_invocations
    reasoning = formats.reasoning
    reasoning_ids = frozenset() if reasoning is None else formats.special_ids_of(reasoning)
    tool_ids = frozenset() if tools is None else formats.special_ids_of(tools)
    return OutputPlan(
        tokenizer=context.tokenizer,
        choice=choice,
        tools=tools,
        reasoning=reasoning,
        prompt=prompt,
        continued=_last_text(request) if request.continue_final_message else "",
        is_constrained=tools is not None and (choice.is_forced or choice.has_strict_tool),
        is_parallel=request.parallel_tool_calls and choice.mode is not ToolMode.NAMED,
        includes_reasoning=request.include_reasoning,
        skips_special_tokens=request.skip_special_tokens,
        marker_ids=reasoning_ids | tool_ids,
        has_special_thinking=bool(reasoning_ids),
        count_parsing=lambda mode, outcome: counters[mode, outcome].inc(),
    )


def fields_without_effect(request: ChatRequest, plan: OutputPlan, context: ApiContext) -> list[str]:
    """Fields that are given although the model, or the rest of the request, leaves them none."""

    words = context.formats.words_of(request.chat_template)
    has_effect = {
        "include_reasoning": context.formats.reasoning is not None,
        "reasoning_effort": "reasoning_effort" in words,
        "documents": not request.documents or "documents" in words,
        # Where calls are looked for, a caller may have told of the tools in other ways.
        "tools": not request.tools or plan.tools is not None or "tools" in words,
        "parallel_tool_calls": bool(request.tools),
        # Nothing cuts a forced call but its grammar and max_tokens.
        "stop": not plan.choice.is_forced,
        "stop_token_ids": not plan.choice.is_forced,
    }
    given = request.model_fields_set
    names = [name for name, has in has_effect.items() if name in given and not has]
    variables = request.chat_template_kwargs.items()
    unread = [name for name, value in variables if value is not None and name not in words]
    return names + [f"chat_template_kwargs.{name}" for name in unread]


def _last_text(request: ChatRequest) -> str:
    """The text of the last message."""
    content = request.messages[-1].get("content")
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
