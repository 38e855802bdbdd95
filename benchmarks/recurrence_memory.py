"""Memory that a recurrent layer keeps per row for its backward pass.

A CPU suffices (a minute), as bytes of fake tensors are counted: one row in bfloat16, with the layers of Qwen3.5-35B-A3B
(gated delta net) and Nemotron-3-Nano (Mamba-2) at full width, under each kind of activation checkpointing. For
comparison: without any recomputation, and the peak of the backward pass of the layer with its norm. Parameters are
excluded. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import NemotronHConfig, Qwen3_5MoeTextConfig

from benchmarks.live_memory import Passes, passes
from primeslurm.models import model_builder
from primeslurm.nn.layers import scan
from primeslurm.trainer.components.activation_checkpointing import POLICIES

RESULT = Path(__file__).resolve().parent / "results" / "recurrence_memory.json"
SMALL = {"vocab_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 1}
QWEN = Qwen3_5MoeTextConfig(
    **SMALL,
    hidden_size=2048,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention"],
)
NEMOTRON = NemotronHConfig(
    **SMALL,
    hidden_size=2688,
    mamba_num_heads=64,
    mamba_head_dim=64,
    n_groups=8,
    ssm_state_size=128,
    chunk_size=128,
    layers_block_type=["linear_attention"],
)
# For each kind a model, and the names of the layer and of the norm before it.
LAYERS = {"gated_delta_net": (QWEN, "delta_net", "attention_norm"), "mamba_2": (NEMOTRON, "mamba", "norm")}
LENGTH = 16384
# Row length of the measurements without recomputation.
SHORT = 4096


class _Layer(nn.Module):
    """A recurrent layer alone, or with its norm and the residual connection."""

    def __init__(self, mixer: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm

    def forward(self, row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.mixer(row, positions) if self.norm is None else row + self.mixer(self.norm(row), positions)


def built(config: Any, name: str, norm: str | None, checkpointing: str) -> nn.Module:
    """Return the recurrent layer of a model's first layer, in bfloat16, which takes rows and positions.

    Args:
        norm: name of the norm before it; empty to leave it out.
    """
    spec, policy = model_builder.spec(config, 64, "flex").model.layers[0], POLICIES[checkpointing]
    with ExitStack() as after:
        after.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        layer: nn.Module = _Layer(getattr(spec, name).build(), getattr(spec, norm).build() if norm else None)
    return layer if policy is None else policy.build(dump_folder="")._wrap_block(layer, base_fqn="layers.0")


def measure(config: Any, length: int, name: str, norm: str | None = None, checkpointing: str = "none") -> Passes:
    """Measure a forward and backward pass of one row."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = built(config, name, norm, checkpointing)
        row = torch.empty(1, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(length)[None]
        return passes(layer, lambda: (layer(row, positions),), [row, positions])


def per_token(config: Any, found: Passes, length: int) -> int:
    """Return the bytes kept per token, including the layer's input and its position."""
    return round(found.kept / length) + config.hidden_size * 2 + 8


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks recurrence_memory", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args(words)
    results: dict[str, Any] = {"command": "python -m benchmarks recurrence_memory --write", "torch": torch.__version__}
    for kind, (config, name, norm) in LAYERS.items():
        kept = {each: measure(config, LENGTH, name, checkpointing=each) for each in POLICIES}
        with patch.object(scan, "checkpoint", lambda function, *tensors, **_: function(*tensors)):
            whole = measure(config, SHORT, name)
        results[kind] = {
            "bytes_per_token": {each: per_token(config, found, LENGTH) for each, found in kept.items()},
            "bytes_per_token_all_saved": per_token(config, whole, SHORT),
            f"peak_bytes_of_{LENGTH}": measure(config, LENGTH, name, norm, "full").backward,
        }
    text = json.dumps(results, indent=2) + "\n"
    print(text, end="")
    if options.write:
        RESULT.write_text(text)
