"""Strings of a mapped file that are decoded when they are asked for.

A vocabulary of 262,144 tokens takes 17 MiB as a list of str and 2 MiB as offsets.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class StringArray(Sequence[str]):
    """UTF-8 strings that lie one after the other, each behind a prefix of `prefix_bytes`."""

    def __init__(self, data: mmap.mmap, starts: npt.NDArray[np.int64], prefix_bytes: int) -> None:
        """starts: [num_strings + 1]; the last is where one more string would start."""
        self._data = data
        self._starts = starts
        self._prefix_bytes = prefix_bytes

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        index %= len(self)
        begin, end = self._starts[index : index + 2].tolist()
        return str(self._data[begin : end - self._prefix_bytes], "utf-8")

    def __iter__(self) -> Iterator[str]:
        data, prefix_bytes = self._data, self._prefix_bytes
        begin, *ends = self._starts.tolist()
        for end in ends:
            yield str(data[begin : end - prefix_bytes], "utf-8")
            begin = end

    def spans(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The bytes of the file from the first string on (a view), where in them each string
        begins, and its length: [num_bytes], [num_strings], [num_strings]."""
        first, last = int(self._starts[0]), int(self._starts[-1])
        # Of no strings nothing is left, not even a place in the file.
        num_bytes = max(last - self._prefix_bytes - first, 0)
        text = np.frombuffer(self._data, np.uint8, num_bytes, first if num_bytes else 0)
        begins = self._starts - first
        return text, begins[:-1], np.diff(begins) - self._prefix_bytes

    def first_damaged(self) -> int | None:
        """The index of the first string that is not UTF-8; None if all are."""
        text, begins, lengths = self.spans()
        # One look at all strings is enough, for what lies between two of them is ASCII too: the
        # prefix of a string of fewer than 128 bytes is, and those of others are blanked.
        long = begins[lengths > 127]
        if long.size:
            text = text.copy()
            text[np.subtract.outer(long[long > 0], np.arange(1, self._prefix_bytes + 1))] = 0
        try:
            str(text.data, "utf-8")
        except UnicodeDecodeError as error:
            return int(np.searchsorted(begins, error.start, "right")) - 1
        return None
