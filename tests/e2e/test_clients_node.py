"""Clients for node against a real server: OpenAI's and Vercel's AI SDK.

Their packages are installed once into a folder of the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

SCRIPTS = Path(__file__).parent / "node"
INSTALL_TIMEOUT_S = 180


@pytest.fixture(scope="session")
def packages() -> Path:
    """A folder with the scripts and their node_modules."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is not installed")
    wanted = (SCRIPTS / "package.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmserve-tests"
    folder = cache / f"node-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (folder / "node_modules").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _install(cache, folder)
    return folder


def _install(cache: Path, folder: Path) -> None:
    """Installs beside the folder and moves it there, so that it is whole or absent."""
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        shutil.copy(SCRIPTS / "package.json", made)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        try:
            done = subprocess.run(
                command, cwd=made, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm install took more than {INSTALL_TIMEOUT_S} s")
        if done.returncode != 0:
            pytest.skip(f"npm install failed: {done.stderr[-500:]}")
        if not folder.exists():
            made.rename(folder)


def run_script(name: str, packages: Path, server: ServerProcess) -> dict[str, Any]:
    """What a script printed. It is copied, since node looks for packages beside it."""
    shutil.copy(SCRIPTS / name, packages / name)
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    done = subprocess.run(
        ["node", name],
        cwd=packages,
        env={**os.environ, "BASE_URL": server.url, "MODEL": model},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai_for_node(packages: Path, demo_server: ServerProcess) -> None:
    seen = run_script("openai_client.mjs", packages, demo_server)

    assert seen["streamed"] == seen["whole"] == seen["response"] != ""
    assert seen["usage"]["completion_tokens"] == 12
    assert seen["call"]["name"] == "set_lamp"
    assert seen["call"]["arguments"]["level"] in (0, 50, 100)
    assert (seen["firstEvent"], seen["lastEvent"]) == ("response.created", "response.incomplete")
    assert seen["status"] == 404
    assert seen["seen"] == 3


def test_ai_sdk(packages: Path, demo_server: ServerProcess) -> None:
    seen = run_script("ai_sdk.mjs", packages, demo_server)

    assert seen["streamed"] == seen["whole"] != ""
    assert seen["usage"]["outputTokens"] == seen["streamedUsage"]["outputTokens"] == 12
    assert seen["object"] == seen["streamedObject"]
    assert seen["object"]["color"] in ("red", "green")
    assert seen["object"]["size"] == 3
    assert seen["call"] == {"name": "set_lamp", "input": {"level": 50}}
    assert seen["streamedCall"] == {"level": 50}
    assert seen["result"] == "the lamp is at 50"
    assert "tool-input-delta" in seen["parts"]
