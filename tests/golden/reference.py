"""What transformers computes, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def greedy(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    num_tokens: int,
    guesses: Sequence[list[int]] | None = None,
) -> list[list[int]]:
    """Greedy continuations; prompts of one length run as a batch, so that nothing is padded.

    One pass over prompts and `guesses` shows whether the guesses are what they should be; only if
    not does the model generate, in as many passes as there are tokens.
    """
    continuations: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        token_ids = torch.tensor([prompts[place] for place in places])
        rows = [guesses[place] for place in places] if guesses else []
        with torch.inference_mode():
            if not _are_greedy(model, token_ids, rows, num_tokens):
                rows = _generate(model, token_ids, num_tokens)
        for place, row in zip(places, rows, strict=True):
            continuations[place] = row
    return [continuations[place] for place in range(len(prompts))]


def _are_greedy(
    model: PreTrainedModel, token_ids: torch.Tensor, guesses: list[list[int]], num_tokens: int
) -> bool:
    if not guesses or any(len(guess) != num_tokens for guess in guesses):
        return False
    guessed = torch.tensor(guesses)
    logits = model(torch.cat([token_ids, guessed], dim=1)).logits[:, token_ids.shape[1] - 1 : -1]
    return torch.equal(logits.argmax(dim=-1), guessed)


def _generate(model: PreTrainedModel, token_ids: torch.Tensor, num_tokens: int) -> list[list[int]]:
    whole = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    tokens: list[list[int]] = whole[:, token_ids.shape[1] :].tolist()
    return tokens


def logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return result
