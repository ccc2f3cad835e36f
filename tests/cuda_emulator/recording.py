"""CUDA graphs without a GPU: what a piece of code launches, to be launched again later.

Kernels are launched again with the arguments that they had, torch's operations with the tensors
that they had, and what such an operation makes anew is copied to where it lay. So a replay reads
and writes the memory of the recording, as a graph does, and runs none of the code around it. Unlike
a graph a recording keeps all tensors that were made meanwhile, so it does not find out that one of
them lies where another one is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cuda_emulator.device_memory import EmulatedModule, address_of

Launch = Callable[[], object]


class Recording:
    """Launches in their order, cut in pieces. Holds the tensors that they use."""

    def __init__(self) -> None:
        self._pieces: list[list[Launch]] = [[]]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Meanwhile launches are noted. They take place, too."""
        EmulatedModule.on_call = self._note
        try:
            with _Operations(self._note):
                yield
        finally:
            EmulatedModule.on_call = None

    def end_piece(self) -> None:
        self._pieces.append([])

    def replays(self) -> list[Callable[[], None]]:
        """For each piece, what launches it again."""
        return [_all_of(launches) for launches in self._pieces]

    def _note(self, launch: Launch) -> None:
        self._pieces[-1].append(launch)


class _Operations(TorchDispatchMode):
    """Notes what torch computes."""

    def __init__(self, note: Callable[[Launch], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)

        def compute_again() -> None:
            again = func(*args, **named)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and address_of(old) != address_of(new):
                    old.copy_(new)

        self._note(compute_again)
        return result


def _all_of(launches: Sequence[Launch]) -> Callable[[], None]:
    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all
