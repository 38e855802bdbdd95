"""Advice about a recipe that can run but may not run well."""

from __future__ import annotations

from primeslurm.plan.model import Finding, Plan
from primeslurm.recipe import Recipe


def advise(recipe: Recipe, plan: Plan) -> tuple[Finding, ...]:
    """Advice about a recipe that can run but may not run well."""
    found: list[Finding] = []
    orchestrator = recipe.orchestrator
    if recipe.task == "rl":
        per_engine = recipe.max_inflight / max(plan.totals.engines, 1)
        router = recipe.inference.router
        hashed = router.type == "vllm-router" and router.policy == "consistent_hash"
        if hashed and per_engine < 4:
            text = f"{recipe.max_inflight} rollouts over {plan.totals.engines} engines fill a hash ring unevenly"
            found.append(Finding(level="warning", field="inference.router.policy", text=text, fix="use round_robin"))
        lead = recipe.max_inflight / orchestrator.batch_size
        if lead > orchestrator.max_off_policy_steps + 1:
            bound = orchestrator.max_off_policy_steps
            text = f"{lead:.1f} batches in flight, but rollouts older than {bound} steps are dropped"
            fix = "lower it, or raise orchestrator.max_off_policy_steps"
            found.append(Finding(level="warning", field="orchestrator.max_inflight_rollouts", text=text, fix=fix))
    single = [group.name for group in plan.groups if group.nodes == 1]
    if single and any(group.spares for group in plan.groups):
        text = f"component {', '.join(single)} has one node: Slurm then requeues the whole job when any node is lost"
        fix = "give it a spare, or use layout: single"
        found.append(Finding(level="warning", field="deployment.spares", text=text, fix=fix))
    if recipe.checkpoint.interval > recipe.max_steps:
        text = f"only the last step ({recipe.max_steps}) is saved: a failure before it starts from the beginning"
        found.append(Finding(level="warning", field="checkpoint.interval", text=text))
    return tuple(found)
