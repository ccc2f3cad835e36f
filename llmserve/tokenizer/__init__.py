"""Text <-> token ids, and conversations -> text. Knows model files, but neither HTTP nor engine."""

from llmserve.tokenizer.chat_template import ChatTemplate, SlowTemplateError
from llmserve.tokenizer.chunked import ChunkedEncoder
from llmserve.tokenizer.load import encode_chat, load_chat_template, load_tokenizer
from llmserve.tokenizer.template_budget import shared_limit
from llmserve.tokenizer.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatTemplate",
    "ChunkedEncoder",
    "SlowTemplateError",
    "StreamDecoder",
    "Tokenizer",
    "encode_chat",
    "load_chat_template",
    "load_tokenizer",
    "shared_limit",
]
