"""Plain HTTP: errors of every kind in one shape, request ids, keys, CORS, broken clients."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from llmserve.engine import EngineState
from tests.server.harness import KEY, MODEL, Answer, Served, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COMPLETION = {"model": MODEL, "prompt": "ab", "max_tokens": 2, "temperature": 0}
ORIGIN = {"Origin": "http://app.example"}
PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def raw(served: Served, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Sends bytes on a connection of their own; reads until the server closes or is silent."""
    reader, writer = await asyncio.open_connection(*served.host_port)
    writer.write(data)
    await writer.drain()
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/pooling", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("GET", "/v1/models/none-such", 404),
    ],
)
async def test_routing_errors_have_the_error_shape(
    served: Served, method: str, path: str, status: int
) -> None:
    answer = await served.request(method, path)

    assert answer.status == status
    assert answer.error["type"] == "invalid_request_error"
    if status == 405:
        assert answer.headers["Allow"]


async def test_every_answer_carries_a_request_id(served: Served) -> None:
    answers = [await served.get("/health"), await served.get("/nope"), await served.complete()]

    ids = {answer.headers["X-Request-Id"] for answer in answers}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("given", "is_kept"), [("abc-123", True), ("x" * 129, False), ("a b", False), ("<b>", False)]
)
async def test_clients_request_id_is_kept_if_harmless(
    served: Served, given: str, is_kept: bool
) -> None:
    answer = await served.get("/health", headers={"X-Request-Id": given})

    assert (answer.headers["X-Request-Id"] == given) is is_kept


async def test_bug_is_a_500_without_internals(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.engine, "generate", explode)

    answer = await served.complete()

    assert answer.status == 500
    assert answer.error["type"] == "internal_server_error"
    assert answer.headers["X-Request-Id"] in answer.error["message"]
    assert b"secret" not in answer.raw
    assert b"Traceback" not in answer.raw
    assert "secret detail" in caplog.text


async def test_failed_step_is_a_500_and_the_server_lives_on(served: Served) -> None:
    served.runner.fail_next = True

    failed = await served.complete()

    assert (failed.status, failed.error["type"]) == (500, "internal_server_error")
    assert (await served.completed())["usage"]["completion_tokens"] == 8


async def test_draining_and_dead_servers_answer_503(served: Served) -> None:
    for state, retries in ((EngineState.DRAINING, None), (EngineState.DEAD, "false")):
        served.engine.state = state

        for answer in (await served.complete(), await served.chat(stream=True)):
            assert answer.status == 503
            assert answer.error["type"] == "service_unavailable"
            assert answer.headers["Retry-After"]
            assert answer.headers.get("X-Should-Retry") == retries
    served.engine.state = EngineState.READY


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("nonsense", 415),
    ],
)
async def test_content_types(served: Served, content_type: str, status: int) -> None:
    answer = await served.request(
        "POST", COMPLETIONS, data=json.dumps(COMPLETION), headers={"Content-Type": content_type}
    )

    assert answer.status == status
    assert answer.headers["Content-Type"].startswith("application/json")
    if status == 415:
        assert "application/json" in answer.error["message"]


async def test_absent_content_type_is_a_415(served: Served) -> None:
    data = json.dumps(COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data)

    status, _, body = await raw(served, head + data)

    assert status == 415
    assert json.loads(body)["error"]["message"]


async def test_connection_is_reused_after_errors_and_streams(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.host_port)
    bodies = [
        (json.dumps(COMPLETION), 200),
        ('{"bad', 400),
        (json.dumps({**COMPLETION, "model": "none"}), 404),
        (json.dumps({**COMPLETION, "stream": True}), 200),
        (json.dumps(COMPLETION), 200),
    ]

    for text, status in bodies:
        data = text.encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode().lower()
        assert head.startswith(f"http/1.1 {status}")
        assert "connection: close" not in head
        if "transfer-encoding: chunked" in head:
            await reader.readuntil(b"0\r\n\r\n")
        else:
            length = int(head.split("content-length: ")[1].split("\r\n")[0])
            await reader.readexactly(length)
    writer.close()


async def test_chunked_bodies_and_expect_continue_are_served(served: Served) -> None:
    data = json.dumps(COMPLETION).encode()
    reader, writer = await asyncio.open_connection(*served.host_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"
    )

    interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    for start in range(0, len(data), 7):
        piece = data[start : start + 7]
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")
    final = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    writer.close()

    assert interim.startswith(b"HTTP/1.1 100")
    assert final.startswith(b"HTTP/1.1 200")


