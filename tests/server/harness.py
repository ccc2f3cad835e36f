"""A real server in the test's process: sockets, application, engine, scheduler; only the model is
scripted (see scripted_runner)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from llmserve.api.app import ModelInfo, make_app
from llmserve.api.runner import ApiRunner
from llmserve.config import CacheConfig, FrontendConfig, SchedulerConfig
from llmserve.core import KVCacheGroup, KVCacheSpec
from llmserve.engine import AsyncEngine, Engine, EngineStats
from llmserve.scheduler import Scheduler
from llmserve.tokenizer import ChatTemplate
from tests.byte_tokenizer import ByteTokenizer
from tests.server.scripted_runner import BOS_ID, VOCAB_SIZE, ScriptedRunner

SPEC = KVCacheSpec((KVCacheGroup((0,)),), 16, num_kv_heads=1, head_dim=1, dtype="float32")
NUM_BLOCKS = 512
MAX_MODEL_LEN = 512
MODEL = "scripted"
KEY = "sk-test"

# Contents alone, so that a conversation's last message is what the runner repeats.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('this template takes no system turn') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
    "{% if tools %} TOOLS {% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}{{ suffix }}{% endif %}"
)


class BosTokenizer(ByteTokenizer):
    """ByteTokenizer with a BOS before every text."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS_ID

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text)
        return [BOS_ID, *ids] if add_special_tokens else ids

    def token_bytes(self, token_id: int) -> bytes:
        return b"<bos>" if token_id == BOS_ID else super().token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


@dataclass
class Answer:
    """A response read to its end."""

    status: int
    headers: CIMultiDictProxy[str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, its shape checked."""
        assert self.status >= 400, self.raw
        assert self.headers["Content-Type"].startswith("application/json")
        assert self.headers["X-Request-Id"]
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def frames(self) -> list[str]:
        """The data of each event; the bytes are checked against the wire format."""
        assert self.status == 200, self.raw
        blocks = self.raw.decode().split("\n\n")
        assert blocks.pop() == ""
        events = [block for block in blocks if not block.startswith(": ")]
        assert all(block.startswith("data: ") and "\n" not in block for block in events)
        return [block.removeprefix("data: ") for block in events]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The chunks of a stream that ended with [DONE]."""
        frames = self.frames
        assert frames[-1] == "[DONE]"
        assert "[DONE]" not in frames[:-1]
        return [json.loads(frame) for frame in frames[:-1]]


@dataclass
class Served:
    """A server that is up, and its parts."""

    url: str
    engine: AsyncEngine
    scheduler: Scheduler
    runner: ScriptedRunner
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def host_port(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def request(self, method: str, path: str, **kwargs: Any) -> Answer:
        async with self.session.request(method, self.url + path, **kwargs) as response:
            raw = await response.read()
            return Answer(response.status, response.headers, raw)

    async def post(self, path: str, body: Any, **kwargs: Any) -> Answer:
        return await self.request("POST", path, json=body, **kwargs)

    async def get(self, path: str, **kwargs: Any) -> Answer:
        return await self.request("GET", path, **kwargs)

    async def complete(self, prompt: Any = "abc", **fields: Any) -> Answer:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return await self.post("/v1/completions", body)

    async def chat(self, text: str = "abc", **fields: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **fields}
        return await self.post("/v1/chat/completions", body)

    async def completed(self, prompt: Any = "abc", **fields: Any) -> dict[str, Any]:
        answer = await self.complete(prompt, **fields)
        assert answer.status == 200, answer.raw
        return answer.json

    async def chatted(self, text: str = "abc", **fields: Any) -> dict[str, Any]:
        answer = await self.chat(text, **fields)
        assert answer.status == 200, answer.raw
        return answer.json

    async def wait_idle(self) -> None:
        """Until the engine has nothing left; fails after 30 s."""
        await wait_for(lambda: not self.engine.num_unfinished and not self.scheduler.num_running)


async def wait_for(condition: Callable[[], bool]) -> None:
    """Fails after 30 s."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true")


def make_parts(
    *, model_len: int = MAX_MODEL_LEN, scheduling_policy: str = "fcfs"
) -> tuple[AsyncEngine, Scheduler, ScriptedRunner]:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=64, max_num_batched_tokens=128, scheduling_policy=scheduling_policy
        ),
        CacheConfig(block_size=16),
        SPEC,
        num_blocks=NUM_BLOCKS,
        max_model_len=model_len,
    )
    runner = ScriptedRunner()
    stats = EngineStats(model_name=MODEL, max_model_len=model_len)
    engine = Engine(scheduler, BosTokenizer(), stats, log_requests=False)
    return AsyncEngine(engine, runner, stats, max_model_len=model_len), scheduler, runner


@contextlib.asynccontextmanager
async def serving(
    *,
    generation_config: dict[str, Any] | None = None,
    scheduling_policy: str = "fcfs",
    names: tuple[str, ...] = (MODEL, "org/alias"),
    seed: int | None = None,
    body_timeout_s: float = 60.0,
    template: str = TEMPLATE,
    **frontend: Any,
) -> AsyncIterator[Served]:
    """A server on a free port. Checks at the end that nothing is left running."""
    engine, scheduler, runner = make_parts(scheduling_policy=scheduling_policy)
    config = FrontendConfig(**{"port": 0, **frontend})
    model = ModelInfo(
        names=names,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        generation_config=generation_config or {},
        scheduling_policy=scheduling_policy,
    )
    app = make_app(
        engine,
        BosTokenizer(),
        ChatTemplate(template, variables=config.template_variables()),
        config,
        model,
        seed=seed,
        body_timeout_s=body_timeout_s,
    )
    app_runner = ApiRunner(app)
    await engine.start()
    await app_runner.setup()
    site = web.TCPSite(app_runner, "127.0.0.1", 0)
    await site.start()
    host, port = app_runner.addresses[0][:2]
    headers = {"Authorization": f"Bearer {config.api_key[0]}"} if config.api_key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        served = Served(f"http://{host}:{port}", engine, scheduler, runner, session, headers)
        try:
            yield served
            runner.release()
            await served.wait_idle()
        finally:
            runner.release()
            await app_runner.cleanup()
            await engine.shutdown()
