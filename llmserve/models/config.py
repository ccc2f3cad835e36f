"""DecoderConfig: every supported architecture, in one vocabulary.

`hf_config.py` and `gguf_config.py` read it from config.json and from GGUF metadata. Both treat the
file as untrusted: a wrong type or an absurd size is a StartupError before anything is allocated.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.errors import StartupError
from llmserve.layers import RopeConfig

MAX_HEAD_DIM = 256  # what the attention kernels hold in registers and on the stack
MAX_CONTEXT = 1 << 26
_MAX_NUMBER = 1e12


class QKNorm(enum.Enum):
    """Whether q and k are normalised, and over what."""

    NONE = "none"
    PER_HEAD = "per head"
    ALL_HEADS = "all heads"


@dataclass(frozen=True, slots=True)
class Traits:
    """What tells one family of decoders from another, apart from sizes."""

    has_pre_norm: bool = True
    has_post_norm: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    is_gemma: bool = False  # norms store weight - 1, embeddings are scaled, GELU


TRAITS: Mapping[str, Traits] = {
    "llama": Traits(),
    "mistral": Traits(),
    "qwen2": Traits(),
    "qwen3": Traits(qk_norm=QKNorm.PER_HEAD),
    "gemma": Traits(is_gemma=True),
    "gemma2": Traits(is_gemma=True, has_post_norm=True),
    "gemma3": Traits(is_gemma=True, has_post_norm=True, qk_norm=QKNorm.PER_HEAD),
    "phi3": Traits(),
    "smollm3": Traits(),
    "granite": Traits(),
    "olmo2": Traits(has_pre_norm=False, has_post_norm=True, qk_norm=QKNorm.ALL_HEADS),
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    sliding_window: int | None = None  # a query at p sees keys p - window + 1 .. p
    rope: RopeConfig | None = None  # None: no positions


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and constants of a decoder. `max_context` is the model's context in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"  # "silu", "gelu_tanh" or "gelu"
    norm_eps: float = 1e-6
    norm_weight_offset: float = 0.0
    attention_scale: float = 1.0  # on q . k
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    is_tied: bool = False  # the output matrix is the embedding matrix

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise StartupError(
                f"the model has {self.num_heads} attention heads, which {self.num_kv_heads} "
                "key-value heads do not divide"
            )
        for rope in {layer.rope for layer in self.layers if layer.rope is not None}:
            if rope.rotary_dim % 2 or not 2 <= rope.rotary_dim <= self.head_dim:
                raise StartupError(
                    f"the model rotates {rope.rotary_dim} of {self.head_dim} dimensions of a "
                    "head; this must be an even number up to all of them"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def traits(self) -> Traits:
        return TRAITS[self.family]


class Fields:
    """Typed access to a mapping from a file. Errors name the file's key and what it must be."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self.values.get(self._prefix + key) is not None

    def raw(self, key: str) -> Any:
        return self.values.get(self._prefix + key)

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 1 << 20
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.reject(key, value, "an integer")
        if not minimum <= value <= maximum:
            self.reject(key, value, f"between {minimum} and {maximum}")
        return int(value)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float = 0.0,
        maximum: float = _MAX_NUMBER,
    ) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.reject(key, value, "a number")
        if not above < value <= maximum:  # NaN is not
            self.reject(key, value, f"a number above {above} and at most {maximum:g}")
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """None where the key is null, or absent without a default."""
        full = self._prefix + key
        if full in self.values and self.values[full] is None:
            return None
        if full not in self.values and default is None:
            return None
        return self.number(key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self.reject(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.reject(key, value, "a text")
        return str(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers above 0."""
        value = self._get(key, None)
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(_is_positive(item) for item in value):
            self.reject(key, value, f"a list of {length} numbers above 0")
        return tuple(float(item) for item in value)

    def reject(self, key: str, value: object, expected: str) -> None:
        """Raises StartupError."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise StartupError(f"{self.source}: {self._prefix}{key} is {shown}; it must be {expected}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise StartupError(f"{self.source}: {self._prefix}{key} is missing")
        return default


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= _MAX_NUMBER  # type: ignore[operator]  # narrowed above


def head_sizes(
    fields: Fields, keys: Mapping[str, str], default_head_dim: int | None
) -> dict[str, int]:
    """num_heads, num_kv_heads, head_dim and hidden_size under the names that `keys` gives them."""
    hidden_size = fields.integer(keys["hidden_size"], maximum=1 << 18)
    num_heads = fields.integer(keys["num_heads"], maximum=1 << 12)
    num_kv_heads = fields.integer(keys["num_kv_heads"], num_heads, maximum=1 << 12)
    if not fields.has(keys["head_dim"]) and default_head_dim is None and hidden_size % num_heads:
        fields.reject(
            keys["num_heads"], num_heads, f"a divisor of the hidden size, which is {hidden_size}"
        )
    head_dim = fields.integer(
        keys["head_dim"], default_head_dim or hidden_size // num_heads, maximum=MAX_HEAD_DIM
    )
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
