"""What the servers are asked: the same requests for all, by one client, over HTTP.

Prompts are random token ids, different in each request and each run, so that no prefix cache helps
where none is measured. Every request streams and forbids an early end; the usage object must show
the length that was asked for. A connection serves one completion, as some servers close theirs
after a stream.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from bench.peers.http_load import requests_per_s
from bench.peers.process import ServerProcess

_BOS = 2
_TOKEN_IDS = (1000, 30000)
_TIMEOUT_S = 900.0
_PSS_INTERVAL_S = 0.25
_FRONT_END_CONNECTIONS = 32
_FRONT_END_S = 3.0

Figures = dict[str, float]


@dataclass(slots=True)
class Answer:
    """Times are time.perf_counter(), seconds; one per chunk that carried text."""

    start: float
    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.chunks[0] - self.start


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: `concurrency` requests are in flight until `num_requests` were answered."""

    concurrency: int
    num_requests: int
    prompt_len: int
    output_len: int
    shared_len: int = 0  # leading tokens that all prompts have in common


class Client:
    """Talks to one server."""

    def __init__(self, session: aiohttp.ClientSession, server: ServerProcess, seed: int) -> None:
        self._session = session
        self.server = server
        self._random = random.Random(seed)
        self._model = ""

    async def wait_ready(self) -> None:
        await self.server.wait_ready(self._session)
        async with self._session.get(self.server.url + "/v1/models") as response:
            self._model = (await response.json())["data"][0]["id"]

    async def complete(self, prompt: list[int], output_len: int) -> Answer:
        """One streamed completion. Raises RuntimeError if it is not as long as asked for."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.perf_counter())
        url = self.server.url + "/v1/completions"
        async with self._session.post(url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    read_event(json.loads(line[6:]), answer)
        if answer.num_tokens != output_len or not answer.chunks:
            raise RuntimeError(f"{answer.num_tokens} tokens came instead of {output_len}")
        return answer

    def prompt(self, length: int, shared: list[int] | None = None) -> list[int]:
        """`shared` (or a BOS) and random ids, `length` tokens in all."""
        begin = shared or [_BOS]
        return begin + [self._random.randrange(*_TOKEN_IDS) for _ in range(length - len(begin))]

    async def closed_loop(self, load: Load) -> tuple[list[Answer], float]:
        """The answers, and the seconds until the last one."""
        shared = self.prompt(load.shared_len) if load.shared_len else None
        if shared is not None:
            # Its first computation is what the cache saves; it is not part of the figure.
            await self.complete(self.prompt(load.prompt_len, shared), 1)
        prompts = iter([self.prompt(load.prompt_len, shared) for _ in range(load.num_requests)])
        answers: list[Answer] = []

        async def worker() -> None:
            for prompt in prompts:
                answers.append(await self.complete(prompt, load.output_len))

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(load.concurrency)))
        return answers, time.perf_counter() - begin


def read_event(event: dict[str, object], answer: Answer) -> None:
    choices = event.get("choices")
    if isinstance(choices, list) and any(choice.get("text") for choice in choices):
        answer.chunks.append(time.perf_counter())
    usage = event.get("usage")
    if isinstance(usage, dict):
        answer.num_tokens = usage["completion_tokens"]


def load_figures(answers: list[Answer], wall_s: float) -> Figures:
    """Throughput of output tokens, and latencies in milliseconds."""
    gaps = sorted(
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.chunks, answer.chunks[1:], strict=False)
    )
    return {
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / wall_s,
        "ttft_p50_ms": 1e3 * statistics.median(answer.ttft_s for answer in answers),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * gaps[math.ceil(0.99 * len(gaps)) - 1],
    }


async def serving(client: Client, concurrency: int) -> Figures:
    load = Load(concurrency, 2 * concurrency, prompt_len=256, output_len=128)
    return load_figures(*await client.closed_loop(load))


async def shared_prefix(client: Client) -> Figures:
    load = Load(4, 16, prompt_len=1088, output_len=32, shared_len=1024)
    figures = load_figures(*await client.closed_loop(load))
    return {"ttft_p50_ms": figures["ttft_p50_ms"]}


async def single(client: Client) -> Figures:
    """One request at a time: 512 tokens of prompt, then 128 of output behind a short prompt."""
    prefill_s = [(await client.complete(client.prompt(512), 1)).ttft_s for _ in range(3)]
    answer = await client.complete(client.prompt(8), 129)
    return {
        "prefill_tokens_per_s": 512 / statistics.median(prefill_s),
        "decode_tokens_per_s": 128 / (answer.chunks[-1] - answer.chunks[0]),
    }


async def memory(client: Client) -> Figures:
    """The most that the server's processes held while they served 8 sequences."""
    samples = [client.server.pss_mb()]
    load = Load(8, 8, prompt_len=256, output_len=128)
    task = asyncio.create_task(client.closed_loop(load))
    while not task.done():
        await asyncio.wait([task], timeout=_PSS_INTERVAL_S)
        samples.append(client.server.pss_mb())
    await task
    return {"pss_mb": max(samples)}


async def front_end(client: Client) -> Figures:
    """Requests that need no model."""
    return {
        f"{name}_requests_per_s": await requests_per_s(
            client.server.url, path, _FRONT_END_CONNECTIONS, _FRONT_END_S
        )
        for name, path in (("health", "/health"), ("models", "/v1/models"))
    }


WORKLOADS: dict[str, Callable[[Client], Awaitable[Figures]]] = {
    "memory": memory,
    "front-end": front_end,
    "single": single,
    "prefix": shared_prefix,
    "serving-8": lambda client: serving(client, 8),
    "serving-32": lambda client: serving(client, 32),
}


async def measure_server(server: ServerProcess, workloads: list[str], seed: int) -> Figures:
    """Figures named `workload/figure`; the start is always among them."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(session, server, seed)
        await client.wait_ready()
        answer = await client.complete(client.prompt(8), 4)
        figures = {"start/first_token_s": answer.chunks[0] - server.started}
        for name, workload in WORKLOADS.items():
            if name in workloads:
                result = await workload(client)
                figures |= {f"{name}/{figure}": value for figure, value in result.items()}
    return figures
