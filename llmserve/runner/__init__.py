"""What runs in the runner thread: a step of the model and the sampling after it."""

from llmserve.runner.load import LoadedRunner, for_device, load_runner
from llmserve.runner.memory import MemoryBudget
from llmserve.runner.runner import ModelRunner

__all__ = ["LoadedRunner", "MemoryBudget", "ModelRunner", "for_device", "load_runner"]
