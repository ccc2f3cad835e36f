"""Asks a server through litellm and prints what it saw as JSON.

A process of its own, since litellm leaves event loops and sockets open. Arguments: URL, model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


def error_of(**ask: Any) -> str:
    try:
        litellm.completion(**ask)
    except Exception as error:
        return type(error).__name__
    return ""


def main(url: str, model: str) -> None:
    ask: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Name a river."}],
        "temperature": 0,
        "max_tokens": 10,
        "num_retries": 0,
    }
    whole = litellm.completion(**ask)
    chunks = list(litellm.completion(**ask, stream=True))
    asynchronous = asyncio.run(litellm.acompletion(**ask))
    messages = {**ask, "model": f"anthropic/{model}", "api_base": url}
    seen = {
        "whole": text_of(whole),
        "num_tokens": whole.usage.completion_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "asynchronous": text_of(asynchronous),
        "by_the_messages_api": text_of(litellm.completion(**messages)),
        "unknown_model": error_of(**{**ask, "model": "openai/none-such"}),
        "too_long": error_of(**{**ask, "max_tokens": 100_000}),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
