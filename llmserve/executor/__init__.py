"""Where a step runs."""

from llmserve.executor.uniproc import UniprocExecutor

__all__ = ["UniprocExecutor"]
