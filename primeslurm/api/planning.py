"""Looking at the files that a recipe names, and working it out with what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from primeslurm.errors import UsageError
from primeslurm.plan.checks.files import absent_data, model_files, with_absolute_paths
from primeslurm.plan.checks.sft_files import data_problems
from primeslurm.plan.checks.teacher import teacher_problems
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.inference import served
from primeslurm.plan.planner import Planned, RecipeFiles, make_emulated_plan, make_plan, refusals
from primeslurm.recipe import Recipe, Site


def look_at_files(recipe: Recipe) -> RecipeFiles:
    """Look at the recipe's models and data, as far as they are here."""
    model, teacher = model_files(recipe), served(recipe)
    of_teacher = model_files(teacher) if teacher else None
    located = with_absolute_paths(recipe)
    data = absent_data(located)
    problems = (*model.problems, *teacher_problems(recipe, of_teacher), *data_problems(located))
    return RecipeFiles(located, model, of_teacher, problems, (data,) if data else ())


def plan_of(recipe: Recipe, site: Site, files: RecipeFiles, *, local: bool) -> Planned:
    """Work out the plan; files that cannot be used block it. Raises UsageError if the recipe cannot be placed."""
    return make_plan(recipe, site, _run_dir(recipe, site), files, local=local)


def strict_plan_of(recipe: Recipe, site: Site, files: RecipeFiles, *, local: bool) -> Planned:
    """Work out the plan of what is to run, try its environments, and render its data.

    Raises:
        UsageError: the recipe cannot be placed, or its files or environments cannot be used; every reason at once.
    """
    problems, untried = list(files.problems), [_BLOCKED]
    if not files.blocked:
        from primeslurm.api import environments  # not above: whoever renders tries none

        wrong, untried = environments.environment_problems(files.located, site, local=local)
        unrendered, noted = environments.data_rendering_problems(files.located, site, local=local)
        problems += [each for each in (*wrong, *unrendered) if each not in problems]
        untried = [*untried, *noted]
    try:
        planned = plan_of(recipe, site, files, local=local)
    except UsageError as error:
        raise UsageError([*problems, *error.violations]) from None
    if problems:
        said = [(each.field, each.why) for each in problems]  # by who looked closer
        more = refusals(planned.plan.findings, "error")
        more = [each for each in more if not any(each.field == field and why in each.why for field, why in said)]
        raise UsageError([*problems, *more])
    findings = (*planned.plan.findings, *untried)
    return replace(planned, plan=planned.plan.model_copy(update={"findings": findings}))


_BLOCKED = Finding(
    level="note", field="environments", text="not tried here: the run cannot be submitted here in any case"
)


def emulated_plan_of(recipe: Recipe, site: Site) -> Planned:
    """Work out the plan of an emulated run; its files need not be there. Raises UsageError."""
    return make_emulated_plan(recipe, site, _run_dir(recipe, site), model_files(recipe).shape)


def _run_dir(recipe: Recipe, site: Site) -> Path:
    return Path(site.runs) / recipe.name
