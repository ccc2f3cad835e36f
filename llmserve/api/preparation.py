"""What both generation endpoints do with a parsed request: ids, budgets, GenerationRequests."""

from __future__ import annotations

import dataclasses
import secrets
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from llmserve.api.context import ApiContext
from llmserve.api.logprobs import TokenNames
from llmserve.api.prompts import MAX_CHOICES, Prompt, resolve_max_tokens
from llmserve.api.sampling import check_min_tokens
from llmserve.api.schemas import GenerationFields
from llmserve.api.usage import UsageCounter
from llmserve.core import GenerationRequest, SamplingParams
from llmserve.errors import RequestError

_R = TypeVar("_R", bound=GenerationFields)


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
        return {"X-Ignored-Params": ", ".join(self.ignored)} if self.ignored else {}

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


def make_generations(
    request: GenerationFields,
    prompts: list[Prompt],
    sampling: SamplingParams,
    context: ApiContext,
    *,
    response_id: str,
    asked_max_tokens: int | None,
    default_max_tokens: int | None,
) -> list[GenerationRequest]:
    """One per prompt. Raises RequestError where a prompt does not fit."""
    if len(prompts) * request.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n = {request.n} make {len(prompts) * request.n} choices; "
            f"at most {MAX_CHOICES} are allowed in one request",
            param="prompt",
        )
    # The response id may be the client's, so it need not be unique among running requests.
    engine_id = f"{response_id}-{secrets.token_hex(4)}"
    generations = []
    for position, prompt in enumerate(prompts):
        max_tokens = resolve_max_tokens(
            asked_max_tokens,
            default_max_tokens,
            len(prompt.token_ids),
            context.engine.max_model_len,
        )
        check_min_tokens(sampling.min_tokens, max_tokens)
        # Equal prompts of a batch differ, unless the request fixes the seed.
        seed = context.draw_seed() if request.seed is None else sampling.seed
        generations.append(
            GenerationRequest(
                request_id=engine_id if len(prompts) == 1 else f"{engine_id}-{position}",
                prompt_token_ids=prompt.token_ids,
                sampling=dataclasses.replace(sampling, max_tokens=max_tokens, seed=seed),
                n=request.n,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        )
    return generations


def token_names(request: GenerationFields, context: ApiContext) -> TokenNames:
    return TokenNames(
        context.tokenizer,
        as_ids=request.return_tokens_as_token_ids,
        skip_special_tokens=request.skip_special_tokens,
    )
