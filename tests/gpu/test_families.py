"""Model families with a GPU's attention kernels: variable-length in bfloat16, flex in float32, windows in both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import make_recipe
from tests.trainer.families import CASES, GENERIC_CASES, Case, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(lane="parameters"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NAMES = ("llama", "glm4_moe", "minimax_m2", "afmoe", "laguna", "mistral", "mixtral")
SEQ_LEN, FIRST = 256, 100


def _wide(case: Case) -> Case:
    """Widen the heads to the size that the kernels support."""

    def config() -> object:
        made = case.config()
        made.head_dim = 64
        return made

    return Case(case.name, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [c for c in (*CASES, *GENERIC_CASES) if c.name in NAMES], ids=lambda case: case.name)
def test_logits_and_gradients(case: Case, dtype: str, world: World, tmp_path: Path) -> None:
    path = write(_wide(case), tmp_path)
    policy = build(make_recipe(path, seq_len=SEQ_LEN, model={"path": str(path), "dtype": dtype}), world)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1)).cuda()
    positions = torch.cat([torch.arange(FIRST), torch.arange(SEQ_LEN - FIRST)])[None].cuda()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().cuda()
    with torch.no_grad():
        alone = torch.cat([reference(part).logits for part in (tokens[:, :FIRST], tokens[:, FIRST:])], dim=1)
    packed = policy.logits(tokens, positions)[0]
    packed.float().square().mean().backward()
    error = (packed - alone).abs()
    # In bfloat16 a token near the border between two experts may choose the other one.
    assert error.max() < 1e-3 if dtype == "float32" else error.median() < 0.05 * alone.abs().max()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in policy.model.parameters())
    assert any(parameter.grad is not None for parameter in policy.model.parameters())
