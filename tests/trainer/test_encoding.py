"""FP8 in blocks: what is written, how exact it is, and that engines get back what the trainer rounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from primeslurm.trainer.encoding import Encoding, quantize
from primeslurm.trainer.parallel import build
from primeslurm.trainer.publish import Publisher
from primeslurm.trainer.world import World
from primeslurm.wire import weights
from tests.trainer.conftest import make_recipe
from tests.trainer.families import COMMON, EXPERTS, Case, write

WIDE = COMMON | {"hidden_size": 192, "intermediate_size": 256}


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """By definition: each element times the scale of its block."""
    rows = torch.arange(weight.shape[0]) // weights.FP8_BLOCK
    columns = torch.arange(weight.shape[1]) // weights.FP8_BLOCK
    return weight.float() * scales[rows][:, columns]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 130), (3, 5)])
def test_a_rounding_error_is_at_most_a_sixteenth_and_does_not_grow(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(-4, 0, shape[1])
    weight, scales = quantize(matrix)
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == matrix.shape
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128)) and scales.dtype == torch.float32
    rounded = dequantised(weight, scales)
    smallest_normal = scales.max() * 2**-6
    torch.testing.assert_close(rounded, matrix, rtol=1 / 16, atol=float(smallest_normal) / 16)
    again, same = quantize(rounded)
    assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
    torch.testing.assert_close(same, scales)


def test_a_block_of_zeros_stays_zero() -> None:
    weight, scales = quantize(torch.zeros(128, 128))
    assert dequantised(weight, scales).abs().max() == 0


def test_a_policy_published_in_fp8(world: World, tmp_path: Path) -> None:
    source = write(Case("wide", lambda: Qwen3MoeConfig(**WIDE, **EXPERTS)), tmp_path / "model")
    path = Publisher(build(make_recipe(source), world), tmp_path, Encoding(torch.bfloat16, fp8=True), 1, world).publish(
        1
    )
    original = load_file(source / "model.safetensors")
    published = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    halved = {name for name in published if name + weights.FP8_SCALE in published}
    assert {name.rsplit(".", 2)[-2] for name in halved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert set(published) == set(original) | {name + weights.FP8_SCALE for name in halved}
    for name, tensor in original.items():
        if name in halved:
            expected = dequantised(*quantize(tensor.bfloat16()))
            assert torch.equal(dequantised(published[name], published[name + weights.FP8_SCALE]), expected), name
        else:
            assert torch.equal(published[name], tensor.bfloat16()), name
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(config["modules_to_not_convert"])
