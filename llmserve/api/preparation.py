"""What both generation endpoints do with a parsed request: ids, budgets, GenerationRequests."""

from __future__ import annotations

import dataclasses
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llmserve.api.context import ApiContext
from llmserve.api.fields import shorten
from llmserve.api.logprobs import TokenNames
from llmserve.api.prompts import MAX_CHOICES, Prompt, resolve_max_tokens
from llmserve.api.sampling import check_beam_search, check_min_tokens, fields_without_effect
from llmserve.api.schemas import GenerationFields, ignored_fields
from llmserve.api.usage import UsageCounter
from llmserve.core import BeamParams, GenerationRequest, SamplingParams
from llmserve.errors import RequestError

_R = TypeVar("_R", bound=GenerationFields)

# An answer of more log-probabilities than this takes gigabytes of memory. Up to so many per token
# the context bounds them.
_MAX_LOGPROBS = 1 << 20
_FEW_LOGPROBS = 1000

_MAX_HEADER_CHARS = 4000  # clients refuse headers of 8 KiB
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # names that are safe in a header


@dataclass(frozen=True, slots=True)
class Prepared(Generic[_R]):
    """A checked HTTP request: what the engine shall do and what the answer needs."""

    request: _R
    prompts: list[Prompt]
    generations: list[GenerationRequest]  # one per prompt; empty if there is nothing to compute
    response_id: str
    model: str
    names: TokenNames
    ignored: list[str]
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer besides the usual ones."""
        return ignored_header(self.ignored)

    def usage_counter(self) -> UsageCounter:
        return UsageCounter([len(prompt.token_ids) for prompt in self.prompts])

    def envelope(self, object_type: str) -> dict[str, Any]:
        """The fields that the answer and every chunk of it begin with."""
        return {
            "id": self.response_id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
        }


def note_ignored(
    request: GenerationFields,
    body: dict[str, Any],
    context: ApiContext,
    others: Iterable[str] = (),
) -> list[str]:
    """Names in `body` without effect, and others of which the caller knows that they have none.

    With --strict-params RequestError names the first.
    """
    names = sorted({*ignored_fields(type(request), body), *fields_without_effect(request), *others})
    refuse_ignored(names, context)
    return names


def refuse_ignored(names: list[str], context: ApiContext) -> None:
    """With --strict-params RequestError names the first."""
    if names and context.config.strict_params:
        shown = ", ".join(shorten(name) for name in names[:10])
        raise RequestError(
            f"{shown} would have no effect, and this server runs with --strict-params; "
            "leave it out",
            param=names[0][:64],
        )


def ignored_header(names: list[str]) -> dict[str, str]:
    """The header of the answer that names the fields without effect."""
    listed = ", ".join(name for name in names if _HEADER_NAME.fullmatch(name))
    if len(listed) > _MAX_HEADER_CHARS:
        listed = listed[: listed.rindex(",", 0, _MAX_HEADER_CHARS)] + ", ..."
    return {"X-Ignored-Params": listed} if listed else {}


def make_generations(
    request: GenerationFields,
    prompts: list[Prompt],
    sampling: SamplingParams,
    context: ApiContext,
    *,
    response_id: str,
    asked_max_tokens: int | None,
    default_max_tokens: int | None,
    best_of: int | None = None,
) -> list[GenerationRequest]:
    """One per prompt, of `best_of` (default: n) choices.

    Raises RequestError where a prompt does not fit.
    """
    n = best_of or request.n
    if len(prompts) * n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {n} choices each make {len(prompts) * n} choices; "
            f"at most {MAX_CHOICES} are allowed in one request",
            param="prompt",
        )
    check_beam_search(request, sampling)
    beam = None
    if request.use_beam_search:
        penalty = request.length_penalty
        beam = BeamParams(width=n, length_penalty=1.0 if penalty is None else penalty)
    # The response id may be the client's, so it need not be unique among running requests.
    engine_id = f"{response_id}-{secrets.token_hex(4)}"
    field = "max_tokens"
    if getattr(request, "max_completion_tokens", None) is not None:
        field = "max_completion_tokens"
    generations = []
    for position, prompt in enumerate(prompts):
        max_tokens = resolve_max_tokens(
            asked_max_tokens,
            default_max_tokens,
            len(prompt.token_ids),
            context.engine.max_model_len,
            field,
        )
        check_min_tokens(sampling.min_tokens, max_tokens)
        check_num_logprobs(sampling, len(prompt.token_ids), n * max_tokens)
        # Equal prompts of a batch differ, unless the request fixes the seed.
        seed = context.draw_seed() if request.seed is None else sampling.seed
        generations.append(
            GenerationRequest(
                request_id=engine_id if len(prompts) == 1 else f"{engine_id}-{position}",
                prompt_token_ids=prompt.token_ids,
                sampling=dataclasses.replace(sampling, max_tokens=max_tokens, seed=seed),
                n=n,
                priority=request.priority,
                cache_salt=request.cache_salt,
                beam=beam,
            )
        )
    return generations


def check_num_logprobs(sampling: SamplingParams, num_prompt_tokens: int, num_tokens: int) -> None:
    """Refuses log-probabilities of so many tokens that the answer would not fit into memory."""
    for field, per_token, count in (
        ("logprobs", sampling.num_logprobs, num_tokens),
        ("prompt_logprobs", sampling.num_prompt_logprobs, num_prompt_tokens),
    ):
        if per_token is not None and per_token > _FEW_LOGPROBS:
            num_entries = per_token * count
            if num_entries > _MAX_LOGPROBS:
                raise RequestError(
                    f"{field} asks for {per_token} log-probabilities of each of {count} tokens; "
                    f"at most {_MAX_LOGPROBS} are given in one answer",
                    param=field,
                )


def token_names(request: GenerationFields, context: ApiContext) -> TokenNames:
    return TokenNames(
        context.tokenizer,
        as_ids=request.return_tokens_as_token_ids,
        skip_special_tokens=request.skip_special_tokens,
    )
