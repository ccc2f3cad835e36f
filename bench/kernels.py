"""Times each kernel and shows its rate beside what this machine can do, measured in the same run.

GB/s are 10^9 bytes a second of the weights, the K and V or the rows that a call reads and writes;
GMAC/s are 10^9 multiply-adds a second. Shares are of the peaks that bench/peers/peak.cpp measures
with as many threads: bytes of a plain read from memory, multiply-adds of the best instruction of
this CPU for the type (quantised weights: int16), whatever --instruction-set says. Of the two the
larger share is shown, which is that of what limits the call. Data that stays in a cache can be
read faster than memory. Every kernel is checked against its reference before. A time is the
median of several calls. The last line is JSON.

    python -m bench.kernels [--threads 2] [--only linear,attention] [--types Q8_0,Q4_K]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from bench import kernel_cases
from bench.kernel_cases import Case
from bench.peers.floors import measure_rates
from llmserve import env, kernels
from llmserve.kernels import GGMLType

GROUPS = ["linear", "attention", "elementwise", "sampling"]
TYPES = [type.name for type in GGMLType]
MIN_CALLS, MAX_CALLS = 3, 300
MAX_PEAK_AGE_S = 4.0

Rates = dict[str, float]


def names_of(known: list[str]) -> Callable[[str], list[str]]:
    """Parses names separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return names

    return parse


def median_seconds(function: Callable[[], object], budget_s: float) -> float:
    function()
    times: list[float] = []
    while len(times) < MIN_CALLS or (sum(times) < budget_s and len(times) < MAX_CALLS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rate_text(case: Case, seconds: float, peaks: Rates) -> str:
    """The rate of what limits the call: memory or multiplication."""
    bytes_per_s, macs_per_s = case.num_bytes / seconds, case.num_macs / seconds
    bytes_share = bytes_per_s / peaks[f"{case.pages}read_bytes_per_s"]
    macs_peak = peaks[f"{case.macs}_macs_per_s"]
    macs_share = macs_per_s / macs_peak if macs_peak > 0 else 0.0
    if macs_share > bytes_share:
        return f"{macs_per_s / 1e9:6.1f} GMAC/s {macs_share:4.0%}"
    return f"{bytes_per_s / 1e9:6.1f} GB/s   {bytes_share:4.0%}"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    dtype = getattr(torch, options.kv_cache_dtype)
    if "linear" in options.only:
        types = [GGMLType[name] for name in options.types]
        num_bytes = max(128 << 20, kernel_cases.largest_matrix_bytes(types))
        memory = kernel_cases.Memory(num_bytes, options.huge_pages)
        yield from kernel_cases.linear_cases(memory, types)
    if "attention" in options.only:
        yield from kernel_cases.attention_cases(dtype)
    if "elementwise" in options.only:
        yield from kernel_cases.elementwise_cases(dtype)
    if "sampling" in options.only:
        yield from kernel_cases.sampling_cases()


class Machine:
    """Peaks, measured anew when they are old: a shared machine changes its speed."""

    def __init__(self, threads: int) -> None:
        self.all_peaks: list[Rates] = []
        self._threads = threads
        self._measured_at = 0.0

    def peaks(self) -> Rates:
        """Prints them, below those of the start only what the shares need."""
        if not self.all_peaks or time.monotonic() - self._measured_at > MAX_PEAK_AGE_S:
            self.all_peaks.append(measure_rates(env.cache_dir() / "bench", self._threads))
            self._measured_at = time.monotonic()
            self._print()
        return self.all_peaks[-1]

    def _print(self) -> None:
        gigas = {name: f"{rate / 1e9:.1f}" for name, rate in self.all_peaks[-1].items()}
        reads = (
            f"read {gigas['read_bytes_per_s']} GB/s, "
            f"of huge pages {gigas['huge_pages_read_bytes_per_s']}"
        )
        if len(self.all_peaks) > 1:
            macs = f"int16 {gigas['int16_macs_per_s']}, float32 {gigas['float32_macs_per_s']}"
            print(f"peaks again: {reads}; {macs} GMAC/s")
            return
        names = ["int8", "int16", "bfloat16", "float32", "int16_avx2", "float32_avx2"]
        rates = ", ".join(f"{name} {gigas[name + '_macs_per_s']}" for name in names)
        print(
            f"1 thread: read {gigas['one_thread_read_bytes_per_s']} GB/s, "
            f"of huge pages {gigas['one_thread_huge_pages_read_bytes_per_s']}\n"
            f"{self._threads} threads: {reads}; {rates} GMAC/s\n"
        )


def print_cases(options: argparse.Namespace, machine: Machine) -> dict[str, float]:
    """A line per kernel and size, with a cell per number of tokens. Returns seconds by name."""
    seconds: dict[str, float] = {}
    by_line = itertools.groupby(cases(options), key=lambda case: (case.kernel, case.size))
    for (kernel, size), line in by_line:
        peaks = machine.peaks()
        print(f"{kernel:22} {size:20}", end="", flush=True)
        for case in line:
            elapsed = median_seconds(case.run, options.budget_ms / 1e3)
            seconds[f"{kernel}, {size}, {case.num_tokens}"] = elapsed
            rate = rate_text(case, elapsed, peaks)
            print(f" | {case.num_tokens:3}: {elapsed * 1e6:8.0f} us {rate}", end="", flush=True)
        print()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=kernels.get_num_threads())
    parser.add_argument("--only", type=names_of(GROUPS), default=GROUPS, help=",".join(GROUPS))
    parser.add_argument(
        "--types", type=names_of(TYPES), default=TYPES, help="storage types of weights for linear"
    )
    parser.add_argument("--instruction-set", help="default: the best of this CPU")
    parser.add_argument("--huge-pages", action="store_true", help="weights in huge pages")
    parser.add_argument(
        "--kv-cache-dtype", default="float16", choices=["float32", "float16", "bfloat16"]
    )
    parser.add_argument("--budget-ms", type=float, default=40, help="time for a figure")
    options = parser.parse_args()
    torch.manual_seed(0)
    kernels.set_num_threads(options.threads)
    if options.instruction_set:
        from llmserve import _cpu_kernels

        _cpu_kernels.set_instruction_set(options.instruction_set)
    machine = Machine(options.threads)
    seconds = print_cases(options, machine)
    print(json.dumps({"options": vars(options), "peaks": machine.all_peaks, "seconds": seconds}))


if __name__ == "__main__":
    main()
