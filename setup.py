"""Builds the C++ extensions; metadata and dependencies are in pyproject.toml.

A machine without a compiler gets the package all the same, and runs its kernels in torch. With
LLMSERVE_REQUIRE_EXT=1 a failed build fails the installation.

The CUDA module is built where nvcc is found: machine code for the architectures that
LLMSERVE_CUDA_ARCHS lists ("80,89,90" unless set; each takes its share of the compile time), and PTX
of the last one for newer GPUs. Its objects and the reports of ptxas stay in build/nvcc.

With LLMSERVE_SANITIZE=1, `python setup.py build_ext` builds the C++ modules with the address and
undefined-behaviour sanitizers, every finding fatal, into build/sanitized and nowhere else. They
load into a process that has libasan preloaded; tests/kernels/test_sanitizers.py runs one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

EXT = Path("ext")
sys.path.insert(0, str(EXT))  # not there in an isolated build
import nvcc  # noqa: E402
import objects  # noqa: E402

INCLUDE = EXT / "include"
# Equal rounding on all machines: the compiler may not fuse a * b + c by itself. -Wno-psabi: vectors
# are passed to inlined functions only, where no calling convention applies.
CXX_FLAGS = ["-O3", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
REQUIRE_EXT = os.environ.get("LLMSERVE_REQUIRE_EXT", "") not in ("", "0")
SANITIZE = os.environ.get("LLMSERVE_SANITIZE", "") not in ("", "0")
SANITIZED = Path("build") / "sanitized"
CUDA_ARCHS = os.environ.get("LLMSERVE_CUDA_ARCHS", "80,89,90").split(",")
if SANITIZE:
    # -O1 and line tables only, as the compiler takes long over the checks. Python asks for -fwrapv,
    # which would make overflows no finding.
    CXX_FLAGS += ["-O1", "-g1", "-fno-omit-frame-pointer", "-fno-wrapv", *SANITIZERS]
    CXX_FLAGS += ["-D_GLIBCXX_ASSERTIONS"]


class CudaExtension(Extension):
    """A module that nvcc compiles and links, C++ bindings included."""


def headers() -> list[str]:
    """Those of the CPU's modules."""
    return sorted(str(path) for path in EXT.rglob("*.h") if path.parent.name != "cuda")


def is_stale(object_file: str, source: str) -> bool:
    """Whether an object file is older than its source, any header or this file."""
    if not os.path.exists(object_file):
        return True
    inputs = [source, "setup.py", *headers()]
    return os.path.getmtime(object_file) < max(os.path.getmtime(path) for path in inputs)


def sources_of(name: str) -> list[str]:
    """Sorted, those that take long first: then no compiler is left with one of them at the end."""
    paths = sorted((EXT / name).glob("*.cpp"))
    return [str(path) for path in sorted(paths, key=lambda path: "linear_" not in path.name)]


def extensions() -> list[Extension]:
    """One module per folder of ext/ that has sources; CUDA folders only where nvcc is found."""
    modules: list[Extension] = []
    for name in ("block_allocator", "cpu_kernels"):
        if sources := sources_of(name):
            module = Pybind11Extension(
                f"llmserve._{name}",
                sources,
                include_dirs=[str(INCLUDE)],
                extra_compile_args=CXX_FLAGS,
                extra_link_args=["-pthread", *(SANITIZERS if SANITIZE else [])],
                depends=["setup.py", *headers()],
                cxx_std=17,
            )
            module.optional = not REQUIRE_EXT
            modules.append(module)
    folder = EXT / "cuda_kernels"
    cuda = sorted(str(path) for path in [*folder.glob("*.cpp"), *folder.glob("*.cu")])
    if cuda and nvcc.find_nvcc() and not SANITIZE:
        modules.append(CudaExtension("llmserve._cuda_kernels", cuda, optional=not REQUIRE_EXT))
    return modules


def leave_bindings_plain(compile_source: Callable[..., None]) -> Callable[..., None]:
    """Compiles pybind11's code without sanitizers, which would treble its time: bindings_*.cpp and
    module.cpp."""

    def compile_plainly(
        obj: str, source: str, ext: str, cc: list, flags: list, *rest: list
    ) -> None:
        if Path(source).name.startswith(("bindings_", "module.")):
            flags = [flag for flag in flags if flag not in SANITIZERS]
        compile_source(obj, source, ext, cc, flags, *rest)

    return compile_plainly


class BuildExt(build_ext):
    """build_ext that knows CUDA and says loudly what is missing when a build fails."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if SANITIZE:
            self.inplace = False
            self.build_lib = str(SANITIZED)
            self.build_temp = str(SANITIZED / "objects")

    def build_extensions(self) -> None:
        if SANITIZE:
            self.compiler._compile = leave_bindings_plain(self.compiler._compile)
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        try:
            if isinstance(ext, CudaExtension):
                self._build_with_nvcc(ext)
            else:
                super().build_extension(ext)
        except Exception as error:
            without = "llmserve runs without it, many times slower, on kernels written in torch."
            remedy = "Install a C++17 compiler and the Python headers"
            if isinstance(ext, CudaExtension):
                without = "llmserve runs on the CPU without it, but not on a GPU."
                remedy = "Install an nvcc that knows your C++ compiler"
            print(
                f"\n{'*' * 78}\n"
                f"{ext.name} could not be built: {error}\n"
                f"{without}\n"
                f"{remedy} and install llmserve again;\n"
                "LLMSERVE_REQUIRE_EXT=1 turns this warning into an error.\n"
                f"{'*' * 78}\n",
                flush=True,
            )
            raise

    def _build_with_nvcc(self, ext: CudaExtension) -> None:
        import pybind11

        includes = [str(INCLUDE), pybind11.get_include(), *self.include_dirs]
        command = nvcc.compile_command(CUDA_ARCHS, includes)
        sources = [Path(source) for source in ext.sources]
        print(f"building {ext.name} for sm_{', sm_'.join(CUDA_ARCHS)}", flush=True)
        try:
            with objects.locked(nvcc.OBJECTS):
                built = objects.compile_objects(sources, nvcc.OBJECTS, lambda source: command)
                target = Path(self.get_ext_fullpath(ext.name))
                objects.link(target, [command[0], "-shared", "-Xcompiler", "-pthread"], built)
        except (OSError, objects.BuildError) as error:
            raise CompileError(str(error)) from error


# A machine with this many processors has the memory for as many compilers.
JOBS = max(2, min(8, os.cpu_count() or 2))
ParallelCompile(default=JOBS, needs_recompile=is_stale).install()
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExt})
