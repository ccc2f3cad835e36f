"""Imports torch in less time: for the start of the server, before anything else needs torch."""

from __future__ import annotations

import sys
from types import ModuleType

# Says what operators do to the shapes of tensors without data, for torch's compiler.
_NOT_NEEDED = "torch._meta_registrations"


def import_torch() -> None:
    """Leaves out a module that a server never uses and that is a quarter of torch's import.

    An empty module stands in for it meanwhile and is taken away again: whoever imports it later
    gets the real one. Does nothing if torch is imported already.
    """
    if "torch" in sys.modules:
        return
    sys.modules[_NOT_NEEDED] = ModuleType(_NOT_NEEDED)
    try:
        import torch
    finally:
        del sys.modules[_NOT_NEEDED]
    vars(torch).pop(_NOT_NEEDED.rpartition(".")[2], None)
