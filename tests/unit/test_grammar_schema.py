"""JSON schemas: jsonschema is the judge of what may be written and of what is."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from llmserve.grammar import GrammarKind, GrammarSpec
from tests.grammar_builders import (
    COMPILER,
    EOS_ID,
    accepts,
    accepts_json,
    allowed,
    is_text_of,
    refusal,
)


class Color(enum.Enum):
    RED = "red"
    GREEN = "grün"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=8)]


class Tree(BaseModel):
    value: bool
    children: list[Tree] = Field(max_length=2)


class Everything(BaseModel):
    """A model as users write them."""

    id: uuid.UUID
    day: datetime.date
    color: Color
    note: str | None = None
    price: float
    code: Annotated[str, Field(pattern=r"^[A-C]{2}-\d{3}$")]
    pet: Cat | Dog = Field(discriminator="kind")
    pair: tuple[bool, None]
    tags: list[Literal["a", "b"]] = Field(max_length=3)
    counts: dict[str, int]


SCHEMAS: list[Any] = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "b"},
    {"type": "string", "pattern": "^b+$", "maxLength": 4},
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": ["boolean", "null"]},
    {"enum": ["a", "日本", 3, None, True, [1], {"x": "y"}]},
    {"const": {"a": [1, "ü"]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1]}], "items": False},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {
        "type": "object",
        "properties": {"straße": {"type": "boolean"}, 'q"\\': {"type": "null"}, "c": {"const": 1}},
        "required": ["straße"],
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}, "maxProperties": 2},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["next"],
            }
        },
    },
    {"definitions": {"a": {"type": "boolean"}}, "items": {"$ref": "#/definitions/a"}, "maxItems": 2}
    | {"type": "array"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email", "maxLength": 20},
    Everything.model_json_schema(),
    Tree.model_json_schema(),
    {"description": "d", "title": "t", "default": 1, "examples": [2], "type": "integer"}
    | {"deprecated": True, "readOnly": True, "$comment": "c", "$id": "https://x.test/s"},
]

VALUES: list[Any] = [
    *(True, False, None, 0, 1, 7, -3, 12, 0.5, 1.5, 3, "", "a", "b", "bb", "abc", "ü", "日本"),
    *([], [None], [True], [None, 1], [True, False, True], [True] * 4, [1], [None, 1, 2]),
    *({}, {"a": [1, "ü"]}, {"a": True, "b": None}, {"next": None}, {"next": {"next": None}}),
    *({"straße": True}, {"straße": 1}, {'q"\\': None}, {"straße": True, 'q"\\': None, "c": 1}),
    *({"x1": None}, {"x1": 1}, {"k": True}, {"x": "y"}),
    *("2024-02-29", "2024-13-01", "1.2.3.4", "256.1.1.1", "2024-02-29T10:00:00Z", "a@b.test"),
    "6f1f3c1e-6a3b-4c5e-9d8f-0a1b2c3d4e5f",
    {"value": True, "children": [{"value": False, "children": []}]},
]


def write_randomly(schema: Any, seed: int, max_tokens: int = 3000) -> str:
    """A text of the grammar, every byte drawn among those allowed; ends when it may."""
    draw = random.Random(seed)
    state = COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))).start()
    text = bytearray()
    while len(text) < max_tokens:
        options = allowed(state.mask())
        if EOS_ID in options:
            return text.decode()
        # Strings and lists would get long if their ends were as unlikely as any other byte.
        ends = options & set(b'"]}')
        token_id = draw.choice(sorted(ends)) if ends and draw.random() < 0.3 else None
        text.append(token_id or draw.choice(sorted(options)))
        state.accept(text[-1])
    raise AssertionError(f"no end after {bytes(text[:200])!r}")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_what_is_written_is_valid(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )

    for seed in range(8):
        validator.validate(json.loads(write_randomly(schema, seed)))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_what_is_valid_can_be_written(schema: Any, separators: tuple[str, str]) -> None:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False, separators=separators)
        assert accepts_json(schema, text) == validator.is_valid(value), text


def test_a_whole_model_can_be_written() -> None:
    value = {
        "id": "6f1f3c1e-6a3b-4c5e-9d8f-0a1b2c3d4e5f",
        "day": "2024-02-29",
        "color": "grün",
        "note": "so\n",
        "price": 1.5,
        "code": "AB-123",
        "pet": {"kind": "dog", "name": "Rex"},
        "pair": [True, None],
        "tags": ["a"],
        "counts": {"x": 1, "y": 2},
    }
    schema = Everything.model_json_schema()

    assert accepts_json(schema, json.dumps(value, ensure_ascii=False))
    assert not accepts_json(schema, json.dumps(value | {"pet": {"kind": "cat", "name": "Rex"}}))
    assert not accepts_json(schema, json.dumps(value | {"extra": 1}))


def test_objects_hold_declared_properties_only() -> None:
    """What models add by themselves seldom ends; vLLM does the same."""
    closed = {"type": "object", "properties": {"a": {"type": "null"}}}
    nested = {"type": "array", "items": closed}

    assert accepts_json(closed, '{"a":null}')
    assert not accepts_json(closed, '{"b":1}')
    assert not accepts_json(nested, '[{"b":1}]')
    assert accepts_json(closed | {"additionalProperties": True}, '{"b":1}')
    assert accepts_json({"type": "object"}, '{"b":1}')
    assert accepts_json(closed | {"required": ["c"]}, '{"a":null,"c":1}')


def test_objects_of_combined_schemas_stay_open() -> None:
    """Closed, the parts would exclude each other."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    schema |= {"anyOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}]}

    assert accepts_json(schema, '{"a":1,"b":2}')


