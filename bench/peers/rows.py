"""The rows of the table, in groups that can be asked for by name, with their targets."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers.table import Row

ENGINE = "engine"  # the workload of groups that are measured without HTTP
_DEMO_JOB = "server-q4_k_m"

_MODELS = {
    "q4_k_m": "Q4_K_M",
    "q8_0": "Q8_0",
    "bf16": "BF16",
    "qwen3-q8_0": "random Qwen3 0.6B, Q8_0",
    "qwen3-q4_k": "random Qwen3 0.6B, Q4_K",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that one workload fills. Groups of the same job are measured in the same process."""

    job: str
    model: str
    workload: str
    rows: tuple[Row, ...]


def _pair(job: str, prefix: str, model: str, how: str) -> tuple[Row, ...]:
    """Decode and prefill of one sequence."""
    is_quantized = model != "bf16"
    title = f"{_MODELS[model]}{how}"
    return (
        Row(
            job,
            f"{prefix}decode_tokens_per_s",
            f"decode, {title}",
            "tokens/s",
            target=1.35,
            floor_target=0.8 if is_quantized else None,
        ),
        Row(
            job,
            f"{prefix}prefill_tokens_per_s",
            f"prefill of 512 tokens, {title}",
            "tokens/s",
            target=2.5 if is_quantized else 1.5,
        ),
    )


def _engine(model: str) -> Group:
    job = f"engine-{model}"
    return Group(job, model, ENGINE, _pair(job, "", model, ""))


def _single(model: str) -> Group:
    job = f"server-{model}"
    return Group(job, model, "single", _pair(job, "single/", model, ", over HTTP"))


def _demo(workload: str, *rows: Row) -> Group:
    return Group(_DEMO_JOB, "q4_k_m", workload, rows)


def _serving(concurrency: int) -> Group:
    name = f"serving-{concurrency}"
    title = f"serving, concurrency {concurrency}"
    return _demo(
        name,
        Row(_DEMO_JOB, f"{name}/output_tokens_per_s", title, "output tokens/s", target=3.0),
        Row(_DEMO_JOB, f"{name}/itl_p99_ms", f"{title}, ITL p99", "ms", False, target=1.0),
        Row(_DEMO_JOB, f"{name}/ttft_p50_ms", f"{title}, TTFT p50", "ms", False, target=1.0),
    )


GROUPS: dict[str, Group] = {
    **{f"engine-{model}": _engine(model) for model in _MODELS},
    **{f"single-{model}": _single(model) for model in ("q4_k_m", "q8_0", "bf16")},
    "serving-8": _serving(8),
    "serving-32": _serving(32),
    "prefix": _demo(
        "prefix",
        Row(
            _DEMO_JOB,
            "prefix/ttft_p50_ms",
            "shared prefix of 1,024 tokens, concurrency 4, TTFT p50",
            "ms",
            False,
            target=3.0,
        ),
    ),
    "start": _demo(
        "start",
        Row(
            _DEMO_JOB,
            "start/first_token_s",
            "process start to first token",
            "s",
            False,
            target=1.0,
            limit=3.0,
        ),
    ),
    "memory": _demo(
        "memory",
        Row(
            _DEMO_JOB,
            "memory/pss_mb",
            "memory (PSS) serving 8 sequences",
            "MB",
            False,
            target=1.0,
        ),
    ),
    "front-end": _demo(
        "front-end",
        Row(_DEMO_JOB, "front-end/health_requests_per_s", "/health, 32 connections", "requests/s"),
        Row(
            _DEMO_JOB, "front-end/models_requests_per_s", "/v1/models, 32 connections", "requests/s"
        ),
    ),
}
