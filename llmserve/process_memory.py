"""Keeps the memory that the process holds close to what it uses, and garbage collection out of the
way.

By default glibc raises the size from which on a block is mapped (and unmapped) by itself up to
32 MiB, so the tensors of steps of ever different lengths leave a heap full of holes: 70 MiB for the
demo model. Where the C library is not glibc the heap is left alone.
"""

from __future__ import annotations

import ctypes
import gc
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h
# Lower costs page faults: with 256 KiB a step of 512 tokens takes a fifth longer.
_MAPPED_BYTES = 1 << 20


def map_large_blocks() -> None:
    """Blocks of a megabyte and more go back to the system when they are freed. Call once."""
    mallopt = _libc_function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def begin_loading() -> None:
    """No garbage collection until settle(): modules and vocabularies are there to stay, and passes
    over ever more of them are a tenth of the time that a start takes."""
    gc.disable()


def keep_modules() -> None:
    """Spares the pass of settle() what has been imported: it would find next to nothing among the
    objects of torch, in 0.15 s."""
    gc.freeze()


def settle() -> None:
    """For after loading: returns free memory to the system, and exempts what lives by now from
    garbage collection, whose full passes over it would stop the event loop for 50 ms and more."""
    gc.collect()
    gc.freeze()
    gc.enable()
    malloc_trim = _libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _libc_function(name: str) -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)
