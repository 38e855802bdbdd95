"""Per-expert products match grouped products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.matrix_products import one_by_one
from primeslurm.trainer.distributed.world import World
from tests.trainer.conftest import SEQ_LEN, make_recipe
from tests.trainer.families import BY_NAME, write


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_logits_and_gradients_match_grouped_products(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(BY_NAME[name], tmp_path)
    tokens = torch.randint(3, 128, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    actual = []
    for grouped in (True, False):
        policy = build(make_recipe(path, trainer={"grouped_mm": grouped}), world)
        if not grouped:
            monkeypatch.setattr(torch, "_grouped_mm", None)  # nobody calls it
        logits = policy.logits(tokens, torch.arange(SEQ_LEN)[None])[0]
        logits.float().square().mean().backward()
        actual.append([logits.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)])
    assert len(actual[0]) == len(actual[1]) > 5
    for grouped, single in zip(*actual, strict=True):
        torch.testing.assert_close(single, grouped, atol=1e-5, rtol=1e-4)


def test_rows_after_the_last_group_become_zeros() -> None:
    rows, matrices = torch.randn(7, 3), torch.randn(3, 3, 2)
    made = one_by_one(rows, matrices, torch.tensor([2, 2, 5]))
    expected = torch.cat([rows[:2] @ matrices[0], rows[2:5] @ matrices[2], torch.zeros(2, 2)])
    torch.testing.assert_close(made, expected)
