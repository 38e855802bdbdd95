"""Checkpoints as they are released: in block-scale FP8, with layers that predict further ahead, under other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from primeslurm.plan import families
from primeslurm.trainer.encoding import Encoding
from primeslurm.trainer.export import export
from primeslurm.trainer.parallel import Policy, build
from primeslurm.trainer.publish import Publisher
from primeslurm.trainer.world import World
from primeslurm.wire import weights
from primeslurm.wire.weights import FP8_SCALE
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import CASES, Case, write

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "moe.gate.", "norm", "weights_proj")
"""Parts of the names of tensors that are not quantised."""
BY_NAME = {case.name: case for case in CASES}


def change_config(directory: Path, **values: Any) -> None:
    """Set values of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E4M3 values, the scale of each block of 128 x 128, and what the two stand for, block by block."""
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
    """Quantise a checkpoint in place. Returns what its tensors then mean."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in KEPT):
            stored[name] = meant[name] = tensor
        else:
            stored[name], stored[name + FP8_SCALE], meant[name] = quantise(tensor)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=FP8)
    return meant


def exported(policy: Policy) -> dict[str, torch.Tensor]:
    """All tensors of a policy."""
    return {name: tensor for layer in export(policy, torch.float32) for name, tensor in layer.items()}


def loads_in_fp8(case: Case) -> bool:
    return families.FAMILIES[case.config().model_type].fp8_checkpoint


@pytest.mark.parametrize("case", [c for c in CASES if loads_in_fp8(c) and "-" not in c.name], ids=lambda c: c.name)
def test_fp8_blocks_are_dequantised(case: Case, world: World, tmp_path: Path) -> None:
    # More rows than a block has, and not a multiple of them.
    wider = Case(case.name, lambda: _wider(case.config()))
    meant = to_fp8(write(wider, tmp_path))
    found = exported(build(make_recipe(tmp_path), world))
    assert any(tensor.shape[0] > 128 and tensor.shape[0] % 128 for name, tensor in meant.items() if "embed" not in name)
    assert set(found) == set(meant)
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor), name


def _wider(config: Any) -> Any:
    text = config.get_text_config()
    text.intermediate_size = 200
    text.moe_intermediate_size = 144
    return config


def test_a_policy_from_fp8_is_published_as_not_quantised(world: World, tmp_path: Path) -> None:
    source = write(BY_NAME["qwen3"], tmp_path / "source")
    meant = to_fp8(source)
    path = Publisher(build(make_recipe(source), world), tmp_path, Encoding(torch.float32), 1, world).publish(1)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    published = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(published) == set(meant)


@pytest.mark.parametrize("change", [{"weight_block_size": None}, {"quant_method": "mxfp4"}, {"fmt": "e5m2"}])
def test_other_quantisations_are_refused(change: dict[str, Any], world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["qwen3"], tmp_path)
    change_config(path, quantization_config=FP8 | change)
    with pytest.raises(ValueError, match="convert them to bfloat16 first"):
        build(make_recipe(path), world)


def test_layers_that_predict_further_ahead_are_left_out(world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["glm_moe_dsa"], tmp_path)
    tensors = load_file(path / "model.safetensors")
    beyond = {f"model.layers.{number}.eh_proj.weight": torch.zeros(2, 2) for number in (4, 5)}
    save_file(tensors | beyond, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.5\.eh_proj\.weight$"):
        build(make_recipe(path), world)
    change_config(path, num_nextn_predict_layers=2)
    assert set(exported(build(make_recipe(path), world))) == set(tensors)


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_modules_that_draft_are_left_out(family: str, world: World, tmp_path: Path) -> None:
    path = write(BY_NAME[family], tmp_path)
    tensors = load_file(path / "model.safetensors")
    draft = {"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}
    save_file(tensors | draft, path / "model.safetensors", metadata={"format": "pt"})
    assert set(exported(build(make_recipe(path), world))) == set(tensors)


def test_kimi_k2_is_deepseek_v3(world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["deepseek_v3"], tmp_path)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        expected = build(make_recipe(path), world).logits(tokens, positions)[0]
        change_config(path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
        kimi = build(make_recipe(path), world).logits(tokens, positions)[0]
    assert torch.equal(kimi, expected)


def test_the_text_model_of_kimi_k25_is_deepseek_v3(world: World, tmp_path: Path) -> None:
    plain = write(BY_NAME["deepseek_v3"], tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    kimi = tmp_path / "kimi"
    kimi.mkdir()
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    vision = {f"{part}.weight": torch.randn(2, 2) for part in ("vision_tower.patch_embed", "mm_projector.pre_norm")}
    save_file(named | vision, kimi / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (kimi / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))

    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN)[None]
    policy = build(make_recipe(kimi), world)
    with torch.no_grad():
        expected = build(make_recipe(plain), world).logits(tokens, positions)[0]
        assert torch.equal(policy.logits(tokens, positions)[0], expected)
    Publisher(policy, tmp_path, Encoding(torch.float32), 1, world).publish(1)
    files = weights.version_dir(tmp_path, 1).glob("*.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert set(found) == set(named | vision)
    assert all(torch.equal(found[name], tensor) for name, tensor in (named | vision).items())


@pytest.mark.parametrize(("family", "impl"), [("deepseek_v3", "custom"), ("glm4_moe", "hf")])
def test_the_selection_bias_is_published_exactly(family: str, impl: str, world: World, tmp_path: Path) -> None:
    path = write(BY_NAME[family], tmp_path)
    policy = build(make_recipe(path, model={"path": str(path), "dtype": "bfloat16", "impl": impl}), world)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    published = {key: tensor for layer in export(policy, torch.bfloat16) for key, tensor in layer.items()}
    assert torch.equal(published[name], load_file(path / "model.safetensors")[name])
    assert {tensor.dtype for key, tensor in published.items() if key != name} == {torch.bfloat16}
