"""The thread pool behind the kernels."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from llmserve.kernels import HAS_EXT, GGMLType, get_num_threads, linear, set_num_threads
from tests.kernels.weight_builders import random_weight

pytestmark = pytest.mark.skipif(not HAS_EXT, reason="the reference uses torch's threads")


@pytest.fixture(autouse=True)
def num_threads() -> Iterator[None]:
    before = get_num_threads()
    yield
    set_num_threads(before)


def test_number_of_threads_can_be_set() -> None:
    set_num_threads(3)

    assert get_num_threads() == 3


@pytest.mark.parametrize("num_threads", [0, -1])
def test_less_than_one_thread_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        set_num_threads(num_threads)


def test_pool_survives_many_changes_of_its_size() -> None:
    weight = random_weight(GGMLType.Q8_0, 640, 256)
    x = torch.ones(4, 256)
    expected = linear(x, weight)

    for i in range(60):
        set_num_threads(1 + i % 4)

        assert torch.equal(linear(x, weight), expected)


def test_kernels_may_be_called_from_several_threads() -> None:
    weight = random_weight(GGMLType.Q4_0, 640, 256)
    inputs = [torch.full((3, 256), float(i)) for i in range(4)]
    expected = [linear(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(50):
            if not torch.equal(linear(inputs[i], weight), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert wrong == []


def test_idle_workers_use_no_cpu() -> None:
    set_num_threads(4)
    linear(torch.ones(64, 256), random_weight(GGMLType.Q8_0, 640, 256))
    time.sleep(0.05)
    before = time.process_time()

    time.sleep(0.3)

    assert time.process_time() - before < 0.15


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's /proc")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_computes_with_workers_of_its_own() -> None:
    set_num_threads(2)
    weight = random_weight(GGMLType.Q8_0, 640, 256)
    x = torch.ones(4, 256)
    expected = linear(x, weight)

    child = os.fork()
    if child == 0:
        is_equal = torch.equal(linear(x, weight), expected)
        num_threads = len(os.listdir("/proc/self/task"))
        os._exit(0 if is_equal and num_threads == 2 else 1)

    assert os.waitpid(child, 0)[1] == 0
