"""Calls written as JSON objects with a name and arguments, in any order.

Arguments come out as the model wrote them. Absent or null arguments are `{}`; arguments given as
a string that holds a JSON object are that object. Other members of the object are ignored unless
the format forbids them. A name or arguments of the wrong type, or given twice, are malformed.
"""

from __future__ import annotations

from llmserve.tool_parsers.json_scanner import is_json
from llmserve.tool_parsers.scanning import ScanningParser
from llmserve.tool_parsers.source import Malformed, Steps

ARGUMENT_KEYS = ("arguments", "parameters")


class JsonCallParser(ScanningParser):
    """A format whose calls are JSON objects."""

    def read_call_object(self, *, is_bare: bool = False) -> Steps[None]:
        """Reads one call. is_bare: no marker says that this is a call, so it must have arguments
        and nothing that calls do not have."""
        source = self.source
        call = _CallMembers(self, is_bare=is_bare)
        yield from source.expect("{")
        yield from source.skip_space()
        if (yield from source.accept("}")):
            raise Malformed
        while True:
            start = source.pos
            key = yield from source.json_string()
            yield from source.skip_space()
            yield from source.expect(":")
            yield from source.skip_space()
            yield from call.read_member(key, start)
            yield from source.skip_space()
            if (yield from source.expect(",", "}")) == "}":
                break
            yield from source.skip_space()
        call.end()

    def read_call_list(self, *, is_bare: bool = False) -> Steps[None]:
        """Reads the calls of a list whose opening bracket has been read; the list is one unit."""
        source = self.source
        while True:
            yield from source.skip_space()
            yield from self.read_call_object(is_bare=is_bare)
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                return


class _CallMembers:
    """Gives out a call as soon as its name is known and its arguments come."""

    def __init__(self, parser: ScanningParser, *, is_bare: bool) -> None:
        self._parser = parser
        self._is_bare = is_bare
        self._name: str | None = None
        self._early_arguments: str | None = None  # came before the name
        self._has_arguments = False

    def read_member(self, key: str, start: int) -> Steps[None]:
        source = self._parser.source
        if key == "name":
            if self._name is not None:
                source.pos = start
                raise Malformed
            self._name = yield from source.json_string()
            self._parser.begin_call(self._name)
            if self._early_arguments is not None:
                self._parser.add_arguments(self._early_arguments)
        elif key in ARGUMENT_KEYS:
            if self._has_arguments:
                source.pos = start
                raise Malformed
            self._has_arguments = True
            yield from self._read_arguments()
        elif self._is_bare and key not in ("type", "id"):
            source.pos = start
            raise Malformed
        else:
            yield from source.json_value()

    def end(self) -> None:
        if self._name is None or (self._is_bare and not self._has_arguments):
            raise Malformed
        if not self._has_arguments:
            self._parser.add_arguments("{}")

    def _read_arguments(self) -> Steps[None]:
        source = self._parser.source
        start = source.pos
        kind = yield from source.at("{", '"', "null")
        if kind == "{" and self._name is not None:
            yield from source.json_value(self._parser.add_arguments)
            return
        if kind == "{":
            arguments = yield from source.json_value()
        elif kind == '"':
            arguments = yield from source.json_string()
            if not (arguments.lstrip().startswith("{") and is_json(arguments)):
                source.pos = start
                raise Malformed
        else:
            yield from source.expect("null")
            arguments = "{}"
        if self._name is None:
            self._early_arguments = arguments
        else:
            self._parser.add_arguments(arguments)
