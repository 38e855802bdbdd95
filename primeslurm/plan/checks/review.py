"""All findings about a recipe on a site, and the estimate that some of them rest on."""

from __future__ import annotations

from primeslurm.plan.checks.capacity import capacity
from primeslurm.plan.checks.compatibility import conflicts
from primeslurm.plan.checks.files import ModelFiles
from primeslurm.plan.checks.rule import RuleContext
from primeslurm.plan.checks.teacher import review_teacher
from primeslurm.plan.checks.unsupported import unsupported
from primeslurm.plan.memory.estimate import estimate
from primeslurm.plan.memory.forecast import Estimate
from primeslurm.plan.memory.gpus import GPUS, gpu_of
from primeslurm.plan.model import Finding
from primeslurm.plan.placement.resources import ResourceRequest
from primeslurm.recipe import Recipe, Site


def review(
    recipe: Recipe, site: Site, requests: list[ResourceRequest], model: ModelFiles, teacher: ModelFiles | None
) -> tuple[list[Finding], Estimate | None]:
    """What is wrong or doubtful; and memory and amounts, if the model's shape is known.

    Args:
        needs: what each role gets; empty if the recipe cannot be placed.
        teacher: what is known of the teacher's model, if the run serves one.
    """
    found = conflicts(RuleContext(recipe, site, requests, model.facts))
    found += unsupported(recipe, model.facts, model.model_type)
    if model.absent:
        found.append(model.absent)
    of_teacher, memory = review_teacher(recipe, site, requests, teacher)
    found += of_teacher
    if model.facts is None:
        return found, None
    worked_out = estimate(recipe, site, requests, model.facts, model.source)
    found += capacity(recipe, requests, worked_out) + _unknown_gpus(site, requests)
    roles = (*worked_out.roles, *([memory] if memory else []))
    return found, worked_out.model_copy(update={"roles": roles})


def _unknown_gpus(site: Site, requests: list[ResourceRequest]) -> list[Finding]:
    partitions = sorted(
        {request.kind.partition for request in requests if request.gpus and gpu_of(request.kind) is None}
    )
    if site.device == "cpu" or not partitions:
        return []
    text = f"no memory estimate: the type of the GPUs in {', '.join(partitions)} is not known"
    fix = f"give their nodes `gpu`, one of {', '.join(GPUS)}, in the site file"
    return [Finding(level="note", field="site", text=text, fix=fix)]
