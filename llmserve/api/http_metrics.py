"""Metrics of the HTTP layer, in the registry that the engine's metrics are in."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics:
    """Labels have few values whatever clients send: unknown routes and methods share one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests",
            "HTTP requests",
            ["handler", "method", "status"],
            registry=registry,
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Arrival of the headers to the end of the answer",
            ["handler", "method"],
            registry=registry,
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

    def observe(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        handler = "unknown" if resource is None else resource.canonical
        method = request.method if request.method in _METHODS else "other"
        self._requests.labels(handler, method, str(status)).inc()
        self._duration.labels(handler, method).observe(seconds)
