"""A validated generation: api -> engine."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search in place of sampling: the `width` best continuations, best first."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and n choices of output. Token ids only; text stays above the engine.

    Choice i gets the id `request_id` for n == 1, else `request_id-i`, and seed
    `sampling.seed + i`. With `beam` the choices are the beams, and n is its width.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str | None = None
    beam: BeamParams | None = None
    is_logged: bool = True  # False for the steps of a larger job
