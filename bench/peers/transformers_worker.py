"""Runs in the environment that has transformers: converts the demo model, measures generate().

    python transformers_worker.py convert FILE.gguf FOLDER
    python transformers_worker.py measure FOLDER THREADS

The last line of `measure` is JSON: medians by dtype.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_NUM_REPETITIONS = 3


def convert(source: Path, folder: Path) -> None:
    """The weights in bfloat16, the tokenizer beside them."""
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def measure(folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """Tokens a second of a prompt of 512 tokens, and of 128 tokens behind a short one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.eos_token_id = None
    _generate_s(model, 512, 1)
    prefill_s, decode_s = [], []
    for _ in range(_NUM_REPETITIONS):
        prefill_s.append(_generate_s(model, 512, 1))
        decode_s.append(_generate_s(model, 8, 129) - _generate_s(model, 8, 1))
    return {
        "prefill_tokens_per_s": 512 / statistics.median(prefill_s),
        "decode_tokens_per_s": 128 / statistics.median(decode_s),
    }


def _generate_s(model: Any, prompt_len: int, output_len: int) -> float:
    prompt = torch.randint(1000, 30000, (1, prompt_len))
    begin = time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=output_len,
        pad_token_id=0,
    )
    elapsed = time.perf_counter() - begin
    if output.shape[1] != prompt_len + output_len:
        raise SystemExit(f"{output.shape[1] - prompt_len} tokens came instead of {output_len}")
    return elapsed


def main() -> None:
    command, path, argument = sys.argv[1:]
    if command == "convert":
        convert(Path(path), Path(argument))
        return
    torch.set_num_threads(int(argument))
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    print(json.dumps({name: measure(Path(path), dtype) for name, dtype in dtypes.items()}))


if __name__ == "__main__":
    main()
