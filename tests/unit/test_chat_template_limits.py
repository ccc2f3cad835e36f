"""Templates that try to take all time or memory are stopped with an error."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from llmserve.errors import RequestError
from llmserve.tokenizer import (
    ChatTemplate,
    SlowTemplateError,
    shared_limit,
    template_budget,
    template_sandbox,
)

MESSAGES = [{"role": "user", "content": "hi " * 1000}]

FOREVER = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested loops without calls": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}"
    "{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [range(9)] recursive %}{% for b in range(9) %}"
    "{{ loop(a) if 0 else '' }}{% endfor %}{% for c in range(99999) %}{% for d in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
}
HUGE = {
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of lists": "{{ [0] * 10 ** 10 }}",
    "product of bytes": "{{ 'a'.encode() * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "negative power": "{{ 2 ** (0 - 10 ** 10) }}",
    "product of numbers": "{% set ns = namespace(x=10 ** 1000) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling sum": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested lists as json": "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}"
    "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 10, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format method": "{{ '{:>10000000000}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "format map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "center method": "{{ 'a'.center(10 ** 10) }}",
    "zfill": "{{ '1'.zfill(10 ** 10) }}",
    "indent": "{{ 'a\\nb' | indent(10 ** 10) }}",
    "indent by text": "{{ ('a\\n' * 99999) | indent('b' * 99999) }}",
    "json indent": "{{ [[1]] | tojson(indent=10 ** 10) }}",
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "replace method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "join": "{{ range(99999) | join('b' * 1000000) }}",
    "join method": "{{ ('b' * 1000000).join(range(99999) | map('string')) }}",
    "batch": "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "round": "{{ 1.5 | round(10 ** 10, 'floor') }}",
    "sum of lists": "{% set a = range(99999) | list %}{{ ([a] * 99999) | sum(start=[]) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "long output": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "range": "{{ range(10 ** 10) | list }}",
    "lipsum": "{{ lipsum(10 ** 6) }}",
    "wordwrap": "{{ ('ab ' * 9999) | wordwrap(1, wrapstring='c' * 999999) }}",
    "replace with names": "{{ ('a' * 100000) | replace(old='a', new='b' * 100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(9999) }}",
    "format that repeats": "{{ ('{0}' * 100000).format('b' * 100000) }}",
    "format map that repeats": "{{ ('{a}' * 100000).format_map({'a': 'b' * 100000}) }}",
    "percent that repeats": "{{ ('%(a)s' * 100000) % {'a': 'b' * 100000} }}",
    "percent that pads": "{{ ('%(a)9999d' * 100000) % {'a': 1} }}",
    "format filter that repeats": "{{ ('%(a)s' * 99999) | format(a='b' * 99999) }}",
    "letters": "{{ ('ж' * 1000000) | list | length }}",
    "letters by map": "{{ [('ж' * 1000000)] | map('list') | first | length }}",
    "words": "{{ ('ж ' * 1000000).split() | length }}",
    "lines": "{{ ('ж\n' * 1000000).splitlines() | length }}",
    "title": "{{ ('ж ' * 1000000) | title | length }}",
    "escape": "{{ ('<' * 3000000) | e | e | e | length }}",
    "urlencode": "{{ ('ж' * 1000000) | urlencode | urlencode | urlencode | length }}",
    "markup": "{% autoescape true %}{{ ('%(a)s' | safe * 100) % {'a': '<' * 99999} }}"
    "{% endautoescape %}",
    "unicode json": "{{ ('ж' * 1000000) | tojson(ensure_ascii=true) | length }}",
    "deep json": "{% set ns = namespace(x=[1]) %}{% for i in range(500) %}"
    "{% set ns.x = [ns.x, 1, 2, 3] %}{% endfor %}{{ ns.x | tojson(indent=64) }}",
    "json separators": "{{ (range(99999) | list) | tojson(separators=(',' * 9999, ':')) }}",
    "number from text": "{{ ('f' * 1000000) | int(base=16) }}",
    "number from bytes": "{{ (1).from_bytes(('f' * 1000000).encode(), 'big') }}",
    "product of numbers by name": "{{ [10 ** 4000, 10 ** 4000] | map('abs') | join * 9999 }}",
    "nested dicts": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "nested tuples": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "nested batches": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = (ns.x * 2) | batch(2) | list %}{% endfor %}",
    "nested views": "{% set ns = namespace(x=1) %}{% for i in range(60) %}"
    "{% set ns.x = {}.fromkeys([1, 2], ns.x).values() | list %}{% endfor %}",
    "sums of lists": "{% set a = range(50000) | list %}{{ ([a] * 50) | sum(start=[]) | length }}",
    "sums": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "date": "{{ strftime_now('%A' * 1000000) }}",
}
# Each of these would search or compare for hours in one call, which nothing could interrupt.
ENDLESS_CALLS = {
    "rfind": "{{ ('a' * 9999999).rfind('ab' ~ 'a' * 5000000) }}",
    "rsplit": "{{ ('a' * 9999999).rsplit('ab' ~ 'a' * 5000000) }}",
    "rpartition": "{{ ('a' * 9999999).rpartition('ab' ~ 'a' * 5000000) }}",
    "strip": "{{ ('a' * 9999999).strip('b' * 5000000 ~ 'a') | length }}",
    "trim": "{{ ('a' * 9999999) | trim('b' * 5000000 ~ 'a') | length }}",
    "striptags": "{{ ('<!---->' * 1000000) | striptags }}",
    "striptags of markup": "{{ (('<!---->' * 1000000) | safe).striptags() }}",
    "equal trees": "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
    "{{ a.x == b.x }}",
    "hash of a tree": "{% set a = namespace(x=(1,)) %}"
    "{% for i in range(60) %}{% set a.x = (a.x, a.x) %}{% endfor %}{{ {a.x: 1} | length }}",
    "namespaces in each other": "{% set ns = namespace(x=namespace(a=1)) %}"
    "{% for i in range(60) %}{% set n = namespace(a=ns.x, b=ns.x) %}{% set ns.x = n %}{% endfor %}"
    "{{ ns.x }}{{ raise_exception('printed') }}",
    "sort of trees": "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}"
    "{% for i in range(17) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
    "{{ ([a.x, b.x] * 50000) | sort | length }}",
    "search of trees": "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}"
    "{% for i in range(17) %}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}"
    "{% set b = [b.x, 1] %}{{ b in ([a.x] * 50000) }}",
    "division": "{{ ('f' * 9999999) | int(base=16) // (('f' * 5000000) | int(base=16)) }}",
}
# What colliding keys cost is quadratic; Python cannot be kept from it but by the clock.
FOREVER["colliding keys"] = (
    "{% set ns = namespace(pairs=[]) %}{% for i in range(99999) %}"
    "{% set ns.pairs = [(i * (2 ** 61 - 1), 1)] %}{% endfor %}"
    "{% for j in range(99999) %}{% set d = dict(ns.pairs) %}{% endfor %}"
)
FOREVER["comparisons in a row"] = (
    "{% set r = 'a' * 49999999 %}{% set s = 'a' * 49999999 %}" + "{% if r == s %}{% endif %}" * 500
)
FOREVER["tests in a row"] = "{% set r = range(99999) %}" + "{% if 'a' is in r %}{% endif %}" * 500
FOREVER["filters in a row"] = (
    "{% set r = range(99999) | list %}" + "{% set s = r | map('abs') | max %}" * 99
)


@pytest.mark.parametrize("name", FOREVER)
def test_a_rendering_that_does_not_end_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.3)

    with pytest.raises(RequestError, match="chat template was stopped: it took more than"):
        ChatTemplate("").with_source(FOREVER[name])


def test_a_long_template_of_a_request_is_refused() -> None:
    with pytest.raises(RequestError, match="65537 characters; at most 65536") as caught:
        ChatTemplate("").with_source("x" * 65537)

    assert caught.value.param == "chat_template"
    assert ChatTemplate("x" * 65537).render(MESSAGES) == "x" * 65537


def test_a_template_of_a_request_with_too_many_statements_is_refused() -> None:
    source = "{{ a }}" * 4000

    with pytest.raises(RequestError, match="too many statements"):
        ChatTemplate("").with_source(source)

    assert ChatTemplate(source).render(MESSAGES) == ""


def test_a_rendering_may_be_given_less_time() -> None:
    template = ChatTemplate(FOREVER["nested loops"].replace("99999", "300"))

    with pytest.raises(SlowTemplateError):
        template.within(0.01).render(MESSAGES)

    assert template.render(MESSAGES) == ""


def test_a_rendering_that_only_this_conversation_makes_long_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.3)
    template = ChatTemplate(
        "{% if messages[0].content | length > 2000 %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )

    with pytest.raises(RequestError, match="chat template was stopped: it took more than"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ('a' * 10 ** 6) | batch(1) | list | length }}",
        "{{ ('a' * 10 ** 7) | list | sort | length }}",
        "{{ ('a' * 10 ** 6) | list | map(attribute='b') | reject | reject | first }}",
        "{% for i in range(700) %}{% for j in range(700) %}{% endfor %}{% endfor %}",
    ],
)
def test_trying_and_rendering_a_template_of_a_request_share_one_limit(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.3)
    begin = time.thread_time()

    with (
        pytest.raises(RequestError, match="was stopped: it took more than") as caught,
        shared_limit(),
    ):
        ChatTemplate("").with_source(source).render(MESSAGES)

    assert caught.value.param == "chat_template"
    assert time.thread_time() - begin < 0.6


@pytest.mark.parametrize("kind", ["sort", "max", "unique | first", "groupby(0) | first"])
def test_lists_that_would_take_long_in_one_call_are_refused(kind: str) -> None:
    source = "{% set x = ('a' * 10 ** 5) | list * 70 %}{{ x | " + kind + " }}"
    template = ChatTemplate(source.replace("5)", "1)").replace("70", "1"))
    template.render(MESSAGES)

    begin = time.thread_time()
    with pytest.raises(RequestError, match="was stopped"), shared_limit():
        ChatTemplate("").with_source(source)

    assert time.thread_time() - begin < 3


@pytest.mark.parametrize("name", ENDLESS_CALLS)
def test_a_call_that_would_not_end_is_refused(name: str) -> None:
    begin = time.thread_time()

    with pytest.raises(RequestError, match=r"chat template was stopped|printed"):
        ChatTemplate("").with_source(ENDLESS_CALLS[name]).render(MESSAGES)

    assert time.thread_time() - begin < 4


@pytest.mark.parametrize("name", HUGE)
def test_a_rendering_that_takes_much_memory_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "MAX_BYTES", 1 << 22)
    monkeypatch.setattr(template_sandbox, "MAX_OUTPUT_CHARS", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="chat template"):
            ChatTemplate("").with_source(HUGE[name]).render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 1 << 26


def test_a_long_conversation_is_well_within_the_limits() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.content | trim ~ '\n' %}"
        "{% for other in messages[:10] %}{% endfor %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 1000

    assert len(template.render(messages)) == 1000 * 1000


def test_what_is_made_is_charged_by_its_size() -> None:
    source = "{{ ('a' * 200000000) | length }}{{ ([1, 2] * 1000000) | length }}"

    assert ChatTemplate(source).render(MESSAGES) == "2000000002000000"


def test_loops_know_their_length_and_position() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }}"
        "{{ loop.previtem.content if loop.previtem }}{% endfor %}"
        "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ loop.length }}"
        "{% else %}none{% endfor %}"
        "{% for m in nothing %}x{% else %}empty{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}"
        "{% for t in [[1, [2]]] recursive %}{% if t is iterable %}({{ loop(t) }}){% else %}{{ t }}"
        "{% endif %}{% endfor %}"
    )

    text = template.render([{"role": "user", "content": "a"}, {"role": "x", "content": "b"}])

    assert text == "1/22/2.a1emptya1True(1(2))"
