"""A server process: started in a session of its own, asked whether it is ready, ended with all its
children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

_POLL_S = 0.01
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started; `{port}` in an argument stands for the port."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 60.0


class ServerProcess:
    """Use as a context manager. Times are time.perf_counter(), seconds."""

    def __init__(self, command: ServerCommand, log: Path) -> None:
        self._ready_timeout_s = command.ready_timeout_s
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [part.replace("{port}", str(port)) for part in command.argv]
        with log.open("w") as output:
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                argv,
                cwd=log.parent,  # some write files where they are started
                env={**os.environ, **command.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def wait_ready(self, session: aiohttp.ClientSession) -> None:
        """Returns when /health answers 200. Raises RuntimeError if it never does."""
        end = self.started + self._ready_timeout_s
        while time.perf_counter() < end:
            if self._process.poll() is not None:
                break
            try:
                async with session.get(self.url + "/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it does not listen yet
            await asyncio.sleep(_POLL_S)
        raise RuntimeError(f"the server did not get ready; see {self._log}")

    def pss_mb(self) -> float:
        """Proportional set size of the process and its children, 10^6 bytes."""
        return sum(pss_bytes(pid) for pid in session_pids(self._process.pid)) / 1e6

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        # Children that outlived the server would take part in the next measurement.
        for pid in session_pids(self._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def session_pids(session_id: int) -> list[int]:
    """Processes of a session that still run."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        # After the name: state, parent, process group, session.
        if int(fields[3]) == session_id and fields[0] != "Z":
            pids.append(int(entry.name))
    return pids


def pss_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