async def test_half_sent_bodies_block_nobody(served: Served) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n"
    )
    writers = []
    for i in range(40):
        _, writer = await asyncio.open_connection(*served.host_port)
        writer.write(head + (b'{"model":' if i % 2 else b""))
        writers.append(writer)

    answer = await asyncio.wait_for(served.complete(), 30)

    assert answer.status == 200
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("before", [b"", b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_connection_ends_when_the_head_of_a_request_does_not_come(before: bytes) -> None:
    async with serving(body_timeout_s=0.2) as served:
        reader, writer = await asyncio.open_connection(*served.host_port)
        writer.write(before)
        if before:
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: ")

        rest = await asyncio.wait_for(reader.read(), 30)

    assert rest in (b"", b'{"status":"ok"}')
    writer.close()


async def test_body_that_never_comes_is_a_408() -> None:
    async with serving(body_timeout_s=0.05) as served:
        status, headers, body = await raw(
            served,
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{",
        )

    assert status == 408
    assert json.loads(body)["error"]["message"]
    assert headers["x-request-id"]


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Bomb: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(5000)) + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
    ],
    ids=["field", "fields", "line", "tls", "version", "nonsense", "negative", "lengths", "space"],
)
async def test_malformed_http_is_a_400_in_the_error_shape(served: Served, data: bytes) -> None:
    status, headers, body = await raw(served, data)

    assert status == 400
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert (await served.get("/health")).status == 200


async def test_key_is_needed_everywhere_but_for_probes() -> None:
    async with serving(api_key=("sk-other", KEY)) as served:
        paths = [
            *(("POST", path) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize")),
            *(("GET", path) for path in ("/v1/models", "/v1/models/x", "/version", "/load")),
            *(("GET", path) for path in ("/metrics", "/nope", "/health/", "//health")),
        ]
        wrong = [
            "",
            "Bearer",
            "Bearer wrong",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            KEY,
            f"Basic {KEY}",
            "Bearer \xfc",
        ]
        for method, path in paths:
            for value in wrong:
                answer = await served.request(method, path, headers={"Authorization": value})
                assert answer.status == 401, (path, value)
                assert answer.error["code"] == "invalid_api_key"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/ping"):
            assert (await served.get(path, headers={"Authorization": "x"})).status == 200
        for value in (f"Bearer {KEY}", f"bearer  {KEY}", "Bearer sk-other"):
            answer = await served.post(COMPLETIONS, COMPLETION, headers={"Authorization": value})
            assert answer.status == 200


async def test_preflight_is_answered_without_a_key() -> None:
    async with serving(allowed_origins=("*",), api_key=(KEY,)) as served:
        answer = await served.request("OPTIONS", CHAT, headers={**PREFLIGHT, "Authorization": ""})

        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        allowed = answer.headers["Access-Control-Allow-Headers"].lower()
        assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed.split(","))
        assert int(answer.headers["Access-Control-Max-Age"]) > 0


async def test_cors_headers_are_on_streams_and_errors_too() -> None:
    async with serving(allowed_origins=("*",), api_key=(KEY,)) as served:
        answers: list[Answer] = [
            await served.post(COMPLETIONS, {**COMPLETION, "stream": True}, headers=ORIGIN),
            await served.post(COMPLETIONS, {**COMPLETION, "n": 0}, headers=ORIGIN),
            await served.get("/nope", headers=ORIGIN),
            await served.get("/v1/models", headers={**ORIGIN, "Authorization": "x"}),
        ]

        assert [answer.status for answer in answers] == [200, 400, 404, 401]
        for answer in answers:
            assert answer.headers["Access-Control-Allow-Origin"] == "*"
            assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_only_listed_origins_are_allowed() -> None:
    async with serving(allowed_origins=("http://app.example",)) as served:
        good = await served.get("/health", headers=ORIGIN)
        bad = await served.get("/health", headers={"Origin": "http://evil.example"})

        assert good.headers["Access-Control-Allow-Origin"] == "http://app.example"
        assert "Access-Control-Allow-Origin" not in bad.headers
        assert good.headers["Vary"] == bad.headers["Vary"] == "Origin"


async def test_without_allowed_origins_there_is_no_cors(served: Served) -> None:
    answer = await served.get("/health", headers=ORIGIN)
    preflight = await served.request("OPTIONS", CHAT, headers=PREFLIGHT)

    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert preflight.status == 405


async def test_compressed_bodies_are_read(served: Served) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(COMPLETION).encode())

    answer = await served.request("POST", COMPLETIONS, data=body, headers=headers)

    assert answer.status == 200


async def test_body_that_is_not_compressed_as_announced_is_a_400_and_no_alarm(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}

    answer = await served.request("POST", COMPLETIONS, data=b"{}", headers=headers)
    await served.get("/health")

    assert answer.status == 400
    message = "the request body cannot be read: Can not decode content-encoding: gzip"
    assert answer.error["message"] == message
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_unknown_content_encoding_is_a_415(served: Served) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "rot13"}

    answer = await served.request("POST", COMPLETIONS, data=b"{}", headers=headers)

    assert answer.status == 415
    assert "rot13" in answer.error["message"]


async def test_unknown_expectation_is_refused_in_the_error_shape(served: Served) -> None:
    status, headers, body = await raw(
        served, b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n"
    )

    assert status == 417
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert headers["x-request-id"]
    assert headers["server"] == "llmserve"


async def test_malformed_http_names_no_other_server(served: Served) -> None:
    status, headers, _ = await raw(served, b"GET / HTTP/1.1\r\nHost x\r\n\r\n")

    assert status == 400
    assert headers["server"] == "llmserve"
