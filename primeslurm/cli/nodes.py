"""The bad-node ledger: which nodes new jobs keep away from, and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from primeslurm.cli.options import JsonOpt
from primeslurm.cli.output import light_table, note, out, print_json
from primeslurm.cli.runs import RunsOpt, runs_directory
from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.explain import suggestion
from primeslurm.run.ledger import HOUR_S, Ledger, avoiding
from primeslurm.slurm.client import SlurmClient

ForgetOpt = Annotated[
    list[str] | None, typer.Option("--forget", help="Let jobs use this node again.", metavar="NODE", show_default=False)
]


def nodes(forget: ForgetOpt = None, runs: RunsOpt = None, as_json: JsonOpt = False) -> None:
    """List the nodes that failed lately, which new jobs keep away from."""
    ledger = Ledger(runs_directory(runs))
    now = time.time()
    if forget:
        _forget(ledger, forget, now)
    known = ledger.entries(now)
    if as_json:
        print_json(msgspec.to_builtins(known))
        return
    table = light_table("node", "why", "run", "attempt", "hours ago", "hours left")
    for entry in known:
        ago, left = (now - entry.time) / HOUR_S, (entry.expires - now) / HOUR_S
        table.add_row(entry.node, entry.reason, entry.run, str(entry.attempt), f"{ago:.1f}", f"{left:.1f}")
    if known:
        out.print(table)
    else:
        note("no node failed lately")


def avoid_bad_nodes(plan: Plan, slurm_conf: str | None) -> Plan:
    """The plan with the ledger's nodes excluded, as far as they are of this cluster. Raises ClusterError."""
    now = time.time()
    bad = Ledger(Path(plan.run_dir).parent).entries(now)
    names = {node.name for node in SlurmClient(slurm_conf).nodes()} if bad else set()
    return avoiding(plan, [entry for entry in bad if entry.node in names], now)


def _forget(ledger: Ledger, names: list[str], now: float) -> None:
    known = [entry.node for entry in ledger.entries(now)]
    unknown = [name for name in names if name not in known]
    if unknown:
        why = "is not in the ledger of bad nodes"
        raise UsageError([Violation("--forget", name, why, suggestion(name, known)) for name in unknown])
    for name in names:
        ledger.forget(name)
        note(f"{name} may be used again")
