"""Renders Jinja chat templates with the names that transformers gives them, and with limits.

Templates come with models or with requests and are not trusted. Jinja's immutable sandbox keeps
them from objects they should not touch. What it does not bound is bounded here, per rendering:

* time: 5 s of CPU, checked at every call, filter, test, comparison, loop iteration and output;
* memory: 1 GiB of strings and lists made in total, 512 MiB each, charged before they are made;
* output: 64 Mi characters; ranges: 100,000 numbers (Jinja's own limit).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmserve.tokenizer.template_budget import (
    NODE_BYTES,
    Budget,
    TemplateLimitError,
    shallow_size,
)
from llmserve.tokenizer.template_checks import OperationChecks
from llmserve.tokenizer.template_globals import (
    DictMaker,
    TemplateNamespace,
    raise_exception,
    strftime_now,
)

MAX_OUTPUT_CHARS = 1 << 26
# They can multiply a text, and chat templates have no use for them.
_REMOVED_FILTERS = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
_CONTAINERS = (list, tuple, dict, set, frozenset)

# Names of filters that stand for syntax; a template cannot spell them.
_LOOP = "loop over"
_CONCAT = "concatenate"
_MADE = "made"
_TICK = "tick"


class CompiledTemplate:
    """A template that renders within the limits; may render on several threads at once."""

    def __init__(self, source: str, max_code_chars: int | None = None) -> None:
        """Raises jinja2.TemplateError (as TemplateSyntaxError) if it is not a template.

        `max_code_chars` bounds the Python code that it becomes, during whose compilation no other
        thread runs: about 0.1 s for 256 Ki.
        """
        self._environment = _Environment(max_code_chars)
        self._environment.budget.start()
        try:
            self.tree: nodes.Template = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except (RecursionError, OverflowError, SyntaxError, MemoryError) as error:
            raise jinja2.TemplateError("the template is too deeply nested") from error
        finally:
            self._environment.budget.end()

    def render(self, variables: Mapping[str, Any], max_seconds: float | None = None) -> str:
        """Raises jinja2.TemplateError, TemplateLimitError, or what an operation in it raises."""
        self._environment.budget.start(max_seconds)
        parts = []
        num_chars = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise TemplateLimitError(f"it wrote more than {MAX_OUTPUT_CHARS} characters")
        finally:
            self._environment.budget.end()
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Charges the budget wherever a template can loop or make a large value."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_code_chars: int | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._finalize,
        )
        self._max_code_chars = max_code_chars
        self.budget = Budget()
        self._checks = OperationChecks(self.budget)
        del self.globals["lipsum"]
        self.globals["dict"] = DictMaker(self._checks)
        self.globals["namespace"] = TemplateNamespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self.filters["tojson"] = self._to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = self._guard_filter(name, function)
        self.tests.update({name: self._guard_test(test) for name, test in self.tests.items()})
        self.filters[_LOOP] = self._loop
        self.filters[_CONCAT] = self._concat_parts
        self.filters[_MADE] = self._made
        self.filters[_TICK] = self._tick

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a macro or a `{% set %}` block wrote."""
        texts = list(parts)
        self.budget.charge(sum(map(sys.getsizeof, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, _LOOP)
        _instrument(tree)
        return tree

    def _compile(self, source: str, filename: str) -> CodeType:
        if self._max_code_chars is not None and len(source) > self._max_code_chars:
            raise jinja2.TemplateError("the template has too many statements")
        return super()._compile(source, filename)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.charge(NODE_BYTES)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | type):
            args = __self._checks.method(owner, __obj.__name__, args, kwargs)
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "+":
            size = shallow_size(left) + shallow_size(right)
            if isinstance(left, list | tuple):
                size = self.budget.measure(left) + self.budget.measure(right)
                self.budget.check_size(size)
            self.budget.charge(shallow_size(left) + shallow_size(right))
        elif operator == "*":
            self._checks.product(left, right)
        elif operator == "**":
            self._checks.power(left, right)
        elif isinstance(left, str):
            self._checks.formatted(left, "%", right)
        result = super().call_binop(context, operator, left, right)
        if size and isinstance(result, list | tuple):
            self.budget.remember(result, size)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._checks.formatted(value.__self__, "{", [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked

    def _guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its arguments checked; Jinja's mark of what it passes first is kept."""
        num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.charge(NODE_BYTES)
            passed, value, rest = args[:num_passed], args[num_passed], args[num_passed + 1 :]
            value = self._checks.filter(name, value, rest, kwargs)
            return self._made(function(*passed, value, *rest, **kwargs))

        if num_passed:
            guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return guarded

    def _guard_test(self, function: Any) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            return function(*args, **kwargs)

        if hasattr(function, "jinja_pass_arg"):
            guarded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return guarded

    def _finalize(self, value: Any) -> Any:
        self.budget.charge(self.budget.measure(value))
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
        self._checks.json(value, indent, separators)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _made(self, value: Any) -> Any:
        """A container that was made: its size is checked."""
        if isinstance(value, _CONTAINERS):
            self.budget.measure(value)
        return value

    def _tick(self, value: Any) -> Any:
        self.budget.tick()
        return value

    def _loop(self, iterable: Any) -> Any:
        if hasattr(iterable, "__len__"):
            return _SizedLoop(iterable, self._checks)
        return self._checks.counted(iterable)

    def _concat_parts(self, parts: list[Any]) -> str:
        for part in parts:
            self.budget.charge(self.budget.measure(part))
        return "".join(map(str, parts))


class _SizedLoop:
    """Keeps the length that `loop.length` and `loop.last` ask for."""

    def __init__(self, iterable: Any, checks: OperationChecks) -> None:
        self._iterable = iterable
        self._checks = checks

    def __len__(self) -> int:
        return len(self._iterable)

    def __iter__(self) -> Iterator[Any]:
        return self._checks.counted(self._iterable)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the model wrote, for training; here it renders its body.

    As in transformers the body is a block of its own: what it sets is not seen behind it.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _instrument(node: nodes.Node) -> nodes.Node:
    """Makes filters of syntax that builds or compares values, so that it is charged."""
    for name, child in node.iter_fields():
        if isinstance(child, nodes.Node):
            setattr(node, name, _instrument(child))
        elif isinstance(child, list):
            child[:] = [_instrument(c) if isinstance(c, nodes.Node) else c for c in child]
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)
    if isinstance(node, nodes.Compare):
        node.expr = _filtered(node.expr, _TICK)
    is_loaded_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
    if is_loaded_tuple or isinstance(node, nodes.List | nodes.Dict):
        return _filtered(node, _MADE)
    return node
