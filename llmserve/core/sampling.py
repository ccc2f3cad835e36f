"""How one sequence is sampled and when it ends. Validated by the API layer, immutable below it."""

from __future__ import annotations

from dataclasses import dataclass

from llmserve.core.grammar import Grammar
from llmserve.core.thinking import ThinkingBudget


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping rules of one sequence.

    Order of application to a row of logits: logprobs are read from the raw logits; then grammar,
    allowed_token_ids, bad words and min_tokens masks, logit_bias, penalties, temperature, min_p,
    top_k, top_p, draw. Temperature 0 is greedy and switches the filters off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # output tokens only
    frequency_penalty: float = 0.0  # output tokens only
    repetition_penalty: float = 1.0  # prompt and output tokens
    seed: int = 0  # always set; the engine draws one where the request has none
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    # Masks tokens before everything else. An end may come only where it allows one, and does come
    # where it allows nothing else, whatever min_tokens and ignore_eos say.
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None  # its end is forced whatever else masks it

    max_tokens: int = 16
    min_tokens: int = 0  # masks eos_token_ids and stop_token_ids, and defers stop strings
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # asked for by the request; reported as stop_reason
    eos_token_ids: tuple[int, ...] = ()  # the model's; empty when ignore_eos without a grammar
    ignore_eos: bool = False  # with a grammar: eos_token_ids come only where nothing else may
    include_stop_str_in_output: bool = False

    num_logprobs: int | None = None  # None: none; k: the sampled token and the k most likely
    num_prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def depends_on_output(self) -> bool:
        """Whether what may come next depends on the tokens so far, beyond the model's logits."""
        return (
            self.grammar is not None
            or self.thinking_budget is not None
            or bool(self.bad_words_token_ids)
            or self.has_penalties
        )

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
