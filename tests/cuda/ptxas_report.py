"""What ptxas says of each kernel, and how many blocks of it fit on a multiprocessor.

`python -m tests.cuda.ptxas_report` writes the table of docs/cuda.md anew. The reports come from the
module's build (build/nvcc) where its objects are up to date; other sources are compiled again.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.cuda_emulator.build import ROOT, load, objects

nvcc = load("nvcc", ROOT / "ext" / "nvcc.py")

DOCUMENT = ROOT / "docs" / "cuda.md"
BEGIN, END = "<!-- table of kernels -->\n", "<!-- end of table -->\n"
TABLE_ARCH = "sm_90"
ANONYMOUS = "(anonymous namespace)::"

# Threads and dynamic shared memory (bytes) of a block, in the launch that matters most. Where
# instances differ much, those that matter have rows of their own.
LAUNCHES: dict[str, tuple[int, int]] = {
    "act_mul_kernel": (256, 0),
    "add_bias_kernel": (256, 0),
    "add_norm_kernel": (512, 0),
    "attention_decode<__nv_bfloat16, __nv_bfloat16, 64>": (128, 55296),
    "attention_decode<__nv_bfloat16, __nv_bfloat16, 128>": (128, 69632),
    "attention_decode<__nv_bfloat16, __nv_bfloat16, 256>": (64, 67584),
    "attention_decode<__half, __nv_fp8_e4m3, 128>": (128, 55296),
    "attention_decode_fma": (128, 38944),  # float32, head_dim 128
    "attention_prefill<__nv_bfloat16, __nv_bfloat16, 64>": (128, 55296),
    "attention_prefill<__nv_bfloat16, __nv_bfloat16, 128>": (128, 69632),
    "attention_prefill<__nv_bfloat16, __nv_bfloat16, 256>": (128, 101376),
    "attention_prefill<__half, __nv_fp8_e4m3, 128>": (128, 53248),
    "attention_prefill_fma": (128, 38944),
    "attention_reduce": (128, 0),
    "best_kernel": (256, 0),
    "copy_blocks_kernel": (256, 0),
    "decode_rows": (128, 0),
    "draw_kernel": (256, 0),
    "edit_kernel": (512, 0),
    "embedding_kernel": (256, 0),
    "feed_tokens_kernel": (256, 0),
    "gather_rows_kernel": (256, 0),
    "linear_float_row": (128, 0),
    "linear_float_tile": (256, 0),
    "linear_row": (128, 0),
    "linear_tile": (256, 0),
    "logprob_kernel": (256, 0),
    "maxima_kernel": (256, 0),
    "rotate_and_write_kernel": (128, 0),
    "search_kernel": (256, 0),
    "softcap_kernel": (256, 0),
    "store_tokens_kernel": (256, 0),
}


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, compute capabilities)."""

    max_warps: int
    max_blocks: int
    shared_bytes: int
    registers: int = 65536
    parts: int = 4  # each has its share of the registers

    def blocks(self, kernel: Kernel, threads: int, dynamic_bytes: int) -> int:
        """Blocks that are resident at a time."""
        warps = -(-threads // 32)
        warp_registers = _round_up(kernel.registers * 32, 256)
        by_registers = self.registers // self.parts // warp_registers * self.parts // warps
        system_bytes = 1024
        shared = _round_up(kernel.shared_bytes + dynamic_bytes + system_bytes, 128)
        by_shared = self.shared_bytes // shared
        return min(self.max_warps // warps, self.max_blocks, by_registers, by_shared)


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(max_warps=64, max_blocks=32, shared_bytes=164 * 1024),
    "sm_89": Multiprocessor(max_warps=48, max_blocks=24, shared_bytes=100 * 1024),
    "sm_90": Multiprocessor(max_warps=64, max_blocks=32, shared_bytes=228 * 1024),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one instance of a template, for one architecture."""

    name: str  # with template arguments, without scopes
    arch: str
    registers: int
    shared_bytes: int  # static
    stack_bytes: int
    spilled_bytes: int

    @property
    def family(self) -> str:
        return self.name.partition("<")[0]


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>sm_\w+)'\n.*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n.*Used (?P<registers>\d+) registers(?P<rest>.*)"
)


def parse(log: str) -> list[Kernel]:
    """The kernels of a log of `nvcc -Xptxas -v`."""
    entries = list(_ENTRY.finditer(log))
    names = _demangle([entry["name"] for entry in entries])
    kernels = []
    for entry, name in zip(entries, names, strict=True):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        kernels.append(
            Kernel(
                name=name,
                arch=entry["arch"],
                registers=int(entry["registers"]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=int(entry["stack"]),
                spilled_bytes=int(entry["stores"]) + int(entry["loads"]),
            )
        )
    return kernels


@cache
def logs() -> str:
    """What nvcc wrote about all kernels, compiled as they are now."""
    sources = sorted(nvcc.KERNELS.glob("*.cu"))
    built = {source: objects.object_path(nvcc.OBJECTS, source) for source in sources}
    stale = [source for source, target in built.items() if not _is_usable(target)]
    folder = ROOT / "build" / "ptxas"
    command = nvcc.compile_command([TABLE_ARCH.removeprefix("sm_")], [str(ROOT / "ext/include")])
    with objects.locked(folder):
        again = objects.compile_objects(stale, folder, lambda source: command)
    built.update(zip(stale, again, strict=True))
    return "".join(objects.log_of(target).read_text() for target in built.values())


def version() -> str:
    """The release of nvcc, on which the numbers depend."""
    done = subprocess.run([nvcc.find_nvcc() or "nvcc", "--version"], capture_output=True, text=True)
    found = re.search(r"V([\d.]+)", done.stdout)
    return found[1] if found else "unknown"


def table(kernels: Iterable[Kernel]) -> str:
    """The table of docs/cuda.md: a row per launch, with the largest needs among its instances."""
    rows: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        launch = kernel.name if kernel.name in LAUNCHES else kernel.family
        if kernel.arch == TABLE_ARCH and launch in LAUNCHES:
            rows.setdefault(launch, []).append(kernel)
    lines = [
        f"nvcc {version()}, {TABLE_ARCH}:",
        "",
        "| kernel | instances | threads | registers | shared memory, static + dynamic "
        "| blocks per multiprocessor | occupancy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for launch, instances in sorted(rows.items()):
        threads, dynamic = LAUNCHES[launch]
        registers = max(kernel.registers for kernel in instances)
        shared = max(kernel.shared_bytes for kernel in instances)
        machine = MULTIPROCESSORS[TABLE_ARCH]
        blocks = min(machine.blocks(kernel, threads, dynamic) for kernel in instances)
        occupancy = 100 * blocks * -(-threads // 32) // machine.max_warps
        name = launch.replace("__nv_", "")
        lines.append(
            f"| `{name}` | {len(instances)} | {threads} | {registers} | {shared} + {dynamic} "
            f"| {blocks} | {occupancy} % |"
        )
    return "\n".join(lines) + "\n"


def document_table() -> str:
    """The table as docs/cuda.md has it."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def _is_usable(target: Path) -> bool:
    return not objects.is_outdated(target) and TABLE_ARCH in objects.log_of(target).read_text()


def _demangle(names: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return [_short(name) for name in done.stdout.splitlines()]


def _short(name: str) -> str:
    """ "void a::f<b::C>(int)" -> "f<C>" """
    name = name.removeprefix("void ").replace(ANONYMOUS, "")
    depth = 0
    for i, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            name = name[:i]
            break
    return re.sub(r"\w+::", "", name)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(before + BEGIN + table(parse(logs())) + END + after)
