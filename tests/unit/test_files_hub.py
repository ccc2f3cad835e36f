"""Models from the hub: downloaded from a small server with the hub's interface, then from cache.

The downloads run in processes of their own, because the hub client reads its settings at import.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from tests.model_file_builders import write_gguf, write_split_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"  # the discard port: connections are refused


class HubServer(ThreadingHTTPServer):
    """Serves repositories given as {repository: {file: content}}, all at one commit."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repositories = repositories
        self.downloaded: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class HubHandler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test output clean."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        for repository, files in self.server.repositories.items():
            if path.startswith(f"/api/models/{repository}/revision/"):
                return self.describe(repository, path.rpartition("/")[2])
            if path.startswith(f"/api/models/{repository}/tree/"):
                return self.list_files(files)
            prefix = f"/{repository}/resolve/{COMMIT}/"
            if path.startswith(prefix):
                return self.send_file(files, path.removeprefix(prefix))
        self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def describe(self, repository: str, revision: str) -> None:
        if revision in ("main", COMMIT):
            body = {"id": repository, "sha": COMMIT, "siblings": []}
            self.reply(200, json.dumps(body).encode())
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})

    def list_files(self, files: dict[str, bytes]) -> None:
        entries = [
            {
                "type": "file",
                "path": name,
                "size": len(content),
                "oid": hashlib.sha1(content).hexdigest(),
            }
            for name, content in files.items()
        ]
        self.reply(200, json.dumps(entries).encode())

    def send_file(self, files: dict[str, bytes], name: str) -> None:
        content = files[name]
        etag = hashlib.sha1(content).hexdigest()
        if self.command == "GET":
            self.server.downloaded.append(name)
        self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    single, split = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("split")
    write_gguf(single / "m-q8.gguf")
    write_gguf(single / "m-q4.gguf")
    write_split_gguf(split, 3)
    whole = {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": b"{ }",
        "chat_template.jinja": b"x",
        "model.safetensors": save({"w": np.ones(2, np.float32)}),
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"the same again",
        "onnx/model.json": b"the same again",
        "README.md": b"words",
    }
    server = HubServer(
        {
            "org/whole": whole,
            "org/gguf": {**contents(single), "config.json": b"{}"},
            "org/split": {f"q8/{name}": content for name, content in contents(split).items()},
        }
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def open_in_process(
    folder: Path, endpoint: str, model: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """Opens the model with a cache in `folder`; prints kind, path, and tensor names."""
    code = (
        "import sys\n"
        "from llmserve.config import ModelConfig\n"
        "from llmserve.errors import StartupError\n"
        "from llmserve.files.model import open_model\n"
        "settings = dict(pair.split('=') for pair in sys.argv[3:])\n"
        "config = ModelConfig(model=sys.argv[1], download_dir=sys.argv[2], **settings)\n"
        "try:\n"
        "    files = open_model(config, lambda line: None)\n"
        "except StartupError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
        "weights = files.gguf or files.safetensors\n"
        "print(files.kind, files.name, files.path, *sorted(weights.tensors if weights else []))\n"
    )
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")}
    return subprocess.run(
        [sys.executable, "-c", code, model, str(folder / "cache"), *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )


def test_repository_is_downloaded_without_what_a_server_does_not_need(
    tmp_path: Path, hub: HubServer
) -> None:
    hub.downloaded.clear()

    done = open_in_process(tmp_path, hub.url, "org/whole")

    assert done.stdout.split()[:2] == ["huggingface", "org/whole"], done.stderr
    assert done.stdout.split()[3:] == ["w"]
    assert str(tmp_path / "cache") in done.stdout
    assert sorted(hub.downloaded) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_downloaded_repository_opens_without_a_network(tmp_path: Path, hub: HubServer) -> None:
    first = open_in_process(tmp_path, hub.url, "org/whole")

    second = open_in_process(tmp_path, NOWHERE, "org/whole")

    assert second.stdout == first.stdout != ""


def test_dummy_weights_are_not_downloaded(tmp_path: Path, hub: HubServer) -> None:
    hub.downloaded.clear()

    done = open_in_process(tmp_path, hub.url, "org/whole", "load_format=dummy")

    assert done.stdout.split()[0] == "huggingface", done.stderr
    assert "model.safetensors" not in hub.downloaded


@pytest.mark.parametrize("model", ["org/gguf:m-q8.gguf", "org/gguf/m-q8.gguf"])
def test_one_gguf_file_of_a_repository_is_downloaded(
    tmp_path: Path, hub: HubServer, model: str
) -> None:
    hub.downloaded.clear()

    done = open_in_process(tmp_path, hub.url, model)

    assert done.stdout.split()[:2] == ["gguf", model], done.stderr
    assert hub.downloaded == ["m-q8.gguf"]


def test_all_parts_of_a_split_gguf_model_are_downloaded(tmp_path: Path, hub: HubServer) -> None:
    done = open_in_process(tmp_path, hub.url, "org/split:q8/m-00001-of-00003.gguf")

    assert done.stdout.split()[3:] == ["t0", "t1", "t2"], done.stderr


@pytest.mark.parametrize(
    ("model", "setting", "problem"),
    [
        ("org/none", "revision=main", "neither an existing path nor a repository on the hub"),
        ("org/whole", "revision=v9", "--revision v9 does not exist in the repository org/whole"),
        ("org/gguf", "load_format=auto", "for a GGUF file pass org/gguf:FILE.gguf"),
        ("org/gguf", "load_format=gguf", "pass --model org/gguf:FILE.gguf"),
        ("org/gguf:m-q5.gguf", "revision=main", "'m-q5.gguf', which the repository org/gguf does"),
    ],
)
def test_what_the_hub_does_not_have_is_refused(
    tmp_path: Path, hub: HubServer, model: str, setting: str, problem: str
) -> None:
    done = open_in_process(tmp_path, hub.url, model, setting)

    assert problem in done.stderr
    assert done.stderr.startswith("refused: ")
    assert done.stderr.count("\n") == 1


def test_hub_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    done = open_in_process(tmp_path, NOWHERE, "org/whole")

    assert "the hub cannot be reached and the local cache does not have it whole" in done.stderr
    assert done.stderr.count("\n") == 1
