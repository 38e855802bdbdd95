"""`primeslurm doctor` without a run: what is installed on which node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from primeslurm.cli.options import find_site
from primeslurm.cli.output import note, out, print_json
from primeslurm.errors import UsageError, Violation
from primeslurm.hostlists import compress
from primeslurm.recipe import Site
from primeslurm.slurm import inventory
from primeslurm.slurm.client import SlurmClient


def show_installed(site_file: Path | None, node: str | None, every: bool, as_json: bool) -> None:
    """Ask this host, one node or all nodes; exit code 1 if something required is missing or another version."""
    if node is not None and every:
        raise UsageError([Violation("--node", node, "contradicts --all", "keep one of them")])
    site = find_site(site_file) if node or every or site_file else None
    pins = inventory.lock(site.device if site else _device())
    nodes: dict[str, inventory.Parts | None] = {}
    if site is not None and (node or every):
        nodes |= inventory.on_nodes(site, SlurmClient(site.slurm_conf), node)
        gpu_nodes = _gpu_nodes(site)
    else:
        nodes |= inventory.here()
        gpu_nodes = []
    wrong = inventory.differences(nodes, pins, gpu_nodes)
    if as_json:
        print_json({"nodes": nodes, "differences": [asdict(each) for each in wrong]})
    else:
        _show(nodes, wrong)
    if any(each.required for each in wrong):
        raise typer.Exit(1)


def _device() -> str:
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def _gpu_nodes(site: Site) -> list[str]:
    if site.device != "cuda":
        return []
    partitions = {kind.partition for kind in site.nodes.values() if kind.gpus}
    return [name for partition in partitions for name in SlurmClient(site.slurm_conf).nodes_of(partition)]


def _show(nodes: dict[str, inventory.Parts | None], wrong: list[inventory.Difference]) -> None:
    """One row a part; nodes that have the same share a column."""
    marked = {(each.node, each.part): each for each in wrong}
    columns: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for name, found in nodes.items():
        columns.setdefault(tuple((found or {"node": "down"}).items()), []).append(name)
    table = Table("part", *(compress(names) for names in columns.values()))
    for part in dict.fromkeys(part for parts in columns for part, _ in parts):
        cells = []
        for parts, names in columns.items():
            value, difference = dict(parts).get(part), marked.get((names[0], part))
            text = value or "-"
            if difference is not None:
                text += f" (locked: {difference.wanted})" if difference.wanted else " (required)"
            cells.append(Text(text, style="red" if difference else ""))
        table.add_row(part, *cells)
    out.print(table)
    for each in wrong:
        locked = f", locked {each.wanted}" if each.wanted else ""
        note(f"{each.node}: {each.part} is {each.found or 'missing'}{locked}")
