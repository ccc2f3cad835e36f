"""The engine: from validated requests to streams of text."""

from llmserve.engine.async_engine import AsyncEngine, EngineState, RequestStream
from llmserve.engine.engine import Engine
from llmserve.engine.stats import EngineStats
from llmserve.engine.step_threads import Executor

__all__ = ["AsyncEngine", "Engine", "EngineState", "EngineStats", "Executor", "RequestStream"]
