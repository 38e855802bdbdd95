"""Convert checkpoints to released four-bit formats, with the libraries that define them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.trainer.as_released import change_config

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}


def int4(weight: torch.Tensor, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Compress a matrix. Return the module's tensors, and the dequantized values."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=group, symmetric=True)
    )
    scale = (weight.view(len(weight), -1, group).abs().amax(-1) / 7).bfloat16()
    state = {"weight": weight.bfloat16(), "weight_scale": scale}
    stored = PackedQuantizationCompressor.compress(state, scheme)
    return stored, PackedQuantizationCompressor.decompress(stored, scheme)["weight"]


def mxfp4(experts: int, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return random `_blocks` and `_scales` of a stack, and the transposed dequantized values."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(115, 126, (experts, rows, columns // 32), dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def to_mxfp4(directory: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a gpt-oss checkpoint by MXFP4 ones. Return the dequantized tensors."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, meant[name] = mxfp4(len(tensor), tensor.shape[2], tensor.shape[1])
            stored |= {name + part: value for part, value in parts.items()}
        else:
            stored[name] = meant[name] = tensor.bfloat16()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=MXFP4, dtype="bfloat16")
    return meant


def to_int4(directory: Path) -> dict[str, torch.Tensor]:
    """Compress the routed experts of a checkpoint. Return the dequantized tensors."""
    stored: dict[str, Any] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if re.search(r"\.experts\.\d+\.", name):
            parts, meant[name] = int4(tensor)
            stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=INT4)
    return meant
