"""The CPU's kernels behind the interface."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from llmserve.kernels import cpu_functions
from llmserve.kernels.huge_pages import HugePages
from llmserve.kernels.interface import Cache, CompiledLayers, StepInputs
from llmserve.kernels.layer_parameters import LayerParameters, RotaryParameters
from llmserve.kernels.weight import StackedWeights, Weight

if cpu_functions.HAS_EXT:
    from llmserve.kernels.decoder_layers import DecoderLayers


class CPUKernels:
    """Activations are float32; weights stay where they are, in the form that the file has."""

    device = torch.device("cpu")
    act_dtype = torch.float32

    stacked_linear = staticmethod(cpu_functions.stacked_linear)
    embedding = staticmethod(cpu_functions.embedding)
    rms_norm = staticmethod(cpu_functions.rms_norm)
    add_rms_norm = staticmethod(cpu_functions.add_rms_norm)
    act_mul = staticmethod(cpu_functions.act_mul)
    softcap = staticmethod(cpu_functions.softcap)
    copy_blocks = staticmethod(cpu_functions.copy_blocks)
    sample_rows = staticmethod(cpu_functions.sample_rows)
    logprob_rows = staticmethod(cpu_functions.logprob_rows)

    def upload(self, weight: Weight) -> Weight:
        return weight

    def upload_vector(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def prepare_weights(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]
    ) -> StackedWeights:
        return StackedWeights(weights, biases)

    def compile_layers(self, layers: Iterable[LayerParameters]) -> CompiledLayers | None:
        return DecoderLayers(layers) if cpu_functions.HAS_EXT else None

    def allocate_caches(
        self, num_caches: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """In huge pages. Memory is taken from the system when a block is first written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = HugePages(num_caches * HugePages.size_of(num_bytes))
        return [memory.take(num_bytes).view(dtype).view(shape) for _ in range(num_caches)]

    def as_activations(self, residual: torch.Tensor) -> torch.Tensor:
        return residual

    def rotate_and_write_kv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryParameters | None,
        cache: Cache,
        inputs: StepInputs,
    ) -> None:
        if rotary is not None:
            cpu_functions.rotary(
                q,
                k,
                inputs.positions,
                rotary.cos,
                rotary.sin,
                is_interleaved=rotary.is_interleaved,
            )
        cpu_functions.write_kv(k, v, cache.k, cache.v, inputs.slot_mapping)

    def paged_attention(
        self,
        q: torch.Tensor,
        cache: Cache,
        inputs: StepInputs,
        *,
        scale: float,
        sliding_window: int | None,
        logit_softcap: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return cpu_functions.paged_attention(
            q,
            cache.k,
            cache.v,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.cu_seqlens_q,
            scale=scale,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            out=out,
        )
