"""The least time that this machine needs for a model's work, as rates: what no program can beat.

Decoding one sequence reads every matrix once a token. A prompt's tokens share these reads, and cost
multiply-adds, counted at the peak of the type that the weights allow: int8 where they are
quantised, else bfloat16 (float32 where the CPU has no bfloat16 instructions).
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

from bench.peers.install import run_logged
from bench.peers.models import Cost

_SOURCE = Path(__file__).with_name("peak.cpp")


@dataclass(frozen=True, slots=True)
class Peak:
    """Measured with as many threads as the comparison uses."""

    read_bytes_per_s: float
    int8_macs_per_s: float
    bfloat16_macs_per_s: float
    float32_macs_per_s: float

    def macs_per_s(self, is_quantized: bool) -> float:
        wide = max(self.bfloat16_macs_per_s, self.float32_macs_per_s)
        return max(self.int8_macs_per_s, wide) if is_quantized else wide


def measure_rates(work_dir: Path, threads: int) -> dict[str, float]:
    """All that peak.cpp prints. Builds it if it is not there or its source is newer."""
    program = work_dir / "peak"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        flags = ["-std=c++17", "-O3", "-march=native", "-pthread"]
        run_logged(["c++", *flags, _SOURCE, "-o", program], work_dir / "peak.log")
    result = subprocess.run(
        [program, str(threads)], capture_output=True, text=True, check=True, timeout=120
    )
    rates: dict[str, float] = json.loads(result.stdout)
    return rates


def measure_peak(work_dir: Path, threads: int) -> Peak:
    rates = measure_rates(work_dir, threads)
    return Peak(**{field.name: rates[field.name] for field in fields(Peak)})


def decode_floor(cost: Cost, peak: Peak) -> float:
    """Tokens a second of one sequence."""
    return peak.read_bytes_per_s / cost.weight_bytes


def prefill_floor(cost: Cost, peak: Peak, is_quantized: bool, num_tokens: int) -> float:
    """Prompt tokens a second; only the last token needs logits."""
    macs = num_tokens * cost.layer_macs + cost.logit_macs
    return num_tokens * peak.macs_per_s(is_quantized) / macs


def serving_floor(
    cost: Cost,
    peak: Peak,
    is_quantized: bool,
    concurrency: int,
    prompt_len: int,
    output_len: int,
) -> float:
    """Output tokens a second of `concurrency` sequences that run together from begin to end.

    A step of decoding takes as long as its reads or its multiply-adds, what is longer.
    """
    rate = peak.macs_per_s(is_quantized)
    prefill_s = concurrency * (prompt_len * cost.layer_macs + cost.logit_macs) / rate
    step_macs = concurrency * (cost.layer_macs + cost.logit_macs)
    step_s = max(cost.weight_bytes / peak.read_bytes_per_s, step_macs / rate)
    return concurrency * output_len / (prefill_s + (output_len - 1) * step_s)
