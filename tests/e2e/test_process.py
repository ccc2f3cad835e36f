"""The life of the process: start, memory, idleness, signals, bad starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.server_process import ServerProcess, running_server
from tests.scripted_checkpoint import write_checkpoint

STORY = {"prompt": "A long story:", "temperature": 0, "ignore_eos": True}


def run_to_end(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmserve", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
    )


def data_frames(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def test_demo_server_says_what_it_does(demo_server: ServerProcess) -> None:
    for words in ("open model", "tokenizer", "weights", "KV cache", "blocks", "serving"):
        assert words in demo_server.output


def test_demo_server_stays_under_800_mb_with_32_requests_at_once() -> None:
    def complete(index: int) -> int:
        # 256 tokens, no two prompts alike; with 32 of them the KV cache fills up.
        prompt = [2, *(1000 + (index * 255 + i) % 200_000 for i in range(255))]
        body = {**STORY, "prompt": prompt, "max_tokens": 16}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code

    with running_server() as server, ThreadPoolExecutor(32) as pool:
        statuses = list(pool.map(complete, range(32)))
        peak = server.peak_rss_bytes()

    assert statuses == [200] * 32
    assert peak < 800e6


def test_idle_server_uses_no_cpu(demo_server: ServerProcess) -> None:
    httpx.post(f"{demo_server.url}/v1/completions", json={"prompt": "Hi"}, timeout=60)
    time.sleep(0.5)

    # What the answer left to do may take a slow machine a second.
    for _ in range(3):
        before = demo_server.cpu_seconds()
        time.sleep(2.0)
        used = demo_server.cpu_seconds() - before
        if used <= 0.02:
            break

    assert used <= 0.02


def wait_refused(server: ServerProcess) -> None:
    """Until the server takes no connections; fails after 20 s."""
    for _ in range(200):
        try:
            httpx.get(f"{server.url}/health", timeout=30)
        except httpx.ConnectError:
            return
        except httpx.TransportError:  # came just before
            pass
        time.sleep(0.1)
    raise AssertionError("the server still takes connections")


def test_sigterm_lets_a_running_stream_finish_and_refuses_new_requests() -> None:
    with running_server("--max-model-len", "512", "--shutdown-timeout", "30") as server:
        body = {**STORY, "max_tokens": 150, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            frames = data_frames(stream)
            first = [next(frames) for _ in range(3)]
            server.terminate()
            wait_refused(server)
            rest = list(frames)
        code = server.wait()

    assert rest[-1] == "[DONE]"
    last = json.loads(rest[-2])
    assert last["choices"][0]["finish_reason"] == "length"
    assert len(first) == 3
    assert code == 0


def test_shutdown_deadline_aborts_what_still_runs() -> None:
    with running_server("--max-model-len", "8192", "--shutdown-timeout", "0.5") as server:
        body = {**STORY, "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            frames = data_frames(stream)
            next(frames)
            server.terminate()
            rest = list(frames)
        code = server.wait()

    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "abort"
    assert code == 0


def test_second_signal_ends_at_once() -> None:
    with running_server("--max-model-len", "8192") as server:
        body = {**STORY, "max_tokens": 8000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            frames = data_frames(stream)
            next(frames)
            server.terminate()
            time.sleep(0.3)
            begin = time.monotonic()
            server.terminate()
            code = server.wait()
            assert time.monotonic() - begin < 10

    assert code == 143


def test_server_tells_systemd_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(path))
        notify.settimeout(60)
        with running_server("--max-model-len", "512", env={"NOTIFY_SOCKET": str(path)}):
            first = notify.recv(100)
        second = notify.recv(100)

    assert (first, second) == (b"READY=1", b"STOPPING=1")


def test_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "llmserve.sock"
    with running_server("--max-model-len", "512", "--uds", str(path)) as server:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/health", timeout=30).status_code == 200
        server.terminate()
        assert server.wait() == 0

    assert not path.exists()


def test_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("precious")

    done = run_to_end("--uds", str(path))

    assert done.returncode == 2
    assert "not a socket" in done.stderr
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/does/not/exist"], "/does/not/exist"),
        (["--max-model-len", "100000000"], "--max-model-len"),
        (
            ["--max-model-len", "4096", "--num-gpu-blocks-override", "8"],
            "--num-gpu-blocks-override",
        ),
        (["--chat-template", "/does/not/exist.jinja"], "chat-template"),
        (["--chat-template", "{% if %}"], "chat-template"),
        (["--uds", "/does/not/exist/socket"], "--uds"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--host", "192.0.2.1"], "choose another with --host"),
        (["--uds", "/tmp/" + "x" * 200], "too long"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else None,
)
def test_bad_start_is_one_sentence_and_exit_code_2(flags: list[str], words: str) -> None:
    done = run_to_end("--port", "0", *flags)

    lines = [line for line in done.stderr.splitlines() if line.startswith("llmserve: ")]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags",
    [["--threads", "5000"], ["--device", "cpu", "--kv-cache-dtype", "fp8"], ["--block-size", "3"]],
    ids=" ".join,
)
def test_settings_that_cannot_be_are_refused_before_anything_begins(flags: list[str]) -> None:
    done = run_to_end("--port", "0", *flags)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("llmserve: --")


def test_model_that_gives_no_numbers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, {"story": "Once upon a time."})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")

    done = run_to_end("--port", "0", "--model", str(folder), "--threads", "1")

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "llmserve: the model does not compute: the model gives logits that are not finite"
    )
    assert "Traceback" not in done.stderr


def test_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run_to_end("--port", str(port))

    assert done.returncode == 2
    assert f"port {port}" in done.stderr
    assert "already in use" in done.stderr
    assert "open model" not in done.stderr


def test_server_without_its_extensions_says_so_loudly() -> None:
    with running_server("--max-model-len", "512", env={"LLMSERVE_NO_EXT": "1"}) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=120
        )

    assert answer.status_code == 200
    assert "WITHOUT" in server.output
