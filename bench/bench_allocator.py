"""Allocate + free pairs per second: the pool in C++ alone, and both pools called from Python.

Compiles bench_allocator.cpp with the flags of setup.py. The last line is JSON.

    python bench/bench_allocator.py
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from llmserve.kvcache import PyBlockPool, make_block_pool
from llmserve.kvcache.block_pool import BlockPool

BENCH = Path(__file__).parent
BATCH = 16


def run_cpp() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "bench_allocator")
        include = str(BENCH.parent / "ext" / "include")
        command = [os.environ.get("CXX", "c++"), "-O3", "-std=c++17", "-Wall", "-Wextra"]
        command += ["-I", include, str(BENCH / "bench_allocator.cpp"), "-o", program]
        subprocess.run(command, check=True)
        done = subprocess.run([program], check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def pairs_per_second(pool: BlockPool, num_pairs: int = 1 << 20) -> float:
    begin = time.perf_counter()
    for _ in range(num_pairs // BATCH):
        pool.free(pool.allocate(BATCH))
    return num_pairs / (time.perf_counter() - begin)


def main() -> None:
    results = run_cpp()
    results["from_python_pairs_per_s"] = pairs_per_second(make_block_pool(16384))
    results["python_twin_pairs_per_s"] = pairs_per_second(PyBlockPool(16384))
    for name, value in results.items():
        print(f"{name:<26} {value / 1e6:8.1f} million")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
