"""Sampling values of requests that name none: the model's generation_config, then neutral ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults are neutral; `from_generation_config` overrides them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Takes the keys that concern sampling; a value that makes no sense is logged and left."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            value = config.get(item.name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                logger.warning("generation_config: %s is %r; ignored", item.name, value)
                continue
            values[item.name] = int(value) if item.name == "top_k" else float(value)
        if values:
            logger.info("default sampling parameters of the model: %s", values)
        return cls(**values)


def eos_token_ids(tokenizer_ids: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every id that ends a text: the tokenizer's and the generation_config's."""
    listed = config.get("eos_token_id")
    from_config = listed if isinstance(listed, list) else [listed]
    ids = [*tokenizer_ids, *(i for i in from_config if isinstance(i, int))]
    return tuple(dict.fromkeys(ids))
