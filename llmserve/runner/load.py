"""From opened model files to a runner that is ready for its first step."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from llmserve.config import ServerConfig
from llmserve.core import KVCacheSpec
from llmserve.errors import StartupError
from llmserve.files.model import ModelFiles
from llmserve.kernels import (
    HAS_EXT,
    CPUKernels,
    choose_device,
    make_cuda_kernels,
    set_num_threads,
)
from llmserve.kernels.huge_pages import has_huge_pages
from llmserve.models import DecoderConfig, Weights, build_decoder, read_model
from llmserve.runner.cuda_load import GPUMemory, load_cuda_runner, make_recorder
from llmserve.runner.cuda_runner import CUDARunner
from llmserve.runner.memory import MemoryBudget, MemoryPlan, available_memory, plan_memory
from llmserve.runner.runner import ModelRunner

logger = logging.getLogger(__name__)

# Weights that would take more of the free memory stay in the mapped file, which the system can read
# again when it needs the memory.
_MAX_COPIED_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner and what the layers above need to know of it. `num_blocks` counts the null block."""

    runner: ModelRunner | CUDARunner
    kv_spec: KVCacheSpec
    num_blocks: int
    max_model_len: int
    vocab_size: int
    budget: MemoryBudget


def for_device(config: ServerConfig) -> ServerConfig:
    """The settings with a device that is there, and with its defaults.

    Raises StartupError for what the device has not, and warns of what has no effect on it.
    """
    device = choose_device(config.runner.device)
    if device == "cpu" and config.cache.kv_cache_dtype == "fp8":
        raise StartupError(
            "--kv-cache-dtype fp8 needs --device cuda; float16 is the smallest type on the CPU"
        )
    if device == "cpu" and config.runner.enforce_eager:
        logger.warning("--enforce-eager has no effect on the CPU, which has no CUDA graphs")
    return dataclasses.replace(
        config,
        runner=dataclasses.replace(config.runner, device=device),
        scheduler=config.scheduler.for_cuda() if device == "cuda" else config.scheduler,
    )


def load_runner(files: ModelFiles, config: ServerConfig) -> LoadedRunner:
    """Reads the model, divides the memory and takes what the KV cache needs.

    config: as for_device gives it; else auto is the CPU. Raises StartupError for a model that
    cannot be served or does not fit.
    """
    _set_threads(config.runner.threads)
    model, weights = read_model(
        files,
        dtype=config.model.dtype,
        load_format=config.model.load_format,
        seed=config.model.seed or 0,
        device="cuda" if config.runner.device == "cuda" else "cpu",
    )
    runner: ModelRunner | CUDARunner
    if config.runner.device == "cuda":
        kernels = make_cuda_kernels(getattr(torch, weights.act_dtype))
        recorder = make_recorder(enforce_eager=config.runner.enforce_eager)
        runner, plan = load_cuda_runner(model, weights, config, kernels, GPUMemory(), recorder)
    else:
        runner, plan = _load_cpu_runner(model, weights, config)
    return LoadedRunner(
        runner,
        plan.kv_spec,
        plan.num_blocks,
        plan.max_model_len,
        model.vocab_size,
        plan.budget,
    )


def _load_cpu_runner(
    model: DecoderConfig, weights: Weights, config: ServerConfig
) -> tuple[ModelRunner, MemoryPlan]:
    available = available_memory()
    plan = plan_memory(
        model,
        weights.num_bytes,
        weights.kv_dtype,
        config.model.max_model_len,
        config.cache,
        config.scheduler,
        available,
    )
    if weights.num_bytes <= _MAX_COPIED_SHARE * available and has_huge_pages():
        weights.keep_in_memory()
    kernels = CPUKernels()
    decoder = build_decoder(model, weights, plan.max_model_len, kernels)
    runner = ModelRunner(
        decoder,
        plan.kv_spec,
        plan.num_blocks,
        kernels,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=plan.max_model_len,
    )
    return runner, plan


def _set_threads(num_threads: int | None) -> None:
    if HAS_EXT:
        # What is left to torch is small and element-wise: a second set of threads would only
        # contend with the kernels' own.
        torch.set_num_threads(1)
    set_num_threads(num_threads or _num_physical_cores())


def _num_physical_cores() -> int:
    """Cores that this process may use; two hardware threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))
