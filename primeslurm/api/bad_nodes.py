"""The nodes that failed lately: which they are, keeping away from them, and using them again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from primeslurm.errors import UsageError, Violation
from primeslurm.plan.model import Plan
from primeslurm.recipe.reading.explain import suggestion
from primeslurm.run.ledger import BadNode, Ledger, avoiding
from primeslurm.slurm.client import SlurmClient


def bad_nodes(runs: Path, now: float) -> list[BadNode]:
    """The nodes that jobs of this directory of runs keep away from, newest first."""
    return Ledger(runs).entries(now)


def avoid_bad_nodes(plan: Plan, slurm_conf: str | None) -> Plan:
    """The plan with the ledger's nodes excluded, as far as they are of this cluster. Raises ClusterError."""
    now = time.time()
    bad = bad_nodes(Path(plan.run_dir).parent, now)
    names = {node.name for node in SlurmClient(slurm_conf).nodes()} if bad else set()
    return avoiding(plan, [entry for entry in bad if entry.node in names], now)


def forget_bad_nodes(runs: Path, names: Sequence[str], now: float) -> None:
    """Let jobs use these nodes again. Raises UsageError if one is not remembered; then none is forgotten."""
    ledger = Ledger(runs)
    known = [entry.node for entry in ledger.entries(now)]
    unknown = [name for name in names if name not in known]
    if unknown:
        why = "is not in the ledger of bad nodes"
        raise UsageError([Violation("--forget", name, why, suggestion(name, known)) for name in unknown])
    for name in names:
        ledger.forget(name)
