"""The same models, of random weights, on the same device by transformers: with each of its
attentions that can be had, model.forward token by token over its own cache.

    python -m bench.gpu.peer --shape llama-3-8b [--figures FILE] [--roofs FILE] [--beside FILE]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu.figures import Figures, read, value_of
from bench.gpu.roofs import Roofs, read_roofs
from bench.gpu.shapes import FULL_LOAD, SHAPES, TINY_LOAD, Load, Shape

_NUM_STEPS = 16
_NUM_WARM_STEPS = 3


class Peer:
    """One model. attention: a name of transformers."""

    def __init__(self, shape: Shape, attention: str, device: torch.device) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers: Any = importlib.import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            shape.write(Path(folder))
            config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attention
            )
        self._model: Any = model.to(device).eval()
        self._device = device
        self._vocab_size = shape.config["vocab_size"]

    def step_seconds(self, num_seqs: int, context: int, num_steps: int) -> float:
        """Of one decode step, on average over `num_steps`."""
        with torch.inference_mode():
            out = self._forward(self._prompts(num_seqs, context), None)
            begin = 0.0
            for step in range(_NUM_WARM_STEPS + num_steps):
                if step == _NUM_WARM_STEPS:
                    begin = self._now()
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                out = self._forward(tokens, out.past_key_values)
            return (self._now() - begin) / num_steps

    def prefill_seconds(self, num_tokens: int, num_runs: int) -> float:
        times = []
        with torch.inference_mode():
            for _ in range(num_runs + 1):
                begin = self._now()
                self._forward(self._prompts(1, num_tokens), None)
                times.append(self._now() - begin)
        return statistics.median(times[1:])

    def _prompts(self, num_seqs: int, length: int) -> torch.Tensor:
        return torch.randint(3, self._vocab_size, (num_seqs, length), device=self._device)

    def _forward(self, token_ids: torch.Tensor, cache: Any) -> Any:
        return self._model(
            input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        )

    def _now(self) -> float:
        """Once the device has done everything."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def attentions() -> list[str]:
    """That can be had here."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    return ["sdpa", "flash_attention_2"] if has_flash else ["sdpa"]


def measure(
    peer: Peer,
    prefix: str,
    shape: Shape,
    load: Load,
    roofs: Roofs,
    figures: Figures,
    ours: dict[str, dict[str, Any]],
) -> None:
    def add(name: str, bound: float | None, rate: Callable[[], float]) -> None:
        try:
            value = rate()
        except torch.OutOfMemoryError:
            print(f"{prefix} {name}: not enough memory")
            torch.cuda.empty_cache()
            return
        own = value_of(ours, name)
        note = "" if own is None else f"llmserve is {own / value:.2f} times as fast"
        figures.add(f"{prefix} {name}", value, "tokens/s", bound=bound, note=note)

    add(
        f"prefill, {load.prefill_tokens} tokens",
        shape.prefill_bound(roofs, load.prefill_tokens),
        lambda: load.prefill_tokens / peer.prefill_seconds(load.prefill_tokens, load.num_prefills),
    )
    num_steps = min(load.num_steps, _NUM_STEPS)
    for num_seqs in load.batch_sizes:

        def rate(num_seqs: int = num_seqs) -> float:
            return num_seqs / peer.step_seconds(num_seqs, load.context, num_steps)

        context = load.context + _NUM_WARM_STEPS + num_steps / 2
        add(
            f"decode, batch {num_seqs}, context {load.context}",
            shape.decode_bound(roofs, num_seqs, context),
            rate,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--roofs", type=Path)
    parser.add_argument("--beside", type=Path, help="the figures of bench.gpu.serve")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shape, load = SHAPES[options.shape], TINY_LOAD if options.tiny else FULL_LOAD
    figures = Figures(options.figures, has_targets=False)
    device = torch.device("cpu" if options.tiny else "cuda")
    roofs = Roofs() if options.tiny else read_roofs(read(options.roofs))
    for attention in attentions():
        peer = Peer(shape, attention, device)
        prefix = f"transformers ({attention})"
        measure(peer, prefix, shape, load, roofs, figures, read(options.beside))
        del peer


if __name__ == "__main__":
    main()
