"""Figures of a check: a row each with the bound and the target beside it, and all of them as JSON.

A bound is what the device could give at most, from the rates that roofs.py measured on it. The
JSON is written anew with each figure, so that a process that is stopped leaves what it has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Figures:
    """Rows of one table. path: of the JSON; None keeps none. has_targets: whether figures of this
    device are held against the targets."""

    def __init__(self, path: Path | None, *, has_targets: bool = True) -> None:
        self._path = path
        self._has_targets = has_targets
        self.rows: dict[str, dict[str, Any]] = {}

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        bound: float | None = None,
        least_share: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> None:
        """Prints and keeps a figure.

        bound: the highest possible value. least_share: the target as a share of it. most: the
        target for a value that should be low. Without a bound there is no share and no verdict on
        one.
        """
        row: dict[str, Any] = {"value": _rounded(value), "unit": unit}
        words = [f"{name:<58} {_text(value):>11} {unit:<9}"]
        if bound is not None:
            share = value / bound
            row |= {"bound": _rounded(bound), "share": round(share, 4)}
            words.append(f"{share:6.1%} of {_text(bound)}")
            if least_share is not None and self._has_targets:
                row |= {"target": f">= {least_share:.0%}", "met": share >= least_share}
        if most is not None and self._has_targets:
            row |= {"target": f"< {most:g}", "met": value < most}
        if "target" in row:
            words.append(f"target {row['target']}: {'met' if row['met'] else 'missed'}")
        if note:
            row["note"] = note
            words.append(note)
        print("  ".join(words), flush=True)
        self.rows[name] = row
        if self._path is not None:
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self.rows))
            draft.replace(self._path)


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """The figures of another process; none where it left none."""
    if path is None or not path.exists():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return rows


def value_of(rows: dict[str, dict[str, Any]], name: str) -> float | None:
    return float(rows[name]["value"]) if name in rows else None


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
