"""Whatever a format's grammar allows is read back as calls that the tools' schemas allow.

Answers are drawn by random walks over llguidance's masks, on a vocabulary of bytes and of the
words that end values, without which no walk would find an end.
"""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llmserve.grammar import GrammarError
from llmserve.tool_parsers import PARSERS, Tool
from tests.tool_parser_texts import FORMATS, Call, parse, parser_name

TREE = {
    "type": "object",
    "properties": {
        "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["label"],
    "additionalProperties": False,
}
TOOLS = [
    Tool(
        "get",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 1, "maxLength": 9},
                "count": {"type": "integer", "minimum": 1, "maximum": 20},
                "unit": {"type": "string", "enum": ["km", "mi le", 'quo"te', ""]},
                "code": {"type": "string", "pattern": "^[a-c/]{1,4}$"},
                "tag": {"type": "string", "pattern": "x[0-9]"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "limit": {"type": ["integer", "string"]},
                "flags": {
                    "type": "array",
                    "items": {"type": "boolean"},
                    "minItems": 1,
                    "maxItems": 3,
                },
                "level": {"enum": [1, 2.5, None, "high", True]},
                "kind": {"const": "fixed"},
                "tree": {"$ref": "#/$defs/tree"},
                "ratio": {"type": "number"},
            },
            "required": ["count", "tree", "unit"],
            "additionalProperties": False,
            "$defs": {"tree": TREE},
        },
        is_strict=True,
    ),
    Tool(
        "get_all",
        {
            "type": "object",
            "properties": {"is_deep": {"type": "boolean"}, "name": {"type": "string"}},
            "additionalProperties": False,
        },
        is_strict=True,
    ),
    Tool("ping", {"type": "object", "properties": {}, "additionalProperties": False}, True),
    Tool("any", {"type": "object"}),
]
BY_NAME = {tool.name: tool for tool in TOOLS}
NAMES = sorted(FORMATS)
EOS = 256
WORDS = [
    *("</parameter>", "\n</parameter>\n", "</function>\n", "</arg_value>", "</tool_call>"),
    *("<tool_call>", "[TOOL_CALLS]", "functools[", "<|python_tag|>", "<|channel|>", "true"),
]
# Tried in this order once a walk has become long.
ENDINGS = "\"'}])0\n"


