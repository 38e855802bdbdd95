"""Print a plan: verdict, job, memory, and placement of processes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.units import duration, number, size
from primeslurm.cli.output import note
from primeslurm.cli.views.findings import show_findings, totals
from primeslurm.cli.views.plan_verdict import show_verdict
from primeslurm.cli.views.tables import fold, light_table, out, pattern, ranges
from primeslurm.plan.forecast import Estimate, Quantity
from primeslurm.plan.model import Node, Plan, Process
from primeslurm.recipe import Recipe


@dataclass(frozen=True)
class ProcessRow:
    """Similar processes on similar nodes."""

    nodes: str  # empty if the row above has the same nodes
    role: str
    process: str
    ports: str
    gpus: str
    on_death: str


def show_plan(
    plan: Plan, recipe: Recipe, *, placement: bool = False, every: bool = False, verbose: bool = False
) -> None:
    """Print a plan on stdout, and its findings on stderr.

    `placement` also prints the node of each process, `every` gives each process its own row instead of folding similar
    ones, and `verbose` also prints the job, the memory of each role, and all amounts.
    """
    show_verdict(plan, recipe)
    if verbose:
        _show_job(plan)
        out.print(f"totals: {totals(plan)}")
        if plan.estimate:
            _show_estimate(plan.estimate)
        out.print(f"run directory: {plan.run_dir}", soft_wrap=True)
    if placement or every or verbose:
        show_placement(plan, every=every, ports=every or verbose)
    show_findings(plan)
    if not (placement or every or verbose):
        note("--placement shows which process runs where, --verbose shows every number")


def show_placement(plan: Plan, *, every: bool = False, ports: bool = False) -> None:
    """Print the node of each process; with `every`, one row per process. `ports` may need more than 80 columns."""
    table = light_table("node", "role", "process", "GPUs", "on death", *["ports"] * ports, title="placement")
    table.columns[0].max_width = 10  # ranges wrap between two numbers, names of processes do not
    table.columns[3].no_wrap = True
    for row in every_row(plan.nodes) if every else folded_rows(plan.nodes):
        table.add_row(row.nodes, row.role, row.process, row.gpus, row.on_death, *[row.ports] * ports)
    for group in plan.groups:
        if group.spares:
            table.add_row(f"+{group.spares}", f"{group.name} (spare)", "-", "-", "-", *["-"] * ports)
    out.print(table)


def show_commands(plan: Plan, index: int) -> None:
    """Print the command of each process of a node. Raises UsageError if the plan has no such node."""
    if not 0 <= index < len(plan.nodes):
        raise UsageError([Violation("--node", str(index), f"the plan has nodes 0 to {len(plan.nodes) - 1}")])
    node = plan.nodes[index]
    out.print(f"node {index}: {node.role}[{node.index_in_group}]", markup=False)
    for process in node.processes:
        out.print(f"\n{process.name}", style="bold")
        out.print(shlex.join(process.argv), markup=False, highlight=False, soft_wrap=True)
    note("\n${...} is filled in on the node, for example ${port:http} with a free port. --json also shows environments")


def _show_job(plan: Plan) -> None:
    groups = light_table("group", "nodes", "partition", "gres", "cpus", title=f"{plan.layout} job")
    for group in plan.groups:
        groups.add_row(group.name, str(group.nodes), group.partition, group.gres or "-", str(group.cpus_per_task))
    out.print(groups)


def every_row(nodes: Iterable[Node]) -> list[ProcessRow]:
    return [
        ProcessRow(
            nodes=str(node.index) if i == 0 else "",
            role=f"{node.role}[{node.index_in_group}]" if i == 0 else "",
            process=process.name,
            ports=" ".join(f"{port}:{number}" for port, number in process.ports.items()) or "-",
            gpus=",".join(map(str, process.gpus)) or "-",
            on_death=_on_death(process),
        )
        for node in nodes
        for i, process in enumerate(node.processes)
    ]


def folded_rows(nodes: Iterable[Node]) -> list[ProcessRow]:
    """Return a row for similar processes on similar nodes, which have the same GPUs and numbers of processes."""
    alike: dict[object, list[Node]] = {}
    for node in nodes:
        alike.setdefault(_kind_of_node(node), []).append(node)
    rows = []
    for members in alike.values():
        where = ranges(node.index for node in members)
        role = f"{members[0].role}[{ranges(node.index_in_group for node in members)}]"
        for i, processes in enumerate(zip(*(_runs(node) for node in members), strict=True)):
            shown = _row([process for run in processes for process in run])
            rows.append(ProcessRow(where if i == 0 else "", role if i == 0 else "", *shown))
    return rows


def _row(processes: Sequence[Process]) -> tuple[str, str, str, str]:
    first = processes[0]
    ports = [f"{name}:{ranges(process.ports[name] for process in processes)}" for name in first.ports]
    gpus = ranges(gpu for process in processes for gpu in process.gpus)
    deaths = fold(dict.fromkeys(map(_on_death, processes)))
    return ", ".join(fold(p.name for p in processes)), " ".join(ports) or "-", gpus or "-", ", ".join(deaths)


def _runs(node: Node) -> list[list[Process]]:
    """Return the processes of a node, grouped by kind."""
    alike: dict[object, list[Process]] = {}
    for process in node.processes:
        alike.setdefault(_kind(process), []).append(process)
    return list(alike.values())


def _kind(process: Process) -> object:
    return pattern(process.name), tuple(process.ports), len(process.gpus), pattern(_on_death(process))


def _kind_of_node(node: Node) -> object:
    runs = [(_kind(run[0]), len(run), tuple(gpu for process in run for gpu in process.gpus)) for run in _runs(node)]
    return node.role, node.group, tuple(runs)


def _on_death(process: Process) -> str:
    if process.restart == "unit":
        return f"restart {process.restart_group}"
    return "restart" if process.restart == "in_place" else "end attempt"


def _show_estimate(estimate: Estimate) -> None:
    """Print the memory of each role and the amounts of the whole run on stdout."""
    if estimate.roles:
        table = light_table("role", "use", "limit", "free", title="memory of one GPU, GiB")
        for role in estimate.roles:
            parts = ", ".join(f"{name} {size:g}" for name, size in role.parts.items() if size and name != "KV")
            table.add_row(
                role.role, parts, f"{role.limit_gib:g} of {role.gpu_gib:g} ({role.gpu})", f"{role.free_gib:g}"
            )
        out.print(table)
    if engines := [role for role in estimate.roles if role.kv_bytes_per_token]:
        table = light_table("role", "tokens per GPU", "bytes per token", "longest", "typical", title="KV cache")
        for role in engines:
            numbers = (role.kv_tokens, role.kv_bytes_per_token, role.longest, role.typical)
            table.add_row(role.role, *map(number, numbers))
        out.print(table)
        out.print("longest, typical: sequences of seq_len, and of a quarter of it, that all engines hold at once")
    for amount in estimate.amounts:
        out.print(f"{amount.name}: {amount_text(amount)} ({amount.how})")
    for rate in estimate.rates:
        out.print(f"rate of {rate.name}: {rate.value:,g} {rate.unit} ({rate.how})", soft_wrap=True)
    out.print(f"model: {estimate.source}")


def amount_text(amount: Quantity) -> str:
    """Return an amount with a unit that suits its size."""
    if amount.unit == "s":
        return duration(amount.value)
    unit, _, per = amount.unit.partition(" ")
    if unit == "GB":
        return f"{size(amount.value * 1e9)} {per}".rstrip()
    if amount.unit == "h":
        return f"{number(amount.value)} h"
    return f"{amount.value:,g} {amount.unit}"
