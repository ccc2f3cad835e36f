"""Checkpoints and models are made once per session; tests read them only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from tests.make_checkpoints import ARCHITECTURES, ROPE_SCALINGS, make_model, save_checkpoint

Checkpoint = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Name of an architecture or a rope scaling -> (model, folder)."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            model = make_model((ARCHITECTURES | ROPE_SCALINGS)[name])
            made[name] = model, save_checkpoint(model, tmp_path_factory.mktemp(name))
        return made[name]

    return get
