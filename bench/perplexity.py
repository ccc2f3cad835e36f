"""Perplexity of llmserve beside that of llama.cpp: same file, same tokens, same chunks.

The text is cut into chunks of 512 tokens. Each is a sequence of its own whose first token is
replaced by BOS, and the predictions of its second half count. That is what llama-perplexity does,
which is built and run for the one figure; for the other llmserve's decoder runs over the same
chunks, with weights packed as the server packs them, and its logits become log-probabilities in
float64. Caches have each program's default type: float16 in llama.cpp, here float16 beside
quantised weights and else the weights' type.

bench/opticks.txt, the text, is public domain: 3,230 words of Query 31 of Isaac Newton's Opticks,
fourth edition of 1730.

    python -m bench.perplexity
    python -m bench.perplexity --models q4_k_m q8_0 bf16 FILE.gguf
    python -m bench.perplexity --models bf16 --instruction-sets avx512_vnni avx512_bf16
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.compare import TRANSFORMERS, physical_cores
from bench.peers.llama_cpp import LLAMA_CPP
from bench.peers.models import ModelStore, Tools
from bench.peers.peer import Context
from llmserve.config import CacheConfig, ModelConfig
from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.files.demo import demo_model_path
from llmserve.files.model import open_model
from llmserve.kernels import CPUKernels, set_num_threads
from llmserve.kernels.huge_pages import has_huge_pages
from llmserve.models import build_decoder, read_model
from llmserve.runner.batch import SequenceRows
from llmserve.runner.kv_tensors import KVTensors
from llmserve.runner.memory import make_kv_spec
from llmserve.tokenizer import load_tokenizer

CHUNK_LEN = 512
MIN_WORDS = 2000
TARGET = 0.003
NAMES = ("q4_k_m", "q8_0", "bf16", "f32")
TEXT = Path(__file__).with_name("opticks.txt")
# Positions whose logits are held at once: a row of them has a megabyte, two in float64.
_SLICE = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """num_counted: predictions that the mean is over."""

    perplexity: float
    num_chunks: int
    num_counted: int


def split_chunks(token_ids: Sequence[int], length: int, bos: int | None) -> list[list[int]]:
    """Full chunks only; BOS, where the model has one, takes the place of a chunk's first token."""
    chunks = []
    for begin in range(0, len(token_ids) - length + 1, length):
        chunk = list(token_ids[begin : begin + length])
        chunks.append(chunk if bos is None else [bos, *chunk[1:]])
    return chunks


