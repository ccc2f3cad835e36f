"""JSON schemas as applications send them, and some that are hard to compile."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_INT: dict[str, Any] = {"type": "integer"}
_NUMBER: dict[str, Any] = {"type": "number"}
_BOOL: dict[str, Any] = {"type": "boolean"}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def _enum(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


_ADDRESS = _object(
    street=_TEXT, city=_TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}, country=_TEXT
)
_STEP = _object(explanation=_TEXT, output=_TEXT)

REAL: dict[str, Any] = {
    "person": _object(name=_TEXT, age=_INT),
    "sentiment": _object(label=_enum("positive", "negative", "neutral"), score=_NUMBER),
    "weather call": _object(city=_TEXT, unit=_enum("celsius", "fahrenheit")),
    "maths steps": _object(steps=_list(_STEP), final_answer=_TEXT),
    "calendar event": _object(
        name=_TEXT, date={"type": "string", "format": "date"}, participants=_list(_TEXT)
    ),
    "invoice": _object(
        number={"type": "string", "pattern": "^INV-[0-9]{6}$"},
        issued={"type": "string", "format": "date"},
        items=_list(_object(description=_TEXT, quantity=_INT, price=_NUMBER), minItems=1),
        total=_NUMBER,
        paid=_BOOL,
    ),
    "contact": _object(
        name=_TEXT,
        email={"type": "string", "format": "email"},
        address=_ADDRESS,
        phones=_list(_TEXT),
    ),
    "entities": _object(
        entities=_list(
            _object(text=_TEXT, type=_enum("person", "place", "org", "date"), start=_INT)
        )
    ),
    "classification": _object(category=_enum(*(f"category_{i}" for i in range(60)))),
    "recipe": _object(
        title=_TEXT,
        servings={"type": "integer", "minimum": 1, "maximum": 20},
        ingredients=_list(_object(name=_TEXT, amount=_NUMBER, unit=_enum("g", "ml", "piece"))),
        steps=_list(_TEXT),
    ),
    "optional fields": {
        "type": "object",
        "properties": {f"field_{i}": {"anyOf": [_TEXT, {"type": "null"}]} for i in range(12)},
        "additionalProperties": False,
    },
    "union of calls": {
        "anyOf": [_object(tool={"const": f"tool_{i}"}, query=_TEXT, limit=_INT) for i in range(8)]
    },
    "recursive user interface": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": _object(
                type=_enum("div", "button", "header", "section", "field", "form"),
                label=_TEXT,
                children=_list({"$ref": "#/$defs/node"}),
                attributes=_list(_object(name=_TEXT, value=_TEXT)),
            )
        },
    },
    "linked list": {
        "$ref": "#/$defs/link",
        "$defs": {
            "link": _object(
                value=_INT, next={"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}
            )
        },
    },
    "map of numbers": {"type": "object", "additionalProperties": _NUMBER},
    "moderation": _object(
        violating=_BOOL,
        category={"anyOf": [_enum("violence", "sexual", "self_harm"), {"type": "null"}]},
        explanation={"anyOf": [_TEXT, {"type": "null"}]},
    ),
    "research paper": _object(
        title=_TEXT, authors=_list(_TEXT), abstract=_TEXT, keywords=_list(_TEXT, maxItems=10)
    ),
    "coordinates": _list(
        {"type": "array", "prefixItems": [_NUMBER, _NUMBER], "items": False}, maxItems=50
    ),
    "identifiers": _object(
        id={"type": "string", "format": "uuid"}, at={"type": "string", "format": "date-time"}
    ),
    "bounded texts": _object(
        headline={"type": "string", "maxLength": 80}, body={"type": "string", "maxLength": 2000}
    ),
}
NASTY: dict[str, Any] = {
    "enum of 5,000": _enum(*(f"value {i * 7919 % 99991}" for i in range(5000))),
    "300 optional properties": {
        "type": "object",
        "properties": {f"property_{i}": _INT for i in range(300)},
        "additionalProperties": False,
    },
    "pattern with a window": {"type": "string", "pattern": "a.{60}b"},
    "repeated alternatives": {"type": "string", "pattern": "^(a|aa|aaa){1,40}$"},
    "list of 10,000": _list(_object(a=_INT), minItems=5000, maxItems=10_000),
}