def test_all_objects_can_be_closed() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}

    assert not accepts_json(schema, '{"b":1}', closes_objects=True)


def test_whitespace_is_one_space_or_newline_at_most() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}

    assert accepts_json(schema, '{\n"a": 1\n}')
    assert accepts_json(schema, '{"a":1}')
    assert not accepts_json(schema, '{  "a":1}')
    assert not accepts_json(schema, '{\n\n"a":1}')
    assert not accepts_json(schema, ' {"a":1}')
    assert not accepts_json(schema, '{"a":1} ')


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("", ["[1,2]"], ["[1, 2]"]),
        ("[\\n\\t ]*", ["[1,\n\t 2]", "[1,2]"], ["[1,\r2]"]),
        ("\\s{1,2}", ["[1,  2]", "[1,2]"], ["[1,   2]", "[1,\u00a02]"]),
        (" ", ["[1, 2]"], ["[1,\n2]"]),
    ],
)
def test_whitespace_can_be_chosen(pattern: str, texts: list[str], others: list[str]) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}

    assert [t for t in texts if not accepts_json(schema, t, whitespace=pattern)] == []
    assert [t for t in others if accepts_json(schema, t, whitespace=pattern)] == []


@pytest.mark.parametrize("pattern", ["a*", "[^a]", ".", "\\d", " 1", "("])
def test_whitespace_that_is_none_is_refused(pattern: str) -> None:
    message = refusal(GrammarKind.JSON_SCHEMA, '{"type":"array"}', whitespace=pattern)

    assert "whitespace pattern" in message or "regex" in message


def test_json_object_is_any_object() -> None:
    assert accepts(GrammarKind.JSON_OBJECT, "", '{"a": [1, {"b": null}]}')
    assert accepts(GrammarKind.JSON_OBJECT, "", "{}")
    assert not accepts(GrammarKind.JSON_OBJECT, "", "[]")
    assert not accepts(GrammarKind.JSON_OBJECT, "", '{"a":}')


def test_keywords_of_old_drafts_mean_what_they_meant() -> None:
    pair = {"type": "array", "items": [{"type": "null"}], "additionalItems": False}

    assert accepts_json(pair, "[null]")
    assert not accepts_json(pair, "[null,1]")
    assert not accepts_json(pair, "[1]")


def test_keywords_without_effect_are_allowed() -> None:
    schema = {"type": "array", "uniqueItems": False, "not": False, "x-custom": 1}

    assert accepts_json(schema, "[1,1]")


