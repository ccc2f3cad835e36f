"""Every setting, once. A field's name is its flag (`max_num_seqs` is `--max-num-seqs`), its
default is the flag's default and its `help` is the flag's help.

One frozen dataclass per layer; they compose in ServerConfig and never inherit. `__post_init__`
raises ValueError with the flag's name. Nothing writes to a config after it was made; numbers that
are derived at start-up (context length, number of blocks) travel as values of their own.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that carries what its command line flag needs."""
    metadata = {"help": help, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=metadata)


def _at_least(config: object, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not minimum <= value < math.inf:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {value}; it must be a number of at least {minimum}")


def _one_of(config: object) -> None:
    for item in fields(config):  # type: ignore[arg-type]  # called by dataclasses only
        choices = item.metadata.get("choices")
        value = getattr(config, item.name)
        if choices and value is not None and value not in choices:
            flag = "--" + item.name.replace("_", "-")
            raise ValueError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str | None = setting(
        None,
        "folder with safetensors, GGUF file, or Hugging Face hub id; default: the demo model",
    )
    served_model_name: tuple[str, ...] = setting(
        (), "name(s) of the model in the API; default: the value of --model", metavar="NAME"
    )
    tokenizer: str | None = setting(None, "folder or hub id of another tokenizer than the model's")
    load_format: str = setting(
        "auto",
        "format of the weights; dummy: random weights for the shapes of config.json",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = setting(
        "auto",
        "type of weights that are not quantised, with CUDA of activations too; auto: as stored",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    max_model_len: int | None = setting(
        None, "context length in tokens (prompt + output); default: the model's"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    download_dir: str | None = setting(None, "folder for downloads; default: the hub's cache")
    generation_config: str = setting(
        "auto",
        "default sampling parameters: auto (the model's generation_config.json), vllm (none), "
        "or a folder with a generation_config.json",
    )
    seed: int | None = setting(
        None, "seed of requests without one, and of dummy weights; default: drawn anew"
    )

    def __post_init__(self) -> None:
        _one_of(self)
        _at_least(self, 2, "max_model_len")  # one token of prompt, one of output
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}; it must fit into 64 bits")
        if not all(name.strip() for name in self.served_model_name):
            raise ValueError("--served-model-name is empty; it must be a name")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = setting(16, "tokens per KV cache block")
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache; auto: the model's, float16 for quantised weights, with CUDA that of "
        "activations; fp8 (e4m3): with CUDA only, with the scales of K and V that a checkpoint "
        "brings",
        choices=("auto", "float32", "float16", "bfloat16", "fp8"),
    )
    kv_cache_memory_bytes: int | None = setting(
        None, "size of the KV cache, as 268435456 or 256M or 2G; overrides the utilization"
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU's memory that the server may use; on the CPU the KV cache is sized by "
        "--kv-cache-memory-bytes",
    )
    num_gpu_blocks_override: int | None = setting(None, "number of KV cache blocks, for tests")
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of equal prompt beginnings")

    def __post_init__(self) -> None:
        _one_of(self)
        _at_least(self, 1, "block_size", "kv_cache_memory_bytes", "num_gpu_blocks_override")
        if self.block_size & (self.block_size - 1) or self.block_size > 256:
            raise ValueError(
                f"--block-size is {self.block_size}; it must be a power of two up to 256"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; "
                "it must be above 0 and at most 1"
            )


# With 128 tokens the CPU's kernels are as fast as with more, and who decodes waits less.
_CPU_TOKEN_BUDGET = 128
# Of prompts beside sequences that decode: 32 tokens compute for a few times as long as a step reads
# weights; 4 for each sequence keep up with prompts that are a few times as long as their answers;
# and what waits shall not wait for more than some 64 steps.
_CPU_PROMPT_TOKENS_BESIDE_DECODES = 32
_CPU_PROMPT_TOKENS_PER_DECODE = 4
_CPU_STEPS_FOR_WAITING_TOKENS = 64
_CUDA_TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Which requests run in a step."""

    max_num_seqs: int = setting(128, "most sequences that run at once")
    max_num_batched_tokens: int = setting(
        0,
        "most tokens in one step (the token budget); 0: 128, with CUDA 2048, or --max-num-seqs if "
        "that is more; without CUDA 0 also limits prompts in a step that decodes n sequences to 32 "
        "tokens, 4n or a 64th of what waits, whatever is most",
    )
    long_prefill_token_threshold: int = setting(
        0, "most prompt tokens of one request in one step; 0: the token budget alone"
    )
    scheduling_policy: str = setting(
        "fcfs",
        "order of waiting requests: first come first served, or by the request's priority",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool | None = setting(
        None,
        "schedule and launch a step while the one before it runs; default: with CUDA",
    )

    def __post_init__(self) -> None:
        _one_of(self)
        _at_least(self, 1, "max_num_seqs")
        _at_least(self, 0, "max_num_batched_tokens", "long_prefill_token_threshold")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}; "
                f"it must be at least --max-num-seqs ({self.max_num_seqs})"
            )

    @property
    def token_budget(self) -> int:
        """Most tokens in one step."""
        return self.max_num_batched_tokens or max(_CPU_TOKEN_BUDGET, self.max_num_seqs)

    def prompt_tokens_beside(self, num_decodes: int, count_waiting: Callable[[int], int]) -> int:
        """Most tokens of prompts in a step that decodes so many sequences.

        `count_waiting` counts those that are still to be computed, up to a limit. It is called only
        where they matter, as it may take a while.
        """
        budget = self.token_budget - num_decodes
        if self.max_num_batched_tokens or not num_decodes:
            return budget
        num_waiting_tokens = count_waiting(_CPU_STEPS_FOR_WAITING_TOKENS * budget)
        share = max(
            _CPU_PROMPT_TOKENS_BESIDE_DECODES,
            _CPU_PROMPT_TOKENS_PER_DECODE * num_decodes,
            num_waiting_tokens // _CPU_STEPS_FOR_WAITING_TOKENS,
        )
        return min(budget, share)

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be scheduled before the first of them has ended."""
        return 2 if self.async_scheduling else 1

    def for_cuda(self) -> SchedulerConfig:
        """With the defaults of CUDA, where nothing is set."""
        budget = self.max_num_batched_tokens or max(_CUDA_TOKEN_BUDGET, self.max_num_seqs)
        is_async = self.async_scheduling is not False
        return replace(self, max_num_batched_tokens=budget, async_scheduling=is_async)


_MAX_THREADS_PER_CPU = 4


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Where a step runs."""

    device: str = setting(
        "auto",
        "where the model runs; auto: on a GPU, where there is one and the CUDA kernels are built",
        choices=("auto", "cpu", "cuda"),
    )
    enforce_eager: bool = setting(
        False, "with CUDA, run every step kernel by kernel, without CUDA graphs"
    )
    threads: int | None = setting(
        None,
        f"CPU threads of a forward pass, at most {_MAX_THREADS_PER_CPU} for each CPU of the "
        "machine; default: physical cores",
    )

    def __post_init__(self) -> None:
        _one_of(self)
        _at_least(self, 1, "threads")
        limit = _MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
        if self.threads is not None and self.threads > limit:
            raise ValueError(
                f"--threads is {self.threads}; on this machine it must be at most {limit}"
            )


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """The HTTP server."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, "port to listen on; 0 picks a free one")
    uds: str | None = setting(None, "Unix socket to listen on instead of host and port")
    api_key: tuple[str, ...] = setting(
        (), "key(s) of which clients must send one as bearer token", metavar="KEY"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origins that browsers may call from, as a JSON list: '[\"*\"]'", metavar="JSON"
    )
    chat_template: str | None = setting(None, "file with a chat template, or the template itself")
    chat_template_content_format: str = setting(
        "auto",
        "form in which the template gets message contents",
        choices=("auto", "string", "openai"),
    )
    chat_template_kwargs: str | None = setting(
        None,
        "variables of the chat template, '{\"enable_thinking\": false}'; a request's override them",
        metavar="JSON",
    )
    enable_auto_tool_choice: bool = setting(
        True,
        "find tool calls in what the model writes, where a request has tools; off: only calls "
        "that a request forces",
    )
    tool_call_parser: str = setting(
        "auto",
        "format in which the model writes tool calls (deepseek_v3, glm45, granite, hermes, json, "
        "kimi_k2, llama3_json, llama4_pythonic, mistral, openai, phi4_mini_json, pythonic, "
        "qwen3_coder); auto: as the chat template shows it",
    )
    tool_parser_plugin: str | None = setting(
        None, "Python file that registers more values of --tool-call-parser", metavar="FILE"
    )
    reasoning_parser: str | None = setting(
        None,
        "format in which the model writes its thinking, which answers then set apart "
        "(deepseek_r1, glm45, granite, kimi_k2, mistral, openai_gptoss, qwen3); auto: as the chat "
        "template shows it; default: none",
    )
    reasoning_parser_plugin: str | None = setting(
        None, "Python file that registers more values of --reasoning-parser", metavar="FILE"
    )
    trust_request_chat_template: bool = setting(False, "allow chat_template in a request")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "serve GET /tokenizer_info: special tokens and chat template"
    )
    response_role: str = setting("assistant", "role of the messages that the server writes")
    max_logprobs: int = setting(
        20, "most logprobs a request may ask for per token; -1: the whole vocabulary"
    )
    prepare_grammars: bool = setting(
        False,
        "prepare the vocabulary for structured outputs at the start; else their first request "
        "waits for it, and all others with it (1 s for 262,144 tokens)",
    )
    strict_params: bool = setting(
        False,
        "refuse requests with fields that have no effect, instead of listing these in a header",
    )
    disable_fastapi_docs: bool = setting(
        False, "do not serve /openapi.json and the pages made of it (named as in vLLM)"
    )
    metrics_prefix: str = setting(
        "llmserve:", "prefix of metric names; 'vllm:' fits dashboards made for vLLM"
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM"
    )
    sse_ping_interval: float = setting(
        15.0, "seconds of silence in a stream before a comment keeps it alive; 0: never"
    )
    max_request_bytes: int = setting(16 << 20, "largest request body, as 16777216 or 16M")
    response_store_size: int = setting(
        1000, "most responses of /v1/responses that are kept in memory; 0: none"
    )
    response_store_bytes: int = setting(
        64 << 20, "most memory of the responses that are kept, as 67108864 or 64M"
    )
    log_level: str = setting(
        "info", "least severe messages to log", choices=("debug", "info", "warning", "error")
    )
    disable_log_requests: bool = setting(False, "do not log a line per finished request")

    def __post_init__(self) -> None:
        _one_of(self)
        _at_least(self, 0, "port", "shutdown_timeout", "sse_ping_interval")
        _at_least(self, -1, "max_logprobs")
        _at_least(self, 1, "max_request_bytes")
        if not all(key.strip() for key in self.api_key):
            raise ValueError("--api-key is empty; it must be a key (or not be given at all)")
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix):
            raise ValueError(
                f"--metrics-prefix is {self.metrics_prefix!r}; it must consist of letters, digits, "
                "_ and :, and not begin with a digit"
            )
        self.template_variables()
        if self.port > 65535:
            raise ValueError(f"--port is {self.port}; it must be at most 65535")

    def template_variables(self) -> dict[str, Any]:
        """--chat-template-kwargs as an object. Raises ValueError."""
        text = self.chat_template_kwargs
        try:
            variables = json.loads(text) if text is not None else {}
        except (ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            raise ValueError(f"--chat-template-kwargs is {text!r}; it must be a JSON object")
        return variables


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """All of it; each layer is handed its own part."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
