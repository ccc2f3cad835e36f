"""Charges a rendering's budget for what an operation is about to make.

A method, a filter or an operator of Python can turn a few characters into gigabytes, or search for
hours in one call that nothing can interrupt. Each one that can is bounded here by its arguments.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmserve.tokenizer.template_budget import (
    NODE_BYTES,
    Budget,
    TemplateLimitError,
    shallow_size,
)

_MAX_WIDTH = 10_000  # of a padded or indented text
_MAX_JSON_INDENT = 64
_MAX_NUMBER_BITS = 1 << 14
_MAX_DIGITS = 4300  # of a text that becomes a number; Python's own limit for decimals
_MAX_SEARCHED = 1 << 28  # characters of a text times those of what is sought in it
_MAX_STRIPPED = 1 << 16  # characters of a text whose tags are stripped, in quadratic time
_SPLIT_BYTES = 64  # of one piece of a split text
_ESCAPED = 6  # "&quot;" and "\u0041" for one character
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|:[^{}]*(?:\d{5}|\{)")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_WIDTH_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "to_bytes"})
_SEARCH_METHODS = frozenset(
    {"rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"}
)
_SPLIT_METHODS = frozenset({"split", "rsplit", "splitlines"})
_TYPE_METHODS = frozenset({"fromkeys"})

# Filters that go through all of their input, by what they make of a character or an entry.
_TEXT_FILTERS = {
    **dict.fromkeys(("capitalize", "lower", "upper", "string", "center", "truncate", "format"), 1),
    **dict.fromkeys(("escape", "e", "forceescape", "urlencode"), _ESCAPED),
    **dict.fromkeys(("title", "wordcount"), 32),  # they split a text into words
    **dict.fromkeys(("indent", "replace", "striptags", "trim"), 1),
}
# Filters that go through a list in one call, by what they are charged for an entry: most of them
# take longer than memory, so that this bounds how many entries they get.
_LIST_FILTERS = {
    **dict.fromkeys(("batch", "list", "reverse", "slice"), 8),
    **dict.fromkeys(("join", "sum"), 64),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), 256),
}
# These look for an entry, in as many as it takes, or make their output one by one.
_LAZY_FILTERS = frozenset({"first", "map", "reject", "rejectattr", "select", "selectattr"})
_COMPARING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
_WIDTH_FILTERS = frozenset({"batch", "center", "indent", "round", "slice"})


class OperationChecks:
    """Every method raises TemplateLimitError for what would take too much."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def counted(self, iterable: Any) -> Iterator[Any]:
        """The items, charged one by one."""
        item_bytes = NODE_BYTES + (24 if isinstance(iterable, str) else 0)
        for item in iterable:
            self._budget.charge(item_bytes)
            yield item

    def product(self, left: Any, right: Any) -> None:
        for value, count in ((left, right), (right, left)):
            if isinstance(value, str | bytes | list | tuple) and isinstance(count, int):
                count = max(0, count)
                if isinstance(value, list | tuple):
                    self._budget.check_size(self._budget.measure(value) * count)
                self._budget.charge((sys.getsizeof(value) - sys.getsizeof(type(value)())) * count)
                return
        self._number(_bits(left) + _bits(right))

    def power(self, left: Any, right: Any) -> None:
        self._number(_bits(left) * max(1, abs(right) if isinstance(right, int) else 1))

    def formatted(self, text: Any, mark: str, values: Any) -> None:
        """A text is filled with `values`; each may be written once for every `mark` in it."""
        if _WIDE_FORMAT.search(text):
            raise TemplateLimitError("it formats a value with too large a width")
        size = self._budget.measure(values) + _MAX_WIDTH
        self._budget.charge(sys.getsizeof(text) + text.count(mark) * size * _factor(text))

    def method(
        self, owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """A method of a string, bytes, a number or a type is called.

        Returns `args`, in which an iterator that had to be counted is a list.
        """
        if isinstance(owner, type) and name not in _TYPE_METHODS:
            raise TemplateLimitError(f"it calls {name} of a type")
        self._budget.charge(shallow_size(owner) * _factor(owner))
        options = [*args, *kwargs.values()]
        if name in _WIDTH_METHODS:
            self._widths(options)
        elif name == "expandtabs":
            self._widths(options)
            self._budget.charge(owner.count("\t") * max([8, *filter(_is_number, options)]))
        elif name == "translate":
            raise TemplateLimitError("it translates a text")
        elif name == "striptags":
            self._stripped(owner)
        elif name == "replace":
            self._replaced(owner, options)
        elif name == "join" and args:
            items = list(self.counted(args[0]))
            self._joined(owner, items)
            return (items, *args[1:])
        if name in _SEARCH_METHODS:
            self._searched(owner, options)
        if name in _SPLIT_METHODS:
            self._split(owner, name, options)
        return args

    def filter(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A filter is called. Returns `value`, or what stands for it where it is counted."""
        options = [*args, *kwargs.values()]
        if name == "reverse" and isinstance(value, str):
            self._budget.charge(shallow_size(value))
            return value
        if name in _LIST_FILTERS and (isinstance(value, str) or not hasattr(value, "__len__")):
            value = list(self.counted(value))
        if name in _LIST_FILTERS:
            self._budget.charge(_LIST_FILTERS[name] * len(value))
        elif name in _LAZY_FILTERS and value and hasattr(value, "__iter__"):
            value = self.counted(value)
        if name in _TEXT_FILTERS:
            size = self._budget.measure(value) + self._budget.measure(options)
            self._budget.charge(size * _TEXT_FILTERS[name])
        if name in _COMPARING_FILTERS:
            self._compared(value)
        if name in _WIDTH_FILTERS:
            self._widths(options)
        self._of_filter(name, value, args, kwargs, options)
        return value

    def json(self, value: Any, indent: Any, separators: Any) -> None:
        size = self._budget.measure(value)
        num_nodes = size // NODE_BYTES
        size *= _ESCAPED
        if separators is not None:
            size += num_nodes * sum(map(shallow_size, separators))
        if indent is not None:
            width = len(indent) if isinstance(indent, str) else max(0, indent)
            if width > _MAX_JSON_INDENT:
                raise TemplateLimitError(f"it indents a text by {width} characters")
            size += num_nodes * width * _depth(value)
        self._budget.charge(size)

    def _of_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: list[Any],
    ) -> None:
        if name == "format":
            self.formatted(str(value), "%", [args, kwargs])
        elif name == "replace":
            old, new = _bound(args, kwargs, "old", "new")
            self._replaced(str(value), [str(old), str(new)])
        elif name == "join":
            (separator,) = _bound(args, kwargs, "d")
            self._joined("" if separator is None else str(separator), value)
        elif name == "trim":
            self._searched(value, options)
        elif name == "striptags":
            self._stripped(value)
        elif name == "indent":
            width = sum(len(o) if isinstance(o, str) else int(o) for o in options)
            self._budget.charge(str(value).count("\n") * (width + _SPLIT_BYTES))
        elif name == "sum":
            self._summed(value)
        elif name == "int" and isinstance(value, str | bytes) and len(value) > _MAX_DIGITS:
            raise TemplateLimitError("it computes too large a number")

    def _widths(self, values: Iterable[Any]) -> None:
        for value in values:
            if _is_number(value) and value > _MAX_WIDTH:
                raise TemplateLimitError(f"it pads a text to {value} characters")

    def _number(self, num_bits: int) -> None:
        if num_bits > _MAX_NUMBER_BITS:
            raise TemplateLimitError("it computes too large a number")

    def _replaced(self, text: Any, options: Sequence[Any]) -> None:
        if len(options) >= 2 and isinstance(options[0], type(text)):
            growth = shallow_size(options[1]) * _factor(text)
            self._budget.charge(text.count(options[0]) * growth)

    def _joined(self, separator: Any, items: Sequence[Any]) -> None:
        size = len(items) * shallow_size(separator) + self._budget.measure(items)
        self._budget.charge(size * _factor(separator))

    def _searched(self, text: Any, options: Sequence[Any]) -> None:
        sought = options[0] if options else None
        if (
            isinstance(sought, str | bytes)
            and len(sought) > 16
            and len(text) * len(sought) > _MAX_SEARCHED
        ):
            raise TemplateLimitError("it searches too long a text")

    def _split(self, text: Any, name: str, options: Sequence[Any]) -> None:
        separator = options[0] if options else None
        if name == "splitlines":
            ends = _LINE_ENDS if isinstance(text, str) else (b"\n", b"\r")
            num_parts = sum(map(text.count, ends))
        elif isinstance(separator, str | bytes) and separator:
            num_parts = text.count(separator)
        else:
            num_parts = len(text) // 2
        limits = [option for option in options[1:] if _is_number(option) and option >= 0]
        self._budget.charge(min([num_parts, *limits]) * _SPLIT_BYTES)

    def _stripped(self, text: Any) -> None:
        if len(str(text)) > _MAX_STRIPPED:
            raise TemplateLimitError("it strips the tags of too long a text")

    def _compared(self, value: Any) -> None:
        """All entries are compared with each other, or nearly."""
        size = self._budget.measure(value)
        if size > 1 << 20:
            self._budget.charge(size * len(value).bit_length())

    def _summed(self, values: Sequence[Any]) -> None:
        """Summing lists copies each partial sum."""
        size = sum(map(shallow_size, values))
        self._budget.charge(size * len(values))


def _bound(args: Sequence[Any], kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of a filter's first parameters; None where one is not given."""
    given = dict(zip(names, args, strict=False))
    return [given.get(name, kwargs.get(name)) for name in names]


def _factor(text: Any) -> int:
    """Text that is marked as HTML escapes what is put into it."""
    return _ESCAPED if hasattr(text, "__html__") else 1


def _depth(value: Any) -> int:
    """How deeply containers are nested; what is shared counts each time."""
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64