def test_options_for_the_compiler_in_a_schema_are_ignored() -> None:
    lenient = {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}

    assert "uniqueItems" in refusal(GrammarKind.JSON_SCHEMA, json.dumps(lenient))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        *(({keyword: value, "type": "array"}, keyword) for keyword, value in {
            "uniqueItems": True, "contains": {}, "if": {}, "not": {}, "unevaluatedItems": False,
            "minContains": 1, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {}},
            "propertyNames": {"pattern": "a"}, "dependencies": {"a": ["b"]}, "$dynamicRef": "#a",
        }.items()),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"type": "strnig"}, "strnig"),
        ({"properties": {"foo": "bar"}}, "schema must be an object or boolean"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"$ref": "https://example.com/x.json"}, "https://example.com/x.json"),
        ({"$ref": "#"}, "the $ref '#' in the JSON schema leads back to itself without end"),
        ({"anyOf": [{"$ref": "#"}]}, "no text matches the grammar"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"enum": []}, "empty"),
        (False, "must be an object"),
        ({"type": "string", "const": 1}, "incompatible types"),
        ({"minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "integer", "multipleOf": 999983}, "multipleOf"),
        ([], "must be an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, message: str) -> None:
    assert message in refusal(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def test_schema_of_references_that_go_round_is_not_called_complex() -> None:
    to = {name: {"$ref": f"#/$defs/{name}"} for name in "abc"}
    circle = {**to["a"], "title": "t", "$defs": {"a": to["b"], "b": to["a"]}}
    list_of = {**to["a"], "$defs": {"a": to["b"], "b": {"type": "array", "items": to["a"]}}}

    message = refusal(GrammarKind.JSON_SCHEMA, json.dumps(circle))

    assert "'#/$defs/b' in the JSON schema leads back to itself" in message
    assert "complex" not in refusal(GrammarKind.JSON_SCHEMA, '{"allOf":[{"$ref":"#"}]}')
    assert accepts_json(list_of, "[[],[[]]]")


def test_deep_schemas_are_refused_and_not_followed() -> None:
    text = '{"items":' * 5000 + "{}" + "}" * 5000

    assert "JSON" in refusal(GrammarKind.JSON_SCHEMA, text)
    text = '{"items":' * 150 + "{}" + "}" * 150
    assert "more than 100 levels" in refusal(GrammarKind.JSON_SCHEMA, text)


def test_many_optional_properties_are_allowed() -> None:
    number = {"type": "integer"}
    schema = {"type": "object", "properties": {f"p{i}": number for i in range(1000)}}

    assert accepts_json(schema, '{"p3":1,"p999":2}')


@pytest.mark.parametrize(
    ("schema", "written", "endless"),
    [
        ({"type": "integer"}, ["-5", "0", "9" * 18], "1" * 19),
        ({"type": ["integer", "null"]}, ["12", "null"], "1" * 19),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 18], "1" * 19),
        ({"type": "integer", "maximum": 3, "format": "int64"}, ["-7"], "-" + "1" * 19),
        ({"type": "integer", "minimum": 10**18, "maximum": 10**19}, ["15" + "0" * 17], "1" * 21),
        ({"type": "number"}, ["-0.5", "1.25", "12345678.000000001"], "0." + "0" * 10),
        ({"type": "number"}, ["9" * 15], "9" * 16),
        ({"type": "number", "minimum": 0.5, "maximum": 0.75}, ["0.5", "0.625"], "0.5" + "0" * 9),
        ({"type": "number", "enum": [0.12345678912]}, ["0.12345678912"], "1" * 30),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"1"'], "1" * 19),
        ({"properties": {"a": {"type": "integer", "title": "A"}}}, ['{"a":1}'], '{"a":' + "1" * 19),
    ],
)
def test_numbers_have_so_many_digits_at_most(
    schema: dict[str, Any], written: list[str], endless: str
) -> None:
    grammar = COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    assert [text for text in written if not is_text_of(grammar, text)] == []
    state = grammar.start()
    for char in endless[:-1].encode():
        if char not in allowed(state.mask()):
            return
        state.accept(char)
    assert ord(endless[-1]) not in allowed(state.mask())


def test_numbers_of_any_object_have_so_many_digits_at_most() -> None:
    assert accepts(GrammarKind.JSON_OBJECT, "", '{"a":[-1.5,' + "9" * 15 + "]}")
    assert not accepts(GrammarKind.JSON_OBJECT, "", '{"a":' + "9" * 16 + "}")


@pytest.mark.parametrize("name", ["path", "password", "binary", "base64", "uri-reference", "frob"])
def test_formats_that_are_not_known_change_nothing(name: str) -> None:
    assert accepts_json({"type": "string", "format": name}, '"any text"')


def test_decimal_multiples_are_exact() -> None:
    schema = {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 10}

    for seed in range(5):
        value = decimal.Decimal(write_randomly(schema, seed))
        assert value % decimal.Decimal("0.01") == 0


@pytest.mark.parametrize("name", ["date-time", "time"])
def test_times_are_what_readers_take(name: str) -> None:
    """No second 60, no small letters: RFC 3339 has them, datetime has not."""
    schema = {"type": "string", "format": name}
    reader: Any = datetime.datetime if name == "date-time" else datetime.time

    for seed in range(30):
        reader.fromisoformat(json.loads(write_randomly(schema, seed)))
    assert accepts_json({"format": "date-time"}, '"2024-02-29T10:00:00.5+01:00"')
