"""--device: what auto chooses, and what is said where CUDA is asked for and not there."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from llmserve.config import CacheConfig, RunnerConfig, SchedulerConfig, ServerConfig
from llmserve.errors import StartupError
from llmserve.runner import for_device


def pretend(monkeypatch: pytest.MonkeyPatch, *, torch_cuda: bool, gpu: bool, module: bool) -> None:
    def find_spec(name: str) -> Any:
        return object() if module else None

    monkeypatch.setattr(torch.version, "cuda", "13.0" if torch_cuda else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def choose(device: str, **scheduler: int) -> ServerConfig:
    config = ServerConfig(
        runner=RunnerConfig(device=device), scheduler=SchedulerConfig(**scheduler)
    )
    return for_device(config)


@pytest.mark.parametrize(
    ("there", "device"),
    [
        ({"torch_cuda": True, "gpu": True, "module": True}, "cuda"),
        ({"torch_cuda": True, "gpu": True, "module": False}, "cpu"),
        ({"torch_cuda": True, "gpu": False, "module": True}, "cpu"),
        ({"torch_cuda": False, "gpu": False, "module": True}, "cpu"),
    ],
)
def test_auto_takes_cuda_if_all_of_it_is_there(
    there: dict[str, bool], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **there)

    assert choose("auto").runner.device == device
    assert choose("cpu").runner.device == "cpu"


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"torch_cuda": False, "gpu": False, "module": True}, "built for the CPU only"),
        ({"torch_cuda": True, "gpu": False, "module": True}, "needs an NVIDIA GPU"),
        ({"torch_cuda": True, "gpu": True, "module": False}, "install nvcc and reinstall"),
    ],
)
def test_cuda_that_is_not_there_is_refused_in_one_sentence(
    there: dict[str, bool], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, **there)

    with pytest.raises(StartupError, match=words) as error:
        choose("cuda")

    assert str(error.value).startswith("--device cuda needs")
    assert str(error.value).endswith("--device cpu works without")


def test_cuda_has_a_larger_token_budget_unless_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_cuda=True, gpu=True, module=True)

    assert choose("cuda").scheduler.token_budget == 2048
    assert choose("cuda", max_num_batched_tokens=128).scheduler.token_budget == 128
    assert choose("cuda", max_num_seqs=3000).scheduler.token_budget == 3000
    assert choose("cpu").scheduler.token_budget == 128


def test_cuda_schedules_ahead_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch_cuda=True, gpu=True, module=True)

    assert choose("cuda").scheduler.max_steps_in_flight == 2
    assert choose("cuda", async_scheduling=False).scheduler.max_steps_in_flight == 1
    assert choose("cpu").scheduler.max_steps_in_flight == 1
    assert choose("cpu", async_scheduling=True).scheduler.max_steps_in_flight == 2


def test_cpu_refuses_a_kv_cache_of_fp8() -> None:
    config = ServerConfig(
        cache=CacheConfig(kv_cache_dtype="fp8"), runner=RunnerConfig(device="cpu")
    )

    with pytest.raises(StartupError, match="--kv-cache-dtype fp8 needs --device cuda"):
        for_device(config)


def test_eager_steps_are_said_to_have_no_effect_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, torch_cuda=True, gpu=True, module=True)

    for_device(ServerConfig(runner=RunnerConfig(device="cuda", enforce_eager=True)))
    for_device(ServerConfig(runner=RunnerConfig(device="cpu")))
    assert caplog.text == ""
    for_device(ServerConfig(runner=RunnerConfig(device="cpu", enforce_eager=True)))

    assert "--enforce-eager has no effect on the CPU" in caplog.text
