"""Verbs that look at a recipe and change nothing: plan, render, check, schema."""

from __future__ import annotations

import sys

import typer
from rich.table import Table

from primeslurm.cli.options import JsonOpt, LocalOpt, NameOpt, RecipeArg, SetOpt, SiteOpt, load
from primeslurm.cli.output import guarded, note, out, print_json
from primeslurm.plan.model import Plan
from primeslurm.recipe import Recipe, Site
from primeslurm.slurm.render import render


@guarded
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


@guarded
def render_(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
) -> None:
    """Print the batch script, byte for byte as it would be submitted."""
    loaded = load(recipe, site, set_, name, local=False, need_files=False)
    sys.stdout.write(render(loaded.plan))


@guarded
def check(
    recipe: RecipeArg,
    site: SiteOpt = None,
    set_: SetOpt = None,
    name: NameOpt = None,
    local: LocalOpt = False,
    as_json: JsonOpt = False,
) -> None:
    """Check recipe, placement and model files; exit code 2 if it cannot run."""
    loaded = load(recipe, site, set_, name, local)
    if as_json:
        print_json([finding.model_dump() for finding in loaded.plan.findings])
        return
    show_findings(loaded.plan)
    note(f"{loaded.recipe.name}: ok, {_totals(loaded.plan)}")


def schema(site: bool = typer.Option(False, "--site", help="The schema of site files instead.")) -> None:
    """Print the JSON schema of recipes, for editors."""
    print_json((Site if site else Recipe).model_json_schema(by_alias=True))


def show_plan(plan: Plan) -> None:
    """Tables of the groups and of every process, on stdout."""
    groups = Table(
        "group", "nodes", "partition", "gres", "cpus", title=f"{plan.run}: {plan.layout} job", title_justify="left"
    )
    for group in plan.groups:
        groups.add_row(group.name, str(group.nodes), group.partition, group.gres or "-", str(group.cpus_per_task))
    out.print(groups)
    table = Table("node", "role", "process", "ports", "GPUs", "on death", title="placement", title_justify="left")
    for node in plan.nodes:
        for i, process in enumerate(node.processes):
            table.add_row(
                str(node.index) if i == 0 else "",
                f"{node.role}[{node.index_in_group}]" if i == 0 else "",
                process.name,
                " ".join(f"{port}:{number}" for port, number in process.ports.items()) or "-",
                ",".join(map(str, process.gpus)) or "-",
                "restart" if process.restart == "in_place" else "end attempt",
            )
    out.print(table)
    out.print(f"totals: {_totals(plan)}")
    out.print(f"run directory: {plan.run_dir}")
    show_findings(plan)


def show_findings(plan: Plan) -> None:
    """Advice, on stderr."""
    for finding in plan.findings:
        note(f"{finding.level}: {finding.field}: {finding.text}" + (f" ({finding.fix})" if finding.fix else ""))


def _totals(plan: Plan) -> str:
    t = plan.totals
    parts = [f"{t.nodes} nodes", f"{t.gpus} GPUs", f"{t.trainer_gpus} trainer GPUs"]
    if plan.task == "rl":
        parts += [f"{t.inference_nodes} inference nodes", f"{t.engines} engines", f"{t.routers} routers"]
    return ", ".join(parts)
