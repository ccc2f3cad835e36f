#!/bin/sh
# Builds, tests and measures the CUDA backend on the GPU of this machine, in under 8 minutes and
# without a network: needs Python with torch for CUDA, transformers, pybind11, setuptools and pytest,
# and nvcc. The last line is JSON. Exit status 1: a phase failed. Missed targets are no failure.
#
#     bench/gpu_check.sh            all of it; without a GPU the build and the emulated tests
#     bench/gpu_check.sh --quick    nothing is built, a few tests are run
#     bench/gpu_check.sh --tiny     without a GPU: the code of the figures too, over emulated kernels
#
# --out FOLDER, by default build/gpu_check, gets the figures of each table.
# PYTHON names another python3.
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
if ! command -v "$python" > /dev/null; then
    echo '{"failed": ["there is no python3"]}'
    exit 1
fi
exec "$python" -m bench.gpu.check "$@"
