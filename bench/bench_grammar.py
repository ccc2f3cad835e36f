"""Times grammars over the demo model's 262,144 tokens: llguidance against xgrammar, and decoding.

Compiling: from a JSON schema to the first mask, nothing cached. Masks: the text of a random
document of the schema, one mask a token. xgrammar is timed if it is installed. Decoding: 8
sequences, plain and under a grammar in turns, median times of a step. The last line is JSON.
Usage: python -m bench.bench_grammar [--model PATH] [--rounds 6] [--skip-schemas]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.grammar_schemas import NASTY, REAL
from llmserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig, ServerConfig
from llmserve.core import NewSequence, SamplingParams, StepPlan
from llmserve.core.grammar import Grammar
from llmserve.files.demo import demo_model_path
from llmserve.files.model import open_model
from llmserve.grammar import GrammarCompiler, GrammarError, GrammarKind, GrammarSpec
from llmserve.runner import LoadedRunner, load_runner
from llmserve.tokenizer import Tokenizer, load_tokenizer

NUM_SEQS = 8
NUM_STEPS = 40
PROMPT_LEN = 32
DECODED = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "new"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


class Walk(Protocol):
    """A grammar of one library, at its start."""

    def mask(self) -> np.ndarray: ...
    def accept(self, token_id: int) -> bool: ...


class OurWalk:
    def __init__(self, grammar: Grammar) -> None:
        self._state = grammar.start()

    def mask(self) -> np.ndarray:
        return np.frombuffer(self._state.mask(), np.uint8)

    def accept(self, token_id: int) -> bool:
        try:
            self._state.accept(token_id)
        except GrammarError:
            return False
        return True


class XgrammarWalk:
    def __init__(self, xgrammar: Any, compiled: Any, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._mask)
        return self._mask.numpy().view(np.uint8)[0]

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def llguidance_starter(tokenizer: Tokenizer, vocab_size: int) -> Callable[[Any], Walk]:
    compiler = GrammarCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids, timeout_s=60)
    begin = time.perf_counter()
    compiler.warm_up()
    print(f"llguidance: vocabulary {time.perf_counter() - begin:.2f} s")

    def start(schema: Any) -> Walk:
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        return OurWalk(compiler.compile(spec))

    return start


def xgrammar_starter(tokenizer: Tokenizer, vocab_size: int) -> Callable[[Any], Walk] | None:
    try:
        import xgrammar
    except ImportError:
        return None
    begin = time.perf_counter()
    info = xgrammar.TokenizerInfo(
        [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(tokenizer.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
    print(f"xgrammar: vocabulary {time.perf_counter() - begin:.2f} s")

    def start(schema: Any) -> Walk:
        compiled = compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=True, max_whitespace_cnt=1
        )
        return XgrammarWalk(xgrammar, compiled, vocab_size)

    return start


def write_document(walk: Walk, tokenizer: Tokenizer, max_tokens: int = 120) -> list[int]:
    """Random ids of a document; closing strings and lists is made likelier than chance."""
    draw = random.Random(0)
    ends = {i for text in ('"', "]", "}", '",', '"}', ",") for i in tokenizer.encode(text, False)}
    ids: list[int] = []
    while len(ids) < max_tokens:
        options = np.flatnonzero(np.unpackbits(walk.mask(), bitorder="little"))
        closing = [i for i in options.tolist() if i in ends]
        if tokenizer.eos_token_ids[0] in options:
            break
        ids.append(
            draw.choice(closing) if closing and draw.random() < 0.3 else int(draw.choice(options))
        )
        walk.accept(ids[-1])
    return ids


def time_schema(start: Callable[[Any], Walk], schema: Any, ids: list[int]) -> dict[str, Any]:
    """Milliseconds; `length` is how many tokens of the document the library accepts."""
    begin = time.perf_counter()
    try:
        walk = start(schema)
        walk.mask()
    except Exception as error:  # each library raises its own
        return {"refused": str(error)[:60]}
    compile_ms = (time.perf_counter() - begin) * 1e3
    masks = []
    for token_id in ids:
        begin = time.perf_counter()
        walk.mask()
        masks.append((time.perf_counter() - begin) * 1e3)
        if not walk.accept(token_id):
            break
    return {
        "compile_ms": compile_ms,
        "mask_ms": statistics.fmean(masks),
        "mask_max_ms": max(masks),
        "length": len(masks),
    }


def compare_libraries(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    starters = {"llguidance": llguidance_starter(tokenizer, vocab_size)}
    other = xgrammar_starter(tokenizer, vocab_size)
    if other is not None:
        starters["xgrammar"] = other
    results: dict[str, Any] = {}
    print(f"{'schema':<26}{'library':<12}{'compile ms':>11}{'mask ms':>9}{'max':>8}{'tokens':>8}")
    for name, schema in (REAL | NASTY).items():
        ids = write_document(starters["llguidance"](schema), tokenizer)
        for library, start in starters.items():
            fresh = {**schema, "description": f"for {library}"}  # not the one in the cache
            row = results.setdefault(name, {})[library] = time_schema(start, fresh, ids)
            if "refused" in row:
                print(f"{name:<26}{library:<12} refused: {row['refused']}")
                continue
            print(
                f"{name:<26}{library:<12}{row['compile_ms']:>11.1f}{row['mask_ms']:>9.3f}"
                f"{row['mask_max_ms']:>8.2f}{row['length']:>8}"
            )
    return results


def load(model: Path) -> tuple[LoadedRunner, Tokenizer]:
    config = ServerConfig(
        model=ModelConfig(model=str(model), max_model_len=512),
        cache=CacheConfig(num_gpu_blocks_override=NUM_SEQS * 32 + 1),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=512),
        runner=RunnerConfig(threads=2),
    )
    files = open_model(config.model, print)
    return load_runner(files, config), load_tokenizer(files)


def time_steps(loaded: LoadedRunner, sampling: list[SamplingParams]) -> list[float]:
    """Milliseconds of each decoding step of NUM_SEQS sequences."""
    num_groups = len(loaded.kv_spec.groups)
    size = loaded.kv_spec.block_size
    per_seq = -(-(PROMPT_LEN + NUM_STEPS + 1) // size)
    ids = [f"s{i}" for i in range(NUM_SEQS)]
    new = []
    for i, request_id in enumerate(ids):
        tables = tuple(
            [1 + (i * num_groups + g) * per_seq + b for b in range(per_seq)]
            for g in range(num_groups)
        )
        prompt = [2, *(1000 + 37 * i + j for j in range(PROMPT_LEN - 1))]
        new.append(NewSequence(request_id, prompt, PROMPT_LEN, sampling[i], tables))
    is_sampling = [True] * NUM_SEQS
    loaded.runner.execute(
        StepPlan(ids, [0] * NUM_SEQS, [PROMPT_LEN] * NUM_SEQS, is_sampling, new=new)
    )
    times = []
    for step in range(NUM_STEPS):
        plan = StepPlan(ids, [PROMPT_LEN + step] * NUM_SEQS, [1] * NUM_SEQS, is_sampling)
        begin = time.perf_counter()
        results = loaded.runner.execute(plan).sequences
        times.append((time.perf_counter() - begin) * 1e3)
        assert all(result.error is None for result in results), results
    loaded.runner.forget(ids)
    return times


def time_decoding(loaded: LoadedRunner, tokenizer: Tokenizer, rounds: int) -> dict[str, float]:
    compiler = GrammarCompiler(tokenizer, loaded.vocab_size, tokenizer.eos_token_ids)
    grammar = compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(DECODED)))
    cases = {"plain": None, "grammar": grammar}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(rounds + 1):
        for name, asked in cases.items():
            sampling = [
                SamplingParams(
                    # Drawing from a masked row is faster, which is not what is measured here.
                    temperature=0.0,
                    seed=i,
                    grammar=asked,
                    eos_token_ids=tokenizer.eos_token_ids,
                )
                for i in range(NUM_SEQS)
            ]
            steps = time_steps(loaded, sampling)
            if round_number:
                times[name] += steps
    medians = {name: statistics.median(values) for name, values in times.items()}
    loss = medians["grammar"] / medians["plain"] - 1
    print(
        f"{NUM_SEQS} sequences, a step: plain {medians['plain']:.2f} ms, "
        f"with a grammar {medians['grammar']:.2f} ms ({loss:+.1%})"
    )
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--skip-schemas", action="store_true")
    options = parser.parse_args()
    loaded, tokenizer = load(options.model or demo_model_path(print))
    results: dict[str, Any] = {}
    if not options.skip_schemas:
        results["schemas"] = compare_libraries(tokenizer, loaded.vocab_size)
    results["decode_ms"] = time_decoding(loaded, tokenizer, options.rounds)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
