"""Recipe + Site + what is known of the recipe's files -> Plan with findings and estimate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from primeslurm.errors import UsageError, Violation
from primeslurm.families.shape import ModelShape
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.review import advise, review
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.derive import place, requests_of
from primeslurm.plan.emulate import emulate
from primeslurm.plan.model import Finding, Plan
from primeslurm.recipe import Recipe, Site


@dataclass(frozen=True)
class RecipeFiles:
    """What is known of the files that a recipe names."""

    located: Recipe
    """The recipe with its models and data as absolute paths, where they are there."""
    model: ModelFiles
    teacher: ModelFiles | None
    """None if the run serves no teacher."""
    problems: tuple[Violation, ...] = ()
    """Why the files cannot be used."""
    absent: tuple[Finding, ...] = ()
    """Files that are to be there when the job runs."""

    @property
    def blocked(self) -> bool:
        """Whether a submission would be refused here for a file that is not here."""
        models = [files.absent for files in (self.model, self.teacher) if files is not None]
        return bool(self.absent or any(models))


def make_plan(recipe: Recipe, site: Site, run_dir: Path, files: RecipeFiles, *, local: bool = False) -> Plan:
    """Work out a whole run, with all findings and the estimate. Files that cannot be used block it.

    Args:
        recipe: what is asked for.
        site: where it is to run.
        run_dir: where the run will be.
        files: what is known of the files that the recipe names.
        local: without Slurm, all nodes are agents on this one machine and share its GPUs.

    Raises:
        UsageError: the recipe cannot be placed on this site; every reason at once, contradictions of the recipe too.
    """
    requests, problems = requests_of(recipe, site, local=local)
    findings, estimate = review(recipe, site, requests, files.model, files.teacher)
    if problems:
        raise UsageError([*problems, *refusals(findings, "error")])
    plan = place(files.located, site, run_dir, requests, local=local)
    findings += [*advise(recipe, plan), *files.absent, *as_findings(files.problems, "blocked")]
    return plan.model_copy(update={"findings": tuple(findings), "estimate": estimate})


def make_emulated_plan(recipe: Recipe, site: Site, run_dir: Path, shape: ModelShape | None) -> Plan:
    """Work out a run of stand-ins, with what is known to go wrong with what they stand for. It needs no files.

    Args:
        recipe: what is asked for.
        site: where it is to run.
        run_dir: where the run will be.
        shape: the model's, where it is known.

    Raises:
        UsageError: the recipe cannot be placed on this site; every reason at once.
    """
    requests, problems = requests_of(recipe, site, local=False)
    if problems:
        raise UsageError(problems)
    plan = emulate(place(recipe, site, run_dir, requests, local=False))
    real = site.model_copy(update={"device": "cuda"})  # stand-ins contradict nothing, what they stand for may
    findings = (*conflicts(RuleContext(recipe, real, requests, shape)), *advise(recipe, plan))
    return plan.model_copy(update={"findings": findings})


def refuse(plan: Plan, *levels: str) -> None:
    """Raise UsageError if the plan has findings of these levels."""
    if found := refusals(plan.findings, *levels):
        raise UsageError(found)


def refusals(findings: Iterable[Finding], *levels: str) -> list[Violation]:
    """Take findings of these levels as violations."""
    return [Violation(f.field, "", f.text, f.fix) for f in findings if f.level in levels]


def as_findings(violations: Iterable[Violation], level: Literal["error", "blocked"]) -> list[Finding]:
    """Take violations as findings of this level."""
    return [
        Finding(level=level, field=v.field, text=f"{v.value}: {v.why}" if v.value else v.why, fix=v.fix)
        for v in violations
    ]
