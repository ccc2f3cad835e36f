"""Anthropic's Messages API: /v1/messages and its token counter, translated to and from chat."""

from llmserve.api.anthropic.handlers import add_messages_routes

__all__ = ["add_messages_routes"]
