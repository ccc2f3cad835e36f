"""bench/gpu_check.sh without a GPU: its phases, its limits, and the line of JSON at its end."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import check, figures
from bench.gpu.device import Device
from bench.gpu.engine import StepTime
from bench.gpu.figures import Figures
from bench.gpu.phases import FAILED, OK, SKIPPED, TIMED_OUT, Outcome, Phase, Phases
from bench.gpu.roofs import Roofs
from bench.gpu.serve import decode_steps
from bench.gpu.shapes import FULL_LOAD, SHAPES

ROOT = Path(__file__).parents[2]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_quick_run_ends_with_all_figures_in_a_line_of_json(
    cuda_module: Any, device: torch.device, tmp_path: Path
) -> None:
    """cuda_module: so that the run finds it built."""
    if device.type == "cuda":
        pytest.skip("without a GPU only")
    modules = {path: path.stat().st_mtime_ns for path in (ROOT / "llmserve").glob("*.so")}

    done = subprocess.run(
        [ROOT / "bench" / "gpu_check.sh", "--quick", "--tiny", "--out", tmp_path / "out"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["gpu"] is None
    assert summary["is_emulated"]
    assert summary["failed"] == []
    assert summary["missed_targets"] == []
    assert summary["skipped"]["sanitizer"] == "no GPU"
    assert "no GPU: no figures" in done.stdout
    tables = summary["figures"]
    assert {"kernels", "llmserve tiny", "transformers tiny"} == set(tables)
    for table, name, unit in [
        ("kernels", "product Q4_K, 8 x 256 -> 24", "GB/s"),
        ("llmserve tiny", "start: 4 graphs captured", "s"),
        ("llmserve tiny", "step with a prompt of 24 tokens, graphs in pieces", "ms"),
        ("llmserve tiny", "decode, batch 2, context 20", "tokens/s"),
        ("transformers tiny", "transformers (sdpa) prefill, 24 tokens", "tokens/s"),
    ]:
        assert tables[table][name]["value"] > 0
        assert tables[table][name]["unit"] == unit
    assert modules == {path: path.stat().st_mtime_ns for path in (ROOT / "llmserve").glob("*.so")}


def test_a_machine_without_torch_is_a_failure_with_a_line_of_json(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")

    done = subprocess.run(
        [ROOT / "bench" / "gpu_check.sh", "--quick", "--out", tmp_path / "out"],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    (failure,) = json.loads(done.stdout.splitlines()[-1])["failed"]
    assert "no torch here" in failure


class FakeGPU:
    """Its probe, and phases that are not run: all end well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Path) -> None:
        self.phases: list[Phase] = []
        self.failing = ""  # name of a phase that ends badly
        machine = {"gpu": "NVIDIA Test", "arch": "90"}
        monkeypatch.setattr(check, "probe", lambda environment: machine)
        monkeypatch.setattr(check, "MODULE", module)
        monkeypatch.setattr(check.shutil, "which", lambda *args, **kwargs: "/bin/the-sanitizer")
        monkeypatch.setattr("bench.gpu.phases._run", self._run)

    def _run(self, phase: Phase, limit_s: float) -> Outcome:
        self.phases.append(phase)
        if "--figures" in phase.command:
            path = Path(phase.command[list(phase.command).index("--figures") + 1])
            path.write_text(json.dumps({"a": {"value": 1.0, "unit": "s", "met": False}}))
        return Outcome(FAILED if phase.name == self.failing else OK, 1.0)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    """The kernels are built for it."""
    module = tmp_path / "module.so"
    module.touch()
    return FakeGPU(monkeypatch, module)


def test_on_a_gpu_everything_is_built_tested_and_measured(
    gpu: FakeGPU, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = check.Check(tmp_path / "out", is_quick=False, is_tiny=False).run()

    assert status == 0
    commands = {phase.name: " ".join(phase.command) for phase in gpu.phases}
    assert list(commands) == [
        "build",
        "kernel tests",
        "model tests",
        "kernels figures",
        "llmserve llama-3-8b figures",
        "llmserve qwen3-0.6b figures",
        "transformers llama-3-8b figures",
        "transformers qwen3-0.6b figures",
        "sanitizer",
    ]
    assert "build_ext --inplace" in commands["build"]
    assert gpu.phases[0].environment["LLMSERVE_CUDA_ARCHS"] == "90"
    assert "--ignore=tests/cuda/test_emulator.py" in commands["kernel tests"]
    beside = tmp_path / "out" / "llmserve-qwen3-0.6b.json"
    assert f"--beside {beside}" in commands["transformers qwen3-0.6b figures"]
    assert commands["sanitizer"].startswith("/bin/the-sanitizer --tool memcheck")
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "out" / "summary.json").read_text() == line
    summary = json.loads(line)
    assert summary["gpu"] == "NVIDIA Test"
    assert not summary["is_emulated"]
    assert len(summary["figures"]) == len(summary["missed_targets"]) == 5
    assert sum(phase.limit_s for phase in gpu.phases if "figures" in phase.name) < 400


