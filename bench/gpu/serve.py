"""Decode and prefill rates, host time and start-up of llmserve on a GPU, for a model of random
weights: its own loader (--load-format dummy), scheduler, runner and graphs.

    python -m bench.gpu.serve --shape llama-3-8b [--figures FILE] [--roofs FILE] [--tiny]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu.device import open_device
from bench.gpu.engine import Engine, StepTime
from bench.gpu.figures import Figures
from bench.gpu.roofs import Roofs, load_roofs
from bench.gpu.shapes import FULL_LOAD, SHAPES, TINY_LOAD, Load, Shape
from llmserve.runner.piecewise_graphs import SIZES

_DECODE_SHARE = 0.85  # of one sequence of the 8B shape
_PREFILL_SHARE = 0.6
_MOST_HOST_US = 150.0
_MOST_READY_S = 10.0
_SHORT_PROMPT = 8


def time_start(engine: Engine, load: Load, figures: Figures) -> None:
    """The phases of a start; then a graph for each number of sequences, as they are asked for."""
    for name, seconds in engine.phases.items():
        figures.add(f"start: {name}", seconds, "s")
    begin = time.perf_counter()
    engine.run(1, _SHORT_PROMPT, 1)
    first_s = time.perf_counter() - begin
    figures.add("start: first token", first_s, "s")
    num_seqs = 1
    while num_seqs < 2 * load.max_num_seqs:
        engine.run(min(num_seqs, load.max_num_seqs), _SHORT_PROMPT, 4)
        num_seqs *= 2
    graphs = engine.recorder
    figures.add(f"start: {graphs.num_graphs} graphs captured", graphs.seconds, "s")
    after_weights = sum(s for name, s in engine.phases.items() if name != "weights")
    figures.add(
        "start: ready with all graphs, after the weights",
        after_weights + first_s + graphs.seconds,
        "s",
        most=_MOST_READY_S,
    )


def time_decode(
    engine: Engine, shape: Shape, load: Load, num_seqs: int, roofs: Roofs, figures: Figures
) -> None:
    steps = engine.run(num_seqs, load.context, load.num_output_tokens(num_seqs))
    measured = decode_steps(steps, num_seqs)[load.num_warm_steps :][: load.num_steps]
    if len(measured) < 2:
        print(f"{num_seqs} sequences of {load.context} tokens do not fit into the KV cache")
        return
    seconds = measured[-1].ended_at - measured[0].ended_at
    context = statistics.mean(step.num_keys / num_seqs for step in measured)
    figures.add(
        f"decode, batch {num_seqs}, context {load.context}",
        num_seqs * (len(measured) - 1) / seconds,
        "tokens/s",
        bound=shape.decode_bound(roofs, num_seqs, context),
        least_share=_DECODE_SHARE if num_seqs == 1 and shape.name == "llama-3-8b" else None,
        note=f"{seconds / (len(measured) - 1) * 1e3:.2f} ms a step",
    )
    figures.add(
        f"host time of a decode step, batch {num_seqs}",
        statistics.median(step.host_s for step in measured) * 1e6,
        "us",
        most=_MOST_HOST_US,
    )


def decode_steps(steps: Sequence[StepTime], num_seqs: int) -> list[StepTime]:
    """Those in which all sequences got one token and no prompt was computed."""
    return [step for step in steps if step.num_seqs == step.num_tokens == num_seqs]


def time_prefill(engine: Engine, shape: Shape, load: Load, roofs: Roofs, figures: Figures) -> None:
    times = []
    for _ in range(load.num_prefills + 1):
        begin = time.perf_counter()
        engine.run(1, load.prefill_tokens, 1)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])  # the first one sets libraries up
    figures.add(
        f"prefill, {load.prefill_tokens} tokens",
        load.prefill_tokens / seconds,
        "tokens/s",
        bound=shape.prefill_bound(roofs, load.prefill_tokens),
        least_share=_PREFILL_SHARE,
        note=f"{seconds * 1e3:.2f} ms",
    )


def time_short_prompt(
    engine: Engine, load: Load, num_tokens: int, how: str, figures: Figures
) -> None:
    """A step with one prompt, which a small model computes for less long than the host launches."""
    seconds, host_s = [], []
    for _ in range(load.num_prefills + 1):
        begin = time.perf_counter()
        (step,) = engine.run(1, num_tokens, 1)
        seconds.append(time.perf_counter() - begin)
        host_s.append(step.host_s)
    # The first one runs kernel by kernel, and its graph is captured behind it.
    name = f"step with a prompt of {num_tokens} tokens, {how}"
    figures.add(name, statistics.median(seconds[1:]) * 1e3, "ms")
    figures.add(f"host time of a {name}", statistics.median(host_s[1:]) * 1e6, "us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--roofs", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, load = SHAPES[options.shape], TINY_LOAD if options.tiny else FULL_LOAD
    figures = Figures(options.figures, has_targets=not options.tiny)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open_device(is_tiny=options.tiny) as device:
        shape.write(Path(folder))
        engine = Engine(Path(folder), device, load, shape.config["dtype"])
        roofs = load_roofs(options.roofs, device)
        time_start(engine, load, figures)
        time_prefill(engine, shape, load, roofs, figures)
        largest = min(SIZES[-1], load.token_budget)
        time_short_prompt(engine, load, largest, "graphs in pieces", figures)
        if largest < load.token_budget:
            time_short_prompt(engine, load, largest + 1, "kernel by kernel", figures)
        for num_seqs in load.batch_sizes:
            time_decode(engine, shape, load, num_seqs, roofs, figures)


if __name__ == "__main__":
    main()
