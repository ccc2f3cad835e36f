"""KV cache bookkeeping: which block holds which tokens. No tensors; see runner.kv_tensors."""

from llmserve.core.capacity import max_blocks_per_sequence, max_tokens_that_fit
from llmserve.kvcache.block_pool import NULL_BLOCK, BlockPool, PyBlockPool, make_block_pool
from llmserve.kvcache.manager import BlockIds, CachedPrefix, KVCacheManager
from llmserve.kvcache.prefix import BlockHash

__all__ = [
    "NULL_BLOCK",
    "BlockHash",
    "BlockIds",
    "BlockPool",
    "CachedPrefix",
    "KVCacheManager",
    "PyBlockPool",
    "make_block_pool",
    "max_blocks_per_sequence",
    "max_tokens_that_fit",
]
