"""What a peer is to the comparison: how it is installed, started and, without HTTP, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.peers.models import ModelFiles
from bench.peers.process import ServerCommand
from bench.peers.workloads import Figures

# Names of a peer's variant: its options that make a difference, as the table quotes them.
Variant = str


@dataclass(frozen=True, slots=True)
class Context:
    """What all peers need. `seed` differs between rounds, so that prompts do."""

    work_dir: Path
    threads: int
    seed: int = 0


class Peer(Protocol):
    """A server or library that runs the same models.

    max_rounds: fewer than asked for where a start takes minutes. server_variants: options to try;
    the better is quoted in every row.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_rounds(self) -> int: ...

    @property
    def server_variants(self) -> Sequence[Variant]: ...

    def install(self, context: Context) -> None:
        """Does nothing for what is there. Raises RuntimeError naming a log."""
        ...

    def server(self, context: Context, model: ModelFiles, variant: Variant) -> ServerCommand | None:
        """None if the peer does not serve this model."""
        ...

    def measure_engine(self, context: Context, model: ModelFiles) -> dict[Variant, Figures]:
        """Prefill and decode of one sequence without HTTP; empty if the peer has no such thing."""
        ...
