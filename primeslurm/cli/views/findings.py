"""Print findings, the most severe first, and a plan in one line."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable

from primeslurm.api.checks.recipe_check import Check, by_severity
from primeslurm.base.units import count
from primeslurm.cli.output import note
from primeslurm.cli.views.colours import FINDING_COLOURS
from primeslurm.plan.model import Finding, Level, NodeRole, Plan

_ROLES: tuple[NodeRole, ...] = ("train", "inference", "prefill", "decode", "teacher", "environments", "control")
# Levels that a summary counts.
_WORDS: dict[Level, str] = {"error": "error", "blocked": "blocker", "warning": "warning"}


def show_findings(plan: Plan) -> None:
    show_all(plan.findings)


def show_all(findings: Iterable[Finding]) -> None:
    """Print findings on stderr, in colour on a terminal."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for finding in by_severity(findings):
        if coloured:
            _print_coloured(finding)
        else:
            note(str(finding))


def _print_coloured(finding: Finding) -> None:
    from rich.text import Text

    from primeslurm.cli.views.tables import err

    level, field, rest = finding.level, finding.field, str(finding).removeprefix(f"{finding.level}: {finding.field}")
    err.print(Text.assemble((level, FINDING_COLOURS[level]), ": ", (field, "bold"), rest))


def summary(result: Check, name: str) -> str:
    """Return one line: is the recipe valid, can it be submitted from here, and how many nodes does it use?

    `name` is the run or the recipe file.
    """
    counts = Counter(finding.level for finding in result.findings)
    if not result.ok:
        parts = [count(counts[level], word) for level, word in _WORDS.items() if counts[level]]
        return f"{name}: {', '.join(parts)}."
    verdict = "recipe is valid"
    if result.blocked:
        blockers = [each for each in result.findings if each.level == "blocked"]
        reason = f": {blockers[0].field} {blockers[0].text}" if len(blockers) == 1 else ""
        verdict += f"; not submittable from this machine ({count(len(blockers), 'blocker')}{reason})"
    nodes = nodes_by_role(result.plan) if result.plan else ""
    return f"{name}: {verdict}." + (f" {nodes[0].upper()}{nodes[1:]}." if nodes else "")


def nodes_by_role(plan: Plan) -> str:
    """Return the number of nodes by role, including spares: `3 nodes: 2 train, 1 spare`."""
    if plan.layout == "one_node" or plan.executor == "local":
        where = "this machine, as " if plan.executor == "local" else ""
        return f"{where}{count(plan.allocated, 'node')}"
    working = Counter(node.role for node in plan.nodes)
    parts = [f"{working[role]} {role}" for role in _ROLES if working[role]]
    if plan.totals.spares:
        parts.append(count(plan.totals.spares, "spare"))
    return f"{count(plan.allocated, 'node')}: {', '.join(parts)}"


def totals(plan: Plan) -> str:
    t = plan.totals
    parts = [(t.gpus, "GPU")]
    if plan.task != "sft":
        parts += [(t.engines, "engine"), (t.routers, "router")]
    if t.teacher_engines:
        parts.append((t.teacher_engines, "teacher engine"))
    return ", ".join([nodes_by_role(plan), *(count(number, word) for number, word in parts)])
