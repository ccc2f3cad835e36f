"""Importing torch without what a server never uses, each time in a process of its own."""

import subprocess
import sys

import pytest

_LOADED = "print('torch._meta_registrations' in sys.modules)"
_IMPORT = (
    "import torch._meta_registrations\nprint(torch._meta_registrations.activate_meta.__name__)"
)
_ASK = "import torch\nprint(torch._meta_registrations.activate_meta.__name__)"
_FROM = "from torch._meta_registrations import activate_meta\nprint(activate_meta.__name__)"


def _run(*lines: str) -> list[str]:
    code = "\n".join(["import sys", "from llmserve.torch_import import import_torch", *lines])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("use", [_IMPORT, _ASK, _FROM], ids=["import", "attribute", "from"])
def test_leaves_the_module_out_until_somebody_needs_it(use: str) -> None:
    start = "import_torch()\nimport llmserve.loading, llmserve.server"

    assert _run(start, _LOADED, use, _LOADED) == ["False", "activate_meta", "True"]


def test_does_nothing_where_torch_is_imported_already() -> None:
    assert _run("import torch", "import_torch()", _LOADED) == ["True"]
