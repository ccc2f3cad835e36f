"""The CPU kernels that this process runs: compiled ones, or what stands in for them.

Where the extension was not built, or LLMSERVE_NO_EXT is set, the functions come from `reference`,
which computes the same in plain torch, many times slower.
"""

from __future__ import annotations

import importlib.util
import logging

from llmserve import env

_logger = logging.getLogger(__name__)


def _has_ext() -> bool:
    if env.NO_EXT:
        cause = "LLMSERVE_NO_EXT is set"
    elif importlib.util.find_spec("llmserve._cpu_kernels") is None:
        cause = "install a C++17 compiler and reinstall with LLMSERVE_REQUIRE_EXT=1 to see why"
    else:
        return True
    _logger.warning("running WITHOUT compiled kernels, many times slower: %s", cause)
    return False


HAS_EXT: bool = _has_ext()

if HAS_EXT:
    from llmserve.kernels.attention import copy_blocks, paged_attention, write_kv
    from llmserve.kernels.elementwise import act_mul, add_rms_norm, rms_norm, rotary, softcap
    from llmserve.kernels.linear import dequantize, embedding, linear, stacked_linear
    from llmserve.kernels.sampling import logprob_rows, sample_rows
    from llmserve.kernels.step_gather import step_gather
    from llmserve.kernels.threads import get_num_threads, set_num_threads
else:
    from llmserve.kernels.reference import (
        dequantize,
        embedding,
        get_num_threads,
        linear,
        set_num_threads,
        stacked_linear,
    )
    from llmserve.kernels.reference_attention import (
        act_mul,
        add_rms_norm,
        copy_blocks,
        paged_attention,
        rms_norm,
        rotary,
        softcap,
        write_kv,
    )
    from llmserve.kernels.reference_sampling import (
        logprob_rows,
        sample_rows,
    )
    from llmserve.kernels.reference_step import step_gather

__all__ = [
    "HAS_EXT",
    "act_mul",
    "add_rms_norm",
    "copy_blocks",
    "dequantize",
    "embedding",
    "get_num_threads",
    "linear",
    "logprob_rows",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample_rows",
    "set_num_threads",
    "softcap",
    "stacked_linear",
    "step_gather",
    "write_kv",
]
