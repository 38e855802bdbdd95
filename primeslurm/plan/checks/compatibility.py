"""The compatibility table. It is applied to a recipe on a site, and printed for the docs."""

from __future__ import annotations

from primeslurm.plan.checks.engine_rules import ENGINE_RULES
from primeslurm.plan.checks.joint_rules import JOINT_RULES
from primeslurm.plan.checks.rule import Rule, RuleContext
from primeslurm.plan.checks.trainer_rules import TRAINER_RULES
from primeslurm.plan.model import Finding

GROUPS: dict[str, tuple[Rule, ...]] = {
    "Router replay, KV offload, prefill and decode, teacher": JOINT_RULES,
    "Engines": ENGINE_RULES,
    "Trainer": TRAINER_RULES,
}


def conflicts(context: RuleContext) -> list[Finding]:
    """Return a finding for every rule that the recipe breaks on its site."""
    joint = JOINT_RULES if context.serves else ()
    rules = (*joint, *(ENGINE_RULES if context.serves else ()), *(TRAINER_RULES if context.trains else ()))
    return [
        Finding(level=rule.level, field=rule.field, text=f"{rule.rule}: {what}", fix=rule.fix)
        for rule in rules
        if (what := rule.finds(context))
    ]


def as_markdown() -> str:
    """Return one Markdown table per group of rules."""
    lines: list[str] = []
    for title, rules in GROUPS.items():
        lines += [f"## {title}", "", "| rule | field | level | what to do | source |", "|---|---|---|---|---|"]
        lines += [f"| {r.rule} | `{r.field}` | {r.level} | {r.fix} | {r.source} |" for r in rules]
        lines.append("")
    return "\n".join(lines)
