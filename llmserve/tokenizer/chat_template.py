"""Turns conversations into prompts by the chat template of a model.

Rendering follows transformers' `apply_chat_template`, with the limits of template_sandbox.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from llmserve.errors import RequestError
from llmserve.tokenizer.template_budget import TemplateLimitError, TemplateTimeError
from llmserve.tokenizer.template_globals import TemplateRaisedError
from llmserve.tokenizer.template_messages import Message, prepare_messages
from llmserve.tokenizer.template_sandbox import CompiledTemplate
from llmserve.tokenizer.template_traits import TemplateTraits, find_traits

_RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
)
# Marks the end of a message that is to be continued; the space shows whether the template trims.
_END_MARK = "\ue000llmserve end of message\ue000"
_MAX_MESSAGE_CHARS = 2000  # of a template's own error message
_MAX_SOURCE_CHARS = 1 << 16  # of a request's template
_MAX_CODE_CHARS = 1 << 18  # that it becomes; 10 times what the longest known templates do
_NUM_KEPT = 8  # templates of requests that stay compiled


class SlowTemplateError(Exception):
    """A rendering took more time than it was given by `ChatTemplate.within`."""


@dataclass(frozen=True, slots=True)
class _Template:
    compiled: CompiledTemplate
    traits: TemplateTraits


class ChatTemplate:
    """The template of a model, or several by name, of which "tool_use" serves requests with tools.

    Immutable; renders on several threads at once.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        content_format: str = "auto",
        variables: Mapping[str, Any] | None = None,
        *,
        max_code_chars: int | None = None,
    ) -> None:
        """`sources` None: the model has no template, and every rendering is refused.

        `special_tokens` are variables of the template ("bos_token"), and so are `variables`,
        which a rendering may override. `content_format` is "auto", "string" or "openai".
        `max_code_chars` bounds what may be compiled. Raises ValueError if a source is not a
        template.
        """
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources or {})
        self._special_tokens = dict(special_tokens or {})
        self._content_format = content_format
        self._variables = dict(variables or {})
        self.check_variables(self._variables)
        self._templates = {
            name: self._compile(source, max_code_chars) for name, source in self.sources.items()
        }
        self._max_seconds: float | None = None
        self._blamed = "messages"  # the field of a request at which a rendering fails
        self._make = functools.lru_cache(_NUM_KEPT)(self._make_other)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises RequestError for a name that is a parameter of `render` or a special token."""
        taken = variables.keys() & (_RESERVED | self._special_tokens.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not hold {min(taken)!r}", param="chat_template_kwargs"
            )

    def with_source(self, source: str) -> ChatTemplate:
        """The same with another template, from a request. Raises RequestError."""
        if len(source) > _MAX_SOURCE_CHARS:
            raise RequestError(
                f"chat_template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are "
                "allowed",
                param="chat_template",
            )
        try:
            return self._make(source)
        except ValueError as error:
            raise RequestError(str(error), param="chat_template") from error

    def within(self, max_seconds: float) -> ChatTemplate:
        """The same, but it raises SlowTemplateError for a rendering that takes longer."""
        limited = copy.copy(self)
        limited._max_seconds = max_seconds
        return limited

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text; `kwargs` are further variables, which check_variables allows.

        `continue_final_message` ends the text with the last message's, to be gone on with. Raises
        RequestError with the template's own words if it refuses the conversation.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                param="continue_final_message",
            )
        template = self._choose(has_tools=bool(tools))
        prepared = prepare_messages(messages, template.traits)
        last_text = _mark_end(prepared, messages) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **self._variables,
            **kwargs,
            "messages": prepared,
            "tools": tools or None,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(template.compiled, variables)
        return _cut_at_mark(text, last_text) if continue_final_message else text

    def _make_other(self, source: str) -> ChatTemplate:
        made = ChatTemplate(
            source,
            self._special_tokens,
            self._content_format,
            self._variables,
            max_code_chars=_MAX_CODE_CHARS,
        )
        made._blamed = "chat_template"
        return made

    def _compile(self, source: str, max_code_chars: int | None) -> _Template:
        try:
            compiled = CompiledTemplate(source, max_code_chars)
            traits = find_traits(compiled, self._special_tokens, self._content_format)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid: line {error.lineno}: {error.message}"
            ) from error
        except TemplateLimitError as error:
            raise ValueError(f"the chat template was stopped: {error}") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        return _Template(compiled, traits)

    def _choose(self, *, has_tools: bool) -> _Template:
        if not self._templates:
            raise RequestError(
                "this model has no chat template: start the server with --chat-template, "
                "or send a prompt to /v1/completions"
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))

    def _render(self, template: CompiledTemplate, variables: Mapping[str, Any]) -> str:
        try:
            return template.render(variables, self._max_seconds)
        except TemplateRaisedError as error:
            message = str(error)[:_MAX_MESSAGE_CHARS]
            raise RequestError(message, param="messages") from error
        except TemplateLimitError as error:
            if isinstance(error, TemplateTimeError) and self._max_seconds is not None:
                raise SlowTemplateError(str(error)) from error
            message = f"the chat template was stopped: {error}"
            raise RequestError(message, param=self._blamed) from error
        except RecursionError as error:
            message = "the chat template or the messages are too deeply nested"
            raise RequestError(message, param=self._blamed) from error
        except Exception as error:  # a template can raise whatever an operation in it raises
            reason = str(error)[:_MAX_MESSAGE_CHARS] or type(error).__name__
            message = f"the chat template cannot render this conversation: {reason}"
            raise RequestError(message, param=self._blamed) from error


def _mark_end(messages: list[Message], given: Sequence[Mapping[str, Any]]) -> str:
    """Appends the mark to the last message; returns the text that was there."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    is_text = bool(given) and any(given[-1].get(key) is not None for key in ("content", "refusal"))
    if isinstance(content, str) and is_text:
        last["content"] = content + _END_MARK + " "
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1] = {**content[-1], "text": text + _END_MARK + " "}
        return text
    raise RequestError(
        "continue_final_message is true but the last message has no text to continue",
        param="continue_final_message",
    )


def _cut_at_mark(text: str, last_text: str) -> str:
    position = text.rfind(_END_MARK)
    if position < 0 or last_text.strip() not in text:
        raise RequestError(
            "continue_final_message is true but the chat template changes or drops the last "
            "message",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_END_MARK + " ", position)
    return text[:position].rstrip() if is_trimmed else text[:position]
