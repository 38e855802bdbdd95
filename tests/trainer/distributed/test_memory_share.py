"""Memory limit of a trainer rank that shares a GPU with an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from primeslurm.recipe.sections.trainer import CONTEXT_BYTES, ENGINE_CONTEXT_BYTES
from primeslurm.trainer.distributed.world import bound_memory

GIB = 2**30


@pytest.mark.parametrize(("total_gib", "share", "left_gib"), [(80, 0.6, 45.0), (24, 0.5, 9.0), (4, 0.5, 0.0)], ids=str)
def test_memory_limit_excludes_engine_and_cuda_contexts(
    total_gib: int, share: float, left_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CONTEXT_BYTES + ENGINE_CONTEXT_BYTES == 3 * GIB
    bounds: list[tuple[float, torch.device]] = []
    total = SimpleNamespace(total_memory=total_gib * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *bound: bounds.append(bound))
    device = torch.device("cuda", 0)
    bound_memory(device, share)
    assert bounds == [(pytest.approx(left_gib / total_gib), device)]
