"""Whether an ended attempt is followed by another one. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from primeslurm.plan.model import Plan
from primeslurm.records.fleet import Ending, Outcome


def should_requeue(ending: Ending, attempt: int, plan: Plan, commits: Mapping[int, int | None]) -> tuple[bool, str]:
    """Whether the job resumes as a new attempt, and why not if it does not.

    `commits`: newest committed step at the end of each failed attempt so far, this one included.
    """
    if ending.outcome in (Outcome.COMPLETED, Outcome.CANCELLED):
        return False, ""
    if attempt >= plan.max_attempts:
        return False, f"this was attempt {attempt} of {plan.max_attempts}"
    if ending.outcome is Outcome.PREEMPTED:
        return True, ""
    recent = [commits[n] for n in sorted(commits)][-3:]
    if len(recent) == 3 and len(set(recent)) == 1:
        return False, "three failed attempts in a row committed nothing new"
    return True, ""