def test_what_can_be_built_on_a_gpu_is_tested_and_measured(
    gpu: FakeGPU, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.failing = "build"

    status = check.Check(tmp_path / "out", is_quick=False, is_tiny=False).run()

    assert status == 1
    names = [phase.name for phase in gpu.phases]
    assert names[:3] == ["build", "build of what can be built", "kernel tests"]
    required = [phase.environment["LLMSERVE_REQUIRE_EXT"] for phase in gpu.phases[:2]]
    assert required == ["1", "0"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == ["build"]


def test_on_a_gpu_without_the_kernels_nothing_passes_for_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = FakeGPU(monkeypatch, tmp_path / "missing.so")

    status = check.Check(tmp_path / "out", is_quick=False, is_tiny=False).run()

    assert status == 1
    assert [phase.name for phase in gpu.phases] == ["build"]
    (failure,) = json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    assert "not built" in failure


def test_a_time_on_a_gpu_is_the_median_of_rounds_for_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 8)  # milliseconds from event to event

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = next(clock)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return float(end.time - self.time)

    class Plain:
        def record(self, body: Callable[[], None]) -> Callable[[], None]:
            return body

    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls: list[int] = []
    gpu: Any = Device(torch.device("cuda"), Any, None, Any, Plain(), 1 << 20)

    seconds = gpu.seconds([lambda: calls.append(1), lambda: calls.append(2)])

    assert seconds == pytest.approx(4e-3)
    assert calls == [1, 2] * 26  # 0.2 s after the first round
    assert gpu.num_copies(1 << 18) == 4


def test_a_phase_that_hangs_is_stopped_with_what_it_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.gpu.phases._LEAST_S", 0.1)
    phases = Phases(60.0)
    child = "import time; time.sleep(4); open('late', 'w')"
    code = (
        f"import os, subprocess, sys, time; os.chdir({str(tmp_path)!r}); print('begun');"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )

    phases.run(Phase("hangs", python(code), 2.0))
    phases.run(Phase("goes on", python("import time; time.sleep(3)"), 30.0))

    assert phases.outcomes["hangs"].status == TIMED_OUT
    assert phases.outcomes["goes on"].status == OK
    assert not (tmp_path / "late").exists()
    assert "begun" in capfd.readouterr().out


def test_failures_are_named_and_excuses_are_none() -> None:
    phases = Phases(60.0)
    excuses = {"Device not supported": "not on this device"}

    phases.run(Phase("fails", python("raise SystemExit(3)"), 30.0, {}, excuses))
    code = "print('Device not supported'); raise SystemExit(1)"
    phases.run(Phase("excused", python(code), 30.0, {}, excuses))

    assert phases.named(FAILED, TIMED_OUT) == ["fails"]
    assert phases.outcomes["fails"].why == "exit status 3"
    assert phases.outcomes["excused"].status == SKIPPED


def test_without_time_left_a_phase_is_not_begun() -> None:
    phases = Phases(1.0)

    phases.run(Phase("late", python("print('no')"), 30.0))

    assert phases.outcomes["late"].why == "no time was left"


def test_figures_are_held_against_their_targets(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    table = Figures(path)

    table.add("slow", 50.0, "GB/s", bound=100.0, least_share=0.85)
    table.add("fast", 90.0, "GB/s", bound=100.0, least_share=0.85)
    table.add("late", 12.0, "s", most=10.0)
    table.add("unbounded", 50.0, "GB/s", least_share=0.85)

    rows = figures.read(path)
    assert {name: row.get("met") for name, row in rows.items()} == {
        "slow": False,
        "fast": True,
        "late": False,
        "unbounded": None,
    }
    assert rows["slow"]["share"] == 0.5
    assert figures.value_of(rows, "late") == 12.0


def test_bounds_of_a_model_are_those_of_its_bytes_and_operations() -> None:
    """8.03 billion parameters, of which the embedding's 0.53 are not read in a step."""
    shape, roofs = SHAPES["llama-3-8b"], Roofs(4.3e12, 780e12)

    values = shape.layer_values + shape.logit_values
    assert values == pytest.approx(7.504e9, rel=1e-3)
    assert shape.kv_bytes == 131072
    alone = shape.decode_bound(roofs, 1, 0.0)
    assert alone == pytest.approx(4.3e12 / (2 * values))
    prefill = shape.prefill_bound(roofs, 2048)
    assert prefill is not None
    assert 0.9 * 780e12 / (2 * shape.layer_values) < prefill < 780e12 / (2 * shape.layer_values)
    assert shape.decode_bound(Roofs(), 1, 0.0) is None


def test_steps_with_prompts_are_not_taken_for_decode_steps() -> None:
    steps = [StepTime(2, 30, 40, 0.1, 1.0), StepTime(2, 2, 42, 0.1, 2.0), StepTime(1, 1, 9, 0.1, 3)]

    assert decode_steps(steps, 2) == steps[1:2]


def test_all_sequences_decode_for_as_long_as_is_measured() -> None:
    """Those whose prompts came first still run when the last one's has been computed."""
    load = FULL_LOAD
    for num_seqs in load.batch_sizes:
        num_output = load.num_output_tokens(num_seqs)
        num_prefills = num_seqs * load.context / (load.token_budget - num_seqs)
        assert num_output - num_prefills > load.num_warm_steps + load.num_steps
        assert load.context + num_output < 1024  # one graph for all
