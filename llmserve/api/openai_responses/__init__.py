"""OpenAI's Responses API: /v1/responses and what is under it, translated to and from chat."""

from llmserve.api.openai_responses.handlers import add_responses_routes

__all__ = ["add_responses_routes"]
