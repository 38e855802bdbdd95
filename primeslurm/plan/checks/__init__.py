"""What is known to go wrong, said before anything is submitted; with the reason and, where there is one, a fix.

Levels: `error` contradicts something, and is refused everywhere. `blocked` is sound, but not with this version or on
this file system: only a real `submit` refuses it. `warning` and `note` are advice.
"""

from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import absent_data, model_files, with_absolute_paths
from primeslurm.plan.checks.review import advise, review
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.teacher import teacher_problems

__all__ = [
    "RuleContext",
    "absent_data",
    "advise",
    "conflicts",
    "model_files",
    "review",
    "teacher_problems",
    "with_absolute_paths",
]
