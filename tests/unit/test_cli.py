"""Flags, environment and YAML file become one ServerConfig; mistakes become one sentence."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmserve.cli import main, parse_config, unknown_variables
from llmserve.config import ServerConfig
from llmserve.errors import StartupError

README = Path(__file__).parents[2] / "README.md"


def parse(*argv: str, **environ: str) -> ServerConfig:
    return parse_config(argv, environ)


def setting_names() -> list[str]:
    config: Any = ServerConfig()
    return [
        field.name
        for group in dataclasses.fields(config)
        for field in dataclasses.fields(getattr(config, group.name))
    ]


def test_no_arguments_give_the_defaults() -> None:
    assert parse() == ServerConfig()


def test_flags_of_every_type_are_read() -> None:
    config = parse(
        *("--model", "m", "--max-num-seqs", "7", "--no-enable-prefix-caching"),
        *("--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "256M"),
        *("--served-model-name", "a", "b", "--allowed-origins", '["*"]', "--api-key", "k"),
    )

    assert config.model.model == "m"
    assert config.model.served_model_name == ("a", "b")
    assert config.scheduler.max_num_seqs == 7
    assert config.cache.enable_prefix_caching is False
    assert config.cache.gpu_memory_utilization == 0.5
    assert config.cache.kv_cache_memory_bytes == 256 << 20
    assert config.frontend.allowed_origins == ("*",)
    assert config.frontend.api_key == ("k",)


@pytest.mark.parametrize(
    ("argv", "environ", "value"),
    [
        ((), {}, None),
        (("--async-scheduling",), {}, True),
        (("--no-async-scheduling",), {"LLMSERVE_ASYNC_SCHEDULING": "1"}, False),
        ((), {"LLMSERVE_ASYNC_SCHEDULING": "true"}, True),
        ((), {"LLMSERVE_ASYNC_SCHEDULING": "no"}, False),
    ],
)
def test_a_switch_may_be_left_to_the_server(
    argv: tuple[str, ...], environ: dict[str, str], value: bool | None
) -> None:
    assert parse(*argv, **environ).scheduler.async_scheduling is value


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 1\nblock_size: 32\nport: 1\nenable-prefix-caching: false\n")

    config = parse(
        *("--config", str(file), "--port", "3"), LLMSERVE_PORT="2", LLMSERVE_BLOCK_SIZE="64"
    )

    assert config.frontend.port == 3
    assert config.cache.block_size == 64
    assert config.scheduler.max_num_seqs == 1
    assert config.cache.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seq", "5"], "did you mean --max-num-seqs"),
        (["--port", "abc"], "--port"),
        (["--port", "70000"], "65535"),
        (["--block-size", "12"], "power of two"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--dtype", "int3"], "float32"),
        (["--gpu-memory-utilization", "1.5"], "above 0 and at most 1"),
        (["--kv-cache-memory-bytes", "12Q"], "--kv-cache-memory-bytes"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "8"], "--max-num-seqs (64)"),
        (["--allowed-origins", "[1"], "JSON list"),
        (["--api-key", ""], "--api-key is empty"),
        (["--served-model-name", " "], "--served-model-name is empty"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout is nan"),
        (["--sse-ping-interval", "inf"], "--sse-ping-interval is inf"),
        (["--max-model-len", "1"], "at least 2"),
        (["--seed", "99999999999999999999"], "64 bits"),
        (["--threads", "5000"], "--threads is 5000; on this machine it must be at most"),
        (["--metrics-prefix", "bad prefix!"], "--metrics-prefix"),
        (["--config", "/does/not/exist.yaml"], "cannot be read"),
    ],
)
def test_bad_setting_is_one_sentence_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    error = capsys.readouterr().err
    assert code == 2
    assert words in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-seq: 3", "did you mean max-num-seqs"),
        ("- a\n- b", "flag-name: value"),
        ("a: [", "not valid YAML"),
        ("port: many", "port"),
        ("port: true", "port"),
        ("port: [1]", "port"),
    ],
)
def test_bad_config_file_names_the_problem(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)

    with pytest.raises(StartupError, match=words):
        parse("--config", str(file))


def test_unknown_environment_variables_are_found() -> None:
    environ = {
        "LLMSERVE_PORT": "1",
        "LLMSERVE_NO_EXT": "1",
        "LLMSERVE_CUDA_ARCHS": "90",
        "LLMSERVE_MAX_SEQS": "1",
        "HOME": "/",
    }

    assert unknown_variables(environ) == ["LLMSERVE_MAX_SEQS"]


def test_bad_environment_variable_is_named() -> None:
    with pytest.raises(StartupError, match="LLMSERVE_PORT is 'x'"):
        parse(LLMSERVE_PORT="x")


def test_help_lists_every_setting_and_needs_no_torch() -> None:
    code = (
        "import sys; from llmserve.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )

    for name in setting_names():
        assert "--" + name.replace("_", "-") in done.stdout


def test_readme_has_a_row_for_every_setting_and_no_other() -> None:
    rows = [
        line.split("`")[1] for line in README.read_text().splitlines() if line.startswith("| `--")
    ]

    assert sorted(rows) == sorted("--" + name.replace("_", "-") for name in setting_names())
