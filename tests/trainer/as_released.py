"""Convert checkpoints to released formats: block-scale FP8, or stacked experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from primeslurm.wire.weight_transfer.tensor_names import FP8_SCALE
from tests.trainer.conftest import tensors

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "moe.gate.", "norm", "weights_proj")
"""Name parts of tensors that are not quantized."""


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return E4M3 values, scales of blocks of 128 x 128, and the dequantized values."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    values, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = values[block].float() * scales[i, j]
    return values, scales, meant


def to_fp8(directory: Path) -> dict[str, torch.Tensor]:
    """Quantize a checkpoint in place. Return the dequantized tensors."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in KEPT):
            stored[name] = meant[name] = tensor
        else:
            stored[name], stored[name + FP8_SCALE], meant[name] = quantize(tensor)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    modules = [
        name.removesuffix(".weight") for name in stored if name.endswith(".weight") and name + FP8_SCALE not in stored
    ]
    change_config(directory, quantization_config=FP8 | {"modules_to_not_convert": modules})  # vLLM quantises others
    return meant


def assert_stored_alike(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert equal names, shapes, dtypes and bits, except for the last bit of scales.

    The amax of a block is 448 times its scale, rounded, which does not determine the last bit of the scale.
    """
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        if name.endswith(FP8_SCALE):
            torch.testing.assert_close(actual[name], tensor, rtol=2**-23, atol=0, msg=name)
        else:
            assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name


def stack_experts(directory: Path) -> dict[str, torch.Tensor]:
    """Store each layer's experts as two stacks. Return the original tensors."""
    before = tensors(directory)
    experts: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    stored = {}
    for name, tensor in before.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            stored[name] = tensor
    for module, parts in experts.items():
        numbers = range(len(parts) // 3)
        stored[f"{module}.gate_up_proj"] = torch.stack([torch.cat([parts[i, "gate"], parts[i, "up"]]) for i in numbers])
        stored[f"{module}.down_proj"] = torch.stack([parts[i, "down"] for i in numbers])
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return before
