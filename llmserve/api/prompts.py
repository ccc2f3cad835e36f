"""From a prompt or a conversation to token ids, and whether they fit into the context."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from llmserve.api.body import INLINE_BYTES
from llmserve.api.context import ApiContext
from llmserve.api.fields import check_vocabulary, id_list, refuse
from llmserve.api.schemas import GenerationFields, TemplateFields
from llmserve.api.structured import NeedsThreadError
from llmserve.errors import ContextLengthError, RequestError
from llmserve.tokenizer import ChatTemplate, SlowTemplateError, encode_chat, shared_limit

_R = TypeVar("_R")

MAX_CHOICES = 4096  # of one HTTP request, prompts * n

# Characters that are tokenized whatever the context is: they take a few milliseconds.
_ALWAYS_TOKENIZED = 1 << 16

_QUICK_S = 0.01  # what a rendering may take on the event loop

_PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of such lists"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None where the request gave token ids."""

    token_ids: list[int]
    text: str | None = None


def split_prompts(value: object) -> dict[str, str | list[int]]:
    """The prompts of a completions request in order, by name: prompt, or prompt[0] and so on.

    Raises RequestError.
    """
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, list):
        refuse("prompt", value, _PROMPT_FORMS)
    if not value:
        raise RequestError("prompt is an empty list; it must hold a prompt", param="prompt")
    kinds = set(map(type, value))
    if kinds == {int}:
        return {"prompt": value}
    if kinds not in ({str}, {list}):
        _refuse_mixture(value)
    named = {f"prompt[{position}]": prompt for position, prompt in enumerate(value)}
    for name, prompt in named.items():
        if isinstance(prompt, list) and not id_list(prompt, name):
            raise RequestError(f"{name} is an empty list; it must hold token ids", param=name)
    return named


def _refuse_mixture(value: list[object]) -> NoReturn:
    """Names the first element that cannot stand there, beside the first one if that can."""
    first = type(value[0])
    for position, item in enumerate(value):
        if type(item) not in (str, int, list) or type(item) is not first:
            refuse(f"prompt[{position}]", item, f"part of {_PROMPT_FORMS}")
    refuse("prompt", value, _PROMPT_FORMS)


def encode_prompt(
    prompt: str | list[int],
    context: ApiContext,
    *,
    name: str,
    add_special_tokens: bool,
    is_bounded: bool = False,
) -> Prompt:
    """Raises RequestError for an id outside the vocabulary or a prompt without tokens.

    name: what an error calls a list of ids, as prompt[1].
    """
    if isinstance(prompt, str):
        if is_bounded:
            refuse_overlong(prompt, context)
        ids = context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError("prompt is empty; it must have at least one token", param="prompt")
        return Prompt(ids, prompt)
    check_vocabulary(prompt, context.model.vocab_size, name)
    return Prompt(prompt)


async def run_preparation(context: ApiContext, size: int, work: Callable[[ApiContext], _R]) -> _R:
    """Runs `work`, which may render the chat template and tokenize, on a body of `size` bytes.

    A rendering runs on the event loop only while it is quick, and no grammar is compiled there;
    then it begins again in a thread, where a rendering is stopped after 5 s. A client's own
    template always runs in a thread.
    """
    if size <= INLINE_BYTES and not context.config.trust_request_chat_template:
        quick = context.chat_template.within(_QUICK_S)
        with contextlib.suppress(SlowTemplateError, NeedsThreadError):
            return work(dataclasses.replace(context, chat_template=quick))
    return await context.gate.run(max(size, INLINE_BYTES + 1), work, context)


def refuse_overlong(text: str, context: ApiContext) -> None:
    """Refuses a text that cannot fit even if all of its tokens are the longest ones.

    Tokenizing megabytes takes seconds and gigabytes only to find that out. ContextLengthError.
    """
    if len(text) <= _ALWAYS_TOKENIZED:
        return
    max_model_len = context.engine.max_model_len
    at_least = len(text) // context.longest_token()
    if at_least >= max_model_len:
        raise ContextLengthError(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{len(text)} characters, which are at least {at_least} tokens; shorten the prompt",
            param="prompt",
        )


def encode_conversation(
    messages: list[dict[str, Any]],
    fields: TemplateFields,
    context: ApiContext,
    *,
    add_special_tokens: bool | None,
    is_bounded: bool = False,
) -> Prompt:
    """Renders the chat template and encodes its text. Raises RequestError.

    The text gets a BOS if the tokenizer adds one and the template has not, so never two of them;
    with `add_special_tokens` False it stays as the template made it. `is_bounded`: a text that
    cannot fit into the context is refused before it is tokenized.
    """
    text = render(messages, fields, context)
    if is_bounded:
        refuse_overlong(text, context)
    if add_special_tokens is False:
        ids = context.tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = encode_chat(context.tokenizer, text)
    if not ids:
        raise RequestError("the chat template made an empty prompt", param="messages")
    return Prompt(ids, text)


def render(messages: list[dict[str, Any]], fields: TemplateFields, context: ApiContext) -> str:
    """The text that the chat template makes of a conversation."""
    kwargs = dict(fields.chat_template_kwargs)
    if fields.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
    context.chat_template.check_variables(kwargs)
    add_generation_prompt = fields.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not fields.continue_final_message
    with shared_limit():
        return _template_of(fields, context).render(
            messages,
            tools=fields.tools or None,
            documents=fields.documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            **kwargs,
        )


def _template_of(fields: TemplateFields, context: ApiContext) -> ChatTemplate:
    if fields.chat_template is None:
        return context.chat_template
    if not context.config.trust_request_chat_template:
        raise RequestError(
            "chat_template in a request needs a server with --trust-request-chat-template",
            param="chat_template",
        )
    return context.chat_template.with_source(fields.chat_template)


def truncate(
    prompt: Prompt, request: GenerationFields, max_model_len: int, max_tokens: int | None
) -> Prompt:
    """Applies truncate_prompt_tokens: keeps that many tokens of the end (or of the beginning)."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0:
        refuse("truncate_prompt_tokens", keep, "-1 (as many as fit) or a positive integer")
    if keep > max_model_len:
        refuse("truncate_prompt_tokens", keep, f"at most the context length {max_model_len}")
    if keep == -1:
        keep = max(1, max_model_len - (max_tokens or 1))
    if len(prompt.token_ids) <= keep:
        return prompt
    is_left = request.truncation_side == "left"
    ids = prompt.token_ids[-keep:] if is_left else prompt.token_ids[:keep]
    return Prompt(ids)


def resolve_max_tokens(
    asked: int | None,
    default: int | None,
    num_prompt_tokens: int,
    max_model_len: int,
    field: str = "max_tokens",
) -> int:
    """The output budget of one prompt. Raises ContextLengthError.

    What the request asks for, in `field`, must fit; the default (None: all that is left) is cut
    to fit.
    """
    limit = f"this model's maximum context length is {max_model_len} tokens"
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens, which leaves no room for "
            "output; shorten the prompt",
            param="prompt",
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthError(
            f"{limit}, but the prompt has {num_prompt_tokens} tokens and {field} asks for "
            f"{asked} more; shorten the prompt or lower {field} to {room}",
            param=field,
        )
    return asked
