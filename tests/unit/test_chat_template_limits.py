"""Templates that try to take all time or memory are stopped with an error."""

from __future__ import annotations

import tracemalloc

import pytest

from llmserve.errors import RequestError
from llmserve.tokenizer import ChatTemplate, template_sandbox

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
}


@pytest.mark.parametrize("name", FOREVER)
def test_a_rendering_that_does_not_end_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)

    with pytest.raises(RequestError, match="chat template was stopped: it took more than"):
        ChatTemplate("").with_source(FOREVER[name])


def test_a_rendering_that_only_this_conversation_makes_long_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.3)
    template = ChatTemplate(
        "{% if messages[0].content | length > 2000 %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )

    with pytest.raises(RequestError, match="chat template was stopped: it took more than"):
        template.render(MESSAGES)


@pytest.mark.parametrize("name", HUGE)
def test_a_rendering_that_takes_much_memory_is_stopped(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_BYTES", 1 << 22)
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
