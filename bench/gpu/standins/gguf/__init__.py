"""In place of the gguf package on machines that lack it, for bench/gpu_check.sh alone: the values
of quantised matrices as the CPU's kernels read them, which other tests compare with the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmserve.core.ggml import GGMLType as GGMLQuantizationType


def dequantize(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """float32 [num_rows, num_cols] of rows of blocks, uint8 [num_rows, row_bytes]."""
    import torch

    from llmserve.kernels.linear import dequantize as by_kernel
    from llmserve.kernels.weight import Weight

    kind = GGMLQuantizationType(kind)
    num_rows, row_bytes = data.shape
    num_cols = row_bytes // kind.block_bytes * kind.block_len
    raw = torch.from_numpy(np.array(data))
    values: npt.NDArray[np.float32] = by_kernel(Weight(raw, kind, num_rows, num_cols)).numpy()
    return values
