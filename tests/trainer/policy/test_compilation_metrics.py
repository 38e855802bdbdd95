"""CompilationMetrics are counted per step, and late recompilations are logged."""

from __future__ import annotations

import pytest
import torch

from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.train_step import WARM_UP_STEPS, CompilationMetrics


def test_late_recompilation_is_counted_and_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda tensor: tensor * 2, backend="aot_eager", dynamic=False)
    counted = CompilationMetrics(True, world)
    double(torch.ones(3))
    first = counted.take()
    assert (first["compiles"], first["recompiles"]) == (1, 0) and first["compile_s"] > 0
    for _ in range(WARM_UP_STEPS):
        double(torch.ones(3))
        assert counted.take() == {"compiles": 0, "recompiles": 0, "compile_s": 0}
    assert not _said(caplog)
    double(torch.ones(4))
    late = counted.take()
    assert (late["compiles"], late["recompiles"]) == (1, 1)
    (message,) = _said(caplog)
    assert "recompiled" in message and "size mismatch" in message


def test_eager_layers_have_no_compilation_metrics(world: World) -> None:
    assert CompilationMetrics(False, world).take() == {}


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("primeslurm")]