def counted_positions(length: int) -> range:
    """Positions of a chunk whose predictions count: from the middle to the last with a target."""
    return range(length // 2, length - 1)


def negative_log_likelihoods(logits: torch.Tensor, target_ids: Sequence[int]) -> list[float]:
    """Of each row's target. logits: float32 [num_rows, vocab_size]; computed in float64."""
    rows = logits.double().log_softmax(-1)
    targets = torch.tensor(target_ids)[:, None]
    losses: list[float] = (-rows.gather(1, targets)[:, 0]).tolist()
    return losses


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(math.fsum(losses) / len(losses))


class OwnModel:
    """llmserve's decoder over one chunk at a time, without scheduler and sampler."""

    def __init__(self, path: Path) -> None:
        config = ModelConfig(model=str(path))
        self._files = open_model(config, print)
        model, weights = read_model(
            self._files, dtype=config.dtype, load_format=config.load_format, seed=0
        )
        kv_dtype = weights.kv_dtype
        if has_huge_pages():
            weights.keep_in_memory()
        kernels = CPUKernels()
        self._decoder = build_decoder(model, weights, CHUNK_LEN, kernels)
        spec = make_kv_spec(model, CacheConfig(), kv_dtype, CHUNK_LEN)
        num_blocks = -(-CHUNK_LEN // spec.block_size)
        num_groups = len(spec.groups)
        # Block 0 is the null block.
        self._tables = tuple(
            list(range(1 + group * num_blocks, 1 + (group + 1) * num_blocks))
            for group in range(num_groups)
        )
        self._kv = KVTensors(spec, 1 + num_groups * num_blocks, kernels)
        self._rows = SequenceRows(1, CHUNK_LEN, spec.block_size, num_groups)

    def tokenize(self, text: str) -> tuple[list[int], int | None]:
        """Ids with what the model expects around a text, and the BOS if that begins with one."""
        tokenizer = load_tokenizer(self._files)
        ids = tokenizer.encode(text, add_special_tokens=True)
        bos = tokenizer.bos_token_id
        return ids, bos if ids[:1] == [bos] else None

    def losses(self, chunk: list[int]) -> Iterator[float]:
        """Of the chunk's predictions that count."""
        sampling = SamplingParams(temperature=0.0)
        self._rows.add(NewSequence("chunk", chunk, len(chunk), sampling, self._tables))
        batch = self._rows.build(StepPlan(["chunk"], [0], [len(chunk)], [False]))
        self._rows.release("chunk")
        positions = counted_positions(len(chunk))
        with torch.inference_mode():
            hidden = self._decoder.forward(batch.forward, self._kv.layers)
            for begin in range(positions.start, positions.stop, _SLICE):
                end = min(begin + _SLICE, positions.stop)
                logits = self._decoder.compute_logits(hidden[begin:end])
                yield from negative_log_likelihoods(logits, chunk[begin + 1 : end + 1])


class LlamaPerplexity:
    """llama.cpp's tools, run on a file with the text."""

    def __init__(self, context: Context, text: str) -> None:
        for tool in ("llama-perplexity", "llama-tokenize"):
            LLAMA_CPP.install_tool(context, tool)
        self._context = context
        # llama-perplexity drops a last line end, llama-tokenize keeps it: there is none.
        self._file = context.work_dir / "perplexity.txt"
        self._file.write_text(text)

    def tokenize(self, model: Path) -> list[int]:
        flags = ["--ids", "--no-parse-special", "--no-escape"]
        output = self._run("llama-tokenize", model, flags)
        ids: list[int] = json.loads(output[output.rindex("[") : output.rindex("]") + 1])
        return ids

    def measure(self, model: Path) -> Measured:
        threads, length = str(self._context.threads), str(CHUNK_LEN)
        flags = ["-t", threads, "-tb", threads, "-c", length, "-b", length]
        return parse_llama_perplexity(self._run("llama-perplexity", model, flags))

    def _run(self, tool: str, model: Path, flags: list[str]) -> str:
        argv = [str(LLAMA_CPP.binary(self._context, tool)), "-m", str(model), "-f", str(self._file)]
        result = subprocess.run(
            [*argv, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise RuntimeError(f"{tool} ended with {result.returncode}: {result.stdout[-300:]}")
        return result.stdout


def parse_llama_perplexity(output: str) -> Measured:
    """Raises RuntimeError if the output has no result."""
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", output)
    chunks = re.search(r"perplexity over (\d+) chunks", output)
    if found is None or chunks is None:
        raise RuntimeError(f"llama-perplexity has no result: {output[-300:]}")
    num_chunks = int(chunks.group(1))
    num_counted = num_chunks * len(counted_positions(CHUNK_LEN))
    return Measured(float(found.group(1)), num_chunks, num_counted)


def measure_own(model: OwnModel, chunks: list[list[int]]) -> Measured:
    losses = [loss for chunk in chunks for loss in model.losses(chunk)]
    return Measured(perplexity(losses), len(chunks), len(losses))


def compare(
    path: Path, tools: LlamaPerplexity, text: str, instruction_sets: Sequence[str]
) -> Iterator[str]:
    """The table's lines. Raises RuntimeError if the two do not see the same tokens or chunks."""
    theirs = tools.measure(path)
    model = OwnModel(path)
    token_ids, bos = model.tokenize(text)
    if token_ids != tools.tokenize(path):
        raise RuntimeError(f"llmserve and llama.cpp divide the text into other tokens with {path}")
    chunks = split_chunks(token_ids, CHUNK_LEN, bos)
    from llmserve import _cpu_kernels

    for name in instruction_sets:
        _cpu_kernels.set_instruction_set(name)
        ours = measure_own(model, chunks)
        if (ours.num_chunks, ours.num_counted) != (theirs.num_chunks, theirs.num_counted):
            raise RuntimeError(f"llama.cpp counted {theirs}, llmserve {ours}")
        difference = ours.perplexity / theirs.perplexity - 1
        yield (
            f"| {path.stem} | {name} | {ours.num_counted:,} of {len(token_ids):,} | "
            f"{ours.perplexity:.4f} | {theirs.perplexity:.4f} | "
            f"{100 * difference:+.3f} % | {'yes' if abs(difference) <= TARGET else 'no'} |"
        )


def main() -> None:
    from llmserve import _cpu_kernels

    available = _cpu_kernels.available_instruction_sets()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["q4_k_m"], help=f"{', '.join(NAMES)} (the demo) or a file"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="%(default)s")
    parser.add_argument("--instruction-sets", nargs="+", choices=available, default=available[-1:])
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--work-dir", type=Path, default=Path.home() / ".cache" / "llmserve-bench")
    args = parser.parse_args()
    text = args.text.read_text().strip()
    if len(text.split()) < MIN_WORDS:
        sys.exit(f"{args.text} has {len(text.split())} words; at least {MIN_WORDS} are needed")
    context = Context(args.work_dir.resolve(), args.threads)
    LLAMA_CPP.install(context)
    tools = Tools(LLAMA_CPP.binary(context, "llama-quantize"), TRANSFORMERS.python(context))
    store = ModelStore(context.work_dir / "models", demo_model_path(print).resolve(), tools)
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    peer = LlamaPerplexity(context, text)
    print("\n| model | instruction set | tokens | llmserve | llama.cpp | difference | <= 0.3 % |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in args.models:
        path = store.gguf(name) if name in NAMES else Path(name)
        for line in compare(path, peer, text, args.instruction_sets):
            print(line, flush=True)


if __name__ == "__main__":
    main()
