"""GrammarCompiler: kinds, cache, limits, threads, vocabularies, and grammars behind a marker."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from llmserve.grammar import (
    GrammarBusyError,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
    GrammarSpec,
)
from llmserve.tokenizer import Tokenizer
from llmserve.tokenizer.gguf_spm import GGUFSpmTokenizer
from llmserve.tokenizer.hf import HFTokenizer
from tests.byte_tokenizer import ByteTokenizer
from tests.grammar_builders import (
    EOS_ID,
    MarkerTokenizer,
    accepts,
    allowed,
    is_text_of,
    make_compiler,
    refusal,
)
from tests.pauses import pauses_during, scaled
from tests.unit.tokenizer_builders import spm_metadata, train_byte_level, train_spm

DIGIT = GrammarSpec(GrammarKind.REGEX, "[0-9]")


class SpacedTokenizer(ByteTokenizer):
    """Puts a space before every text, as SentencePiece does, and writes `name` as `na` `me`."""

    words = ("na", "me", "nam")
    vocab_size = 260

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        before, found, after = text.partition("name")
        return [*b" ", *before.encode(), *([257, 258] if found else []), *after.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id > 256:
            return self.words[token_id - 257].encode()
        return super().token_bytes(token_id)


@pytest.mark.parametrize(
    ("kind", "source", "texts", "others"),
    [
        (GrammarKind.REGEX, "a/[bc]{2}|ü+", ["a/bc", "üü"], ["a/b", "xa/bc", "a/bcx", ""]),
        (GrammarKind.REGEX, "^(?P<n>x)$", ["x"], ["xx"]),
        (GrammarKind.REGEX, '\\\\/ "b" /\nx: /', ['\\/ "b" /\nx: /'], ["\\", '\\ "b" ', "b"]),
        (GrammarKind.REGEX, "\\d+\n[\\w]\\s", ["12\na\t"], ["٣\na\t", "1\nü\t", "1\na\u00a0"]),
        (GrammarKind.CHOICE, '["ab","abc","日本 \\"q\\"","a\\u007f\\u2028"]',
         ["ab", "abc", '日本 "q"', "a\x7f\u2028"], ["a", "abcd"]),
        (GrammarKind.LARK, 'start: "a" NAME\nNAME: /[b-d]+/', ["abc"], ["a"]),
        (GrammarKind.LARK, 'start: e\ne: "(" e ")" | %json {"type":"null"}',
         ["((null))"], ["(null"]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(
    kind: GrammarKind, source: str, texts: list[str], others: list[str]
) -> None:
    assert [text for text in texts if not accepts(kind, source, text)] == []
    assert [text for text in others if accepts(kind, source, text)] == []


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, "(?=a)", "look-around"),
        (GrammarKind.REGEX, "\\", "escapes nothing"),
        (GrammarKind.REGEX, "a\\\\\\", "escapes nothing"),
        (GrammarKind.LARK, 'begin: "a"', "start"),
        (GrammarKind.LARK, "start: <nope>", "nope"),
        (GrammarKind.LARK, '{"grammars": [{"json_schema": {}}]}', "begin with a brace"),
        (GrammarKind.CHOICE, "[]", "at least one"),
        (GrammarKind.CHOICE, '["a",""]', "not empty"),
        (GrammarKind.CHOICE, "[1]", "must be a string"),
        (GrammarKind.JSON_SCHEMA, "{", "not valid JSON"),
        (GrammarKind.REGEX, "a" * (1 << 21), "characters"),
    ],
)
def test_what_is_no_grammar_is_refused(kind: GrammarKind, source: str, message: str) -> None:
    assert message in refusal(kind, source)


def test_nothing_but_an_end_follows_a_complete_text() -> None:
    state = make_compiler().compile(DIGIT).start()
    state.accept(ord("7"))

    assert allowed(state.mask()) == {EOS_ID}
    state.accept(EOS_ID)
    assert allowed(state.mask()) == {EOS_ID}


def test_every_end_of_sequence_token_ends_a_text() -> None:
    tokenizer = MarkerTokenizer()
    compiler = GrammarCompiler(tokenizer, 1000, (EOS_ID, tokenizer.id_of("</tool>"), 5000))
    state = compiler.compile(DIGIT).start()

    state.accept(ord("7"))

    assert allowed(state.mask()) == {EOS_ID, tokenizer.id_of("</tool>")}
    assert len(state.mask()) == 128  # 1000 bits in words of 32


def test_forbidden_token_raises_and_the_state_stays_useless() -> None:
    state = make_compiler().compile(DIGIT).start()

    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        state.accept(ord("x"))

    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        state.mask()


def test_states_of_one_grammar_do_not_meet() -> None:
    grammar = make_compiler().compile(GrammarSpec(GrammarKind.REGEX, "ab|cd"))
    first, second = grammar.start(), grammar.start()

    first.accept(ord("a"))
    second.accept(ord("c"))

    assert allowed(first.mask()) == {ord("b")}
    assert allowed(second.mask()) == {ord("d")}
    assert allowed(grammar.start().mask()) == {ord("a"), ord("c")}


def test_model_without_an_end_of_sequence_token_has_no_grammars() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), 257, ())

    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        compiler.compile(DIGIT)


def test_grammar_is_compiled_once() -> None:
    compiler = make_compiler()
    assert compiler.cached(DIGIT) is None

    grammar = compiler.compile(DIGIT)

    assert compiler.compile(DIGIT) is grammar
    assert compiler.cached(GrammarSpec(GrammarKind.REGEX, "[0-9]")) is grammar


def test_bad_grammar_is_compiled_once() -> None:
    compiler = make_compiler()
    spec = GrammarSpec(GrammarKind.REGEX, "(")
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed"):
            compiler.compile(spec)

    with pytest.raises(GrammarError, match="unclosed"):
        compiler.cached(spec)


def test_grammar_used_last_is_kept_longest() -> None:
    compiler = make_compiler()
    compiler.compile(DIGIT)
    for i in range(300):
        compiler.compile(GrammarSpec(GrammarKind.REGEX, f"a{{{i + 1}}}"))
        if i % 50 == 0:
            assert compiler.cached(DIGIT) is not None

    assert compiler.cached(GrammarSpec(GrammarKind.REGEX, "a{1}")) is None
    assert compiler.cached(DIGIT) is not None


def slow_spec(num_fields: int) -> GrammarSpec:
    """Takes more than 0.1 s a field; others take some milliseconds."""
    fields = {f"f{i}": {"type": "integer", "multipleOf": 19997 - 2 * i} for i in range(num_fields)}
    source = json.dumps({"type": "object", "properties": fields})
    return GrammarSpec(GrammarKind.JSON_SCHEMA, source)


def test_slow_grammar_is_given_up_while_others_are_compiled() -> None:
    compiler = make_compiler(timeout_s=0.2)
    compiler.compile(DIGIT)

    with pytest.raises(GrammarError, match=r"more than 0\.2 s"):
        compiler.compile(slow_spec(5))

    compiler.compile(GrammarSpec(GrammarKind.REGEX, "[a-f]"))
    compiler.close()


def test_grammars_are_put_off_while_slow_ones_keep_all_threads() -> None:
    compiler = make_compiler(timeout_s=0.2)
    compiler.compile(DIGIT)
    for num_fields in (9, 10):
        with pytest.raises(GrammarError, match=r"more than 0\.2 s"):
            compiler.compile(slow_spec(num_fields))

    with pytest.raises(GrammarBusyError, match="try again later"):
        compiler.compile(GrammarSpec(GrammarKind.REGEX, "[a-f]"))
    compiler.compile(DIGIT)

    compiler.close()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "a{1000000}"),
        (GrammarKind.REGEX, "(a{1000}){1000}"),
        (GrammarKind.REGEX, "((a{100}){100}){100}"),
        (GrammarKind.LARK, "start: /a{100000}{100000}/"),
        (GrammarKind.GBNF, 'root ::= ("a"{1000}){1000}'),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"^(a{1000}){1000}$"}'),
        (GrammarKind.CHOICE, json.dumps(["x" * 900_000])),
        (GrammarKind.LARK, "start: " + " ".join(f"r{i}" for i in range(2000))
         + "".join(f'\nr{i}: "a"?' for i in range(2000))),
    ],
)  # fmt: skip
def test_grammar_that_would_break_in_mid_output_is_refused(kind: GrammarKind, source: str) -> None:
    assert "too complex" in refusal(kind, source)


def test_long_texts_and_counts_are_no_reason_to_refuse() -> None:
    compiler = make_compiler()
    for kind, source in [
        (GrammarKind.REGEX, "a{20000}"),
        (GrammarKind.CHOICE, json.dumps(["x" * 20_000])),
        (GrammarKind.JSON_SCHEMA, '{"type":"string","minLength":90000,"maxLength":100000}'),
    ]:
        compiler.compile(GrammarSpec(kind, source))


def test_ambiguous_grammar_has_masks_that_stay_fast_or_fails() -> None:
    compiler = make_compiler()
    state = compiler.compile(GrammarSpec(GrammarKind.LARK, 'start: e\ne: e e | "a" | "b"')).start()

    times = []
    with contextlib.suppress(ValueError):
        for _ in range(400):
            begin = time.thread_time()
            state.accept(ord("a"))
            state.mask()
            times.append(time.thread_time() - begin)

    assert max(times) < 0.3


def test_threads_share_a_compiler() -> None:
    compiler = make_compiler()
    specs = [GrammarSpec(GrammarKind.REGEX, f"x{{{i % 7 + 1}}}") for i in range(70)]

    with ThreadPoolExecutor(8) as pool:
        grammars = list(pool.map(compiler.compile, specs))
        results = list(
            pool.map(lambda i: is_text_of(grammars[i], "x" * (i % 7 + 1)), range(len(specs)))
        )

    assert all(results)
    assert len(set(map(id, grammars))) == 7


def test_forced_text_is_spelled_with_the_models_tokens() -> None:
    """Others would do, but the model has never seen `name` written with them."""
    tokenizer = SpacedTokenizer()
    spec = GrammarSpec(
        GrammarKind.JSON_SCHEMA,
        '{"type":"object","properties":{"name":{"type":"null"}},"required":["name"]}',
        whitespace="",
    )
    state = make_compiler(tokenizer).compile(spec).start()

    for token_id in (*b'{"', 257, 258, *b'":null}'):
        assert allowed(state.mask()) == {token_id}
        state.accept(token_id)

    assert allowed(state.mask()) == {EOS_ID}


def thinking(**fields: Any) -> GrammarSpec:
    return GrammarSpec(**({"kind": GrammarKind.REGEX, "source": "[0-9]"} | fields))


def test_marker_that_is_a_special_token_ends_the_free_text() -> None:
    tokenizer = MarkerTokenizer()
    state = make_compiler(tokenizer).compile(thinking(starts_after="</think>")).start()
    marker = tokenizer.id_of("</think>")

    assert allowed(state.mask()) == set(range(tokenizer.vocab_size)) - {EOS_ID}
    for token_id in (*b"1 </think>", tokenizer.id_of("<tool>"), *b"\xff", marker):
        assert token_id in allowed(state.mask())
        state.accept(token_id)

    assert allowed(state.mask()) == set(b"0123456789")


@pytest.mark.parametrize(
    "pieces",
    [
        [*b"so</answer>"],
        ["</t", *b" </answer>"],
        [*b"<</answer", *b"</answer>"],
        [*b"\xff\xf0</answer>"],
        ["<think>", "<tool>", *b"</answer>"],
    ],
)
def test_marker_that_is_text_ends_the_free_text(pieces: list[int | str]) -> None:
    tokenizer = MarkerTokenizer()
    state = make_compiler(tokenizer).compile(thinking(starts_after="</answer>")).start()

    for piece in pieces:
        token_id = tokenizer.id_of(piece) if isinstance(piece, str) else piece
        assert token_id in allowed(state.mask())
        state.accept(token_id)

    assert allowed(state.mask()) == set(b"0123456789")


def test_token_does_not_run_over_the_end_of_a_marker() -> None:
    """What it holds behind the marker would not be held to the grammar."""
    tokenizer = MarkerTokenizer()
    spec = thinking(starts_after="think>")
    state = make_compiler(tokenizer).compile(spec).start()
    over, within, whole = map(tokenizer.id_of, ("k>\n", "k>", "hink>"))

    assert {over, within, whole} <= allowed(state.mask())
    for byte in b"thin":
        state.accept(byte)

    assert over not in allowed(state.mask())
    assert tokenizer.id_of('k>{"') not in allowed(state.mask())
    assert within in allowed(state.mask())
    with pytest.raises(ValueError, match="goes on behind"):
        state.accept(over)


def test_token_that_holds_a_marker_and_more_is_not_allowed() -> None:
    tokenizer = MarkerTokenizer()
    state = make_compiler(tokenizer).compile(thinking(starts_after="b</th")).start()

    assert tokenizer.id_of("b</think>") not in allowed(state.mask())


def test_json_behind_a_marker_may_begin_with_empty_lines() -> None:
    tokenizer = MarkerTokenizer()
    spec = thinking(kind=GrammarKind.JSON_OBJECT, source="", starts_after="</think>")
    state = make_compiler(tokenizer).compile(spec).start()

    for token_id in (tokenizer.id_of("</think>"), *b"\n\n{}"):
        assert token_id in allowed(state.mask())
        state.accept(token_id)

    assert allowed(state.mask()) == {EOS_ID}


def test_grammar_computes_without_the_gil() -> None:
    """A thread that computes masks must not stop the event loop."""
    compiler = make_compiler(MarkerTokenizer())
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"integer","multipleOf":9973}')
    compiler.warm_up()

    pauses = pauses_during(lambda: compiler.compile(spec))

    assert len(pauses) > 10, "compiled too fast to tell, or none of it beside this thread"
    assert sorted(pauses)[-3] < scaled(0.02)


def byte_level_tokenizer() -> Tokenizer:
    return HFTokenizer(train_byte_level(), {"eos_token": "</s>"})


def spm_tokenizer(*, add_dummy_prefix: bool) -> Tokenizer:
    return GGUFSpmTokenizer(spm_metadata(train_spm(add_dummy_prefix=add_dummy_prefix)))


@pytest.mark.parametrize(
    "make_tokenizer",
    [
        byte_level_tokenizer,
        partial(spm_tokenizer, add_dummy_prefix=True),
        partial(spm_tokenizer, add_dummy_prefix=False),
    ],
    ids=["byte level", "sentencepiece with a space", "sentencepiece"],
)
def test_tokens_of_real_vocabularies_write_valid_documents(
    make_tokenizer: Callable[[], Tokenizer],
) -> None:
    tokenizer = make_tokenizer()
    # A model may have more ids than its tokenizer.
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size + 64, tokenizer.eos_token_ids)
    schema = {
        "type": "object",
        "properties": {"the quick fox": {"enum": ["grün", "日本"]}, "on": {"type": "boolean"}},
        "required": ["the quick fox", "on"],
    }
    grammar = compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

    for seed in range(20):
        draw, state, ids = random.Random(seed), grammar.start(), list[int]()
        while not (options := allowed(state.mask())) & set(tokenizer.eos_token_ids):
            ids.append(draw.choice(sorted(options)))
            state.accept(ids[-1])
        value = json.loads(tokenizer.decode(ids))
        assert value["the quick fox"] in ("grün", "日本")
        assert isinstance(value["on"], bool)
        assert max(options) < tokenizer.vocab_size
