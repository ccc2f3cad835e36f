"""What schemas leave open: many patterns for one value, numbers of any length, missing types."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from bench.grammar_schemas import NASTY, REAL
from llmserve.grammar import GrammarError, GrammarKind
from llmserve.grammar.schema_bounds import check_intersections
from tests.grammar_builders import accepts_json, refusal


def texts(count: int, start: int = 0) -> list[Any]:
    return [{"type": "string", "pattern": f".*{i:03}.*"} for i in range(start, start + count)]


def nested(schemas: list[Any]) -> Any:
    """allOf in allOf in allOf ..."""
    schema: Any = {}
    for item in schemas:
        schema = {"allOf": [item, schema]}
    return schema


def objects(schemas: list[Any], *keys: str) -> list[Any]:
    parts: Any = schemas
    for key in reversed(keys):
        parts = [{key: part} for part in parts]
    return [{"type": "object", **part} for part in parts]


REFUSED: dict[str, Any] = {
    "allOf": {"allOf": texts(20)},
    "nested": nested(texts(20)),
    "siblings": {"allOf": texts(3), "pattern": "x"},
    "formats": {"allOf": texts(3), "format": "email"},
    "references": {
        "allOf": [{"$ref": f"#/$defs/d~1{i}"} for i in range(20)],
        "$defs": {f"d/{i}": item for i, item in enumerate(texts(20))},
    },
    "chained references": {
        "$ref": "#/$defs/0",
        "$defs": {str(i): item | {"$ref": f"#/$defs/{i + 1}"} for i, item in enumerate(texts(20))}
        | {"20": {}},
    },
    "alternatives": {"allOf": [{"anyOf": [{"type": "null"}, item]} for item in texts(6)]},
    "properties": {"allOf": objects(texts(20), "properties", "a")},
    "other properties": {"allOf": objects(texts(20), "additionalProperties")},
    "properties by pattern": {"allOf": objects(texts(20), "patternProperties", "^x")},
    "crossing": {
        "allOf": [
            *objects(texts(10), "properties", "xa"),
            *objects(texts(10, 10), "patternProperties", "^x"),
        ]
    },
    "items": {"items": {"items": {"allOf": texts(20)}}},
    "items of lists": {"allOf": [{"type": "array", "items": item} for item in texts(20)]},
    "tuples": {"allOf": [{"prefixItems": [{}, item]} for item in texts(20)]},
    "multiples": {"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    "endless": {"allOf": [{"anyOf": texts(8, 8 * i)} for i in range(8)]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_many_patterns_of_one_value_are_refused_at_once(name: str) -> None:
    begin = time.process_time()
    message = refusal(GrammarKind.JSON_SCHEMA, json.dumps(REFUSED[name]))

    assert "at once" in message or "too many alternatives" in message
    assert time.process_time() - begin < 3


ALLOWED: dict[str, Any] = {
    **{name: REAL[name] for name in REAL},
    **{name: NASTY[name] for name in NASTY},
    "alternatives": {"anyOf": texts(50)},
    "properties": {"properties": {f"p{i}": item for i, item in enumerate(texts(50))}},
    "by pattern": {"patternProperties": {f"^{i}": item for i, item in enumerate(texts(50))}}
    | {"properties": {"a": {"pattern": "x"}}},
    "the same twice": {"allOf": [texts(1)[0] for _ in range(9)]},
    "recursion": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"anyOf": [{"pattern": "a"}, {"items": {"$ref": "#/$defs/n"}}]}},
    },
    "recursion without an end": {"$ref": "#"},
    "extended": {
        "allOf": [
            {"properties": {"a": {"pattern": "a"}, "b": {"format": "date"}}},
            {"properties": {"c": {"pattern": "c"}, "d": {"pattern": "d"}, "e": {"pattern": "e"}}},
        ]
    },
}


@pytest.mark.parametrize("name", ALLOWED)
def test_patterns_of_different_values_do_not_count_together(name: str) -> None:
    check_intersections(ALLOWED[name])


def test_reference_to_nothing_is_left_to_the_compiler() -> None:
    for ref in ("#/a/b", "#/prefixItems/7", "https://x.test/a", "#anchor", 5):
        check_intersections({"$ref": ref, "prefixItems": [{}]})
    with pytest.raises(GrammarError, match="4 patterns"):
        check_intersections({"allOf": texts(4)})


LONG = "1" * 30
# Schemas that take any value somewhere, with a %s for it.
OPEN: dict[str, tuple[Any, str]] = {
    "nothing said": ({}, "%s"),
    "true": (True, "%s"),
    "annotations": ({"title": "Any", "description": "at all"}, "%s"),
    "property": ({"type": "object", "properties": {"a": {"title": "A"}}}, '{"a":%s}'),
    "other properties": ({"type": "object"}, '{"a":%s}'),
    "open properties": ({"type": "object", "additionalProperties": True}, '{"a":[%s]}'),
    "beside patterns": (
        {"type": "object", "patternProperties": {"^b": {"type": "null"}}},
        '{"b":null,"a":%s}',
    ),
    "items": ({"type": ["array", "null"]}, "[%s]"),
    "tuple": ({"type": "array", "prefixItems": [{}]}, '[%s,{"a":%s}]'),
    "option": ({"anyOf": [{"type": "string"}, {}]}, "%s"),
    "definition": (
        {"type": "array", "items": {"$ref": "#/$defs/any"}, "$defs": {"any": {}}},
        "[%s]",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_numbers_in_values_of_any_kind_are_bounded(name: str) -> None:
    schema, text = OPEN[name]

    assert accepts_json(schema, text.replace("%s", "-12.5"))
    assert accepts_json(schema, text.replace("%s", '{"b":[null,"x"]}'))
    assert not accepts_json(schema, text.replace("%s", LONG))
    assert not accepts_json(schema, text.replace("%s", f'{{"b":[{LONG}]}}'))


def test_options_that_exclude_each_other_may_hold_values_of_any_kind() -> None:
    options = [
        {"type": "object", "properties": {"k": {"const": k}, "v": {}}, "required": ["k", "v"]}
        for k in "ab"
    ]

    assert accepts_json({"oneOf": options}, '{"k":"b","v":1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
        {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["a"], "minProperties": 1}}},
    ],
)
def test_schema_of_properties_without_a_type_is_one_of_an_object(schema: Any) -> None:
    assert accepts_json(schema, '{"a":1}')
    assert not any(accepts_json(schema, text) for text in ("true", '"a"', "1", "[]", "{}"))
