"""The socket that the server will listen on. Knows neither HTTP nor models, so that a taken port is
known before either is loaded."""

from __future__ import annotations

import errno
import os
import socket
import stat

from llmserve.config import FrontendConfig
from llmserve.errors import StartupError


def bind(config: FrontendConfig) -> socket.socket:
    """A bound socket that does not listen yet. Raises StartupError naming the address."""
    if config.uds is not None:
        return _bind_unix(config.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"--host {config.host} cannot be resolved: {error}") from error
    listener = socket.socket(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise StartupError(
                f"{config.host} is no address of this machine; choose another with --host"
            ) from error
        raise StartupError(
            f"port {config.port} on {config.host} is already in use or not allowed "
            f"({error.strerror}); choose another with --port"
        ) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale_socket(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        # Without a number it is Python's own: the path does not fit into a socket's address.
        raise StartupError(f"--uds {path} cannot be used: {error.strerror or error}") from error
    return listener


def _remove_stale_socket(path: str) -> None:
    """Removes a socket that nobody listens on; OSError if somebody does or it is no socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, "another server listens there")
