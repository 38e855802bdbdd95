"""Metrics of torch.compile: number of compilations and recompilations per step, and their time."""

from __future__ import annotations

import logging

import torch
from torch._dynamo import utils

from primeslurm.trainer.distributed.world import World

log = logging.getLogger(__name__)

# Number of steps in which recompilations are expected, because new layer kinds and batch shapes appear
WARM_UP_STEPS = 3


class CompilationMetrics:
    """Counts the compilations per step of all ranks, which wait while one of them compiles."""

    def __init__(self, compiled: bool, world: World) -> None:
        self._compiled = compiled
        self._world = world
        self._steps = 0
        utils.clear_compilation_metrics()

    def take(self) -> dict[str, float]:
        """Return the counts and seconds of compilations of the last step, summed over all ranks. A collective."""
        if not self._compiled:
            return {}
        compilations = utils.get_compilation_metrics()  # torch keeps the last 64
        utils.clear_compilation_metrics()
        self._steps += 1
        forward = [each for each in compilations if each.is_forward]
        reasons = [each.recompile_reason for each in forward if each.recompile_reason]
        seconds = sum(each.duration_us or 0 for each in compilations) / 1e6
        if reasons and self._steps > WARM_UP_STEPS:
            log.warning("layers were recompiled in %.1f s: %s", seconds, "; ".join(sorted(set(reasons))))
        # Recompiled graphs had been compiled for other inputs before. The time includes backward graphs.
        counts = torch.tensor([len(forward), len(reasons), seconds], dtype=torch.float32)
        sums = self._world.sum(counts.to(self._world.device)).tolist()
        return dict(zip(("compiles", "recompiles", "compile_s"), sums, strict=True))
