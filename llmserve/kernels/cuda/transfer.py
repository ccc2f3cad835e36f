"""Bytes between host and device without a halt of either: pinned memory, side streams, events.

With CPU tensors for device memory, as in tests, a transfer is a copy that is done at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_CHUNK_BYTES = 32 << 20
_NUM_CHUNKS = 3


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] from which and into which the device copies by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class Mark:
    """A point in a stream's work. Any thread may wait for it, without the GIL.

    Before the first record() it counts as passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def record(self) -> None:
        """The mark is behind all that the current stream was given so far."""
        if self._event is not None:
            self._event.record()

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """What the stream is given from now on waits for the mark."""
        stream.wait_event(self._event)

    @property
    def has_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Raises RuntimeError if work before the mark has failed."""
        if self._event is not None:
            self._event.synchronize()


class WeightUploader:
    """Copies weights in chunks through a few pinned buffers on a stream of its own.

    While the device fetches a chunk, the next one is read from the file.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._buffers: list[tuple[torch.Tensor, Mark]] = []
        self._stream: torch.cuda.Stream | None = None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target: uint8 on the device; source: as many bytes in the CPU's memory; contiguous.

        Work that is given to the current stream from now on sees the bytes.
        """
        target, source = target.view(-1), source.reshape(-1)
        if self._device.type != "cuda":
            target.copy_(source)
            return
        stream = self._prepare()
        stream.wait_stream(torch.cuda.current_stream())  # the memory may have had another use
        for begin in range(0, source.numel(), _CHUNK_BYTES):
            piece = source[begin : begin + _CHUNK_BYTES]
            buffer, fetched = self._buffers[self._next]
            self._next = (self._next + 1) % _NUM_CHUNKS
            fetched.wait()
            pinned = buffer[: piece.numel()]
            pinned.copy_(piece)
            with torch.cuda.stream(stream):
                target[begin : begin + piece.numel()].copy_(pinned, non_blocking=True)
                fetched.record()
        torch.cuda.current_stream().wait_stream(stream)

    def finish(self) -> None:
        """Blocks until all is there, and lets the buffers go."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers, self._stream = [], None

    def _prepare(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = _make_stream()
            self._buffers = [
                (host_buffer(_CHUNK_BYTES, self._device), Mark(self._device))
                for _ in range(_NUM_CHUNKS)
            ]
        return self._stream


class InputRing:
    """Host memory for the inputs of two steps, so that one is filled while the other is fetched.

    The bytes go to a buffer beside `target` on a stream of their own, also while a step computes,
    and from there to `target` in the order of the steps.
    """

    def __init__(self, target: torch.Tensor) -> None:
        """target: uint8 [num_bytes] on the device."""
        self._target = target
        device = target.device
        self._hosts = [host_buffer(target.numel(), device) for _ in range(2)]
        self._copies = [torch.empty_like(target) for _ in range(2)]
        self._arrived = [Mark(device) for _ in range(2)]
        self._taken = [Mark(device) for _ in range(2)]
        for taken in self._taken:
            taken.record()  # work before may still use the memory that the copies were given
        self._stream = _make_stream() if device.type == "cuda" else None
        self._turn = 0

    def take(self) -> torch.Tensor:
        """uint8 [num_bytes] to fill; waits until its last content has arrived."""
        self._turn ^= 1
        self._arrived[self._turn].wait()
        return self._hosts[self._turn]

    def upload(self, num_bytes: int) -> None:
        """The first bytes of what take() gave become those of the target, for work given later."""
        host, copy = self._hosts[self._turn][:num_bytes], self._copies[self._turn][:num_bytes]
        arrived, taken = self._arrived[self._turn], self._taken[self._turn]
        if self._stream is None:
            copy.copy_(host)
        else:
            taken.hold_back(self._stream)
            with torch.cuda.stream(self._stream):
                copy.copy_(host, non_blocking=True)
                arrived.record()
            arrived.hold_back(torch.cuda.current_stream())
        self._target[:num_bytes].copy_(copy)
        taken.record()


def _make_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's


def upload_bytes(parts: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Small CPU tensors as device tensors, in one copy; each begins at a multiple of 16 bytes."""
    tensors = list(parts)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // 16) * 16)
    host = host_buffer(starts[-1], device)
    for begin, tensor in zip(starts, tensors, strict=False):
        host[begin : begin + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    # The allocator of pinned memory keeps `host` until the copy has been made.
    there = host.to(device, non_blocking=True) if device.type == "cuda" else host
    return [
        there[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for begin, tensor in zip(starts, tensors, strict=False)
    ]


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that has the content once the current stream has got this far."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
