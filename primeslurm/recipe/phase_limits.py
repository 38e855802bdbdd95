"""Timeouts of the trainer's phases and of torch collectives.

A rank that makes no progress for the limit of its phase is found by its node agent and the head. The timeouts of torch
collectives are longer and only apply if both of them fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primeslurm.recipe import Recipe

# Limit of long phases [s], in addition to the time for reading and writing.
LONG_PHASE_S = 7200


@dataclass(frozen=True)
class PhaseLimits:
    """Limits of one recipe, all in seconds."""

    step_s: float
    """Between two micro batches of a step."""
    publish_s: float
    """Between two chunks of a weight update. Includes the wait for engines that do not answer."""
    wait_s: float
    """Wait for a batch. Only the first rank reports progress meanwhile."""
    long_s: float
    """Loading, the first step, checkpoints."""

    @classmethod
    def of(cls, recipe: Recipe) -> PhaseLimits:
        trainer = recipe.trainer
        step_s = float(trainer.hang_s)
        long_s = max(float(trainer.long_phase_timeout_s or LONG_PHASE_S), step_s)
        # Each wait has its own timeout. The limit is one step longer, so that the wait ends first and names its reason.
        return cls(step_s, recipe.weights.load_s + step_s, trainer.batch_wait_s + step_s, long_s)

    def of_phase(self, phase: str, *, first_step: bool) -> float:
        """Return the limit of a phase. During the first step, kernels are compiled."""
        if phase in ("snapshot", "checkpoint", "load"):
            return self.long_s
        if phase == "wait":
            return self.wait_s
        usual = self.publish_s if phase == "publish" else self.step_s
        return max(usual, self.long_s) if first_step else usual

    @property
    def collective_s(self) -> float:
        """Timeout of collectives in steps and weight updates, after the first step."""
        # One step longer than the phases, so that the node agent finds the rank first.
        return max(self.publish_s, self.step_s) + self.step_s

    @property
    def control_s(self) -> float:
        """Timeout of collectives that wait for the orchestrator or a disk, and of all collectives in the first step."""
        return max(self.wait_s, self.long_s, self.collective_s) + self.step_s
