"""Verbs that look at a recipe and change nothing: plan, render, check, schema."""

from __future__ import annotations

import sys

import typer

from primeslurm.cli.options import JsonOpt, LocalOpt, NameOpt, RecipeArg, SetOpt, SiteOpt, load, refusals, refuse
from primeslurm.cli.output import count, light_table, note, out, print_json
from primeslurm.errors import UsageError, Violation
from primeslurm.plan.forecast import Estimate
from primeslurm.plan.model import Finding, Plan, Process
from primeslurm.recipe import Recipe, Site
from primeslurm.slurm.render import render


def plan(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Show the placement that a recipe gives: node x process x port x GPU, and derived totals."""
    loaded = load(recipe, site, set_, name, local, need_files=False)
    if as_json:
        sys.stdout.write(loaded.plan.to_json())
    else:
        show_plan(loaded.plan)


def render_(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
) -> None:
    """Print the batch script, byte for byte as it would be submitted."""
    loaded = load(recipe, site, set_, name, local=False, need_files=False)
    refuse(loaded.plan, "error")
    sys.stdout.write(render(loaded.plan))


def check(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Check recipe, placement, compatibility, memory and model files; exit code 2 if it cannot run."""
    try:
        loaded = load(recipe, site, set_, name, local)
    except UsageError as error:
        if not as_json:
            raise
        found = [Finding(level="error", field=v.field, text=_told(v), fix=v.fix) for v in error.violations]
        print_json([finding.model_dump() for finding in found])
        raise typer.Exit(error.exit_code) from None
    errors = refusals(loaded.plan.findings, "error")
    if as_json:
        print_json([finding.model_dump() for finding in loaded.plan.findings])
    else:
        show_findings(loaded.plan)
        blocked = refusals(loaded.plan.findings, "blocked")
        verdict = count(len(errors), "error") if errors else "ok, but cannot be submitted here" if blocked else "ok"
        note(f"{loaded.recipe.name}: {verdict}, {_totals(loaded.plan)}")
    if errors:
        raise typer.Exit(2)


def _told(violation: Violation) -> str:
    return f"{violation.value}: {violation.why}" if violation.value else violation.why


def schema(site: bool = typer.Option(False, "--site", help="The schema of site files instead.")) -> None:
    """Print the JSON schema of recipes, for editors."""
    print_json((Site if site else Recipe).model_json_schema(by_alias=True))


def show_plan(plan: Plan) -> None:
    """Tables of the groups and of every process, on stdout."""
    groups = light_table("group", "nodes", "partition", "gres", "cpus", title=f"{plan.run}: {plan.layout} job")
    for group in plan.groups:
        groups.add_row(group.name, str(group.nodes), group.partition, group.gres or "-", str(group.cpus_per_task))
    out.print(groups)
    table = light_table("node", "role", "process", "ports", "GPUs", "on death", title="placement")
    for node in plan.nodes:
        for i, process in enumerate(node.processes):
            table.add_row(
                str(node.index) if i == 0 else "",
                f"{node.role}[{node.index_in_group}]" if i == 0 else "",
                process.name,
                " ".join(f"{port}:{number}" for port, number in process.ports.items()) or "-",
                ",".join(map(str, process.gpus)) or "-",
                _on_death(process),
            )
    out.print(table)
    out.print(f"totals: {_totals(plan)}")
    if plan.estimate:
        show_estimate(plan.estimate)
    out.print(f"run directory: {plan.run_dir}")
    show_findings(plan)


def _on_death(process: Process) -> str:
    if process.restart == "unit":
        return f"restart {process.unit}"
    return "restart" if process.restart == "in_place" else "end attempt"


def show_estimate(estimate: Estimate) -> None:
    """The memory of each role, and amounts of the whole run, on stdout."""
    if estimate.roles:
        columns = ("role", "use", "limit", "free", "KV tokens", "sequences at once: longest, typical")
        table = light_table(*columns, title="memory of one GPU, GiB (estimate; what is free for KV is its cache)")
        for role in estimate.roles:
            engines = role.kv_bytes_per_token > 0
            table.add_row(
                role.role,
                ", ".join(f"{name} {size:g}" for name, size in role.parts.items() if size and name != "KV"),
                f"{role.limit_gib:g} of {role.gpu_gib:g} ({role.gpu})",
                f"{role.free_gib:g}",
                f"{role.kv_tokens} x {role.kv_bytes_per_token} B" if engines else "-",
                f"{role.longest:g}, {role.typical:g}" if engines else "-",
            )
        out.print(table)
    for amount in estimate.amounts:
        out.print(f"{amount.name}: {amount.value:g} {amount.unit} ({amount.how})")
    out.print(f"model: {estimate.source}", soft_wrap=True)


def show_findings(plan: Plan) -> None:
    """Advice, on stderr."""
    for finding in plan.findings:
        note(f"{finding.level}: {finding.field}: {finding.text}" + (f" ({finding.fix})" if finding.fix else ""))


def _totals(plan: Plan) -> str:
    t = plan.totals
    parts = [(t.nodes, "node"), (t.gpus, "GPU"), (t.trainer_gpus, "trainer GPU")]
    if t.spares:
        parts.insert(1, (t.spares, "spare node"))
    if plan.task != "sft":
        parts += [(t.inference_nodes, "inference node"), (t.engines, "engine"), (t.routers, "router")]
    if t.teacher_engines:
        parts.append((t.teacher_engines, "teacher engine"))
    return ", ".join(count(number, word) for number, word in parts)
