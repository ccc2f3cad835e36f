"""Imports torch in less time: for the start of the server, before anything else needs torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

# Says what operators do to the shapes of tensors without data, for torch's compiler.
_NOT_NEEDED = "torch._meta_registrations"


def import_torch() -> None:
    """Leaves out a module that a server never uses and that is a quarter of torch's import.

    Another module stands in for it meanwhile and loads the real one when something of it is asked
    for; whoever imports the module later gets the real one too. Does nothing if torch is imported
    already.
    """
    if "torch" in sys.modules:
        return
    stand_in = _stand_in()
    sys.modules[_NOT_NEEDED] = stand_in
    try:
        importlib.import_module("torch")
    finally:
        if sys.modules.get(_NOT_NEEDED) is stand_in:
            del sys.modules[_NOT_NEEDED]


def _stand_in() -> ModuleType:
    module = ModuleType(_NOT_NEEDED)

    def load(name: str) -> object:
        if name.startswith("__"):  # inspect looks at __file__ of all modules
            raise AttributeError(name)
        if sys.modules.get(_NOT_NEEDED) is module:
            del sys.modules[_NOT_NEEDED]
        return getattr(importlib.import_module(_NOT_NEEDED), name)

    module.__dict__["__getattr__"] = load
    return module
