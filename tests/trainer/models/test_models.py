"""Published policies, compared with transformers, and configs that are not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from primeslurm.models import model_builder
from primeslurm.nn import compat
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weight_senders.filesystem_sender import Publisher
from primeslurm.trainer.weights.export import Encoding
from primeslurm.wire.weight_transfer import deltas, filesystem
from tests.trainer.conftest import SEQ_LEN, make_recipe, tensors
from tests.trainer.families import BY_NAME, MLA_YARN, YARN

FIRST = 40
"""Length of the first document in the packed row."""


def packed_logits(policy: PolicyModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return our logits for one row with two documents."""
    positions = torch.cat([torch.arange(FIRST), torch.arange(SEQ_LEN - FIRST)])[None]
    with torch.no_grad():
        return policy.logits(tokens, positions)[0]


def separate_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of transformers for the two documents, one by one."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        parts = [reference(tokens[:, :FIRST]).logits, reference(tokens[:, FIRST:]).logits]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("model", ["dense_model", "moe_model"])
def test_published_policy_loads_in_transformers(
    model: str, request: pytest.FixtureRequest, world: World, tmp_path: Path
) -> None:
    policy = build(make_recipe(request.getfixturevalue(model)), world)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    path = Publisher(policy, tmp_path, Encoding(torch.float32), 3, world).publish(7)
    assert path == filesystem.version_dir(tmp_path, 7)
    assert filesystem.damage(path) == []
    assert (path / "tokenizer.json").is_file()
    tokens = torch.randint(0, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(packed_logits(policy, tokens), separate_logits(path, tokens), atol=2e-5, rtol=1e-4)


def test_bfloat16_is_published_as_such(moe_model: Path, world: World, tmp_path: Path) -> None:
    policy = build(make_recipe(moe_model, model={"path": str(moe_model), "dtype": "bfloat16"}), world)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}, "masters stay float32"
    path = Publisher(policy, tmp_path, Encoding(torch.bfloat16), 3, world).publish(1)
    original = load_file(moe_model / "model.safetensors")
    for name, tensor in tensors(path).items():
        assert torch.equal(tensor, original[name].bfloat16()), name
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"


def test_pruning_keeps_the_newest_and_what_checkpoints_need(moe_model: Path, world: World, tmp_path: Path) -> None:
    from primeslurm.wire.stored import checkpoints

    publisher = Publisher(build(make_recipe(moe_model), world), tmp_path, Encoding(torch.float32), 2, world)
    needed = checkpoints.step_dir(tmp_path, 1)
    needed.mkdir(parents=True)
    checkpoints.commit(needed, 1, 1)
    for version in range(1, 6):
        publisher.publish(version)
    assert filesystem.published(tmp_path) == [1, 4, 5]
    publisher.discard_after(4)
    assert filesystem.published(tmp_path) == [1, 4]
    assert publisher.is_sound(4) and not publisher.is_sound(5)


def test_delta_and_its_base_give_the_policy(moe_model: Path, world: World, tmp_path: Path) -> None:
    policy = build(make_recipe(moe_model), world)
    publisher = Publisher(policy, tmp_path, Encoding(torch.bfloat16), 1, world, whole=lambda version: version == 4)
    for version in range(1, 5):
        path = publisher.publish(version)
        whole = Publisher(policy, tmp_path / "whole", Encoding(torch.bfloat16), 1, world).publish(version)
        base = filesystem.base_of(path)
        assert base == ((filesystem.version_dir(tmp_path, 1), 1) if version in (2, 3) else None)
        if base is not None:
            (file,) = path.glob("*.safetensors")
            with safe_open(file, "pt") as handle:
                digests = handle.metadata()
            old, stored = tensors(base[0]), load_file(file)
            actual = {name: deltas.restored(name, tensor, stored, digests[name]) for name, tensor in old.items()}
            assert all(torch.equal(actual[name], tensor) for name, tensor in tensors(whole).items())
            assert file.stat().st_size < sum(tensor.nbytes for tensor in old.values())
            assert not publisher.is_sound(version), "a resumed run publishes it again as a whole"
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.view(-1)[version::9] *= 1.5
    assert filesystem.published(tmp_path) == [4]


def test_missing_model_is_named(world: World) -> None:
    with pytest.raises(FileNotFoundError, match="no/such/place"):
        build(make_recipe(Path("/no/such/place")), world)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt_oss", {"attention_bias": False}, "attention_bias false "),
        ("gpt_oss", {"rope_parameters": YARN | {"rope_type": "longrope"}}, "RoPE scaling longrope "),
        ("gpt_oss", {"rope_parameters": YARN | {"mscale": 0.7}}, "RoPE option mscale "),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings True "),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_activation silu "),
        ("qwen3_5_text", {"attention_bias": True}, "attention_bias True "),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias True "),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false "),
        ("deepseek_v3", {"rope_parameters": MLA_YARN | {"mscale": 0.7}}, "mscale_all_dim 1.0 beside mscale 0.7 "),
        ("deepseek_v3", {"rope_parameters": MLA_YARN | {"rope_type": "llama3"}}, "RoPE scaling llama3 "),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "indexer_types beginning with a shared one "),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense"] * 2}, "dense layers after sparse ones "),
    ],
)
def test_unsupported_features_are_named(family: str, change: dict[str, Any], message: str) -> None:
    config = BY_NAME[family].config()
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{message}.*is not supported for {family}"):
        model_builder.spec(config, SEQ_LEN, "flex")


def test_sinks_always_use_flex_attention() -> None:
    config = BY_NAME["gpt_oss"].config()
    for layer in model_builder.spec(config, SEQ_LEN, "varlen").model.layers:
        assert isinstance(layer.attention.inner_attention, compat.titan_attention.FlexAttention.Config)


def test_unsupported_model_types_are_refused(moe_model: Path) -> None:
    config = AutoConfig.from_pretrained(moe_model)
    config.model_type = "mistral"
    with pytest.raises(ValueError, match=r"mistral is not supported \(supported: afmoe, .*, qwen3, "):
        model_builder.spec(config, SEQ_LEN, "flex")
