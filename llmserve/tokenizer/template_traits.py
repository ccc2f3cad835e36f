"""What a chat template expects of the messages that it gets: read from its source, or tried out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import nodes

from llmserve.tokenizer.template_budget import TemplateLimitError
from llmserve.tokenizer.template_sandbox import CompiledTemplate

ContentFormat = Literal["string", "openai"]

_PROBE = "llmserve probe"
_PROBE_KEY = "llmserve_probe"


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """How messages are put for one template.

    `content_format`: contents are strings, or lists of parts. `takes_string_content`: beside lists
    it handles strings. `takes_null_content`: it tells null from an empty content.
    `takes_developer_role`: it writes such a message. `takes_argument_objects`: arguments of tool
    calls are objects, or JSON in strings.
    """

    content_format: ContentFormat
    takes_string_content: bool
    takes_null_content: bool
    takes_developer_role: bool
    takes_argument_objects: bool


def find_traits(
    template: CompiledTemplate, variables: dict[str, Any], content_format: str
) -> TemplateTraits:
    """`content_format` is "auto" or the format to use. Renders the template some times.

    Raises TemplateLimitError if that takes too long or too much memory.
    """
    aliases = _content_aliases(template.tree)
    if content_format == "auto":
        loops = template.tree.find_all(nodes.For)
        has_parts = any(_is_content(loop.iter, aliases) for loop in loops)
    else:
        has_parts = content_format == "openai"
    chosen: ContentFormat = "openai" if has_parts else "string"
    takes_string = chosen == "string" or _tests_content(template.tree, "string", aliases)
    return TemplateTraits(
        content_format=chosen,
        takes_string_content=takes_string,
        takes_null_content=_tests_content(template.tree, "none", aliases),
        takes_developer_role=_takes_developer_role(template, variables, takes_string),
        takes_argument_objects=_takes_argument_objects(template, variables, takes_string),
    )


def _content_aliases(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that hold a message's content."""
    aliases: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        found = set(_direct_aliases(tree, macros, aliases))
        if found <= aliases:
            return aliases
        aliases |= found


def _direct_aliases(
    tree: nodes.Template, macros: dict[str, nodes.Macro], aliases: set[str]
) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            yield assign.target.name
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is not None:
            for parameter, argument in zip(macro.args, call.args, strict=False):
                if _is_content(argument, aliases):
                    yield parameter.name


def _is_content(node: nodes.Node | None, aliases: set[str]) -> bool:
    node = _unfiltered(node)
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Getattr) and node.attr == "content"


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _tests_content(tree: nodes.Template, test: str, aliases: set[str]) -> bool:
    """Whether it asks `content is <test>`."""
    return any(
        node.name == test and _is_content(node.node, aliases) for node in tree.find_all(nodes.Test)
    )


def _takes_developer_role(
    template: CompiledTemplate, variables: dict[str, Any], takes_string: bool
) -> bool:
    messages = [
        {"role": "developer", "content": _content(_PROBE, takes_string)},
        {"role": "user", "content": _content("hi", takes_string)},
    ]
    return _PROBE in (_try_render(template, variables, messages) or "")


def _takes_argument_objects(
    template: CompiledTemplate, variables: dict[str, Any], takes_string: bool
) -> bool:
    """Objects, unless the template fails on them or writes them in Python's spelling."""
    as_object = {_PROBE_KEY: _PROBE}
    text = _try_render(template, variables, _tool_call(as_object, takes_string))
    if text is not None and f"'{_PROBE_KEY}'" not in text:
        return True
    as_string = f'{{"{_PROBE_KEY}": "{_PROBE}"}}'
    text = _try_render(template, variables, _tool_call(as_string, takes_string))
    return text is None or _PROBE_KEY not in text


def _tool_call(arguments: object, takes_string: bool) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return [
        {"role": "user", "content": _content("hi", takes_string)},
        {"role": "assistant", "content": _content("", takes_string), "tool_calls": [call]},
    ]


def _content(text: str, takes_string: bool) -> object:
    return text if takes_string else [{"type": "text", "text": text}]


def _try_render(
    template: CompiledTemplate, variables: dict[str, Any], messages: list[dict[str, Any]]
) -> str | None:
    """None if the template refuses these messages."""
    try:
        return template.render(
            {
                **variables,
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": False,
            }
        )
    except TemplateLimitError:
        raise
    except Exception:  # a template can raise whatever an operation in it raises
        return None
