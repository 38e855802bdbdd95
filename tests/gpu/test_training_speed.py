"""The benchmark of training steps on a GPU, in bfloat16 compared with torchtitan, and in FP8."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training_speed import arguments, measure
from primeslurm.trainer.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus(memory_gb=12),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("extra", [["--against", "torchtitan"], ["--fp8"]], ids=["torchtitan", "fp8"])
def test_a_step_is_measured(extra: list[str], world: World) -> None:
    actual = measure(arguments(["--layers", "2", "--seq", "1024", "--steps", "3", *extra]), world)
    assert actual["dtype"] == "bfloat16" and actual["ours"]["peak_gb"] > 0
    if "H200" in actual["gpu"]:
        assert 0 < actual["ours"]["mfu"] < actual["ours"]["mfu_all_keys"] < 1
