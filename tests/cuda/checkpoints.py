"""Checkpoints so small that emulated kernels compute them in seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.make_checkpoints import ARCHITECTURES, make_model, save_checkpoint

VOCAB_SIZE = 96
Checkpoint = tuple[PreTrainedModel, Path]

_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
_OTHERS: dict[str, dict[str, Any]] = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
}


def make_small_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Two layers of an architecture, from a fixed seed, saved to the folder."""
    kind = ARCHITECTURES[name]
    settings = kind.settings | _SIZES | {"num_hidden_layers": 2} | _OTHERS.get(name, {})
    model = make_model(dataclasses.replace(kind, settings=settings))
    return model, save_checkpoint(model, folder)
