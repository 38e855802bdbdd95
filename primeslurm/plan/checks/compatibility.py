"""The table of compatibility rules: checks of recipes apply it, and the docs print it."""

from __future__ import annotations

from primeslurm.plan.checks.engine_compatibility import ENGINE_RULES
from primeslurm.plan.checks.joint_compatibility import JOINT_RULES
from primeslurm.plan.checks.rule import Rule, RuleContext
from primeslurm.plan.checks.trainer_compatibility import SHARED_WORK, TRAINER_RULES
from primeslurm.plan.model import Finding

GROUPS: dict[str, tuple[Rule, ...]] = {
    "Router replay, KV offload, prefill and decode, teacher": JOINT_RULES,
    "Engines": ENGINE_RULES,
    "Trainer": TRAINER_RULES,
}


def conflicts(context: RuleContext) -> list[Finding]:
    """Return a finding for every rule that the recipe breaks on its site."""
    engine_rules = (*JOINT_RULES, *ENGINE_RULES) if context.serves else ()
    trainer_rules: tuple[Rule, ...] = TRAINER_RULES if context.trains else ()
    if context.recipe.task == "tenants":
        trainer_rules = tuple(rule for rule in TRAINER_RULES if rule.field in SHARED_WORK)
    return [
        Finding(
            level=rule.level,
            field=rule.field,
            value=rule.value(context.recipe),
            text=f"{rule.rule}: {conflict}",
            fix=rule.fix,
        )
        for rule in (*engine_rules, *trainer_rules)
        if (conflict := rule.finds(context))
    ]
