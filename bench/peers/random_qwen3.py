"""Writes a GGUF file of a Qwen3 with 0.6B random parameters.

The shape is that of Qwen3-0.6B with tied embeddings. The vocabulary is made up: 256 bytes and as
many words as the shape needs, enough to turn any token into text.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType

NUM_LAYERS = 28
HIDDEN_SIZE = 1024
NUM_HEADS = 16
NUM_KV_HEADS = 8
HEAD_DIM = 128
INTERMEDIATE_SIZE = 3072
VOCAB_SIZE = 151936
CONTEXT_LEN = 4096

_STD = 0.02
_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3  # as GGUF numbers kinds of tokens


def write_random_qwen3(path: Path) -> None:
    """In BF16, norms in float32; 1.2 GB, all of them in memory meanwhile."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("random Qwen3 0.6B")
    writer.add_context_length(CONTEXT_LEN)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_vocabulary(writer)
    rng = np.random.default_rng(0)
    _add_matrix(writer, rng, "token_embd", VOCAB_SIZE, HIDDEN_SIZE)
    _add_norm(writer, "output_norm", HIDDEN_SIZE)
    for index in range(NUM_LAYERS):
        _add_layer(writer, rng, f"blk.{index}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*_byte_tokens(), "\u0120w"]
    tokens += [f"\u0120w{number}" for number in range(VOCAB_SIZE - len(tokens) - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|endoftext|>"])
    writer.add_token_types([_NORMAL_TOKEN] * len(tokens) + [_CONTROL_TOKEN])
    writer.add_token_merges(["\u0120 w"])
    writer.add_eos_token_id(len(tokens))
    writer.add_add_bos_token(False)


def _byte_tokens() -> list[str]:
    """How byte-level BPE writes the 256 bytes: printable ones as they are, others from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _add_layer(writer: gguf.GGUFWriter, rng: np.random.Generator, prefix: str) -> None:
    for name, size in (
        ("attn_norm", HIDDEN_SIZE),
        ("ffn_norm", HIDDEN_SIZE),
        ("attn_q_norm", HEAD_DIM),
        ("attn_k_norm", HEAD_DIM),
    ):
        _add_norm(writer, f"{prefix}.{name}", size)
    num_q, num_kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    for name, num_rows, num_cols in (
        ("attn_q", num_q, HIDDEN_SIZE),
        ("attn_k", num_kv, HIDDEN_SIZE),
        ("attn_v", num_kv, HIDDEN_SIZE),
        ("attn_output", HIDDEN_SIZE, num_q),
        ("ffn_gate", INTERMEDIATE_SIZE, HIDDEN_SIZE),
        ("ffn_up", INTERMEDIATE_SIZE, HIDDEN_SIZE),
        ("ffn_down", HIDDEN_SIZE, INTERMEDIATE_SIZE),
    ):
        _add_matrix(writer, rng, f"{prefix}.{name}", num_rows, num_cols)


def _add_norm(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))


def _add_matrix(
    writer: gguf.GGUFWriter, rng: np.random.Generator, name: str, num_rows: int, num_cols: int
) -> None:
    values: npt.NDArray[np.float32] = rng.standard_normal((num_rows, num_cols), dtype=np.float32)
    values *= _STD
    data = gguf.quants.quantize(values, GGMLQuantizationType.BF16)
    writer.add_tensor(f"{name}.weight", data, raw_dtype=GGMLQuantizationType.BF16)
