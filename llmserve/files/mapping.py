"""Read-only mappings of whole files, shared by the readers of model files."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from pathlib import Path

from llmserve.errors import StartupError

_MAX_SHOWN = 80  # characters of a file's own strings that an error message repeats


def map_file(path: Path) -> mmap.mmap:
    """Maps a regular file for reading; the mapping outlives the open file.

    Pages are read on first touch. A file that another process shortens later ends this one with
    SIGBUS, as with every mapping. Raises StartupError if there is nothing to map.
    """
    try:
        # Non-blocking: opening a named pipe must fail, not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be opened: {reason(error)}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise StartupError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise StartupError(f"{path} is empty")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StartupError(f"{path} cannot be mapped: {reason(error)}") from error
    finally:
        os.close(descriptor)


def drop_pages(address: int, num_bytes: int) -> None:
    """Lets go of the whole pages of a range of a mapped file, which are read anew when touched.

    For mapped files only: other memory would lose its content.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def reason(error: Exception) -> str:
    """The cause of a failed system call, without number and path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def quoted(text: str) -> str:
    """A string from a file as it may appear in a message: printable and short."""
    shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return ascii(shown)
