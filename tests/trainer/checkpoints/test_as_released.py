"""Released checkpoints: block-scale FP8, multi-token-prediction layers, and other names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from primeslurm.models import model_types
from primeslurm.nn.kernels.fp8.blocks import BLOCKS, quantize
from primeslurm.nn.layers import fp8
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.checkpoints import export as checkpoint_export
from primeslurm.trainer.checkpoints.checkpoint import Checkpoints
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding, published, stored_by_engines
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.weight_transfer import filesystem
from tests.trainer.as_released import FP8, assert_stored_alike, change_config, stack_experts, to_fp8
from tests.trainer.conftest import SEQ_LEN, exported, make_batch, make_recipe, make_timer, tensors
from tests.trainer.families import BY_NAME, CASES, Case, write

RELEASED = ("qwen3_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m2")
"""Families that are released in FP8."""


def loads_in_fp8(case: Case) -> bool:
    return model_types()[case.config().model_type].fp8_checkpoint


@pytest.mark.parametrize("case", [c for c in CASES if loads_in_fp8(c) and "-" not in c.name], ids=lambda c: c.name)
def test_fp8_blocks_are_dequantized(case: Case, world: World, tmp_path: Path) -> None:
    # More rows than a block has, and not a multiple of them.
    wider = Case(case.name, lambda: _wider(case.config()))
    meant = to_fp8(write(wider, tmp_path))
    actual = exported(build(make_recipe(tmp_path), world))
    assert any(tensor.shape[0] > 128 and tensor.shape[0] % 128 for name, tensor in meant.items() if "embed" not in name)
    assert set(actual) == set(meant)
    for name, tensor in meant.items():
        assert torch.equal(actual[name], tensor), name


def _wider(config: Any) -> Any:
    text = config.get_text_config()
    text.intermediate_size = 200
    text.moe_intermediate_size = 144
    return config


def test_stacked_experts_are_loaded_and_exported_separately(world: World, tmp_path: Path) -> None:
    source = write(BY_NAME["qwen3_5_moe"], tmp_path)
    before = stack_experts(source)
    assert len(tensors(source)) < len(before)
    actual = exported(build(make_recipe(source), world))
    assert set(actual) == set(before)
    for name, tensor in before.items():
        assert torch.equal(actual[name], tensor), name


def test_policy_from_fp8_is_published_in_compute_dtype(world: World, tmp_path: Path) -> None:
    source = write(BY_NAME["qwen3"], tmp_path / "source")
    meant = to_fp8(source)
    path = Publisher(build(make_recipe(source), world), tmp_path, Encoding(torch.float32), 1, world).publish(1)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert set(tensors(path)) == set(meant)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in RELEASED], ids=lambda c: c.name)
def test_unchanged_policy_is_published_as_its_fp8_checkpoint(case: Case, world: World, tmp_path: Path) -> None:
    source = write(Case(case.name, lambda: _wider(case.config())), tmp_path / "source")
    to_fp8(source)
    policy = build(make_recipe(source, model={"path": str(source), "dtype": "bfloat16"}), world)
    path = Publisher(policy, tmp_path, Encoding(torch.bfloat16, stored=policy.stored_fp8), 1, world).publish(1)
    released = tensors(source)
    expected = {name: t.bfloat16() if name in _unquantised(released) else t for name, t in released.items()}
    assert_stored_alike(tensors(path), expected)
    config = json.loads((path / "config.json").read_text())
    assert (config["dtype"], config["quantization_config"] | FP8) == ("bfloat16", config["quantization_config"])
    modules = {name.removesuffix(".weight") for name in _unquantised(released) if name.endswith(".weight")}
    assert set(config["quantization_config"]["modules_to_not_convert"]) == modules


def test_bfloat16_policy_is_published_as_the_engines_fp8_checkpoint(world: World, tmp_path: Path) -> None:
    source = write(Case("wide", lambda: _wider(BY_NAME["qwen3_moe"].config())), tmp_path / "source")
    engines = Path(shutil.copytree(source, tmp_path / "engines"))
    to_fp8(engines)
    inference = {"quantization": "fp8", "model": str(engines)}
    recipe = make_recipe(source, model={"path": str(source), "dtype": "bfloat16"}, inference=inference)
    policy = build(recipe, world)
    assert policy.stored_fp8 == frozenset()
    encoding = published(recipe, stored_by_engines(recipe, policy.stored_fp8, world))
    path = Publisher(policy, tmp_path, encoding, 1, world).publish(1)
    released = tensors(engines)
    expected = {name: t.bfloat16() if name in _unquantised(released) else t for name, t in released.items()}
    assert_stored_alike(tensors(path), expected)


def _unquantised(released: dict[str, torch.Tensor]) -> set[str]:
    """Names published in the compute dtype: neither FP8, nor scales, nor a router's bias."""
    return {
        name
        for name, tensor in released.items()
        if tensor.dtype != torch.float8_e4m3fn and not name.endswith(("_scale_inv", "e_score_correction_bias"))
    }


