"""Tells the emulator which memory a kernel may touch: the tensors whose pointers were taken.

While `watching()` holds, `Tensor.data_ptr` notes the tensor. The next call of the emulated module
may touch the bytes of the elements of these tensors, and of tensors noted for earlier calls that
are still alive and have not been noted again. Bytes between the rows of a strided view belong to
nobody.

New memory (`torch.empty` and its kin) is filled with NaN, or with a number that is no valid index,
so that what a kernel does not write shows in its result.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_NO_INDEX = {
    torch.int8: -91,
    torch.int16: -23131,
    torch.int32: -1515870811,
    torch.int64: -6510615555426900571,
}

# Of the host's memory, at the address that is the first argument: launchers read it when called.
_HOST_BYTES = {"dequantize": 64}


@dataclass
class _Note:
    """The bytes of one tensor: where its elements lie."""

    storage: StorageWeakRef
    begin: int
    end: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    name: str

    @property
    def is_dense(self) -> bool:
        num_bytes = self.itemsize
        for size in self.sizes:
            num_bytes *= size
        return num_bytes == self.end - self.begin


class DeviceMemory:
    """The tensors that the emulated kernels may touch."""

    def __init__(self) -> None:
        self._fresh: list[_Note] = []
        self._earlier: list[_Note] = []

    def note(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0 or tensor.device.type != "cpu":
            return
        itemsize = tensor.element_size()
        strides = tuple(stride * itemsize for stride in tensor.stride())
        begin = _data_ptr(tensor)
        last = begin + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
        dtype = str(tensor.dtype).removeprefix("torch.")
        name = f"the {dtype} tensor {list(tensor.shape)}"
        storage = StorageWeakRef(tensor.untyped_storage())
        self._fresh.append(
            _Note(storage, begin, last + itemsize, tuple(tensor.shape), strides, itemsize, name)
        )

    def fresh(self) -> list[_Note]:
        """The tensors noted for the next call."""
        return list(self._fresh)

    def note_again(self, notes: list[_Note]) -> None:
        """RuntimeError if one of the tensors is gone."""
        for note in notes:
            if note.storage.expired():
                raise RuntimeError(f"{note.name} is gone, and its memory may have another use")
        self._fresh += notes

    def buffers(self) -> list[tuple[int, torch.Tensor | None, int, str]]:
        """(address, mask or None, bytes, name) of all tensors of the next call; none overlap."""
        again = {note.storage.cdata for note in self._fresh}
        self._earlier = [
            note
            for note in self._earlier
            if not note.storage.expired() and note.storage.cdata not in again
        ]
        notes = sorted([*self._earlier, *self._fresh], key=lambda note: (note.begin, -note.end))
        self._earlier += self._fresh
        self._fresh = []
        groups: list[list[_Note]] = []
        end = 0
        for note in notes:
            if note.begin < end:
                groups[-1].append(note)
            else:
                groups.append([note])
            end = max(end, note.end)
        return [_buffer(group) for group in groups]


def _buffer(notes: list[_Note]) -> tuple[int, torch.Tensor | None, int, str]:
    begin = notes[0].begin
    num_bytes = max(note.end for note in notes) - begin
    name = " or ".join(dict.fromkeys(note.name for note in notes))
    if any(note.is_dense and note.end - note.begin == num_bytes for note in notes):
        return begin, None, num_bytes, name
    mask = torch.zeros(num_bytes, dtype=torch.uint8)
    for note in notes:
        shape = (*note.sizes, note.itemsize)
        mask.as_strided(shape, (*note.strides, 1), note.begin - begin).fill_(1)
    return begin, mask, num_bytes, name


class _Buffer(ctypes.Structure):
    """Mirrors ControlBuffer in control.cpp."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("num_bytes", ctypes.c_uint64),
        ("mask", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
    )


class EmulatedModule:
    """The functions of an emulated module; every call says first what it may touch.

    on_call: is given, at every call, what makes the same call again, with the same memory.
    """

    on_call: ClassVar[Callable[[Callable[[], object]], None] | None] = None

    def __init__(self, kernels: ModuleType, memory: DeviceMemory) -> None:
        assert kernels.__file__ is not None
        self._kernels = kernels
        self._memory = memory
        self._control = ctypes.CDLL(kernels.__file__)
        self._control.llmserve_take_host_finding.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._kernels, name)
        return functools.partial(self._call, attribute) if callable(attribute) else attribute

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if EmulatedModule.on_call is not None:
            EmulatedModule.on_call(self._again(function, args, kwargs))
        buffers = self._memory.buffers()  # holds the masks
        self._set_buffers(
            [
                _Buffer(begin, num_bytes, None if mask is None else _data_ptr(mask), name.encode())
                for begin, mask, num_bytes, name in buffers
            ]
        )
        try:
            result = function(*args, **kwargs)
        finally:
            self._set_buffers([])
        if finding := self._control.llmserve_take_host_finding():
            raise RuntimeError(finding.decode())
        return result

    def _again(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], object]:
        notes = self._memory.fresh()
        num_bytes = _HOST_BYTES.get(function.__name__)
        if num_bytes is not None:
            host = ctypes.create_string_buffer(ctypes.string_at(args[0], num_bytes), num_bytes)
            args = (host, *args[1:])

        def call_again() -> object:
            self._memory.note_again(notes)
            return self._call(function, *map(_host_address, args), **kwargs)

        return call_again

    def _set_buffers(self, buffers: list[_Buffer]) -> None:
        array = (_Buffer * len(buffers))(*buffers)
        self._control.llmserve_set_buffers(array, ctypes.c_int64(len(buffers)))


def _host_address(argument: Any) -> Any:
    is_buffer = isinstance(argument, ctypes.Array)
    return ctypes.addressof(argument) if is_buffer else argument


_data_ptr = torch.Tensor.data_ptr


def address_of(tensor: torch.Tensor) -> int:
    """data_ptr() that notes nothing."""
    return _data_ptr(tensor)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with what no kernel should read, and returns it."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(0xFF)  # raw memory: NaN in every float format
    elif tensor.dtype in _NO_INDEX:
        tensor.fill_(_NO_INDEX[tensor.dtype])
    return tensor


@contextmanager
def watching(memory: DeviceMemory) -> Iterator[None]:
    """Notes the tensors whose pointers are taken, in all threads, and poisons new memory."""

    def noting(tensor: torch.Tensor) -> int:
        memory.note(tensor)
        return _data_ptr(tensor)

    def poisoned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return functools.wraps(create)(lambda *args, **kwargs: poison(create(*args, **kwargs)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "data_ptr", noting)
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
