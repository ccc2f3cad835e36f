"""Runs commands one after the other, each for a limited time, and notes what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OK, FAILED, TIMED_OUT, SKIPPED = "ok", "failed", "timed out", "skipped"
_LEAST_S = 5.0  # a phase with less time is not begun
_TAIL_LINES = 60
_KILL_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Phase:
    """excuses: words of the output -> why a failure is the machine's and not ours."""

    name: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    excuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    status: str
    seconds: float = 0.0
    why: str = ""


class Phases:
    """Outcomes by name. All phases together have `total_s`."""

    def __init__(self, total_s: float) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._end = time.monotonic() + total_s

    def run(self, phase: Phase) -> bool:
        """Whether it ended well. Its output goes to this process's."""
        limit_s = min(phase.limit_s, self._end - time.monotonic())
        if limit_s < _LEAST_S:
            self.skip(phase.name, "no time was left")
            return False
        print(f"\n== {phase.name} ({limit_s:.0f} s at most)", flush=True)
        outcome = _run(phase, limit_s)
        words = f": {outcome.why}" if outcome.why else ""
        print(f"== {phase.name} {outcome.status}{words}, {outcome.seconds:.1f} s", flush=True)
        self.outcomes[phase.name] = outcome
        return outcome.status == OK

    def skip(self, name: str, why: str) -> None:
        print(f"\n== {name} {SKIPPED}: {why}", flush=True)
        self.outcomes[name] = Outcome(SKIPPED, why=why)

    def named(self, *statuses: str) -> list[str]:
        """Phases with one of these statuses."""
        return [name for name, outcome in self.outcomes.items() if outcome.status in statuses]


def _run(phase: Phase, limit_s: float) -> Outcome:
    begin = time.monotonic()
    # A session of its own, so that what it starts can be stopped with it.
    process = subprocess.Popen(
        phase.command,
        cwd=ROOT,
        env=_environment(phase.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    reader = threading.Thread(target=_pass_on, args=(process, tail), daemon=True)
    reader.start()
    is_late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
    finally:
        _kill(process)
    reader.join(_KILL_WAIT_S)
    seconds = time.monotonic() - begin
    if is_late:
        return Outcome(TIMED_OUT, seconds, f"stopped after {limit_s:.0f} s")
    if process.returncode == 0:
        return Outcome(OK, seconds)
    output = "".join(list(tail))
    for words, why in phase.excuses.items():
        if words in output:
            return Outcome(SKIPPED, seconds, why)
    return Outcome(FAILED, seconds, f"exit status {process.returncode}")


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Without the settings of a pytest that may have started this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "passive"} | dict(more)


def _pass_on(process: subprocess.Popen[str], tail: deque[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            tail.append(line)
            print(line, end="", flush=True)


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and what it started, if any of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(_KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        print("== a process that waits for the device cannot be stopped", flush=True)
