"""The engine: from validated requests to streams of text."""

from llmserve.engine.async_engine import AsyncEngine, EngineState, RequestStream
from llmserve.engine.engine import Engine, Executor
from llmserve.engine.stats import EngineStats

__all__ = ["AsyncEngine", "Engine", "EngineState", "EngineStats", "Executor", "RequestStream"]
