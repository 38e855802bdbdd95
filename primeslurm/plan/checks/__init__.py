"""What is known to go wrong, said before anything is submitted; with the reason and, where there is one, a fix.

Levels: `error` contradicts something, and is refused everywhere. `blocked` is sound, but not with this version or on
this file system: only a real `submit` refuses it. `warning` and `note` are advice.
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
