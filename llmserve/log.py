"""Logging set-up: one line per record on stderr, with the time, the level and the module."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Sends this package's records to stderr; other libraries' from WARNING up."""
    logging.basicConfig(format=_FORMAT, datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("llmserve").setLevel(level.upper())
