"""Kernels: what computes, behind one interface.

`Kernels` is what layers, models and the runner use; `CPUKernels` and `CUDAKernels` are the two.
The functions here are those of the CPU, over torch tensors in its memory.
"""

from __future__ import annotations

from llmserve.kernels.backend import choose_device, make_cuda_kernels
from llmserve.kernels.cpu import CPUKernels
from llmserve.kernels.cpu_functions import (
    HAS_EXT,
    act_mul,
    add_rms_norm,
    copy_blocks,
    dequantize,
    embedding,
    get_num_threads,
    linear,
    logprob_rows,
    paged_attention,
    rms_norm,
    rotary,
    sample_rows,
    set_num_threads,
    softcap,
    stacked_linear,
    step_gather,
    write_kv,
)
from llmserve.kernels.interface import (
    Cache,
    CompiledLayers,
    Kernels,
    KVScales,
    Matrix,
    PendingLogprobs,
    SampledRows,
    SampledTokens,
    StepInputs,
)
from llmserve.kernels.layer_parameters import LayerParameters, NormParameters, RotaryParameters
from llmserve.kernels.packing import keep, kept_bytes
from llmserve.kernels.reference_sampling import (
    SAMPLED_ROW,
    SAMPLING_ROW,
    STATUS_INVALID,
    STATUS_OK,
    RowLogprobs,
)
from llmserve.kernels.reference_step import GatheredArrays
from llmserve.kernels.row_edit import RowEdit
from llmserve.kernels.weight import GGMLType, StackedWeights, Weight

__all__ = [
    "CPUKernels",
    "Cache",
    "CompiledLayers",
    "GGMLType",
    "GatheredArrays",
    "HAS_EXT",
    "KVScales",
    "Kernels",
    "LayerParameters",
    "Matrix",
    "NormParameters",
    "PendingLogprobs",
    "RotaryParameters",
    "RowEdit",
    "RowLogprobs",
    "SAMPLED_ROW",
    "SAMPLING_ROW",
    "SampledRows",
    "SampledTokens",
    "STATUS_INVALID",
    "STATUS_OK",
    "StackedWeights",
    "StepInputs",
    "Weight",
    "act_mul",
    "add_rms_norm",
    "choose_device",
    "copy_blocks",
    "dequantize",
    "embedding",
    "get_num_threads",
    "keep",
    "kept_bytes",
    "linear",
    "logprob_rows",
    "make_cuda_kernels",
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
