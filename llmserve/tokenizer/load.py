"""Finds the tokenizer and the chat template of a model, whatever files it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from llmserve.config import FrontendConfig
from llmserve.errors import RequestError, StartupError
from llmserve.files.gguf import GGUFFile
from llmserve.files.hub import download, parse_hub_id
from llmserve.tokenizer.chat_template import ChatTemplate
from llmserve.tokenizer.gguf_bpe import load_gguf_bpe
from llmserve.tokenizer.gguf_spm import GGUFSpmTokenizer
from llmserve.tokenizer.hf_folder import load_hf_folder, read_folder_templates
from llmserve.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_KWARGS_FLAG = "--chat-template-kwargs"
_GGUF_TEMPLATE = "tokenizer.chat_template"
_GGUF_MODELS: dict[str, Callable[[Mapping[str, Any]], Tokenizer]] = {
    "llama": GGUFSpmTokenizer,
    "gpt2": load_gguf_bpe,
}

# The turns that Gemma models are trained on: a system message has no turn of its own and goes
# before the first user's. Turns need not alternate. Gemma has no format of calls, so tools are
# told of before the system message, in words, with the tags of Hermes.
_GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set ns = namespace(system='', is_head=true) -%}
{%- if tools -%}
    {%- set ns.system = 'You can call these functions:\\n' -%}
    {%- for tool in tools -%}
        {%- set ns.system = ns.system + (tool.function or tool) | tojson + '\\n' -%}
    {%- endfor -%}
    {%- set ns.system = ns.system + 'If one of them helps with the request, answer with a call in '
        + 'this form and nothing else:\\n<tool_call>\\n{"name": "FUNCTION", "arguments": '
        + '{"PARAMETER": "VALUE"}}\\n</tool_call>\\nIf none does, answer in words.\\n\\n' -%}
{%- endif -%}
{%- set roles = ['system', 'developer', 'user', 'assistant', 'tool'] -%}
{%- for message in messages -%}
    {%- if message.role not in roles -%}
        {{- raise_exception('the role of a message is ' + (message.role | tojson)
            + '; it must be one of ' + (roles | join(', '))) -}}
    {%- endif -%}
    {%- set content = (message.content or '') | trim -%}
    {%- if message.role == 'tool' -%}
        {%- set content = '<tool_response>\\n' + content + '\\n</tool_response>' -%}
    {%- endif -%}
    {%- set made = namespace(calls='') -%}
    {%- for call in message.tool_calls or [] -%}
        {%- set function = call.function -%}
        {%- set body = {'name': function.name, 'arguments': function.arguments} | tojson -%}
        {%- set made.calls = made.calls + '\\n<tool_call>\\n' + body + '\\n</tool_call>' -%}
    {%- endfor -%}
    {%- set content = (content + made.calls) | trim -%}
    {%- if message.role in ['system', 'developer'] and ns.is_head and not loop.last -%}
        {%- set ns.system = ns.system + content + '\\n\\n' -%}
    {%- else -%}
        {%- if message.role == 'assistant' and ns.system -%}
            {{- '<start_of_turn>user\\n' + ns.system | trim + '<end_of_turn>\\n' -}}
            {%- set ns.system = '' -%}
        {%- endif -%}
        {%- set role = 'model' if message.role == 'assistant' else 'user' -%}
        {{- '<start_of_turn>' + role + '\\n' + ns.system + content + '<end_of_turn>\\n' -}}
        {%- set ns.system = '' -%}
        {%- set ns.is_head = false -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


class ModelSource(Protocol):
    """What is read here of llmserve.files.model.ModelFiles."""

    @property
    def tokenizer_path(self) -> Path: ...
    @property
    def gguf(self) -> GGUFFile | None: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation_config(self) -> dict[str, Any]: ...


def load_tokenizer(files: ModelSource, override: str | None = None) -> Tokenizer:
    """The model's tokenizer, or the one that --tokenizer names (folder, GGUF file or hub id).

    Raises StartupError in one sentence.
    """
    end_ids = _end_ids(files)
    if override is not None:
        path = _locate(override)
        if path.is_dir():
            return load_hf_folder(path, end_ids)
        return _load_gguf(GGUFFile.open(path).metadata)
    if files.gguf is not None:
        return _load_gguf(files.gguf.metadata)
    return load_hf_folder(files.tokenizer_path, end_ids)


def load_chat_template(
    files: ModelSource, tokenizer: Tokenizer, config: FrontendConfig, override: str | None = None
) -> ChatTemplate:
    """--chat-template, else the tokenizer's own (`override` is --tokenizer), else the model's,
    else the built-in one of its family. Raises StartupError if it is not a template.
    """
    sources = _find_sources(files, config, override)
    if not sources and _is_gemma(files, tokenizer):
        logger.info("the model has no chat template; using the turns of Gemma models")
        sources = {"default": _GEMMA_TEMPLATE}
    if not sources:
        logger.warning("the model has no chat template; chat requests will be refused")
    try:
        return ChatTemplate(
            sources,
            tokenizer.special_tokens,
            config.chat_template_content_format,
            config.template_variables(),
        )
    except RequestError as error:
        raise StartupError(str(error).replace("chat_template_kwargs", _KWARGS_FLAG)) from error
    except ValueError as error:
        raise StartupError(f"{error}; pass another with --chat-template") from error


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a rendered conversation. Gets a BOS if the tokenizer adds one and it has none yet."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos]:
        return ids
    adds_bos = tokenizer.encode("", add_special_tokens=True)[:1] == [bos]
    return [bos, *ids] if adds_bos else ids


def _load_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    load = _GGUF_MODELS.get(kind) if isinstance(kind, str) else None
    if load is None:
        raise StartupError(
            f"the GGUF file has a tokenizer of the kind {kind!r}; supported are "
            f"{' and '.join(map(repr, _GGUF_MODELS))}; pass --tokenizer with the original model's"
        )
    return load(metadata)


def _locate(override: str) -> Path:
    path = Path(override).expanduser()
    if path.exists():
        return path
    hub_model = parse_hub_id(override)
    if hub_model is None:
        raise StartupError(f"--tokenizer {override} is neither an existing path nor a hub id")
    try:
        return download(hub_model, None, None, logger.info, with_weights=False)
    except StartupError as error:
        raise StartupError(str(error).replace("--model", "--tokenizer")) from error


def _end_ids(files: ModelSource) -> tuple[int, ...]:
    """EOS ids of generation_config.json, else of config.json. Negative ones stand for none.

    Raises StartupError.
    """
    sources = {"generation_config.json": files.generation_config, "config.json": files.config}
    for name, config in sources.items():
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise StartupError(
                f"{name}: eos_token_id is {value!r}; it must be a token id or a list of token ids"
            )
        ids = [i for i in ids if i >= 0]
        if ids:
            return tuple(ids)
    return ()


def _find_sources(
    files: ModelSource, config: FrontendConfig, override: str | None
) -> dict[str, str]:
    if config.chat_template is not None:
        return {"default": _read_flag(config.chat_template)}
    if override is not None:
        path = _locate(override)
        sources = (
            read_folder_templates(path)
            if path.is_dir()
            else _gguf_templates(GGUFFile.open(path).metadata)
        )
        if sources:
            return sources
    if files.gguf is not None:
        return _gguf_templates(files.gguf.metadata)
    return read_folder_templates(files.tokenizer_path)


def _read_flag(value: str) -> str:
    """--chat-template: a file, or the template itself."""
    path = Path(value).expanduser()
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # also a template, as a file name too long
        if "{" not in value:
            raise StartupError(f"--chat-template {value} cannot be read: {error}") from error
    if "{" not in value:
        raise StartupError(f"--chat-template {value} is neither a file nor a template")
    return value


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.tool_use` a named."""
    sources = {}
    for key, value in metadata.items():
        if isinstance(value, str) and value.strip():
            if key == _GGUF_TEMPLATE:
                sources["default"] = value
            elif key.startswith(_GGUF_TEMPLATE + "."):
                sources[key.removeprefix(_GGUF_TEMPLATE + ".")] = value
    return sources


def _is_gemma(files: ModelSource, tokenizer: Tokenizer) -> bool:
    if files.gguf is not None:
        family = files.gguf.metadata.get("general.architecture")
    else:
        family = files.config.get("model_type")
    turn_ids = tokenizer.encode("<start_of_turn>", add_special_tokens=False)
    return isinstance(family, str) and family.startswith("gemma") and len(turn_ids) == 1
