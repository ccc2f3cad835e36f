"""What each reasoning parser makes of the text that its models write."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.errors import StartupError
from llmserve.reasoning_parsers import (
    PARSERS,
    ReasoningParser,
    Thinking,
    detect_parser,
    get_parser,
    load_plugin,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
HARMONY_CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>'


def split(parser: ReasoningParser, text: str) -> tuple[str, str]:
    parts = [parser.feed(text), parser.flush()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("deepseek_r1", "A:", "why</think>so", "why", "so"),
        ("deepseek_r1", "A:<think>\n", "why</think>\nso", "why", "\nso"),
        ("deepseek_r1", "A:", "<think>why</think>so", "why", "so"),
        ("deepseek_r1", "A:", "never closed", "never closed", ""),
        ("deepseek_r1", "A:<think></think>", "so", "", "so"),
        ("qwen3", "A:", "<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        ("qwen3", "A:", "just so", "", "just so"),
        ("qwen3", "A:<think>\n", "why</think>so", "why", "so"),
        ("qwen3", "A:<think>\n\n</think>\n\n", "so", "", "so"),
        ("qwen3", "A:", f"<think>why\n{CALL}", "why\n", CALL),
        ("glm45", "A:", "\n<think>why</think>\nso", "why", "\nso"),
        ("glm45", "A:\n<think></think>", "so", "", "so"),
        ("kimi_k2", "A:", "<think>why</think>so", "why", "so"),
        (
            *("kimi_k2", "A:", "<think>why<|tool_calls_section_begin|>x"),
            *("why", "<|tool_calls_section_begin|>x"),
        ),
        ("mistral", "A:", "[THINK]why[/THINK]so", "why", "so"),
        ("mistral", "A:", "so [THINK]", "", "so [THINK]"),
        (
            *("granite", "A:", "Here is my thought process: why Here's my response: so"),
            *(" why ", " so"),
        ),
        ("granite", "A:", "Here is the answer", "", "Here is the answer"),
        (
            *("openai_gptoss", "<|start|>assistant"),
            "<|channel|>analysis<|message|>why<|end|>"
            "<|start|>assistant<|channel|>final<|message|>so<|return|>",
            *("why", "so"),
        ),
        (
            *("openai_gptoss", "<|start|>assistant"),
            f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{HARMONY_CALL}",
            *("why", HARMONY_CALL),
        ),
        (
            *("openai_gptoss", "<|start|>assistant"),
            " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            *("", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
        ),
        ("openai_gptoss", "<|start|>assistant", '{"a": 1}', "", '{"a": 1}'),
    ],
)
def test_text_is_split(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert split(PARSERS[name](prompt), text) == (reasoning, content)


def test_stray_markers_are_left_out_when_they_are_hidden() -> None:
    text = "<think>a<think></think>b</think>c<think>d"

    shown = split(PARSERS["qwen3"](""), text)
    hidden = split(PARSERS["qwen3"]("", hides_markers=True), text)

    assert shown == ("a<think>", "b</think>c<think>d")
    assert hidden == ("a", "bcd")


def test_tag_in_a_users_words_does_not_open_the_thinking() -> None:
    prompt = "<user>What does <think> mean?<assistant>"

    assert PARSERS["qwen3"](prompt).thinking is Thinking.OPTIONAL


@pytest.mark.parametrize(
    ("continued", "thinking"),
    [
        ("<think>so far", Thinking.OPEN),
        ("<think>so far</think>the", Thinking.OFF),
        ("1, 2,", Thinking.OFF),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_continued_message_decides_where_the_output_begins(
    name: str, continued: str, thinking: Thinking
) -> None:
    parser = PARSERS[name]("A:" + continued, continued=continued)

    assert parser.thinking is thinking


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "openai_gptoss"),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}<tool_call>", "qwen3"),
        ("<tool_call>f<arg_key>k</arg_key></tool_call></think>", "glm45"),
        ("{{ '<\uff5cAssistant\uff5c><think>' }}{{ content.split('</think>') }}", "deepseek_r1"),
        ("[INST]{{ content }}[/INST]", None),
        ("<\uff5cAssistant\uff5c>{{ content }}", None),
    ],
)
def test_template_tells_the_parser(template: str, name: str | None) -> None:
    assert detect_parser(template) == name


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match=r"nope.*qwen3"):
        get_parser("nope")


def test_plugin_adds_a_parser(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from llmserve.reasoning_parsers import register\n"
        "from llmserve.reasoning_parsers.tagged import TaggedParser\n"
        "@register('mine')\n"
        "class Mine(TaggedParser):\n"
        "    start_markers = ('<a>',)\n"
        "    end_markers = ('</a>',)\n"
    )

    load_plugin(str(plugin))

    try:
        assert split(get_parser("mine")(""), "<a>x</a>y") == ("x", "y")
    finally:
        del PARSERS["mine"]


@pytest.mark.parametrize("text", [None, "raise KeyError('x')"])
def test_broken_plugin_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    plugin = tmp_path / "mine.py"
    if text is not None:
        plugin.write_text(text)

    with pytest.raises(StartupError, match=r"--reasoning-parser-plugin .*mine\.py"):
        load_plugin(str(plugin))
