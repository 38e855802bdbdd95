"""Encoding of policies in FP8: format, precision, and round trip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from primeslurm.nn.kernels.fp8.blocks import BLOCKS, quantize
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding, published
from primeslurm.wire.weight_transfer import tensor_names
from primeslurm.wire.weight_transfer.tensor_names import in_fp8
from tests.trainer.conftest import make_recipe, tensors
from tests.trainer.families import COMMON, EXPERTS, Case, write

WIDE = COMMON | {"hidden_size": 192, "intermediate_size": 256}


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 130), (3, 5)])
def test_rounding_error_is_bounded_and_does_not_grow(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) * torch.logspace(-4, 0, shape[1])
    first = quantize(matrix, BLOCKS)
    smallest_normal = first.scales.max() * 2**-6
    torch.testing.assert_close(first.values(), matrix, rtol=1 / 16, atol=float(smallest_normal) / 16)
    again = quantize(first.values(), BLOCKS)
    assert torch.equal(again.data.view(torch.uint8), first.data.view(torch.uint8))
    torch.testing.assert_close(again.scales, first.scales, rtol=2**-23, atol=0)


def test_policy_is_published_in_fp8(world: World, tmp_path: Path) -> None:
    source = write(Case("wide", lambda: Qwen3MoeConfig(**WIDE, **EXPERTS)), tmp_path / "model")
    path = Publisher(build(make_recipe(source), world), tmp_path, Encoding(torch.bfloat16, fp8=True), 1, world).publish(
        1
    )
    original = load_file(source / "model.safetensors")
    actual = tensors(path)
    halved = {name for name in actual if name + tensor_names.FP8_SCALE in actual}
    assert {name.rsplit(".", 2)[-2] for name in halved} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert set(actual) == set(original) | {name + tensor_names.FP8_SCALE for name in halved}
    for name, tensor in original.items():
        if name in halved:
            expected = quantize(tensor.bfloat16(), BLOCKS)
            assert torch.equal(actual[name].view(torch.uint8), expected.data.view(torch.uint8)), name
            assert torch.equal(actual[name + tensor_names.FP8_SCALE], expected.scales), name
        else:
            assert torch.equal(actual[name], tensor.bfloat16()), name
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(config["modules_to_not_convert"])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.self_attn.indexer.wq_b.weight",
        "model.layers.0.self_attn.gate_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.12.down_proj.weight",
        "model.layers.0.block_sparse_moe.experts.12.w1.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.0.mixer.fc1_latent_proj.weight",
    ],
)
def test_projections_and_experts_are_in_fp8(name: str) -> None:
    assert in_fp8(name)
    assert not in_fp8(name.replace(".weight", ".bias"))


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.router.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.experts.e_score_correction_bias",
        "model.layers.0.self_attn.indexer.wk.weight",
        "model.layers.0.self_attn.indexer.weights_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.linear_attn.in_proj_a.weight",
        "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.61.eh_proj.weight",
        "model.visual.blocks.0.attn.proj.weight",
    ],
)
def test_small_or_sensitive_weights_are_not_in_fp8(name: str) -> None:
    assert not in_fp8(name)


def test_encoding_follows_engines_for_rl_and_compute_dtype_for_sft() -> None:
    stored = frozenset({"model.layers.0.mlp.up_proj.weight"})
    model, none = Path("model"), frozenset[str]()
    assert published(make_recipe(model), none) == Encoding(torch.float32)
    asked = make_recipe(model, inference={"quantization": "fp8"})
    assert published(asked, none) == Encoding(torch.float32, fp8=True)
    assert published(make_recipe(model), stored) == Encoding(torch.float32, stored=stored)
    assert published(make_recipe(model, trainer={"fp8": True}), stored).gathered == torch.float32
    bfloat16 = make_recipe(model, model={"path": "model", "dtype": "bfloat16"}, trainer={"fp8": True})
    assert published(bfloat16, stored).gathered == torch.bfloat16
    sft = make_recipe(model, task="sft", environments=[], sft={"data": {"path": "data.jsonl"}})
    assert published(sft, stored) == Encoding(torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
def test_stack_of_experts_is_encoded_like_single_experts(fp8: bool) -> None:
    encoding = Encoding(torch.bfloat16, fp8)
    pattern, experts = "model.layers.0.mlp.experts.{}.up_proj.weight", (2, 5, 7)
    stack = torch.randn(3, 200, 130)
    actual = encoding.encode(pattern, stack, experts)
    assert set(actual) == ({pattern, pattern + tensor_names.FP8_SCALE} if fp8 else {pattern})
    for row, expert in enumerate(experts):
        for name, tensor in encoding.encode(pattern.format(expert), stack[row]).items():
            whole = actual[name.replace(f".{expert}.", ".{}.")]
            assert torch.equal(whole[row].view(torch.uint8), tensor.view(torch.uint8))
