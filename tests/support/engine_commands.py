from __future__ import annotations

from primeslurm.plan.commands.command import Command, Device, EngineRole
from primeslurm.plan.commands.engine import ALONE, DataParallel, Engines
from primeslurm.recipe import Recipe


def engine_command(recipe: Recipe, device: Device, role: EngineRole, python: str, dp: DataParallel = ALONE) -> Command:
    """Return the command that the plan of this recipe would start for one rank of a role."""
    return Engines(recipe, device, role, python).command(dp)