class Vocabulary:
    """Implements what llguidance reads of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, special_tokens: tuple[str, ...]) -> None:
        words = [word for word in WORDS if word not in special_tokens]
        self.tokens = [bytes([i]) for i in range(256)]
        self.tokens += [b"<eos>", *(text.encode() for text in (*special_tokens, *words))]
        self.ids = {text: 257 + i for i, text in enumerate(special_tokens)}
        self.special_token_ids = [EOS, *self.ids.values()]
        self.num_tokens = len(self.tokens)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def vocabulary(special_tokens: tuple[str, ...]) -> tuple[Vocabulary, LLTokenizer]:
    words = Vocabulary(special_tokens)
    return words, LLTokenizer(TokenizerWrapper(words), eos_token=EOS)


class Walker:
    """A grammar over a vocabulary."""

    def __init__(
        self,
        name: str,
        *,
        is_required: bool,
        is_parallel: bool,
        is_special: bool,
        tools: tuple[Tool, ...] = tuple(TOOLS),
    ) -> None:
        self.words, guide = vocabulary(FORMATS[name].tokens if is_special else ())
        grammar = PARSERS[parser_name(name)].lark(
            list(tools),
            is_required=is_required,
            is_parallel=is_parallel,
            special_tokens=self.words.ids,
        )
        self.start = LLMatcher(guide, LLMatcher.grammar_from_lark(grammar))
        assert not self.start.is_error(), self.start.get_error()

    def walk(self, draw: random.Random, num_free_steps: int) -> str | None:
        """A text that the grammar allows; None if the walk did not end."""
        matcher = self.start.deep_copy()
        ids: list[int] = []
        while len(ids) < num_free_steps + 400:
            allowed = self._allowed(matcher)
            token_id = self._choose(draw, allowed, is_ending=len(ids) > num_free_steps)
            if token_id == EOS:
                return self.text(ids)
            matcher.consume_token(token_id)
            ids.append(token_id)
            if matcher.is_stopped():
                return self.text(ids)
        return None

    def accepts(self, text: str) -> bool:
        matcher = self.start.deep_copy()
        ids = self._tokenize(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def text(self, ids: list[int]) -> str:
        return b"".join(self.words.tokens[i] for i in ids).decode()

    def _allowed(self, matcher: LLMatcher) -> list[int]:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        return [i for i in range(self.words.num_tokens) if mask >> i & 1]

    def _choose(self, draw: random.Random, allowed: list[int], *, is_ending: bool) -> int:
        words = [i for i in allowed if i >= EOS]
        if is_ending and EOS in words:
            return EOS
        endings = [ord(char) for char in ENDINGS if ord(char) in allowed]
        if is_ending and endings and (not words or draw.random() < 0.5):
            return endings[0]
        if words and draw.random() < 0.3:
            return draw.choice(words)
        return draw.choice(endings if endings and draw.random() < 0.2 else allowed)

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            special = next((word for word in self.words.ids if text.startswith(word)), "")
            ids += [self.words.ids[special]] if special else text[0].encode()
            text = text[len(special) or 1 :]
        return ids


MODES = [
    (is_required, is_parallel, is_special)
    for is_required in (True, False)
    for is_parallel in (True, False)
    for is_special in (True, False)
]


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_the_grammar_are_valid_calls(name: str) -> None:
    """25 walks in each of 8 modes."""
    draw = random.Random(name)
    num_calls = num_ended = 0
    for is_required, is_parallel, is_special in MODES:
        walker = Walker(
            name, is_required=is_required, is_parallel=is_parallel, is_special=is_special
        )
        for _ in range(25):
            text = walker.walk(draw, draw.randint(5, 120))
            if text is None:
                continue
            num_ended += 1
            calls = read_back(name, draw, text)
            num_calls += len(calls)
            check(calls, is_required=is_required, is_parallel=is_parallel, text=text)
    assert num_ended >= 130
    assert num_calls >= 80


def read_back(name: str, draw: random.Random, text: str) -> list[tuple[str, str]]:
    cuts = sorted(draw.choices(range(len(text) + 1), k=9))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls, _ = parse(name, pieces, is_constrained=True, tools=TOOLS)

    whole_content, whole_calls, _ = parse(name, [text], tools=TOOLS)
    assert (content, calls) == (whole_content, whole_calls)
    return calls


def check(calls: list[tuple[str, str]], *, is_required: bool, is_parallel: bool, text: str) -> None:
    if is_required:
        assert calls, text
    if not is_parallel:
        assert len(calls) <= 1, text
    for name, arguments in calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        if is_required or BY_NAME[name].is_strict:
            jsonschema.validate(value, BY_NAME[name].parameters)


GOOD: Call = ("get", {"count": 3, "unit": "km", "tree": {"label": "x"}})
FLAGS = {"flags": [True, False, True], "tree": GOOD[1]["tree"], "ratio": 0.5}
BAD: dict[str, Call] = {
    "unknown name": ("got", GOOD[1]),
    "wrong type": ("get", {**GOOD[1], "count": "three"}),
    "out of range": ("get", {**GOOD[1], "count": 21}),
    "not in enum": ("get", {**GOOD[1], "unit": "m"}),
    "too few": ("get", {"count": 3, "unit": "km", "flags": [], "tree": {"label": "x"}}),
    "too many": ("get", {"count": 3, "unit": "km", "flags": [True] * 4, "tree": {"label": "x"}}),
    "missing": ("get", {"count": 3, "unit": "km"}),
    "wrong inside": ("get", {**GOOD[1], "tree": {"label": 5}}),
    "unknown key": ("get_all", {"is_deep": True, "x": 1}),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("is_required", "is_parallel", "is_special"), MODES)
def test_grammar_takes_good_calls_and_no_bad_ones(
    name: str, *, is_required: bool, is_parallel: bool, is_special: bool
) -> None:
    walker = Walker(name, is_required=is_required, is_parallel=is_parallel, is_special=is_special)
    write = FORMATS[name].write
    if not walker.accepts(write([GOOD])):
        assert name in FOREIGN
        return

    assert walker.accepts(write([("get_all", {"is_deep": True, "name": "a"})]))
    assert walker.accepts(write([("get", {"count": 3, "unit": "", **FLAGS})]))
    assert walker.accepts(write([GOOD, ("ping", {})])) == is_parallel
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert walker.accepts(f"{final}Hello.") == (not is_required)
    for reason, call in BAD.items():
        assert not walker.accepts(write([call])), reason


# Other ways to write calls, which models without a grammar may use.
FOREIGN = {"granite tag", "granite bare", "mistral named", "mistral"}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("is_special", [False, True])
def test_text_that_reads_as_another_type_follows_its_schema(name: str, is_special: bool) -> None:
    level = {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 3}]}
    tool = Tool("f", {"type": "object", "properties": {"level": level}, "required": ["level"]})
    walker = Walker(name, is_required=True, is_parallel=False, is_special=is_special, tools=(tool,))

    for value, is_good in ((5, True), (7, False), ("abc", True), ("abcd", False)):
        assert walker.accepts(FORMATS[name].write([("f", {"level": value})])) == is_good


ODD_VALUES = [5, None, "x", [], {}, [1], {"a": 1}, True, -1, 1.5]
KEYWORDS = [
    *("required", "properties", "enum", "const", "minItems", "maxItems", "items", "anyOf", "oneOf"),
    *(
        "allOf",
        "$ref",
        "$defs",
        "type",
        "pattern",
        "minLength",
        "maxLength",
        "additionalProperties",
    ),
]
CALL_TEXT = (
    "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_odd_schemas_are_read_or_refused(name: str, keyword: str) -> None:
    parser = PARSERS[parser_name(name)]
    for value in ODD_VALUES:
        for kind in ({}, {"type": "string"}, {"type": "array"}, {"type": "object"}):
            inner = {"type": "object", "properties": {"a": {**kind, keyword: value}}}
            for schema in (inner, {"type": "object", keyword: value}):
                tool = Tool("f", schema, is_strict=True)
                with contextlib.suppress(GrammarError):
                    parser.lark([tool], is_required=True, is_parallel=True, special_tokens={})
                parse(name, [CALL_TEXT], tools=[tool])
