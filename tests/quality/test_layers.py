"""Imports point down only: cli -> server -> api -> engine -> (scheduler | executor) -> ..."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "llmserve"

BASE = {
    "core",
    "config",
    "errors",
    "env",
    "log",
    "files",
    "listener",
    "process_memory",
    "sd_notify",
    "torch_import",
    "__init__",
}
MAY_IMPORT = {
    "__main__": {"cli"},
    "cli": {"server", "loading"},
    "server": {"api", "engine", "scheduler", "kvcache", "executor", "loading", "tokenizer"},
    "loading": {"runner", "tokenizer"},
    "api": {"engine", "tokenizer", "grammar", "tool_parsers", "reasoning_parsers"},
    "engine": {"scheduler", "executor", "tokenizer"},
    "scheduler": {"kvcache"},
    "kvcache": {"_block_allocator"},
    "executor": {"runner"},
    "runner": {"models", "layers", "kernels"},
    "models": {"layers", "kernels"},
    "layers": {"kernels"},
    "kernels": {"_cpu_kernels", "_cuda_kernels"},
    "tokenizer": set(),
    "grammar": set(),
    "tool_parsers": {"grammar"},
    "reasoning_parsers": set(),
    **{name: set() for name in BASE},
}
MAY_IMPORT_TORCH = {"executor", "runner", "models", "layers", "kernels"}


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path) -> set[str]:
    """Every module named in an import statement, in functions and under TYPE_CHECKING too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_no_layer_above_it(path: Path) -> None:
    layer = layer_of(path)
    allowed = MAY_IMPORT[layer] | BASE | {layer}
    imported = {
        name.split(".")[1]
        for name in imported_modules(path)
        if name.startswith("llmserve.") and name.split(".")[1] != "__version__"
    }

    assert imported <= allowed, f"{layer} must not import {sorted(imported - allowed)}"


@pytest.mark.parametrize("path", module_files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_is_imported_by_compute_layers_only(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}

    assert "torch" not in roots or layer_of(path) in MAY_IMPORT_TORCH
