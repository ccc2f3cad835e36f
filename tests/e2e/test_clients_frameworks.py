"""Frameworks that talk to OpenAI-compatible servers: langchain-openai, litellm, instructor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.e2e.server_process import ServerProcess

# These packages warn about their own use of each other.
pytestmark = pytest.mark.filterwarnings("ignore")


class Fruit(BaseModel):
    """A fruit."""

    name: Literal["apple", "plum"]
    is_ripe: bool


class Anything(BaseModel):
    """Any JSON object."""

    model_config = ConfigDict(extra="allow")


@pytest.fixture(scope="module")
def model(demo_server: ServerProcess) -> str:
    return str(httpx.get(f"{demo_server.url}/v1/models").json()["data"][0]["id"])


@pytest.fixture
def chat(demo_server: ServerProcess, model: str) -> Any:
    """A ChatOpenAI."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=model,
        base_url=f"{demo_server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_tokens=100,  # type: ignore[call-arg]
        max_retries=0,
        stream_usage=True,
    )


def test_langchain_invokes_and_streams(chat: Any) -> None:
    short = chat.bind(max_tokens=10)
    whole = short.invoke("Name a river.")
    chunks = list(short.stream("Name a river."))

    assert "".join(chunk.content for chunk in chunks) == whole.content != ""
    assert whole.usage_metadata["output_tokens"] == 10
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 10


def test_langchain_binds_tools(chat: Any) -> None:
    bound = chat.bind_tools([Fruit], tool_choice="any", strict=True, parallel_tool_calls=False)
    whole = bound.invoke("A fruit?")
    streamed = None
    for chunk in bound.stream("A fruit?"):
        streamed = chunk if streamed is None else streamed + chunk

    assert whole.tool_calls[0]["name"] == "Fruit"
    assert Fruit(**whole.tool_calls[0]["args"])
    assert streamed is not None
    assert streamed.tool_calls[0]["args"] == whole.tool_calls[0]["args"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Fruit, method=method).invoke("A fruit?"), Fruit)


def test_langchain_uses_the_responses_api(
    chat: Any, demo_server: ServerProcess, model: str
) -> None:
    from langchain_openai import ChatOpenAI

    responses = ChatOpenAI(
        model=model,
        base_url=f"{demo_server.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_tokens=10,  # type: ignore[call-arg]
        max_retries=0,
        use_responses_api=True,
    )

    answer = responses.invoke("Name a river.")

    assert answer.text == chat.bind(max_tokens=10).invoke("Name a river.").content


def test_litellm_completes_streams_and_maps_errors(demo_server: ServerProcess, model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.litellm_script", demo_server.url, model],
        # Else importing it asks the network for prices.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])

    assert seen["whole"] == seen["streamed"] == seen["asynchronous"] != ""
    assert seen["by_the_messages_api"] == seen["whole"]
    assert seen["num_tokens"] == 10
    assert seen["unknown_model"] == "NotFoundError"
    assert seen["too_long"] in ("BadRequestError", "ContextWindowExceededError")


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "JSON"])
def test_instructor_gives_an_object(demo_server: ServerProcess, model: str, mode: str) -> None:
    import instructor

    # JSON mode puts the schema into the prompt alone, which this model does not heed.
    wanted: type[BaseModel] = Anything if mode == "JSON" else Fruit
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none") as api:
        client = instructor.from_openai(api, mode=getattr(instructor.Mode, mode))
        made = client.create(
            model=model,
            messages=[{"role": "user", "content": "A fruit?"}],
            response_model=wanted,
            max_retries=0,
            max_tokens=400,
            temperature=1,  # greedily it may write one number for ever
            seed=1,
        )

    assert isinstance(made, wanted)
