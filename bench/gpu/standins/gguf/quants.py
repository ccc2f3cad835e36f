"""As gguf.quants."""

from __future__ import annotations

from gguf import dequantize

__all__ = ["dequantize"]
