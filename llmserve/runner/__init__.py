"""What runs in the runner thread: a step of the model and the sampling after it."""

from llmserve.runner.load import LoadedRunner, load_runner
from llmserve.runner.memory import MemoryBudget
from llmserve.runner.runner import ModelRunner

__all__ = ["LoadedRunner", "MemoryBudget", "ModelRunner", "load_runner"]
