"""Checks of the ports that a recipe fixes (`router_port` and `backend_port` of `deployment.inference`)."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.base.errors import Violation
from primeslurm.plan.model import Finding, Node, Plan, Process
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.types import LAST_PORT

# Ports that Linux gives to outgoing connections, unless a site changes `net.ipv4.ip_local_port_range`
EPHEMERAL = range(32768, 61000)


def port_problems(recipe: Recipe, nodes: Sequence[Node], *, local: bool) -> list[Violation]:
    """Return why processes cannot have the ports that the recipe fixes, at most one reason per field."""
    machines: dict[int, list[Process]] = {}
    for node in nodes:
        machines.setdefault(0 if local else node.index, []).extend(node.processes)
    problems: dict[str, Violation] = {}
    for processes in machines.values():
        users: dict[int, list[Process]] = {}
        for process in processes:
            for number in process.ports.values():
                users.setdefault(number, []).append(process)
        for number, sharing in users.items():
            owner = next((each for each in sharing if number in (each.ports[name] for name in each.fixed_ports)), None)
            if owner is None:
                continue
            field, value = _field(recipe, owner)
            if number > LAST_PORT:
                why = f"{owner.name} would need port {number}, and the last port is {LAST_PORT}"
                fix = f"use at most {_first(recipe) + LAST_PORT - max(users)}, or leave it out"
            elif len(sharing) > 1:
                where = "this machine, which stands for all nodes" if local else f"node {owner.node}"
                other = next(process for process in sharing if process is not owner)
                why = f"{owner.name} and {other.name} would both listen on port {number} of {where}"
                fix = "leave it out, or submit to Slurm" if local else "use another port, or leave it out"
            else:
                continue
            problems.setdefault(field, Violation(field, value, why, fix))
    return list(problems.values())


def port_warnings(recipe: Recipe, plan: Plan) -> list[Finding]:
    """Warn of fields that fix ports which an outgoing connection of any program may have."""
    warnings: dict[str, Finding] = {}
    for process in plan.processes():
        for number in (process.ports[name] for name in process.fixed_ports):
            if number in EPHEMERAL:
                field, value = _field(recipe, process)
                text = f"Linux gives ports {EPHEMERAL[0]} to {EPHEMERAL[-1]} to outgoing connections, and "
                text += f"{process.name} cannot start while one of them has port {number}"
                fix = "use a port outside that range, or leave it out"
                warnings.setdefault(field, Finding(level="warning", field=field, value=value, text=text, fix=fix))
    return list(warnings.values())


def _field(recipe: Recipe, process: Process) -> tuple[str, str]:
    """Return the field that fixes a process's port, and its value."""
    name = "router_port" if process.role == "router" else "backend_port"
    return f"deployment.inference.{name}", str(getattr(recipe.deployment.inference, name))


def _first(recipe: Recipe) -> int:
    return recipe.deployment.inference.backend_port or 0
