"""Requests a second over keep-alive connections: a client that costs little beside the server."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

_HEADER_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class KeepAliveConnection(asyncio.Protocol):
    """Sends a request, reads the answer, sends the next one, until somebody closes it.

    `closed` is done then, with a RuntimeError if an answer was no 200.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.num_answers = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = answer_end(self._buffer)
        if end is None or len(self._buffer) < end:
            return
        if not self._buffer.startswith(b"HTTP/1.1 200"):
            status = self._buffer[:80].decode("latin-1")
            if not self.closed.done():
                self.closed.set_exception(RuntimeError(f"the server answered {status!r}"))
            return
        self._buffer = self._buffer[end:]
        self.num_answers += 1
        assert self._transport is not None
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


def answer_end(buffer: bytes) -> int | None:
    """Length of the answer that `buffer` begins with; None while its header is incomplete."""
    header, separator, body = buffer.partition(_HEADER_END)
    if not separator:
        return None
    begin = len(header) + len(_HEADER_END)
    for line in header.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return begin + int(value)
    end = body.find(_LAST_CHUNK)
    return None if end < 0 else begin + end + len(_LAST_CHUNK)


async def requests_per_s(url: str, path: str, num_connections: int, duration_s: float) -> float:
    """Raises RuntimeError if an answer is not a 200 or a connection brings none.

    A connection that the server closes after some answers is opened again, as clients do.
    """
    address = urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    end = time.perf_counter() + duration_s

    async def worker() -> int:
        num_answers = 0
        while (rest := end - time.perf_counter()) > 0:
            _, connection = await loop.create_connection(
                lambda: KeepAliveConnection(request), address.hostname or "", address.port or 80
            )
            try:
                await asyncio.wait_for(connection.closed, rest)
                if not connection.num_answers:
                    raise RuntimeError(f"{path}: the server closed a connection without an answer")
            except TimeoutError:
                pass  # the time is over
            finally:
                connection.abort()
            num_answers += connection.num_answers
        return num_answers

    begin = time.perf_counter()
    counts = await asyncio.gather(*(worker() for _ in range(num_connections)))
    return sum(counts) / (time.perf_counter() - begin)
