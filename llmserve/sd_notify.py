"""Tells systemd about the server's state (sd_notify(3)); does nothing outside a systemd unit."""

from __future__ import annotations

import contextlib
import os
import socket


def sd_notify(state: str) -> None:
    """Sends `state` (READY=1, STOPPING=1) to the socket that NOTIFY_SOCKET names."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # abstract namespace
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.sendall(state.encode())
