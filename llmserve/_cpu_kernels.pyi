"""CPU kernels, mostly over raw pointers; llmserve.kernels checks what it passes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def get_num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
def available_instruction_sets() -> list[str]: ...
def set_instruction_set(name: str) -> None: ...
def linear(x: int, parts: int, num_parts: int, out: int, num_tokens: int) -> None: ...
def embedding(
    token_ids: int,
    weight: int,
    type: int,
    scale: float,
    out: int,
    num_tokens: int,
    num_rows: int,
    num_cols: int,
) -> None: ...
def dequantize(weight: int, type: int, out: int, num_rows: int, num_cols: int) -> None: ...
def packed_bytes(type: int, num_rows: int, num_cols: int) -> int: ...
def pack(weight: int, type: int, out: int, num_rows: int, num_cols: int) -> None: ...
def sample_rows(
    logits: int,
    row_stride: int,
    num_rows: int,
    vocab_size: int,
    params: npt.NDArray[np.void],
    masks: int,
    out: npt.NDArray[np.void],
) -> None: ...
def logprob_rows(
    logits: int,
    row_stride: int,
    num_rows: int,
    vocab_size: int,
    row_ids: int,
    token_ids: int,
    top_k: int,
    logprobs: int,
    ranks: int,
    top_ids: int,
    top_logprobs: int,
) -> None: ...
def philox4x32(counter: list[int], key: list[int]) -> list[int]: ...
def paged_attention(
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    k_cache: int,
    k_block_stride: int,
    v_cache: int,
    v_block_stride: int,
    cache_type: int,
    num_blocks: int,
    block_size: int,
    block_tables: int,
    table_stride: int,
    max_blocks: int,
    seq_lens: int,
    cu_seqlens_q: int,
    out: int,
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    sliding_window: int,
    logit_softcap: float,
) -> None: ...
def write_kv(
    k: int,
    v: int,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    k_cache: int,
    k_block_stride: int,
    v_cache: int,
    v_block_stride: int,
    cache_type: int,
    num_blocks: int,
    block_size: int,
    slot_mapping: int,
    is_slot_int64: bool,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
) -> None: ...
def copy_blocks(
    cache: int,
    block_stride_bytes: int,
    block_bytes: int,
    num_blocks: int,
    block_copies: list[tuple[int, int]],
) -> None: ...
def rms_norm(
    x: int,
    x_token_stride: int,
    x_head_stride: int,
    residual: int,
    residual_token_stride: int,
    residual_head_stride: int,
    out: int,
    out_token_stride: int,
    out_head_stride: int,
    weight: int,
    num_tokens: int,
    num_heads: int,
    size: int,
    eps: float,
    weight_offset: float,
) -> None: ...
def rotary(
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    num_q_heads: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    num_k_heads: int,
    positions: int,
    is_position_int64: bool,
    cos: int,
    sin: int,
    max_positions: int,
    half_dim: int,
    num_tokens: int,
    is_interleaved: bool,
) -> None: ...
def act_mul(
    gate_up: int, token_stride: int, activation: int, out: int, num_tokens: int, size: int
) -> None: ...
def softcap(x: int, count: int, cap: float) -> None: ...

class DecoderLayers:
    def add(
        self,
        *,
        qkv: int,
        num_qkv: int,
        output: int,
        gate_up: int,
        num_gate_up: int,
        down: int,
        q_norm: int,
        k_norm: int,
        is_qk_norm_per_head: bool,
        cos: int,
        sin: int,
        max_positions: int,
        half_dim: int,
        is_interleaved: bool,
        post_attention_norm: int,
        pre_mlp_norm: int,
        post_mlp_norm: int,
        next_norm: int,
        norm_eps: float,
        norm_weight_offset: float,
        residual_scale: float,
        activation: int,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        attention_scale: float,
        sliding_window: int,
        logit_softcap: float,
    ) -> None: ...
    def run(
        self,
        groups: int,
        caches: int,
        cache_type: int,
        num_blocks: int,
        block_size: int,
        num_tokens: int,
        num_seqs: int,
        qkv: int,
        intermediate: int,
        attention_out: int,
        gate_up: int,
        mlp_out: int,
        x: int,
        residual: int,
    ) -> bool: ...

class StepGather:
    def __init__(
        self,
        *,
        arrays: object,
        row_token_ids: int,
        row_tables: int,
        num_rows: int,
        max_tokens: int,
        num_groups: int,
        max_blocks: int,
        block_size: int,
        token_ids: int,
        positions: int,
        slot_mapping: int,
        tables: int,
        table_width: int,
        seq_lens: int,
        cu_seqlens_q: int,
        num_tokens: int,
        num_seqs: int,
    ) -> None: ...
    def run(
        self, row_ids: Sequence[int], num_computed: Sequence[int], num_scheduled: Sequence[int]
    ) -> None: ...
