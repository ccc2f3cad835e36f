"""Counters, gauges and histograms of the engine. Knows no HTTP; `registry` is what is exported.

Names, labels and buckets are vLLM's (v1 engine), with a prefix of our own that can be set to
`vllm:` so that dashboards made for vLLM work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from llmserve.core import FinishReason

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_PHASE_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKEN_BUCKETS = (1, *(2**i for i in range(3, 15)))
_N_BUCKETS = (1, 2, 5, 10, 20)


def _1_2_5_series(maximum: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to `maximum`, which ends the list."""
    series = []
    power = 1
    while power <= maximum:
        series += [m * power for m in (1, 2, 5) if m * power <= maximum]
        power *= 10
    return series


class EngineStats:
    """Owns one registry per server; every metric carries the label model_name."""

    def __init__(self, *, model_name: str, max_model_len: int, prefix: str = "llmserve:") -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._model_name = model_name
        self._metrics: dict[str, Any] = {}
        lengths = _1_2_5_series(max_model_len)

        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self.num_preemptions = self._counter(
            "num_preemptions", "Sequences that lost their blocks to others and were recomputed"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that were not computed, but cached"
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.request_success = {
            reason: self._counter(
                "request_success", "Finished requests", finished_reason=reason.value
            )
            for reason in FinishReason
        }

        self.tool_call_parser_invocations = {
            (mode, outcome): self._counter(
                "tool_call_parser_invocations",
                "Ended outputs that were searched for tool calls",
                mode=mode,
                outcome=outcome,
            )
            for mode in ("auto", "required", "named")
            for outcome in ("success", "none", "error")
        }

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence", _ITL_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "(e2e - TTFT) / (output tokens - 1), per request",
            _ITL_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token", _PHASE_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to first schedule", _PHASE_BUCKETS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "First schedule to last token", _PHASE_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First schedule to first token", _PHASE_BUCKETS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last token", _PHASE_BUCKETS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens per request", lengths
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request", lengths
        )
        self.request_params_n = self._histogram(
            "request_params_n", "Choices asked for per request", _N_BUCKETS
        )
        self.request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens per request", lengths
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed per step", _STEP_TOKEN_BUCKETS
        )

    def watch(
        self,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        kv_cache_usage: Callable[[], float],
    ) -> None:
        """Gauges read their value when they are scraped."""
        self.num_running = num_running
        self.num_waiting = num_waiting
        gauges = {
            "num_requests_running": ("Sequences in the running batch", num_running),
            "num_requests_waiting": ("Sequences that wait to be scheduled", num_waiting),
            "kv_cache_usage_perc": ("Share of KV cache blocks in use, 0 to 1", kv_cache_usage),
        }
        for name, (text, read) in gauges.items():
            self._gauge(name, text).set_function(read)

    def describe_cache(self, settings: dict[str, object]) -> None:
        """cache_config_info: a constant 1 whose labels are the cache's settings."""
        labels = {name: str(value) for name, value in settings.items()}
        self._gauge("cache_config_info", "Settings of the KV cache", **labels).set(1)

    def _labels(self, labels: dict[str, str]) -> dict[str, str]:
        return {"model_name": self._model_name, **labels}

    def _counter(self, name: str, text: str, **labels: str) -> Counter:
        return self._child(Counter, name, text, labels)  # type: ignore[no-any-return]

    def _gauge(self, name: str, text: str, **labels: str) -> Gauge:
        return self._child(Gauge, name, text, labels)  # type: ignore[no-any-return]

    def _histogram(self, name: str, text: str, buckets: Any) -> Histogram:
        metric = Histogram(
            self._prefix + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return metric.labels(model_name=self._model_name)

    def _child(self, kind: Any, name: str, text: str, labels: dict[str, str]) -> Any:
        full_labels = self._labels(labels)
        full_name = self._prefix + name
        metric = self._metrics.get(full_name)
        if metric is None:
            metric = kind(full_name, text, list(full_labels), registry=self.registry)
            self._metrics[full_name] = metric
        return metric.labels(**full_labels)
