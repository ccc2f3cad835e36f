"""Checks of single request fields; every refusal names the field, the value and what is allowed.

The checkers run as pydantic validators. They raise RequestError themselves, which pydantic lets
through, because its own messages do not say the whole allowed range. Each carries the JSON schema
of the values that it takes, for the API's description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema

from llmserve.errors import RequestError

_M = TypeVar("_M", bound=BaseModel)

_SHOWN_CHARS = 60
INT64_MAX = (1 << 63) - 1


def shorten(value: object) -> str:
    """A value for an error message, in JSON's spelling, a few words at most."""
    if isinstance(value, str):
        text = value[:_SHOWN_CHARS] + ("..." if len(value) > _SHOWN_CHARS else "")
        return orjson.dumps(text).decode()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)[:_SHOWN_CHARS]
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "an object"


def refuse(field: str, value: object, requirement: str) -> NoReturn:
    """`field` is a field's name, or the path of a value in it, such as messages[0].role."""
    raise RequestError(f"{field} is {shorten(value)}; it must be {requirement}", param=field)


def refuse_unsupported(field: str, reason: str) -> NoReturn:
    """The request asks for something that this server does not do."""
    raise RequestError(f"{field} is not supported: {reason}", param=field)


def name_of(info: ValidationInfo) -> str:
    return info.field_name or "body"


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A validator for `Annotated`, and what the API's description says of its values.

    `schema` None: what pydantic makes of the annotated type.
    """

    check: Callable[[Any, str], Any]  # of (value, field name)
    schema: Mapping[str, Any] | None = None

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def run(value: object, info: ValidationInfo) -> Any:
            return self.check(value, name_of(info))

        return BeforeValidator(run).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return dict(handler(schema) if self.schema is None else self.schema)


def integer(low: int, high: int | None = None, *, requirement: str = "") -> Check:
    """An integer within [low, high]; 2.0 counts as 2, as in JSON Schema."""
    upper = INT64_MAX if high is None else high
    if not requirement:
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        requirement = f"an integer {span}"

    def check(value: object, field: str) -> int:
        number = value
        # JSON's integers outside of 64 bits arrive as floats, rounded.
        if isinstance(value, float) and value.is_integer() and abs(value) <= INT64_MAX:
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= upper:
            refuse(field, value, requirement)
        return number

    return Check(check, {"type": "integer", "minimum": low, "maximum": upper})


def real(low: float, high: float | None = None, *, is_low_excluded: bool = False) -> Check:
    """A number within [low, high], or (low, high]."""
    bound = f"above {low:g}" if is_low_excluded else f"of at least {low:g}"
    if high is None:
        requirement = f"a number {bound}"
    elif is_low_excluded:
        requirement = f"a number above {low:g} and at most {high:g}"
    else:
        requirement = f"a number from {low:g} to {high:g}"

    def check(value: object, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse(field, value, requirement)
        is_low_enough = high is None or value <= high
        is_high_enough = value > low if is_low_excluded else value >= low
        if not is_low_enough or not is_high_enough:
            refuse(field, value, requirement)
        return float(value)

    schema: dict[str, Any] = {"type": "number"}
    schema["exclusiveMinimum" if is_low_excluded else "minimum"] = low
    if high is not None:
        schema["maximum"] = high
    return Check(check, schema)


def checked(check: Callable[[Any, str], Any], schema: Mapping[str, Any] | None = None) -> Check:
    """A validator from a function of (value, field name), and the schema of what it takes."""
    return Check(check, schema)


def id_list(value: object, field: str) -> list[int]:
    """A list of integers; whether they are in the vocabulary is checked later."""
    if not isinstance(value, list):
        refuse(field, value, "a list of token ids")
    if not set(map(type, value)) <= {int}:
        position = next(i for i, item in enumerate(value) if type(item) is not int)
        refuse(f"{field}[{position}]", value[position], "a token id (an integer)")
    return value


def text_list(value: object, field: str) -> list[str]:
    """A list of strings that are not empty."""
    if not isinstance(value, list):
        refuse(field, value, "a list of strings that are not empty")
    for position, item in enumerate(value):
        if not isinstance(item, str) or not item:
            refuse(f"{field}[{position}]", item, "a string that is not empty")
    return value


def check_vocabulary(ids: list[int], vocab_size: int, field: str) -> None:
    """Raises RequestError naming an id outside the vocabulary. O(len(ids)), no Python loop."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    refuse(f"{field}[{position}]", ids[position], f"a token id from 0 to {vocab_size - 1}")


def validate(model: type[_M], body: dict[str, Any]) -> _M:
    """The body as `model`; null means absent. Raises RequestError for the first thing wrong."""
    present = {name: value for name, value in body.items() if value is not None}
    try:
        return model.model_validate(present)
    except ValidationError as error:
        raise _to_request_error(error) from None


def _to_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    if first["type"] == "missing":
        return RequestError(f"{field} is required", param=field)
    requirement = first["msg"].replace("Input should be", "it must be")
    if first["type"] == "model_type":  # its own message names the class
        requirement = "it must be an object"
    return RequestError(f"{field} is {shorten(first['input'])}; {requirement}", param=field)
