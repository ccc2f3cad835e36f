"""Chat templates: text as transformers renders it, messages as templates expect them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from llmserve.config import FrontendConfig, ModelConfig
from llmserve.errors import RequestError, StartupError
from llmserve.files.model import open_model
from llmserve.tokenizer import ChatTemplate, encode_chat, load_chat_template, load_tokenizer
from llmserve.tokenizer.hf import HFTokenizer
from llmserve.tool_parsers import PARSERS, detect_parser
from tests.unit.tokenizer_builders import train_byte_level

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function %}
            {{- '<tool_call>' }}
            {{- {'name': function.name, 'arguments': function.arguments} | tojson }}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
MISTRAL = """\
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('Only user and assistant roles are supported, not ' ~ message.role) }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- set ns.index = ns.index + 1 %}
        {{- '[INST] ' ~ message.content ~ ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' ~ message.content }}{%- endgeneration %}{{- eos_token }}
    {%- endif %}
    {%- if loop.last and ns.index > 100 %}{%- break %}{%- endif %}
{%- endfor %}
"""
PLAIN = """\
{{- bos_token -}}
{%- if tools is defined and tools -%}
TOOLS:{% for t in tools %} {{ t.function.name }}{% endfor %}{{ '\\n' }}
{%- endif -%}
{%- for m in messages -%}
[{{ m['role'] }}{% if m['name'] is defined and m['name'] %} {{ m['name'] }}{% endif %}]
{% if m['content'] is not none %}{{ m['content'] }}{% endif -%}
{%- for c in m['tool_calls'] or [] -%}
CALL {{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}
{%- endfor -%}
{{ '[end]\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]
{% endif -%}
"""
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "plain": PLAIN,
}

USER = {"role": "user", "content": "Hello <b>&amp;</b> 'quoted'"}
REPLY = {"role": "assistant", "content": "  Naïve “reply” 🚀\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "one turn": [USER],
    "three turns": [USER, REPLY, {"role": "user", "content": "And\n\nthen?"}],
    "with system": [SYSTEM, USER, REPLY, USER],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Says <how> it is & where",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@cache
def transformers_tokenizer() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({"?": 0, "<s>": 1, "</s>": 2}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)


def theirs(template: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    text = transformers_tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, **kwargs
    )
    assert isinstance(text, str)
    return text


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_equals_that_of_transformers(
    name: str, conversation: str, add_generation_prompt: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    if name == "mistral":
        messages = [m for m in messages if m["role"] != "system"]

    text = ChatTemplate(TEMPLATES[name], TOKENS).render(
        messages, add_generation_prompt=add_generation_prompt
    )

    assert text == theirs(TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("name", ["chatml", "plain"])
def test_tools_and_their_results_are_rendered_as_by_transformers(name: str) -> None:
    messages = [
        USER,
        call({"city": "Zürich", "n": [1, 2.5, None, True]}),
        {"role": "tool", "tool_call_id": "call00001", "content": "{}"},
    ]

    text = ChatTemplate(TEMPLATES[name], TOKENS).render(messages, tools=TOOLS)

    # Null contents are dropped by transformers, and the template plain writes null as nothing.
    known = [USER, {**messages[1], "content": ""}, messages[2]]
    assert text == theirs(TEMPLATES[name], known, tools=TOOLS, add_generation_prompt=True)


def test_further_variables_reach_the_template() -> None:
    text = ChatTemplate(CHATML, TOKENS).render([USER], enable_thinking=False)

    assert text.endswith("</think>\n\n")
    assert text == theirs(CHATML, [USER], enable_thinking=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", ["messages", "tools", "documents", "bos_token", "eos_token"])
def test_variables_with_fields_of_their_own_and_special_tokens_are_refused(name: str) -> None:
    template = ChatTemplate(CHATML, TOKENS)

    template.check_variables({"enable_thinking": False, "pad_token": "x"})
    with pytest.raises(RequestError, match=f"must not hold '{name}'"):
        template.check_variables({name: [], "enable_thinking": False})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["Count: 1, 2,", "ends in space ", "1\n"])
def test_a_final_message_is_continued_as_by_transformers(name: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]

    text = ChatTemplate(TEMPLATES[name], TOKENS).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )

    assert text == theirs(TEMPLATES[name], messages, continue_final_message=True)
    assert text.rstrip().endswith(content.rstrip())


def test_a_final_message_of_parts_is_continued() -> None:
    parts = [{"type": "text", "text": "Count:"}, {"type": "text", "text": "1, 2,"}]
    messages = [USER, {"role": "assistant", "content": parts}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}

    assert ChatTemplate(PLAIN, TOKENS).render(messages, **flags).endswith("Count:\n1, 2,")
    assert ChatTemplate(GEMMA, TOKENS).render(messages, **flags).endswith("Count:1, 2,")


@pytest.mark.parametrize(
    ("template", "last", "message"),
    [
        (PLAIN, call({}), "has no text to continue"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", REPLY, "changes or drops"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(
    template: str, last: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(template, TOKENS).render(
            [USER, last], add_generation_prompt=False, continue_final_message=True
        )

    assert caught.value.status == 400


def test_continuing_and_a_new_turn_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="cannot both be true"):
        ChatTemplate(PLAIN, TOKENS).render([USER, REPLY], continue_final_message=True)


def test_parts_become_lines_for_templates_that_take_strings() -> None:
    parts = [{"type": "text", "text": "part-A"}, {"type": "text", "text": "part-B"}]

    text = ChatTemplate(PLAIN, TOKENS).render([{"role": "user", "content": parts}])

    assert "part-A\npart-B" in text
    assert "'type'" not in text


def test_parts_stay_parts_for_templates_that_take_them() -> None:
    parts = [{"type": "text", "text": " part-A "}, {"type": "text", "text": "part-B"}]
    messages = [{"role": "user", "content": parts}]

    text = ChatTemplate(GEMMA, TOKENS).render(messages)

    assert text == theirs(GEMMA, messages, add_generation_prompt=True)
    assert "part-Apart-B" in text


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}"
        "{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}{% for part in c %}{{ part.text }};"
        "{% endfor %}{% endfor %}",
        "{% macro show(c) %}{% for part in c %}{{ part.text }};{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    ],
)
def test_strings_become_parts_for_templates_that_take_nothing_else(template: str) -> None:
    assert ChatTemplate(template).render([{"role": "user", "content": "ab"}]) == "ab;"


def test_the_content_format_can_be_set() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "ab"}]

    assert ChatTemplate(template, content_format="auto").render(messages) == "ab"
    as_parts = ChatTemplate(template, content_format="openai").render(messages)
    assert as_parts == "[{'type': 'text', 'text': 'ab'}]"


def test_parts_that_are_not_text_are_refused_by_position() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]

    with pytest.raises(RequestError, match=r"messages\[1\]\.content\[1\] is not a text part"):
        ChatTemplate(PLAIN, TOKENS).render([USER, {"role": "user", "content": parts}])


def test_null_content_is_empty_unless_the_template_asks_for_null() -> None:
    joins = "{% for m in messages %}[{{ m.content + '' }}]{% endfor %}"
    asks = "{% for m in messages %}{{ 'null' if m.content is none else 'text' }}{% endfor %}"

    assert ChatTemplate(joins).render([call({})]) == "[]"
    assert ChatTemplate(asks).render([call({})]) == "null"


def test_a_refusal_is_text_of_its_message() -> None:
    messages = [USER, {"role": "assistant", "content": None, "refusal": "I must not."}]

    assert "I must not." in ChatTemplate(PLAIN, TOKENS).render(messages)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_under_either_name(key: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"

    text = ChatTemplate(template).render([{"role": "assistant", "content": "b", key: "a"}])

    assert text == "ab"


def test_arguments_in_json_become_objects() -> None:
    text = ChatTemplate(PLAIN, TOKENS).render([USER, call('{"city": "Zürich"}')])

    assert 'CALL get_weather {"city": "Zürich"}' in text


@pytest.mark.parametrize(("arguments", "expected"), [("{broken", '"{broken"'), ("", "{}")])
def test_arguments_that_are_no_json_are_kept(arguments: str, expected: str) -> None:
    text = ChatTemplate(PLAIN, TOKENS).render([USER, call(arguments)])

    assert f"CALL get_weather {expected}" in text


@pytest.mark.parametrize("join", ["~", "+"])
def test_arguments_stay_json_for_templates_that_print_them(join: str) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name "
        + join
        + " c.function.arguments }}{% endfor %}{% endfor %}"
    )

    assert ChatTemplate(template).render([call('{"a": 1}')]) == 'get_weather{"a": 1}'
    assert ChatTemplate(template).render([call({"a": 1})]) == 'get_weather{"a": 1}'


def test_a_developer_message_passes_where_the_template_writes_it() -> None:
    messages = [{"role": "developer", "content": "DEV1"}, USER]

    assert "[developer]\nDEV1" in ChatTemplate(PLAIN, TOKENS).render(messages)


def test_a_developer_message_becomes_a_system_message_elsewhere() -> None:
    messages = [SYSTEM, {"role": "developer", "content": "DEV1"}, USER]
    developer_first = [messages[1], USER]

    assert "Be brief.\n\nDEV1\n\nHello" in ChatTemplate(GEMMA, TOKENS).render(messages)
    assert "DEV1\n\nHello" in ChatTemplate(GEMMA, TOKENS).render(developer_first)


def test_messages_of_the_caller_are_left_alone() -> None:
    messages = [USER, call('{"a": 1}'), {"role": "developer", "content": "d", "name": None}]
    before = json.dumps(messages)

    ChatTemplate(PLAIN, TOKENS).render(messages)

    assert json.dumps(messages) == before


def test_a_template_that_refuses_does_so_in_its_own_words() -> None:
    template = ChatTemplate(MISTRAL, TOKENS)

    with pytest.raises(RequestError) as caught:
        template.render([SYSTEM, USER])

    assert str(caught.value) == "Only user and assistant roles are supported, not system"
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source).render([USER])


def test_the_server_gives_variables_that_a_request_overrides() -> None:
    template = ChatTemplate("{{ a }}{{ b }}{{ bos_token }}", TOKENS, variables={"a": 1, "b": 2})

    assert template.render([USER]) == "12<s>"
    assert template.render([USER], b=3) == "13<s>"
    assert template.with_source("{{ b }}{{ a }}").render([USER]) == "21"


@pytest.mark.parametrize("text", ["[1]", "{", '"a"', "{'a': 1}"])
def test_variables_that_are_no_json_object_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--chat-template-kwargs is .*must be a JSON object"):
        FrontendConfig(chat_template_kwargs=text)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_of_the_server_must_not_take_the_place_of_fields(
    name: str, tmp_path: Path
) -> None:
    variables = json.dumps({name: False})

    with pytest.raises(StartupError, match=f"--chat-template-kwargs must not hold '{name}'"):
        rendered(make_files(tmp_path), chat_template="x{{", chat_template_kwargs=variables)


def test_names_of_a_namespace_do_not_begin_with_an_underscore() -> None:
    for source in (
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
    ):
        with pytest.raises(RequestError, match="underscore"):
            ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict(a=1, **{'b': 2}) }}{{ dict([('c', 3)]) }}{{ dict({'d': 4}, e=5) }}",
        "{{ dict.fromkeys(['a', 'b'], 0) }}",
        "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}"
        "{{ ns.b }}",
        "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}",
        "{{ [1, 2.5, none, 'ü'] | tojson }}{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}"
        "{{ {'b': 'ü'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
        "{{ 'a-b'.split('-') }}{{ 'abc'.replace('b', 'x') }}{{ ' a '.strip() }}{{ 'a' * 3 }}",
        "{{ ['b', 'a'] | sort }}{{ [3, 1] | max }}{{ [1, 2] | sum }}{{ 'ab' | list }}",
        "{{ 'ab' | reverse }}{{ [1, 2] | reverse | list }}{{ 'ab' | first }}{{ [] | first }}"
        "{{ nope | map('upper') | list }}{{ {'a': 1} | map('upper') | first }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | first }}"
        "{{ [0, 1] | reject | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [2, 2] | unique | list }}",
        "{{ '%s %d' % ('a', 1) }}{{ '{} {a}'.format(1, a=2) }}{{ '%s' | format('x') }}",
        "{{ 7 // 2 }}{{ 7 % 2 }}{{ 2 ** 10 }}{{ 1 / 4 }}{{ [1] + [2] }}{{ (1, 2) == (1, 2) }}",
        "{{ 'a\\nb' | indent(2) }}{{ '<b>' | e }}{{ 'a b' | title }}{{ '10' | int + 1 }}",
        "{{ messages | map(attribute='role') | join(',') }}{{ messages | length }}",
        "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
    ],
)
def test_what_templates_are_made_of_works_as_in_transformers(source: str) -> None:
    messages = [USER, REPLY, USER]

    assert ChatTemplate(source).render(messages) == theirs(
        source, messages, add_generation_prompt=True
    )


def test_a_message_without_text_is_not_continued() -> None:
    with pytest.raises(RequestError, match="no text to continue"):
        ChatTemplate(CHATML, TOKENS).render(
            [USER, call({})], add_generation_prompt=False, continue_final_message=True
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ ''['__class__'] }}",
        "{{ self._TemplateReference__context }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__ }}",
        "{{ dict.__call__ }}",
        "{{ dict._checks }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends '/etc/passwd' %}",
        "{% set _ = messages.clear() %}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source: str) -> None:
    messages = [dict(USER)]
    try:
        text = ChatTemplate(source).render(messages)
    except (RequestError, ValueError):
        text = ""

    assert text in ("", "['']", "[Undefined]")
    assert messages == [USER]


def test_a_request_may_bring_its_own_template() -> None:
    template = ChatTemplate(PLAIN, TOKENS)

    assert template.with_source("{{ bos_token }}x").render([USER]) == "<s>x"
    with pytest.raises(RequestError, match=r"not valid: line 2") as caught:
        template.with_source("a\n{% for %}")
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize("source", ["{{ nope.x }}", "{{ 1 / 0 }}"])
def test_a_template_that_fails_is_blamed_if_the_request_brought_it(source: str) -> None:
    template = ChatTemplate(source)

    with pytest.raises(RequestError) as of_model:
        template.render([USER])
    with pytest.raises(RequestError) as of_request:
        ChatTemplate(PLAIN).with_source(source).render([USER])

    assert (of_model.value.param, of_request.value.param) == ("messages", "chat_template")
    assert str(of_model.value) == str(of_request.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ 1" + " | abs" * 3000 + " }}",
        "{{ 1 | no_filter }}",
    ],
)
def test_a_source_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="chat template is not valid"):
        ChatTemplate(source)


def test_a_model_without_template_refuses_chats() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template"):
        ChatTemplate(None).render([USER])


def test_the_template_for_tools_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"})

    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools"
    assert ChatTemplate({"rag": "rag"}).render([USER]) == "rag"


def test_the_date_is_at_hand() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render([USER])

    assert text.isdecimal()


def make_files(folder: Path, **config: Any) -> Any:
    return SimpleNamespace(tokenizer_path=folder, gguf=None, config=config, generation_config={})


@cache
def small_tokenizer() -> HFTokenizer:
    return HFTokenizer(train_byte_level(), TOKENS)


def rendered(files: Any, **flags: Any) -> str:
    template = load_chat_template(files, small_tokenizer(), FrontendConfig(**flags))
    return template.render([USER])


def test_sources_of_templates_by_order(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of json"}')
    assert rendered(files) == "of json"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of config"}')
    assert rendered(files) == "of config"
    (tmp_path / "chat_template.jinja").write_text("of jinja")
    assert rendered(files) == "of jinja"
    flag = tmp_path / "mine.txt"
    flag.write_text("of flag")
    assert rendered(files, chat_template=str(flag)) == "of flag"
    assert rendered(files, chat_template="text {{ bos_token }}") == "text <s>"


def test_named_templates_of_the_config_are_read(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))

    template = load_chat_template(make_files(tmp_path), small_tokenizer(), FrontendConfig())

    assert template.render([USER], tools=TOOLS) == "b"


def test_a_template_of_another_type_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')

    with pytest.raises(StartupError, match=r"tokenizer_config\.json: chat_template is 5"):
        rendered(make_files(tmp_path))


def test_templates_of_gguf_files_are_read() -> None:
    metadata = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    files = SimpleNamespace(gguf=SimpleNamespace(metadata=metadata), config={})

    template = load_chat_template(files, small_tokenizer(), FrontendConfig())

    assert template.render([USER]) == "a"
    assert template.render([USER], tools=TOOLS) == "b"


@pytest.mark.parametrize("flag", ["{% for %}", "no/such/file", "x" * 5000 + "{{"])
def test_an_unusable_flag_stops_the_start(flag: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--chat-template"):
        rendered(make_files(tmp_path), chat_template=flag)


def test_a_model_of_no_known_family_gets_no_template(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        rendered(make_files(tmp_path, model_type="gemma3_text"))  # without Gemma's tokens


@cache
def demo() -> tuple[Any, ChatTemplate]:
    files = open_model(ModelConfig(), print)
    tokenizer = load_tokenizer(files)
    return tokenizer, load_chat_template(files, tokenizer, FrontendConfig())


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_the_built_in_gemma_template_writes_what_gemma_was_trained_on(conversation: str) -> None:
    tokens = {"bos_token": "<bos>"}
    messages = CONVERSATIONS[conversation]

    assert demo()[1].render(messages) == ChatTemplate(GEMMA, tokens).render(messages)


def test_the_built_in_gemma_template_takes_turns_in_any_order() -> None:
    roles = ["system", "developer", "assistant", "user", "user", "system", "tool", "assistant"]
    messages = [{"role": role, "content": f"T{i}"} for i, role in enumerate(roles)]

    text = demo()[1].render(messages)

    positions = [text.index(f"T{i}") for i in range(len(roles))]
    assert positions == sorted(positions)
    assert text.startswith("<bos><start_of_turn>user\nT0\n\nT1<end_of_turn>\n")


def test_the_built_in_gemma_template_takes_no_role_that_it_does_not_know() -> None:
    with pytest.raises(RequestError, match='"asistant"; it must be one of system, developer, user'):
        demo()[1].render([USER, {"role": "asistant", "content": "a"}, USER])


def test_the_built_in_gemma_template_tells_of_tools_calls_and_results() -> None:
    function = {"name": "lamp", "arguments": '{"on": true}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Light!"},
        {"role": "assistant", "content": None, "tool_calls": calls * 2},
        {"role": "tool", "tool_call_id": "1", "content": "It is on."},
    ]
    lamp = {"name": "lamp", "parameters": {"type": "object", "properties": {}}}

    template = demo()[1]
    text = template.render(messages, tools=[{"type": "function", "function": lamp}])

    parts = [json.dumps(lamp), "Be brief.", "Light!", '{"name": "lamp", "arguments": {"on": true}}']
    positions = [text.index(part) for part in (*parts, "<tool_response>", "It is on.")]
    assert positions == sorted(positions)
    assert text.startswith("<bos><start_of_turn>user\nYou can call")
    assert detect_parser(template.sources["default"]) == "hermes"
    parser = PARSERS["hermes"]([])
    said = parser.feed(text[text.index("<start_of_turn>model") :])
    assert [call.name for call in said.calls] == ["lamp", "lamp"]
    assert "functions" not in template.render(messages)


def test_a_chat_of_the_demo_model_starts_with_one_bos() -> None:
    tokenizer, template = demo()

    ids = encode_chat(tokenizer, template.render([USER]))

    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
