"""Samples of many rounds, and the table made of them: medians, spread, ratios, floors."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OWN = "llmserve"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `job` and `figure` say where its samples are.

    target: least ratio to the best peer; floor_target: least share of the floor.
    """

    job: str
    figure: str
    title: str
    unit: str
    is_higher_better: bool = True
    target: float | None = None
    floor_target: float | None = None
    limit: float | None = None  # llmserve's own figure must not exceed it


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the samples of one figure. `variant`: the options that they were measured with."""

    median: float
    low: float
    high: float
    num_rounds: int
    variant: str = ""

    def text(self) -> str:
        if self.num_rounds == 1:
            return f"{number(self.median)} (1 round)"
        spread = f"{number(self.low)} to {number(self.high)}"
        return f"{number(self.median)} ({spread}, {self.num_rounds} rounds)"


def number(value: float) -> str:
    """Three digits or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def summarize(samples: Sequence[float], variant: str = "") -> Summary:
    """Raises StatisticsError without samples."""
    return Summary(statistics.median(samples), min(samples), max(samples), len(samples), variant)


@dataclass(slots=True)
class Samples:
    """Every figure of every round: (job, peer, variant) -> figure -> one value per round."""

    values: dict[tuple[str, str, str], dict[str, list[float]]] = field(default_factory=dict)

    def add(self, job: str, peer: str, variant: str, figures: Mapping[str, float]) -> None:
        own = self.values.setdefault((job, peer, variant), {})
        for figure, value in figures.items():
            own.setdefault(figure, []).append(value)

    def best(self, row: Row, peer: str) -> Summary | None:
        """Of the peer's variants the one that is best in this row; None without samples."""
        summaries = [
            summarize(figures[row.figure], variant)
            for (job, name, variant), figures in self.values.items()
            if job == row.job and name == peer and row.figure in figures
        ]
        if not summaries:
            return None
        sign = 1 if row.is_higher_better else -1
        return max(summaries, key=lambda summary: sign * summary.median)

    def num_rounds(self, rows: Sequence[Row], peer: str) -> int:
        """How often all of the rows were measured; 0 if one never was."""
        best = [self.best(row, peer) for row in rows]
        return min(0 if summary is None else summary.num_rounds for summary in best)

    def to_measure(self, rows: Sequence[Row], peer: str, variants: Sequence[str]) -> list[str]:
        """Variants that lack a sample in one of the rows; if none does, those that are best in one
        of them at least."""
        missing = [
            variant
            for variant in variants
            if not all(row.figure in self.values.get((row.job, peer, variant), {}) for row in rows)
        ]
        best = [self.best(row, peer) for row in rows]
        return missing or list(dict.fromkeys(summary.variant for summary in best if summary))


def ratio(own: float, peer: float, is_higher_better: bool) -> float:
    """Above 1 llmserve is ahead."""
    return own / peer if is_higher_better else peer / own


def floor_share(own: float, floor: float, is_higher_better: bool) -> float:
    """How much of what the machine can do is reached; at most 1 unless the floor is wrong."""
    return own / floor if is_higher_better else floor / own


def best_peer(samples: Samples, row: Row, peers: Sequence[str]) -> tuple[str, Summary] | None:
    """The peer that llmserve has to be compared with in this row."""
    found = [(peer, summary) for peer in peers if (summary := samples.best(row, peer))]
    if not found:
        return None
    sign = 1 if row.is_higher_better else -1
    return max(found, key=lambda item: sign * item[1].median)


def markdown(
    samples: Samples,
    rows: Sequence[Row],
    peers: Sequence[str],
    floors: Mapping[tuple[str, str], float],
) -> str:
    """The table, and below it which options the peers' figures were measured with."""
    header = ["work", "unit", OWN, "floor", *peers, "ratio to the best", "target"]
    lines = [_line(header), _line(["---"] * len(header))]
    notes: dict[str, list[str]] = {}
    for row in rows:
        own = samples.best(row, OWN)
        if own is None:
            continue
        cells = [row.title, row.unit, own.text(), _floor_text(own, row, floors)]
        for peer in peers:
            summary = samples.best(row, peer)
            cells.append("" if summary is None else summary.text())
            if summary is not None and summary.variant:
                notes.setdefault(f"{peer} `{summary.variant}`", []).append(row.title)
        best = best_peer(samples, row, peers)
        cells.append("" if best is None else _ratio_text(own, best, row))
        cells.append(_target_text(row))
        lines.append(_line(cells))
    options = [f"- {option}: {'; '.join(titles)}" for option, titles in notes.items()]
    return "\n".join([*lines, "", *options])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _floor_text(own: Summary, row: Row, floors: Mapping[tuple[str, str], float]) -> str:
    floor = floors.get((row.job, row.figure))
    if floor is None:
        return ""
    share = floor_share(own.median, floor, row.is_higher_better)
    return f"{number(floor)}, {share:.0%} reached"


def _ratio_text(own: Summary, best: tuple[str, Summary], row: Row) -> str:
    peer, summary = best
    return f"{ratio(own.median, summary.median, row.is_higher_better):.2f} ({peer})"


def _target_text(row: Row) -> str:
    parts = []
    if row.target is not None:
        parts.append(f"{row.target:g}x")
    if row.floor_target is not None:
        parts.append(f"{row.floor_target:.0%} of the floor")
    if row.limit is not None:
        parts.append(f"under {row.limit:g} {row.unit}")
    return ", ".join(parts)
