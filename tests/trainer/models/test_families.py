"""Every family compared with transformers: logits, and a round trip of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig

from primeslurm.models import model_types
from primeslurm.plan.checks.files import model_files
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.assembly.generic_model import GenericModel
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import SEQ_LEN, exported, make_recipe, tensors
from tests.trainer.families import (
    BY_NAME,
    CASES,
    GENERIC_CASES,
    OTHER_VISION_CASE,
    VISION_CASES,
    Case,
    reference_of,
    write,
)

FIRST = 40
"""Length of the first document in the packed row."""


def test_every_family_is_compared_with_transformers() -> None:
    compared = {case.config().model_type for case in CASES}
    # Both are DeepSeek-V3. transformers has no code for the first; the second adds a vision encoder.
    assert set(model_types()) == compared | {"kimi_k2", "kimi_k25"}


@pytest.mark.parametrize("case", [*CASES, *GENERIC_CASES, *VISION_CASES, OTHER_VISION_CASE], ids=lambda case: case.name)
def test_logits_and_checkpoint_round_trip(case: Case, world: World, tmp_path: Path) -> None:
    path = write(case, tmp_path)
    assert model_files(make_recipe(path)).problems == ()
    policy = build(make_recipe(path), world)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(FIRST), torch.arange(SEQ_LEN - FIRST)])[None]
    reference = reference_of(case).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        packed = policy.logits(tokens, positions)[0]
        alone = torch.cat([reference(part).logits for part in (tokens[:, :FIRST], tokens[:, FIRST:])], dim=1)
    assert alone.abs().max() > 0.5
    assert (packed - alone).abs().max() < case.tolerance

    original = tensors(path)
    actual = exported(policy)
    assert set(actual) == set(original)
    for name, tensor in actual.items():
        assert torch.equal(tensor, original[name]), name


@pytest.mark.parametrize("change", ["missing", "unknown"])
@pytest.mark.parametrize("name", ["glm4_moe", "mixtral"])
def test_missing_and_unknown_tensors_are_refused(name: str, change: str, world: World, tmp_path: Path) -> None:
    path = write(BY_NAME[name], tmp_path)
    tensors = load_file(path / "model.safetensors")
    expert = next(tensor for tensor in sorted(tensors) if ".experts.3." in tensor)
    if change == "missing":
        del tensors[expert]
    else:
        tensors[expert + "_extra"] = torch.zeros(1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{change}: {expert}"):
        build(make_recipe(path), world)


def test_generic_model_refuses_recurrent_layers() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="qwen3_next has layers with state beside attention"):
        GenericModel(Qwen3NextConfig(num_hidden_layers=1, hidden_size=32, vocab_size=64))
