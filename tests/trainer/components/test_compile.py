"""Compiled layers compute what others do."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.trainer.distributed.world import World
from tests.trainer.families import CASES, write
from tests.trainer.gradients import Layout, gradients


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gradients_of_compiled_layers_are_as_near_to_the_exact_ones(
    tmp_path: Path, world: World, checkpointing: str
) -> None:
    write(next(case for case in CASES if case.name == "qwen3_moe"), tmp_path / "qwen3_moe")
    layers = {"activation_checkpointing": checkpointing}
    exact = gradients(Layout("qwen3_moe", layers), tmp_path, world)
    rounded = gradients(Layout("qwen3_moe", layers, "varlen", "bfloat16"), tmp_path, world)
    compiled = gradients(Layout("qwen3_moe", layers, "varlen", "bfloat16", compile=True), tmp_path, world)
    for name, gradient in exact.items():
        allowed = 1.5 * (rounded[name] - gradient).norm() + 1e-3 * gradient.norm()
        assert (compiled[name] - gradient).norm() <= allowed, name
