"""Checks of a recipe, its files and its plan before anything is submitted. Each finding has a reason and usually a fix.

Levels: an `error` is refused everywhere. `blocked` is valid, but a real `submit` refuses it with this version or on
this file system. `warning` and `note` are advice.
"""

from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import absent_data, model_files, with_absolute_paths
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.run_checks import check_plan, check_run
from primeslurm.plan.checks.teacher import teacher_problems

__all__ = [
    "RuleContext",
    "absent_data",
    "check_plan",
    "check_run",
    "conflicts",
    "model_files",
    "teacher_problems",
    "with_absolute_paths",
]
