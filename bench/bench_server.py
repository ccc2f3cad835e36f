"""Serving speed of a server process: throughput, TTFT and ITL over HTTP, in a closed loop.

Starts `python -m llmserve` with the given flags, keeps `--concurrency` streamed completions in
flight, and prints the figures of each concurrency; with `--rounds` several times, each with a new
server, and their medians. Prompts are random token ids, all different, so the prefix cache does not
help. Tokens are counted by the server's usage object, which must show the length that was asked
for. TTFT ends at the first chunk with text; ITL is the gap between two such chunks.

    python bench/bench_server.py --concurrency 1 8 32 --rounds 5 -- --max-model-len 2048
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp


@dataclass
class Answer:
    """Times are time.perf_counter(), seconds."""

    start: float
    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    answer = Answer(time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if any(choice["text"] for choice in event["choices"]):
                answer.chunks.append(time.perf_counter())
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
    assert answer.num_tokens == body["max_tokens"], "the answer is shorter than asked for"
    return answer


async def run(
    url: str, concurrency: int, num_requests: int, prompt_len: int, output_len: int, seed: int
) -> dict[str, float]:
    rng = random.Random(seed)
    bodies = iter(
        [
            {
                "prompt": [2, *(rng.randrange(1000, 30000) for _ in range(prompt_len - 1))],
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for _ in range(num_requests)
        ]
    )
    answers: list[Answer] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def worker() -> None:
            for body in bodies:
                answers.append(await complete(session, url, body))

        begin = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        wall = time.perf_counter() - begin
    ttft = sorted(1e3 * (answer.chunks[0] - answer.start) for answer in answers)
    itl = sorted(
        1e3 * (b - a)
        for answer in answers
        for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)
    )
    return {
        "output_tokens_per_s": sum(answer.num_tokens for answer in answers) / wall,
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p99_ms": ttft[math.ceil(0.99 * len(ttft)) - 1],
        "itl_p50_ms": statistics.median(itl),
        "itl_p99_ms": itl[math.ceil(0.99 * len(itl)) - 1],
    }


def memory_mb(pid: int, field: str) -> float:
    """VmRSS: resident now; VmHWM: at most so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/{pid}/status has no {field}")


def first_answer(flags: list[str]) -> tuple[subprocess.Popen[str], str, float]:
    """Starts a server; returns it, its URL and the seconds to its first answered request."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "llmserve", "--port", "0", "--disable-log-requests", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        print(line, end="")
        if line.startswith("serving "):
            break
    else:
        raise SystemExit("the server did not start")
    url = next(word for word in line.split() if word.startswith("http"))
    try:
        asyncio.run(run(url, 1, 1, 8, 4, seed=0))
    except BaseException:
        server.kill()
        raise
    return server, url, time.perf_counter() - begin


def measure(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One server, started anew: its start, its memory, and every concurrency in turn."""
    server, url, start_s = first_answer(args.flags)
    try:
        figures = {"start_to_first_answer_s": start_s, "idle_mb": memory_mb(server.pid, "VmRSS")}
        for concurrency in args.concurrency:
            num_requests = concurrency * args.requests_per_slot
            row = asyncio.run(
                run(
                    url,
                    concurrency,
                    num_requests,
                    args.prompt_len,
                    args.output_len,
                    seed=seed + concurrency,
                )
            )
            figures |= {f"c{concurrency}_{name}": value for name, value in row.items()}
            figures[f"c{concurrency}_peak_mb"] = memory_mb(server.pid, "VmHWM")
        return figures
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests-per-slot", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="servers started one after another")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    rounds = []
    for index in range(args.rounds):
        rounds.append(measure(args, seed=1000 * index))
        print({name: round(value, 1) for name, value in rounds[-1].items()}, flush=True)
    print(f"{'median of ' + str(len(rounds)):<28} {'median':>9} {'min':>9} {'max':>9}")
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        print(f"{name:<28} {statistics.median(values):9.1f} {min(values):9.1f} {max(values):9.1f}")


if __name__ == "__main__":
    main()
