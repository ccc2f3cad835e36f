"""CUDA kernels over raw pointers. Nothing is checked here; llmserve.kernels.cuda does."""

# Rows and elements.

max_head_dim: int
max_norm_size: int

def add_norm(
    x: int,
    x_type: int,
    x_token_stride: int,
    x_head_stride: int,
    residual: int,
    residual_token_stride: int,
    residual_head_stride: int,
    out: int,
    out_type: int,
    out_token_stride: int,
    out_head_stride: int,
    post_weight: int,
    post_eps: float,
    post_offset: float,
    weight: int,
    eps: float,
    offset: float,
    scale: float,
    num_tokens: int,
    num_heads: int,
    size: int,
    stream: int,
) -> None: ...
def rotate_and_write(
    type: int,
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    q_out: int,
    q_out_token_stride: int,
    q_out_head_stride: int,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    k_out: int,
    k_out_token_stride: int,
    k_out_head_stride: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    offset: float,
    positions: int,
    cos: int,
    sin: int,
    max_positions: int,
    half_dim: int,
    is_interleaved: bool,
    k_cache: int,
    k_block_stride: int,
    k_scales: int,
    v_cache: int,
    v_block_stride: int,
    v_scales: int,
    cache_type: int,
    slots: int,
    num_blocks: int,
    block_size: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    stream: int,
) -> None: ...
def act_mul(
    gate_up: int,
    type: int,
    token_stride: int,
    activation: int,
    out: int,
    out_token_stride: int,
    num_tokens: int,
    size: int,
    stream: int,
) -> None: ...
def embedding(
    ids: int,
    table: int,
    type: int,
    row_stride: int,
    num_rows: int,
    scale: float,
    out: int,
    num_tokens: int,
    size: int,
    stream: int,
) -> None: ...
def softcap(x: int, count: int, cap: float, stream: int) -> None: ...
def add_bias(
    x: int, type: int, token_stride: int, bias: int, num_tokens: int, size: int, stream: int
) -> None: ...
def gather_rows(
    x: int,
    row_stride_bytes: int,
    row_bytes: int,
    row_ids: int,
    num_rows: int,
    out: int,
    stream: int,
) -> None: ...
def copy_blocks(
    caches: int,
    num_caches: int,
    block_stride_bytes: int,
    block_bytes: int,
    pairs: int,
    num_pairs: int,
    is_vectorized: bool,
    stream: int,
) -> None: ...
def feed_tokens(
    input_ids: int, source_rows: int, last_tokens: int, num_tokens: int, stream: int
) -> None: ...

# Sampling.

max_vocab_size: int
max_top_logprobs: int
draw_stage: int
top_k_stage: int
top_p_stage: int

def sampling_workspace_bytes(num_rows: int, vocab_size: int) -> int: ...
def sample_rows(
    logits: int,
    row_stride: int,
    num_rows: int,
    vocab_size: int,
    mask_words: int,
    num_mask_words: int,
    mask_ids: int,
    params: int,
    stages: int,
    out: int,
    workspace: int,
    stream: int,
) -> None: ...
def store_tokens(
    sampled: int, target_rows: int, last_tokens: int, num_rows: int, stream: int
) -> None: ...
def logprob_workspace_bytes(num_rows: int, vocab_size: int, top_k: int) -> int: ...
def logprob_rows(
    logits: int,
    row_stride: int,
    num_logit_rows: int,
    vocab_size: int,
    row_ids: int,
    token_ids: int,
    token_rows: int,
    token_stride: int,
    num_rows: int,
    top_k: int,
    logprobs: int,
    ranks: int,
    top_ids: int,
    top_logprobs: int,
    workspace: int,
    stream: int,
) -> None: ...
def edit_logits(
    logits: int,
    row_stride: int,
    num_rows: int,
    vocab_size: int,
    mask_words: int,
    num_mask_words: int,
    edits: int,
    num_edits: int,
    ids: int,
    values: int,
    stream: int,
) -> None: ...

# Matrices in their storage types.

def linear(
    parts: int,
    num_parts: int,
    x: int,
    x_type: int,
    out: int,
    out_type: int,
    num_tokens: int,
    num_cols: int,
    stream: int,
) -> None: ...
def dequantize(
    part: int,
    row_ids: int,
    first_row: int,
    out: int,
    out_type: int,
    num_rows: int,
    num_cols: int,
    stream: int,
) -> None: ...

# Attention.

def attention_workspace_bytes(
    num_seqs: int, num_heads: int, head_dim: int, max_seq_len: int, sliding_window: int
) -> int: ...
def paged_attention(
    q: int,
    q_token_stride: int,
    q_head_stride: int,
    k_cache: int,
    v_cache: int,
    k_block_stride: int,
    v_block_stride: int,
    k_scale: int,
    v_scale: int,
    sinks: int,
    block_tables: int,
    table_stride: int,
    seq_lens: int,
    cu_seqlens_q: int,
    out: int,
    workspace: int,
    element_type: int,
    cache_type: int,
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int,
    scale: float,
    logit_softcap: float,
    stream: int,
) -> None: ...
