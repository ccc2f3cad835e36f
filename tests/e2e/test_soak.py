"""Many requests, many clients that leave: nothing is lost, nothing leaks, nothing blocks."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, running_server

NUM_REQUESTS = 500


async def complete(client: httpx.AsyncClient, seed: int) -> tuple[int, int]:
    """One whole request; returns (tokens asked for, tokens that came)."""
    rng = random.Random(seed)
    # Long ones outgrow the blocks that they started with, and the cache is full by then.
    num_tokens = rng.randint(1, 12) if rng.random() < 0.9 else 80
    body = {
        "prompt": [rng.randrange(1000, 30000) for _ in range(rng.randint(1, 60))],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": rng.choice([0, 1]),
    }
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return num_tokens, answer.json()["usage"]["completion_tokens"]


async def leave_early(client: httpx.AsyncClient, seed: int) -> None:
    """A request whose client goes away at a random moment, streaming or not."""
    rng = random.Random(seed)
    body = {
        "prompt": [rng.randrange(1000, 30000) for _ in range(rng.randint(1, 60))],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
        "n": rng.choice([1, 1, 3]),
    }
    try:
        async with asyncio.timeout(rng.uniform(0.0, 0.8)):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
    except TimeoutError:
        pass


async def run_all(url: str) -> list[tuple[int, int]]:
    limits = httpx.Limits(max_connections=64)
    gate = asyncio.Semaphore(48)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

        async def one(seed: int) -> tuple[int, int] | None:
            async with gate:
                if seed % 3 == 0:
                    await leave_early(client, seed)
                    return None
                return await complete(client, seed)

        results = await asyncio.gather(*(one(seed) for seed in range(NUM_REQUESTS)))
    return [result for result in results if result is not None]


def wait_until_idle(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0:
            return
        time.sleep(0.2)
    raise AssertionError("requests are still running after their clients left")


@pytest.mark.timeout(600)
def test_500_requests_a_third_cut_off_leave_nothing_behind() -> None:
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "40")
    with running_server(*flags, "--disable-log-requests") as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hi"}, timeout=60)
        num_fds = server.num_fds()

        finished = asyncio.run(run_all(server.url))

        wait_until_idle(server)
        assert len(finished) == sum(seed % 3 != 0 for seed in range(NUM_REQUESTS))
        assert all(asked == got for asked, got in finished)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.metric("num_preemptions_total") > 0, "the cache was not small enough"
        time.sleep(0.5)
        assert server.num_fds() <= num_fds + 2
        assert "Traceback" not in server.output
        assert "Task was destroyed" not in server.output


def test_running_decodes_get_tokens_while_a_long_prompt_is_prefilled() -> None:
    flags = ("--max-model-len", "8192", "--max-num-batched-tokens", "256")
    with running_server(*flags) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        body = {"prompt": "Count:", "max_tokens": 400, "ignore_eos": True, "stream": True}
        times: list[float] = []
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            while len(times) < 5:
                if next(lines).startswith("data: "):
                    times.append(time.monotonic())
            with httpx.Client(base_url=server.url, timeout=120) as other:
                spans: list[float] = []

                def prefill() -> None:
                    prompt = [random.randrange(1000, 30000) for _ in range(4000)]
                    begin = time.monotonic()
                    other.post(
                        "/v1/completions", json={"prompt": prompt, "max_tokens": 1}
                    ).raise_for_status()
                    spans.extend((begin, time.monotonic()))

                import threading

                thread = threading.Thread(target=prefill)
                thread.start()
                for line in lines:
                    if line.startswith("data: "):
                        times.append(time.monotonic())
                    if not thread.is_alive():
                        break
                thread.join()

    inside = [t for t in times if spans[0] < t < spans[1]]
    # 4,000 tokens in chunks of at most 255 are 16 steps; the stream gets a token in each.
    assert len(inside) >= 14


def test_nothing_blocks_the_event_loop_while_a_megabyte_is_tokenized(
    demo_server: ServerProcess,
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000

    async def probe(client: httpx.AsyncClient, done: asyncio.Event) -> float:
        worst = 0.0
        while not done.is_set():
            begin = time.perf_counter()
            await client.get("/ping")
            worst = max(worst, time.perf_counter() - begin)
        return worst

    async def longest_share(client: httpx.AsyncClient) -> float:
        """The longest wait for an answer, as a share of the time that a text takes."""
        done = asyncio.Event()
        probing = asyncio.create_task(probe(client, done))
        begin = time.perf_counter()
        answer = await client.post("/tokenize", json={"prompt": text})
        tokenizing_s = time.perf_counter() - begin
        assert answer.status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": text})
        assert refused.status_code == 400
        done.set()
        return await probing / tokenizing_s

    async def run() -> list[float]:
        async with httpx.AsyncClient(base_url=demo_server.url, timeout=120) as client:
            await client.get("/ping")
            return [await longest_share(client) for _ in range(3)]

    shares = asyncio.run(run())

    # The client shares two cores with the server and other tests, which may delay the probes of one
    # text; a server that is blocked is so each time.
    assert min(shares) < 0.5
