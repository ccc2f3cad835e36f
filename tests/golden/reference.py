"""What transformers computes, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def greedy(
    model: PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """Greedy continuations; prompts of one length run as a batch, so that nothing is padded."""
    continuations: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
        token_ids = torch.tensor([prompts[place] for place in places])
        with torch.inference_mode():
            whole = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        for place, row in zip(places, whole[:, length:].tolist(), strict=True):
            continuations[place] = row
    return [continuations[place] for place in range(len(prompts))]


def logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return result
