"""GPU memory of a vision encoder per image patch.

A CPU suffices (a minute), as bytes of live tensors are counted: the encoders of Qwen3-VL-30B-A3B and Qwen3.5-35B-A3B at
full width with four blocks, bfloat16, one image; frozen, trained, and trained with recomputed blocks. A patch is the
difference between images of 1,024 and 512 patches. Parameters are excluded. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig

from benchmarks.live_memory import Passes, passes

RESULT = Path(__file__).resolve().parent / "results" / "vision_memory.json"
ENCODERS = {
    "qwen3_vl_moe": Qwen3VLMoeVisionConfig(depth=4, out_hidden_size=2048, deepstack_visual_indexes=[0, 1, 2]),
    "qwen3_5_moe": Qwen3_5MoeVisionConfig(depth=4, out_hidden_size=2048),
}
# Frozen, or trained with none or full activation checkpointing.
MODES = ("frozen", "none", "full")


def measure(config: Any, mode: str, width: int) -> Passes:
    """Measure a forward and backward pass of an image with a height of 32 patches."""
    encoder = AutoModel.from_config(config, dtype=torch.bfloat16).requires_grad_(mode != "frozen").train()
    if mode == "full":
        encoder.gradient_checkpointing_enable({"use_reentrant": False})
    pixels, grid = torch.randn(32 * width, 3 * 2 * config.patch_size**2), torch.tensor([[1, 32, width]])

    def call() -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(mode != "frozen"):
            out = encoder(pixels, grid_thw=grid, return_dict=True)
        return out.pooler_output, *(getattr(out, "deepstack_features", None) or ())

    return passes(encoder, call, [pixels, grid])


def per_patch(config: Any, mode: str) -> dict[str, int]:
    """Return the bytes per patch, in addition to its pixels and the encoder's output."""
    small, large = (asdict(measure(config, mode, width)) for width in (16, 32))
    return {name: round((large[name] - small[name]) / 512) for name in small}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks vision_memory", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    results: dict[str, Any] = {
        "command": "python -m benchmarks vision_memory --write",
        "torch": torch.__version__,
        "bytes_per_patch": {
            name: {mode: per_patch(config, mode) for mode in MODES} for name, config in ENCODERS.items()
        },
    }
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)
