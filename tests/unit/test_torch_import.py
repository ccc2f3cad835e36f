"""Importing torch without what a server never uses, each time in a process of its own."""

import subprocess
import sys

_STATE = """
import sys
from llmserve.torch_import import import_torch
{before}
import_torch()
import llmserve.loading, llmserve.server
print("torch._meta_registrations" in sys.modules)
import torch
print(hasattr(torch, "_meta_registrations"))
import torch._meta_registrations
print(torch._meta_registrations.activate_meta.__name__)
print(tuple((torch.ones(3, 4, device="meta") @ torch.ones(4, 2, device="meta")).shape))
"""


def _run(before: str) -> list[str]:
    code = _STATE.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def test_leaves_the_module_out_and_lets_others_import_it_later() -> None:
    assert _run("") == ["False", "False", "activate_meta", "(3, 2)"]


def test_does_nothing_where_torch_is_imported_already() -> None:
    assert _run("import torch") == ["True", "True", "activate_meta", "(3, 2)"]
