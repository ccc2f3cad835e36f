"""From opened weights to a CUDA runner: weights to the device, the largest steps measured, and the
KV cache from what they leave.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from llmserve.config import ServerConfig
from llmserve.core import KVCacheSpec
from llmserve.errors import StartupError
from llmserve.kernels.cuda.kernels import CUDAKernels
from llmserve.models import DecoderConfig, Weights, build_decoder, load_kv_scales
from llmserve.runner.cuda_graphs import CUDARecorder, Recorder
from llmserve.runner.cuda_runner import CUDARunner
from llmserve.runner.memory import MemoryPlan, estimate_activations, plan_memory

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_LOAD_BYTES = 16
_MEASURED_BLOCKS = 2  # of the cache of the runner whose steps are measured


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...

    @property
    def allocated(self) -> int:
        """By this process, for tensors."""
        ...

    def peak(self, work: Callable[[], None]) -> int:
        """The most that was allocated at any time while `work` ran."""
        ...


class GPUMemory:
    """The memory of the current GPU."""

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    @property
    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated())

    def peak(self, work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated())
        torch.cuda.empty_cache()
        return peak


def load_cuda_runner(
    model: DecoderConfig,
    weights: Weights,
    config: ServerConfig,
    kernels: CUDAKernels,
    memory: DeviceMemory,
    recorder: Recorder | None,
) -> tuple[CUDARunner, MemoryPlan]:
    """recorder: None runs every step kernel by kernel. StartupError for what does not fit."""
    kv_dtype = _kv_dtype(config, kernels)
    _check_head_dim(model.head_dim, config.cache.kv_cache_dtype, kernels)
    weights.leave_packed()
    share = config.cache.gpu_memory_utilization
    available = min(int(share * memory.total), memory.free)
    before = memory.allocated

    def plan_with(
        weight_bytes: int, activation_bytes: int, max_model_len: int | None
    ) -> MemoryPlan:
        return plan_memory(
            model,
            weight_bytes,
            kv_dtype,
            max_model_len,
            config.cache,
            config.scheduler,
            available,
            activation_bytes,
        )

    # Before weights are read: whether it can fit, and how long a context.
    estimate = estimate_activations(
        model, config.scheduler.token_budget, config.scheduler.max_num_seqs
    )
    first = plan_with(weights.num_bytes, estimate, config.model.max_model_len)

    def make_runner(spec: KVCacheSpec, num_blocks: int) -> CUDARunner:
        return CUDARunner(
            decoder,
            spec,
            num_blocks,
            kernels,
            recorder,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_tokens=config.scheduler.token_budget,
            max_model_len=first.max_model_len,
            kv_scales=kv_scales,
        )

    def measure() -> None:
        make_runner(first.kv_spec, _MEASURED_BLOCKS).run_largest_steps()

    kv_scales = None
    if first.kv_spec.dtype == "fp8":
        kv_scales = load_kv_scales(model, weights, kernels)
        num_scaled = sum(scales is not None for scales in kv_scales)
        logger.info(
            "K and V are stored with scales of the checkpoint in %d of %d layers",
            num_scaled,
            model.num_layers,
        )
    try:
        decoder = build_decoder(model, weights, first.max_model_len, kernels)
        weight_bytes = memory.allocated - before
        peak = memory.peak(measure)
        plan = plan_with(weight_bytes, peak - before - weight_bytes, first.max_model_len)
        return make_runner(plan.kv_spec, plan.num_blocks), plan
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"the GPU has no memory for the weights and a step of {config.scheduler.token_budget} "
            f"tokens: {memory.free / _MIB:.0f} MiB were free; lower --max-num-batched-tokens, "
            "--max-num-seqs or --gpu-memory-utilization"
        ) from error


def make_recorder(*, enforce_eager: bool) -> Recorder | None:
    return None if enforce_eager else CUDARecorder()


def _check_head_dim(head_dim: int, kv_cache_dtype: str, kernels: CUDAKernels) -> None:
    item_bytes = 1 if kv_cache_dtype == "fp8" else kernels.act_dtype.itemsize
    if head_dim * item_bytes % _LOAD_BYTES:
        raise StartupError(
            f"the model's heads have {head_dim} dimensions; with {item_bytes} bytes each they do "
            f"not divide into the {_LOAD_BYTES} bytes that a GPU loads; --device cpu serves them"
        )


def _kv_dtype(config: ServerConfig, kernels: CUDAKernels) -> str:
    """The type for --kv-cache-dtype auto: that of the activations, which kernels multiply with."""
    act_dtype = str(kernels.act_dtype).removeprefix("torch.")
    if config.cache.kv_cache_dtype not in ("auto", "fp8", act_dtype):
        raise StartupError(
            f"--kv-cache-dtype is {config.cache.kv_cache_dtype}; with activations in {act_dtype} "
            f"it must be auto, {act_dtype} or fp8 on a GPU (--dtype sets both)"
        )
    return act_dtype
