"""llmserve: an OpenAI-compatible LLM inference server in one asyncio process."""

__version__ = "0.1.0"
__all__ = ["__version__"]
