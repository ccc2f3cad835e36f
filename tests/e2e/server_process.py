"""Starts `python -m llmserve` as a user would and ends it by its own pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

_READY = re.compile(r"serving .* on (http://\S+|unix:\S+) after ([0-9.]+) s")


class ServerProcess:
    """A server that is up. `output` grows while it runs."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmserve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self.lines: list[str] = []
        self._is_ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_ready(self, timeout_s: float = 120) -> None:
        if not self._is_ready.wait(timeout_s) or not self.url:
            self.kill()
            raise AssertionError(f"the server did not come up:\n{self.output}")

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 60) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(10)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._reader.join(10)

    def peak_rss_bytes(self) -> int:
        """The most resident memory that the process has had."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        return int(kib) * 1024

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = re.findall(rf"^llmserve:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            match = _READY.search(line)
            if match:
                self.url = match.group(1)
                self._is_ready.set()
        self._is_ready.set()
        self._process.stdout.close()


@contextlib.contextmanager
def running_server(*flags: str, env: dict[str, str] | None = None) -> Iterator[ServerProcess]:
    """A server on a free port, ended (SIGTERM, then SIGKILL) at exit."""
    server = ServerProcess("--port", "0", *flags, env=env)
    try:
        server.wait_ready()
        yield server
    finally:
        if server._process.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(40)
        server.kill()