def test_exported_checkpoint_matches_published_fp8_policy(world: World, tmp_path: Path) -> None:
    source = write(Case("wide", lambda: _wider(BY_NAME["qwen3_moe"].config())), tmp_path / "source")
    to_fp8(source)
    run, out = tmp_path / "run", tmp_path / "out"
    recipe = make_recipe(source, model={"path": str(source), "dtype": "bfloat16"}, checkpoint={"interval": 1})
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    timer = make_timer(run)
    train_step.train(make_batch(1), timer)
    path = Publisher(policy, run, Encoding(torch.bfloat16, stored=policy.stored_fp8), 1, world).publish(1)
    Checkpoints(run, 1, recipe.checkpoint, world, None).after(1, train_step, timer)
    checkpoint_export.export(recipe, checkpoints.step_dir(run, 1), out)
    actual, expected = tensors(out), tensors(path)
    assert set(actual) == set(expected) == set(tensors(source))
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].view(torch.uint8), tensor.view(torch.uint8)), name
    configs = [json.loads((directory / "config.json").read_text())["quantization_config"] for directory in (out, path)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_trainer_and_engines_multiply_by_the_same_numbers(
    family: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, values equal the checkpoint's, and scales are within bfloat16 rounding."""
    source = write(Case("wide", lambda: _wider(BY_NAME[family].config())), tmp_path / "source")
    to_fp8(source)
    model = {"path": str(source), "dtype": "bfloat16"}
    recipe = make_recipe(
        source, model=model, trainer={"fp8": True, "optimizer": {"lr": 1e-3}}, checkpoint={"interval": 1}
    )
    policy = build(recipe, world)
    train_step = TrainStep(policy, recipe, world)
    publisher = Publisher(policy, tmp_path, published(recipe, policy.stored_fp8), 2, world)

    def of_engines(version: int) -> dict[str, torch.Tensor]:
        return tensors(publisher.publish(version))

    def of_trainer() -> set[bytes]:
        """Return values and scales of every weight that is multiplied in FP8."""
        seen: set[bytes] = set()
        for name in ("linear_product", "grouped_product"):
            multiply = getattr(fp8, name)

            def noting(rows: torch.Tensor, weight: torch.Tensor, *more: Any, multiply: Any = multiply) -> torch.Tensor:
                for matrix in weight.detach().reshape(-1, *weight.shape[-2:]):
                    quantised = quantize(matrix, BLOCKS)
                    seen.add(_bytes(quantised.data, quantised.scales))
                return multiply(rows, weight, *more)

            monkeypatch.setattr(fp8, name, noting)
        with torch.no_grad():
            policy.logits(torch.arange(3, 67)[None], torch.arange(64)[None])
        monkeypatch.undo()
        return seen

    released, first = tensors(source), of_engines(1)
    assert set(first) == set(released)
    for name, tensor in released.items():
        if name.endswith("_scale_inv"):
            torch.testing.assert_close(first[name], tensor, rtol=2**-8, atol=0, msg=name)
        elif tensor.dtype == torch.float8_e4m3fn:
            assert torch.equal(first[name].view(torch.uint8), tensor.view(torch.uint8)), name
    train_step.train(make_batch(1), make_timer(tmp_path))
    second = of_engines(2)
    stored = {name for name in second if name + "_scale_inv" in second}
    assert {_bytes(second[name], second[name + "_scale_inv"]) for name in stored} == of_trainer()
    assert any(not torch.equal(second[name].view(torch.uint8), first[name].view(torch.uint8)) for name in stored)

    timer = make_timer(tmp_path)
    Checkpoints(tmp_path, 1, recipe.checkpoint, world, None).after(1, train_step, timer)
    checkpoint_export.export(recipe, checkpoints.step_dir(tmp_path, 1), tmp_path / "out")
    exported_again = tensors(tmp_path / "out")
    for name in stored:
        for part in (name, name + "_scale_inv"):
            assert torch.equal(exported_again[part].view(torch.uint8), second[part].view(torch.uint8)), part


def _bytes(*tensors: torch.Tensor) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("change", [{"weight_block_size": None}, {"quant_method": "mxfp4"}, {"fmt": "e5m2"}])
def test_other_quantizations_are_rejected(change: dict[str, Any], world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["qwen3"], tmp_path)
    change_config(path, quantization_config=FP8 | change)
    with pytest.raises(ValueError, match="convert them to bfloat16 first"):
        build(make_recipe(path), world)


def test_multi_token_prediction_layers_are_ignored(world: World, tmp_path: Path) -> None:
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
def test_draft_modules_are_ignored(family: str, world: World, tmp_path: Path) -> None:
    path = write(BY_NAME[family], tmp_path)
    tensors = load_file(path / "model.safetensors")
    draft = {"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}
    save_file(tensors | draft, path / "model.safetensors", metadata={"format": "pt"})
    assert set(exported(build(make_recipe(path), world))) == set(tensors)


@pytest.mark.parametrize("trainer", [{}, {"fp8": True, "lora": {"rank": 8}}], ids=["plain", "fp8 and adapters"])
def test_kimi_k2_is_deepseek_v3(trainer: dict[str, Any], world: World, tmp_path: Path) -> None:
    path = write(BY_NAME["deepseek_v3"], tmp_path)
    recipe = make_recipe(path, trainer=trainer)
    deepseek = build(recipe, world)
    change_config(path, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"})
    kimi = build(recipe, world)
    same_model(kimi, deepseek)


def same_model(one: PolicyModel, other: PolicyModel) -> None:
    """Assert equal layer types, trained parameters and logits."""
    for mine, theirs in zip(one.model.named_modules(), other.model.named_modules(), strict=True):
        assert (mine[0], type(mine[1])) == (theirs[0], type(theirs[1]))
    for name, parameter in other.model.named_parameters():
        assert one.model.get_parameter(name).requires_grad == parameter.requires_grad
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(SEQ_LEN)[None]
    with torch.no_grad():
        assert torch.equal(one.logits(tokens, positions)[0], other.logits(tokens, positions)[0])


def test_text_model_of_kimi_k25_is_deepseek_v3(world: World, tmp_path: Path) -> None:
    plain = write(BY_NAME["deepseek_v3"], tmp_path / "plain")
    stored = load_file(plain / "model.safetensors")
    kimi = tmp_path / "kimi"
    kimi.mkdir()
    named = {f"language_model.{name}": tensor for name, tensor in stored.items()}
    vision = {f"{part}.weight": torch.randn(2, 2) for part in ("vision_tower.patch_embed", "mm_projector.pre_norm")}
    save_file(named | vision, kimi / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text()) | {"model_type": "kimi_k2"}
    (kimi / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))

    same_model(*(build(make_recipe(path, trainer={"fp8": True}), world) for path in (kimi, plain)))
    policy = build(make_recipe(kimi), world)
    same_model(policy, build(make_recipe(plain), world))
    Publisher(policy, tmp_path, Encoding(torch.float32), 1, world).publish(1)
    actual = tensors(filesystem.version_dir(tmp_path, 1))
    assert set(actual) == set(named | vision)
    assert all(torch.equal(actual[name], tensor) for name, tensor in (named | vision).items())


@pytest.mark.parametrize(("family", "impl"), [("deepseek_v3", "custom"), ("glm4_moe", "hf")])
def test_router_bias_is_published_exactly(family: str, impl: str, world: World, tmp_path: Path) -> None:
    path = write(BY_NAME[family], tmp_path)
    policy = build(make_recipe(path, model={"path": str(path), "dtype": "bfloat16", "impl": impl}), world)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    published = exported(policy, torch.bfloat16)
    assert torch.equal(published[name], load_file(path / "model.safetensors")[name])
    assert {tensor.dtype for key, tensor in published.items() if key != name} == {torch.bfloat16}
