"""Environment variables that are not flags, read once at import.

A flag's variable is LLMSERVE_ plus its name in capitals (LLMSERVE_MAX_NUM_SEQS); cli.py reads
those. What is here concerns code that runs before or below the command line.
"""

from __future__ import annotations

import os
from pathlib import Path

# 1: do not load the compiled extensions; every kernel runs its readable torch version.
NO_EXT: bool = os.environ.get("LLMSERVE_NO_EXT", "") not in ("", "0")


def cache_dir() -> Path:
    """Folder for files that the server derives (demo model, tokenizer models). Not created here."""
    explicit = os.environ.get("LLMSERVE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llmserve"
