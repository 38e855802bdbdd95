"""Four-bit checkpoints are dequantized bit for bit like the libraries that define the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights import loading
from primeslurm.trainer.weights.export import Encoding
from primeslurm.trainer.weights.four_bits import dequantize
from primeslurm.trainer.weights.loading import Loader
from primeslurm.trainer.weights.tensor_files import TensorFiles
from tests.trainer.as_released import change_config
from tests.trainer.checkpoints.test_as_released import exported
from tests.trainer.conftest import make_recipe, tensors
from tests.trainer.families import BY_NAME, Case, write
from tests.trainer.four_bits import INT4, int4, mxfp4, to_int4, to_mxfp4


def test_mxfp4_matches_transformers() -> None:
    """Without 255, which is NaN in E8M0 but 2 ** 128 in transformers."""
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16)
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    expected = convert_moe_packed_tensors(blocks, scales)
    actual = dequantize("mxfp4", blocks.reshape(1, 255, 256), scales.contiguous()).mT
    assert torch.equal(actual, expected) and actual.unique().numel() > 1000


@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16, torch.float32])
def test_int4_matches_compressed_tensors(group: int, scale: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, _ = int4(torch.randn(67, 384), group)
    parts["weight_scale"] = torch.rand(67, 384 // group).to(scale)
    expected = _decompressed(parts)
    save_file({f"up_proj.{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    files = TensorFiles.read(tmp_path)
    assert set(files.places) == {"up_proj.weight"}
    actual = torch.empty(67, 384)
    with Loader(files, torch.device("cpu")) as loader:
        loader.fill({"up_proj.weight": actual})
    assert torch.equal(actual, expected.float())


def _decompressed(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes = unpack_from_int32(parts["weight_packed"], 4, torch.Size(parts["weight_shape"].tolist()))
    return dequantize(codes, parts["weight_scale"])


@pytest.mark.parametrize("at_once", [64, 3000, 8 << 20])
def test_stack_is_read_in_chunks_of_any_size(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CHUNK_BYTES", at_once)
    monkeypatch.setattr(loading, "MIN_RUN_BYTES", 24)
    torch.manual_seed(0)
    parts, expected = mxfp4(5, 24, 96)
    save_file({f"stack{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    actual = torch.empty(5, 96, 24)
    with Loader(TensorFiles.read(tmp_path), torch.device("cpu")) as loader:
        loader.fill({"stack": actual})
    assert torch.equal(actual, expected.float())


def _oss() -> Any:
    config = BY_NAME["gpt_oss"].config()
    config.intermediate_size = 96  # or every stack has as many columns as rows
    return config


def test_released_gpt_oss_matches_transformers(world: World, tmp_path: Path) -> None:
    source = write(Case("gpt_oss", _oss), tmp_path / "source")
    meant = to_mxfp4(source)
    theirs = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    policy = build(make_recipe(source), world)
    actual, expected = exported(policy), theirs.state_dict()
    assert set(actual) == set(meant) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.float()), name
        assert torch.equal(tensor, meant[name]), name
    path = Publisher(policy, tmp_path, Encoding(torch.bfloat16), 1, world).publish(1)
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    again = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("family", ["kimi_k2", "kimi_k25"])
def test_released_kimi_matches_compressed_tensors(family: str, world: World, tmp_path: Path) -> None:
    source = write(BY_NAME["deepseek_v3"], tmp_path)
    meant = to_int4(source)
    if family == "kimi_k2":
        change_config(source, model_type=family)
    else:
        meant = _below_language_model(source, meant)
    assert any(name.endswith("weight_packed") for name in tensors(source))
    actual = exported(build(make_recipe(source), world))
    assert set(actual) == set(meant)
    for name, tensor in meant.items():
        assert torch.equal(actual[name], tensor.float()), name


def _below_language_model(directory: Path, meant: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a text model to a Kimi-K2.5 checkpoint. Return the dequantized tensors."""
    stored = load_file(directory / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()}, directory / "model.safetensors")
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return {f"language_model.{name}": tensor for name, tensor in meant.items()}


@pytest.mark.parametrize("change", [{"num_bits": 8}, {"symmetric": False}, {"actorder": "group"}, {"type": "float"}])
def test_other_compressed_tensors_formats_are_rejected(change: dict[str, Any], world: World, tmp_path: Path) -> None:
    source = write(BY_NAME["deepseek_v3"], tmp_path)
    group = INT4["config_groups"]["group_0"]  # type: ignore[index]
    groups = {"group_0": group | {"weights": group["weights"] | change}}
    change_config(source, model_type="kimi_k2", quantization_config=INT4 | {"config_groups": groups})
    with pytest.raises(ValueError, match="weights stored in compressed-tensors are not supported"):
        build(make_recipe(source), world)
