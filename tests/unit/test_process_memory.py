"""Garbage collection waits until everything is loaded, and then passes over what came later."""

from __future__ import annotations

import gc

from llmserve.process_memory import begin_loading, keep_modules, settle


def test_collection_is_off_while_loading_and_passes_over_what_was_loaded() -> None:
    begin_loading()
    was_enabled = gc.isenabled()
    loaded = {"modules": [object()]}
    settle()

    try:
        assert not was_enabled
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(thing is loaded for thing in gc.get_objects())
    finally:
        gc.unfreeze()


def test_what_is_imported_is_spared_the_pass_after_loading() -> None:
    begin_loading()
    imported = {"modules": [object()]}
    keep_modules()

    try:
        assert not gc.isenabled()
        assert not any(thing is imported for thing in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()
