"""`primeslurm cluster`: start, inspect and stop an embedded Slurm cluster on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.testbed import ClusterStatus, find_cluster, find_clusters, start_cluster
from primeslurm.base.errors import ExitCode
from primeslurm.base.units import count
from primeslurm.cli.lazy_verbs import HelpingGroup, add_command
from primeslurm.cli.options import JsonOpt, YesOpt, confirm
from primeslurm.cli.output import note, print_json

app = typer.Typer(
    cls=HelpingGroup,
    help="Manage an embedded Slurm cluster on this machine.\n\n"
    "It runs the real daemons of Slurm on nodes with fake GPUs, so that jobs can be tried out without a cluster.",
    add_completion=False,
)

Name = Annotated[str, typer.Option(help="Name of the cluster.", metavar="NAME")]
Directory = Annotated[
    Path | None,
    typer.Option(help="Directory of the cluster's files. Default: ~/.primeslurm/clusters/NAME.", metavar="DIR"),
]


def up_command(
    name: Name = "local",
    nodes: Annotated[int, typer.Option(help="Number of GPU nodes, in partition gpu.", metavar="N")] = 4,
    gpus_per_node: Annotated[int, typer.Option(help="Fake GPUs per GPU node.", metavar="N")] = 8,
    cpus_per_node: Annotated[int, typer.Option(help="CPU cores that Slurm sees on each node.", metavar="N")] = 16,
    control_nodes: Annotated[
        int,
        typer.Option(help="Number of CPU nodes in partition cpu. 0: the cluster has GPU nodes only.", metavar="N"),
    ] = 1,
    runs: Annotated[
        Path,
        typer.Option(help="Directory of runs, for the site file. It is kept when the cluster stops.", metavar="DIR"),
    ] = Path("runs"),
    directory: Directory = None,
) -> None:
    """Start the cluster and print the path of its site file.

    If the cluster is already up, this command changes nothing.

    Examples:
        primeslurm cluster up
        primeslurm cluster up --nodes 1 --control-nodes 0
        primeslurm cluster up --name big --nodes 16 --control-nodes 2
    """
    cluster, started = start_cluster(
        name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        control_nodes=control_nodes,
        runs=runs,
        directory=directory,
    )
    total = count(nodes + control_nodes, "node")
    note(f"cluster {name} {'is up' if started else 'was up already'}: {total}, all idle")
    note(f"To use Slurm's own commands with it: export SLURM_CONF={cluster.spec.slurm_conf}")
    typer.echo(cluster.spec.site_file)


def status_command(
    name: Annotated[str | None, typer.Option(help="Name of the cluster.", metavar="NAME")] = None,
    directory: Directory = None,
    as_json: JsonOpt = False,
) -> None:
    """Show daemons and nodes of a cluster. Without a name, show all clusters of this user.

    The exit code is 1 if there is no cluster, or if not all daemons are alive.

    Examples:
        primeslurm cluster status
        primeslurm cluster status --name demo-4711
    """
    if name or directory:
        statuses = [find_cluster(name or "local", directory).status()]
    else:
        statuses = [cluster.status() for cluster in find_clusters()]
    if as_json:
        fields = [{"up": status.up, **asdict(status)} for status in statuses]
        content = fields[0] if name or directory else {"clusters": fields}
        print_json({"schema_version": 1, **content})
    elif statuses:
        typer.echo("\n\n".join(_as_text(status) for status in statuses))
    else:
        note("this user has no embedded cluster in ~/.primeslurm/clusters; `primeslurm cluster up` starts one")
    if not statuses or not all(status.up for status in statuses):
        raise typer.Exit(ExitCode.FAILED)


def down_command(name: Name = "local", directory: Directory = None, yes: YesOpt = False) -> None:
    """Stop the cluster and its jobs, and remove its directory.

    Directories of runs are kept.

    Examples:
        primeslurm cluster down
        primeslurm cluster down --directory /scratch/me/cluster
    """
    cluster = find_cluster(name, directory)
    confirm(f"Stop cluster {cluster.spec.name} and its jobs?", yes)
    cluster.down()
    typer.echo(f"cluster {cluster.spec.name} is down", err=True)


def _as_text(status: ClusterStatus) -> str:
    dead = [name for name, alive in status.daemons.items() if not alive]
    lines = [f"cluster    {status.name}: {'up' if status.up else 'not up; not running: ' + ', '.join(dead)}"]
    lines += [f"directory  {status.directory}", f"site file  {status.site_file}"]
    lines += [f"Slurm      export SLURM_CONF={status.slurm_conf}"]
    lines += [f"{node:<20} {state}" for node, state in status.nodes.items()]
    return "\n".join(lines)


for _name, _function in (("up", up_command), ("status", status_command), ("down", down_command)):
    add_command(app, _name, _function)
