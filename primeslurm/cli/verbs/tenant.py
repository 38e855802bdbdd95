"""`primeslurm tenant`: add tenants to a deployment, list and stop them, and get keys for clients."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.api.tenants.deployment import SharedDeployment, TenantStatus, find_deployment
from primeslurm.cli.lazy_verbs import HelpingGroup, add_command
from primeslurm.cli.options import JsonOpt, NameOpt, RunArg, RunsOpt, SetOpt, YesOpt, confirm
from primeslurm.cli.output import note, print_json
from primeslurm.cli.views.status import view
from primeslurm.cli.views.tables import light_table, out
from primeslurm.run.tenants import Wanted

app = typer.Typer(cls=HelpingGroup, help="Train adapters of several tenants on one deployment.", add_completion=False)
NameArg = Annotated[str, typer.Argument(help="Name of the tenant.", metavar="NAME", show_default=False)]


def add(
    run: RunArg,
    recipe: Annotated[
        Path, typer.Argument(help="Recipe file of the tenant, or the name of a ready one.", metavar="TENANT.yaml")
    ],
    set_: SetOpt = None,
    name: NameOpt = None,
    runs: RunsOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Add a tenant to a deployment.

    Prints the directory of its run, for `primeslurm status`, `logs`, `summary` and `report`. The deployment may be
    pending, running, or stopped. A tenant's recipe is an RL recipe without model, deployment, inference and slurm.

    Examples:
        primeslurm tenant add lab alice.yaml
        primeslurm tenant add lab alice.yaml --name alice-2 --set trainer.optimizer.lr=1e-5
    """
    tenant = find_deployment(run, runs).add(recipe, set_ or (), name)
    if as_json:
        print_json({"tenant": tenant.name, "directory": str(tenant.run.path)})
    else:
        typer.echo(str(tenant.run.path))
        note(f"watch it with: primeslurm status {shlex.quote(str(tenant.run.path))} --watch")


def list_(run: RunArg, runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """List the tenants of a deployment.

    Examples:
        primeslurm tenant list lab
    """
    deployment = find_deployment(run, runs)
    rows = [deployment.status(tenant)[0] for tenant in deployment.tenants()]
    if as_json:
        print_json([msgspec.to_builtins(row) for row in rows])
        return
    table = light_table("tenant", "state", "step", "reward", "version", "reason")
    for row in rows:
        table.add_row(*_cells(row))
    out.print(table)


def _cells(row: TenantStatus) -> tuple[str, ...]:
    step = f"{row.step or 0}/{row.max_steps}" if row.max_steps else "-"
    reward = "-" if row.reward is None else f"{row.reward:.3f}"
    return row.name, row.state, step, reward, "-" if row.version is None else str(row.version), row.reason


def status(run: RunArg, name: NameArg, runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """Show what a tenant is doing.

    Examples:
        primeslurm tenant status lab alice
    """
    deployment = find_deployment(run, runs)
    state, run_status = deployment.status(deployment.tenant(name))
    if as_json:
        print_json(msgspec.to_builtins(state) | {"run": run_status and msgspec.to_builtins(run_status)})
        return
    failures = f", {state.failures} failures in a row" if state.failures else ""
    out.print(f"{state.name} is {state.state}{failures}" + (f": {state.reason}" if state.reason else ""), markup=False)
    if run_status is not None:
        out.print(view(run_status))


def pause(run: RunArg, name: NameArg, runs: RunsOpt = None) -> None:
    """Stop a tenant's run with a last checkpoint, and free its part of engines and service.

    Examples:
        primeslurm tenant pause lab alice
    """
    _want(find_deployment(run, runs), name, "paused")


def resume(
    run: RunArg,
    name: NameArg,
    disk_gb: Annotated[
        float | None, typer.Option(min=0.001, help="New disk quota of the tenant [GB].", metavar="N")
    ] = None,
    runs: RunsOpt = None,
) -> None:
    """Resume a paused tenant, or start one again that waits after a failure.

    Examples:
        primeslurm tenant resume lab alice
        primeslurm tenant resume lab alice --disk-gb 50
    """
    deployment = find_deployment(run, runs)
    if disk_gb is not None:
        deployment.set_disk_quota(name, disk_gb)
    _want(deployment, name, "running")


def remove(run: RunArg, name: NameArg, runs: RunsOpt = None, yes: YesOpt = False) -> None:
    """Stop a tenant's run with a last checkpoint, then revoke its key, and make room for another tenant.

    Its results stay in the directory of the deployment.

    Examples:
        primeslurm tenant remove lab alice
    """
    deployment = find_deployment(run, runs)
    confirm(f"Remove tenant {deployment.tenant(name).name}?", yes)
    _want(deployment, name, "removed")


def _want(deployment: SharedDeployment, name: str, wanted: Wanted) -> None:
    deployment.want(name, wanted)
    note(f"{name} will be {wanted} while the deployment runs; see: primeslurm tenant list {deployment.run.name}")


def key(
    run: RunArg,
    user: Annotated[str, typer.Argument(help="Name of the client. A new one gets a key.", metavar="USER")],
    runs: RunsOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Print address and API key with which a client of the Tinker API trains on a deployment.

    Each user sees only their own training runs and checkpoints.

    Examples:
        eval "$(primeslurm tenant key lab bob)"
    """
    url, secret = find_deployment(run, runs).key(user)
    if as_json:
        print_json({"user": user, "base_url": url, "api_key": secret})
        return
    if url is None:
        note("the deployment does not run, so its Tinker service has no address now")
    else:
        typer.echo(f"export TINKER_BASE_URL={url}")
    typer.echo(f"export TINKER_API_KEY={secret}")


for _name, _verb in (
    *(("add", add), ("list", list_), ("status", status), ("pause", pause)),
    *(("resume", resume), ("remove", remove), ("key", key)),
):
    add_command(app, _name, _verb)
