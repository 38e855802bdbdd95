"""What one recurrent layer keeps of a row for its backward pass: `python benchmarks/recurrence_memory.py [LENGTH ...]`.

A CPU is enough (minutes): bytes are counted, not allocated by a GPU. One row of LENGTH tokens, bfloat16, the layers of
Qwen3.5-35B-A3B (gated delta net) and Nemotron-3-Nano (Mamba-2) at full width. Counted is every tensor that autograd
saves while the layer runs forward, each storage once, parameters left out; and beside it, for the first length, what
it would save if nothing were computed anew. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from primeslurm.trainer import compat  # noqa: F401  isort: skip  (before torchtitan)
import torch
from torch import nn
from transformers import NemotronHConfig, Qwen3_5MoeTextConfig

from primeslurm.trainer import models
from primeslurm.trainer.models import scan

SMALL = {"vocab_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
QWEN = Qwen3_5MoeTextConfig(
    **SMALL,
    hidden_size=2048,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention"],
    num_hidden_layers=1,
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
LAYERS = {"gated_delta_net": (QWEN, "delta_net"), "mamba_2": (NEMOTRON, "mamba")}


def layer(config: Any, name: str) -> nn.Module:
    """The mixer of a model's first layer, random."""
    mixer: nn.Module = getattr(models.spec(config, 64, "flex").model.layers[0], name).build()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return mixer.bfloat16()


def kept(mixer: nn.Module, width: int, length: int) -> int:
    """Bytes that the forward pass of one row leaves behind for the backward pass."""
    owned = {parameter.untyped_storage().data_ptr() for parameter in mixer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage
        return tensor

    row = torch.randn(1, length, width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = mixer(row, torch.arange(length)[None])
    out.float().sum().backward()
    return sum(storage.nbytes() for storage in saved.values())


def per_token(config: Any, part: str, length: int) -> int:
    """Bytes kept of a token by a new layer."""
    return round(kept(layer(config, part), config.hidden_size, length) / length)


def main() -> None:
    """Measure each layer at each length."""
    lengths = [int(argument) for argument in sys.argv[1:]] or [4096]
    results: dict[str, Any] = {"command": "python benchmarks/recurrence_memory.py", "torch": torch.__version__}
    for name, (config, part) in LAYERS.items():
        result = {f"bytes_per_token_of_{length}": per_token(config, part, length) for length in lengths}
        with patch.object(scan, "checkpoint", lambda function, *tensors, **_: function(*tensors)):
            result["bytes_per_token_all_saved"] = per_token(config, part, lengths[0])
        results[name] = result
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
