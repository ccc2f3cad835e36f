"""From request fields to SamplingParams: request value, else the model's default, else neutral."""

from __future__ import annotations

from typing import TypeVar

from llmserve.api.context import ApiContext
from llmserve.api.defaults import eos_token_ids
from llmserve.api.fields import check_vocabulary, refuse
from llmserve.api.schemas import GenerationFields
from llmserve.api.structured import grammar_field
from llmserve.core import SamplingParams
from llmserve.core.grammar import Grammar
from llmserve.errors import RequestError
from llmserve.tokenizer import Tokenizer

_T = TypeVar("_T")
_G = TypeVar("_G", bound=GenerationFields)

# Below this the division by the temperature loses all precision in float32 (vLLM's limit).
_MIN_TEMPERATURE = 0.01

# What changes the probabilities that a beam search ranks by.
_BIASING_FIELDS = (
    *("logit_bias", "allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty"),
    *("response_format", "structured_outputs", "tool_choice"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def make_sampling_params(
    request: GenerationFields,
    context: ApiContext,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Everything but max_tokens, which depends on the prompt. Raises RequestError."""
    defaults, model = context.defaults, context.model
    temperature = _or(request.temperature, defaults.temperature)
    if 0.0 < temperature < _MIN_TEMPERATURE:
        temperature = _MIN_TEMPERATURE
    if temperature == 0.0 and not request.use_beam_search:
        _refuse_equal_choices(request)
    if request.allowed_token_ids == []:
        refuse("allowed_token_ids", [], "a list of at least one token id")
    vocab_size = model.vocab_size
    check_vocabulary(request.allowed_token_ids or [], vocab_size, "allowed_token_ids")
    check_vocabulary(request.stop_token_ids, vocab_size, "stop_token_ids")
    _check_biased_ids(request, vocab_size)
    if request.priority != 0 and model.scheduling_policy != "priority":
        raise RequestError(
            f"priority is {request.priority}; this server ignores priorities, so it must be 0 "
            "(start it with --scheduling-policy priority)",
            param="priority",
        )
    allowed = request.allowed_token_ids
    eos = eos_token_ids(tuple(context.tokenizer.eos_token_ids), model.generation_config)
    return SamplingParams(
        temperature=temperature,
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=context.draw_seed() if request.seed is None else request.seed,
        logit_bias=request.logit_bias,
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words_token_ids=_encode_bad_words(request.bad_words, context.tokenizer),
        min_tokens=request.min_tokens,
        stop=request.stop,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids)),
        grammar=grammar,
        ignore_eos=request.ignore_eos,
        # A grammar that is complete ends the output all the same.
        eos_token_ids=() if request.ignore_eos and grammar is None else eos,
        include_stop_str_in_output=request.include_stop_str_in_output,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
    )


def _check_biased_ids(request: GenerationFields, vocab_size: int) -> None:
    highest = max((token_id for token_id, _ in request.logit_bias), default=0)
    if highest >= vocab_size:
        raise RequestError(
            f"logit_bias has the key {highest}; its keys must be token ids from 0 to "
            f"{vocab_size - 1}",
            param="logit_bias",
        )


def _refuse_equal_choices(request: GenerationFields) -> None:
    for field in ("n", "best_of"):
        value = getattr(request, field, None)
        if value is not None and value > 1:
            raise RequestError(
                f"{field} is {value}, but with temperature 0 all choices are the same; "
                "it must be 1, or temperature above 0",
                param=field,
            )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        refuse("min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")


def resolve_logprobs(request: _G, context: ApiContext) -> _G:
    """The request with the number of logprobs in place of -1, which means the whole vocabulary.

    Raises RequestError for more than --max-logprobs.
    """
    vocab_size, limit = context.model.vocab_size, context.config.max_logprobs
    resolved: dict[str, int] = {}
    for field in ("logprobs", "top_logprobs", "prompt_logprobs"):
        value = getattr(request, field, None)
        if value is None or isinstance(value, bool):
            continue
        wanted = vocab_size if value == -1 else value
        if wanted > (vocab_size if limit == -1 else limit):
            top = f"-1 (all) or an integer from 0 to {vocab_size}"
            refuse(field, value, top if limit == -1 else f"an integer from 0 to {limit}")
        resolved[field] = wanted
    return request.model_copy(update=resolved) if resolved else request


def check_stream_fields(request: GenerationFields) -> None:
    """Combinations with `stream` that have no meaning. Raises RequestError."""
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is given, but stream is false; leave it out", param="stream_options"
        )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs does not go with stream; set one of them only",
            param="prompt_logprobs",
        )


def check_beam_search(request: GenerationFields, sampling: SamplingParams) -> None:
    """Raises RequestError for what a beam search cannot honour."""
    if not request.use_beam_search:
        return
    if request.stream:
        raise RequestError(
            "use_beam_search does not go with stream; set one of them only",
            param="use_beam_search",
        )
    is_biased = (
        sampling.has_penalties
        or sampling.logit_bias
        or sampling.bad_words_token_ids
        or sampling.allowed_token_ids is not None
        or sampling.grammar is not None
    )
    if is_biased:
        given = [name for name in _BIASING_FIELDS if getattr(request, name, None)]
        field = given[0] if given else "repetition_penalty"
        raise RequestError(
            f"{field} does not go with use_beam_search, which ranks by the model's own "
            "probabilities; leave it out",
            param=field,
        )


def fields_without_effect(request: GenerationFields) -> list[str]:
    """Names of fields that have an effect, but not beside the others of this request."""
    names = set()
    if request.guided_whitespace_pattern is not None and grammar_field(request) is None:
        names.add("guided_whitespace_pattern")
    if not request.use_beam_search:
        return sorted(names if request.length_penalty is None else {*names, "length_penalty"})
    names |= {"top_p", "top_k", "min_p", "seed"} & request.model_fields_set
    return sorted({*names, "temperature"} if request.temperature else names)


def _encode_bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word at the start of a text and after a space."""
    sequences = [
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in words
        for text in (word, " " + word.lstrip())
    ]
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
