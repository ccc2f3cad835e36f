"""Renders Jinja chat templates with the names that transformers gives them, and with limits.

Templates come with models or with requests and are not trusted. Jinja's immutable sandbox keeps
them from objects they should not touch. What it does not bound is bounded here, per rendering:

* time: 10 s, checked at every call, every loop iteration and every piece of text;
* memory: 1 GiB of strings and lists made in total, charged before they are made;
* output: 64 Mi characters; ranges: 100,000 numbers (Jinja's own limit).
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10.0
MAX_BYTES = 1 << 30
MAX_OUTPUT_CHARS = 1 << 26
_MAX_WIDTH = 10_000  # of a padded or indented text
_MAX_NUMBER_BITS = 1 << 14
_NODE_BYTES = 64  # of an entry of a list or dict, roughly
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|:[^{}]*(?:\d{5}|\{)")
_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_GUARDED_FILTERS = (
    *("batch", "center", "format", "indent", "join", "replace", "round", "slice", "string", "sum"),
)
# They can multiply a text, and chat templates have no use for them.
_REMOVED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")


_SEQUENCES = (str, bytes, list, tuple)


class TemplateLimitError(Exception):
    """A rendering took too long or too much memory."""


class TemplateRaisedError(jinja2.TemplateError):
    """The template itself refused: its call of raise_exception."""


class _Budget(threading.local):
    """What the rendering on this thread may still use."""

    deadline = float("inf")
    num_bytes = MAX_BYTES

    def start(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.num_bytes = MAX_BYTES

    def charge(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise TemplateLimitError(f"it made more than {MAX_BYTES >> 20} MiB of text")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it took more than {MAX_SECONDS:.0f} s")

    def charge_text_of(self, value: Any) -> None:
        """For the text that str() or JSON makes of a value: shared parts count each time."""
        if isinstance(value, str):
            self.charge(sys.getsizeof(value))
        elif isinstance(value, dict):
            self.charge(_NODE_BYTES)
            for key, item in value.items():
                self.charge_text_of(key)
                self.charge_text_of(item)
        elif isinstance(value, list | tuple | set):
            self.charge(_NODE_BYTES)
            for item in value:
                self.charge_text_of(item)
        else:
            self.charge(_NODE_BYTES)


class CompiledTemplate:
    """A template that renders within the limits; may render on several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError (as TemplateSyntaxError) if it is not a template."""
        self._environment = _Environment()
        self._environment.budget.start()
        try:
            self.tree: nodes.Template = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except (RecursionError, OverflowError, SyntaxError, MemoryError) as error:
            raise jinja2.TemplateError("the template is too deeply nested") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises jinja2.TemplateError, TemplateLimitError, or what an operation in it raises."""
        self._environment.budget.start()
        parts = []
        num_chars = 0
        for part in self._template.generate(variables):
            parts.append(part)
            num_chars += len(part)
            if num_chars > MAX_OUTPUT_CHARS:
                raise TemplateLimitError(f"it wrote more than {MAX_OUTPUT_CHARS} characters")
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Charges the budget wherever a template can loop or make a large value."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
        )
        self.budget = _Budget()
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = self._to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _GUARDED_FILTERS:
            self.filters[name] = self._guard_filter(name, self.filters[name])
        self.filters[_LOOP] = self._loop
        self.filters[_CONCAT] = self._concat_parts

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a macro or a `{% set %}` block wrote."""
        texts = list(parts)
        self.budget.charge(sum(map(sys.getsizeof, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _LOOP)
        _replace_concats(tree)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.charge(_NODE_BYTES)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            args = __self._check_method(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.budget.charge(_shallow_size(left) + _shallow_size(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            if _bits(left) * max(1, abs(right) if isinstance(right, int) else 1) > _MAX_NUMBER_BITS:
                raise TemplateLimitError("it computes too large a number")
        elif isinstance(left, str):
            self._check_format(left)
            self.budget.charge_text_of(right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(value.__self__)
            self.budget.charge_text_of([args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def _check_method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Returns `args`, in which an iterator that had to be counted is a list."""
        self.budget.charge(sys.getsizeof(owner))
        if name in _WIDTH_METHODS:
            self._check_widths([*args, *kwargs.values()])
        elif name == "replace":
            self._check_replace(owner, args)
        elif name == "join" and args:
            items = list(args[0])
            self._check_join(owner, items)
            return (items, *args[1:])
        return args

    def _check_widths(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int) and value > _MAX_WIDTH:
                raise TemplateLimitError(f"it pads a text to {value} characters")

    def _check_format(self, text: str) -> None:
        self.budget.charge(sys.getsizeof(text))
        if _WIDE_FORMAT.search(text):
            raise TemplateLimitError("it formats a value with too large a width")

    def _check_replace(self, text: Any, args: Sequence[Any]) -> None:
        if len(args) >= 2 and isinstance(args[0], type(text)):
            self.budget.charge(text.count(args[0]) * sys.getsizeof(args[1]))

    def _check_join(self, separator: Any, items: list[Any]) -> None:
        self.budget.charge(len(items) * sys.getsizeof(separator))
        self.budget.charge_text_of(items)

    def _check_product(self, left: Any, right: Any) -> None:
        for value, count in ((left, right), (right, left)):
            if isinstance(value, _SEQUENCES) and isinstance(count, int):
                self.budget.charge(_shallow_size(value) * max(0, count))
                return
        if _bits(left) + _bits(right) > _MAX_NUMBER_BITS:
            raise TemplateLimitError("it computes too large a number")

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its arguments checked; Jinja's mark of what it passes first is kept."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            passed, value, rest = args[:num_passed], args[num_passed], args[num_passed + 1 :]
            if name in ("join", "sum"):
                value = list(value)
            self._check_filter(name, value, rest, kwargs)
            return function(*passed, value, *rest, **kwargs)

        if num_passed:
            guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return guarded

    def _check_filter(
        self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        options = [*args, *kwargs.values()]
        self.budget.charge_text_of([value, options])
        if name == "format":
            self._check_format(str(value))
        elif name == "replace":
            self._check_replace(str(value), args)
        elif name == "join":
            self._check_join(str(options[0]) if options else "", value)
        else:
            self._check_widths(options)
        if name == "indent":
            self.budget.charge(str(value).count("\n") * sum(map(_indent_width, options)))

    def _finalize(self, value: Any) -> Any:
        self.budget.charge_text_of(value)
        return value

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As in transformers: without the HTML escapes of Jinja's own filter."""
        self._check_widths([indent])
        self.budget.charge_text_of(value)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _loop(self, iterable: Any) -> Any:
        if hasattr(iterable, "__len__"):
            return _SizedLoop(iterable, self.budget)
        return _counted(iterable, self.budget)

    def _concat_parts(self, parts: list[Any]) -> str:
        for part in parts:
            self.budget.charge_text_of(part)
        return "".join(map(str, parts))


class _SizedLoop:
    """Keeps the length that `loop.length` and `loop.last` ask for."""

    def __init__(self, iterable: Any, budget: _Budget) -> None:
        self._iterable = iterable
        self._budget = budget

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._iterable, self._budget)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the model wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_LOOP = "llmserve_loop"
_CONCAT = "llmserve_concat"


def _counted(iterable: Any, budget: _Budget) -> Iterator[Any]:
    for item in iterable:
        budget.charge(_NODE_BYTES)
        yield item


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _replace_concats(node: nodes.Node) -> nodes.Node:
    """`a ~ b` becomes a filter, so that it is charged."""
    for name, child in node.iter_fields():
        if isinstance(child, nodes.Node):
            setattr(node, name, _replace_concats(child))
        elif isinstance(child, list):
            child[:] = [_replace_concats(c) if isinstance(c, nodes.Node) else c for c in child]
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    return node


def _indent_width(option: Any) -> int:
    return len(option) if isinstance(option, str) else int(option)


def _shallow_size(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, _SEQUENCES) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRaisedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
