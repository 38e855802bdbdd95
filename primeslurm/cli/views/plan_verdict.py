"""The first part of `primeslurm plan`: does the run fit, what does it use, how long do its parts take?"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from primeslurm.base.units import count, duration, gib, number, size, tokens
from primeslurm.cli.views.tables import light_table, out
from primeslurm.plan.estimates.estimate import SAMPLED, TYPICAL
from primeslurm.plan.forecast import Quantity, RoleMemory
from primeslurm.plan.model import Plan
from primeslurm.recipe import Recipe
from primeslurm.recipe.fields.types import minutes

# Share of its limit from which on a role may run out of memory, by the accuracy of the estimate.
TIGHT = 0.9
# Width of the labels before lines, and of the names of roles.
LABELS = 10
# Roles of processes that compute, and the names of their rows.
ROLES = {
    "trainer": "train",
    "tinker": "train",
    "engine": "inference",
    "prefill": "prefill",
    "decode": "decode",
    "teacher": "teacher",
}


@dataclass(frozen=True)
class RoleRow:
    """Resources of one role."""

    role: str
    nodes: int
    processes: int
    gpus: int
    memory: RoleMemory | None  # None if there is no estimate

    @property
    def free_gib(self) -> float:
        """Memory of a GPU that is not needed, and not used for a KV cache."""
        return self.memory.free_gib if self.memory else 0.0

    @property
    def meaning(self) -> str:
        if self.memory is None:
            return "memory not estimated"
        # As far above its limit as TIGHT is below, a trainer may still fit; an engine without a KV cache does not.
        far_above = self.memory.needed_gib > (2 - TIGHT) * self.memory.limit_gib
        if self.free_gib <= 0 and (far_above or self.role != "train"):
            return "does not fit"
        if self.memory.kv_tokens:
            return f"{tokens(self.memory.kv_tokens)} KV tokens per GPU"
        return "may not fit" if self.memory.needed_gib > TIGHT * self.memory.limit_gib else "fits"


def show_verdict(plan: Plan, recipe: Recipe) -> None:
    """Print verdict, resources, a row for each role, and durations on stdout."""
    rows = role_rows(plan)
    out.print(Text.assemble((f"{plan.run}: {verdict(plan, rows)}", "bold")))
    out.print(_lines({**resources(plan, rows), **_fixed_ports(recipe), **_least(plan, recipe)}))
    if rows:
        out.print(_table(rows, on_gpus=plan.device == "cuda"))
    out.print(_lines({**_in_flight(plan, recipe), **_step(plan, recipe), **_rollouts(plan), **_rates(plan)}))
    out.print(_lines({**_start(plan), **_saving(plan, recipe)}))


def verdict(plan: Plan, rows: list[RoleRow]) -> str:
    """Return one line: does the run fit, and can it be submitted from here?"""
    errors = sum(finding.level == "error" for finding in plan.findings)
    blocked = sum(finding.level == "blocked" for finding in plan.findings)
    meanings = [row.meaning for row in rows]
    if "does not fit" in meanings:
        text = "does not fit"
    elif errors:
        text = "cannot run"
    elif "may not fit" in meanings:
        text = "may not fit"
    elif plan.emulated:
        text = "can run with stand-ins"
    elif plan.device != "cuda":
        text = "can run on CPUs (memory is not estimated)"
    else:
        text = "can run (memory is not estimated)" if "memory not estimated" in meanings else "fits in GPU memory"
    if errors:
        return f"{text} ({count(errors, 'error')})"
    fits = text not in ("does not fit", "may not fit")
    return f"{text}, {'but' if fits else 'and'} {count(blocked, 'blocker')} must be removed first" if blocked else text


def resources(plan: Plan, rows: list[RoleRow]) -> dict[str, str]:
    """Return lines about the nodes, GPUs and time limit of the run."""
    gpus = plan.totals.gpus
    if plan.executor == "local":
        on_gpus = f", {count(gpus, 'GPU')}" if plan.device == "cuda" else ""
        return {"nodes": f"this machine, as {count(plan.totals.nodes, 'node')}{on_gpus}"}
    if plan.device == "cuda":
        kinds = "/".join(sorted({row.memory.gpu.upper() for row in rows if row.memory}))
        with_gpus = sum(group.nodes for group in plan.groups if group.requested_gres)
        gpu_text = f"{gpus} {kinds}" if kinds else count(gpus, "GPU")
        nodes = [(with_gpus, f"{count(with_gpus, 'GPU node')} ({gpu_text})")]
        nodes += [(plan.allocated - with_gpus, count(plan.allocated - with_gpus, "CPU node"))]
        parts = [text for number_of_nodes, text in nodes if number_of_nodes]
    else:
        parts = [count(plan.allocated, "node")]
    if plan.totals.spares:
        parts.append(f"including {count(plan.totals.spares, 'spare')}")
    limit = minutes(plan.job.time)
    hours = f"at most {count(math.ceil(gpus * limit / 60), 'GPU-hour')}, " if plan.device == "cuda" else ""
    return {"nodes": ", ".join(parts), "time": f"{hours}time limit {duration(limit * 60)}"}


def _fixed_ports(recipe: Recipe) -> dict[str, str]:
    inference = recipe.deployment.inference
    ports = {"routers on": inference.router_port, "engines of each node from": inference.backend_port}
    text = ", ".join(f"{who} {port}" for who, port in ports.items() if port is not None)
    return {"ports": text} if text and recipe.task != "sft" else {}


def role_rows(plan: Plan) -> list[RoleRow]:
    """Return rows of the roles in `ROLES`, in that order."""
    memory = {role.role: role for role in plan.estimate.roles} if plan.estimate else {}
    gpus = _gpus_by_role(plan)
    rows = []
    for role, name in ROLES.items():
        processes = [process for process in plan.processes() if process.role == role]
        if processes:
            nodes = {process.node for process in processes}
            rows.append(RoleRow(name, len(nodes), len(processes), len(gpus[role]), memory.get(name)))
    return rows


def _gpus_by_role(plan: Plan) -> dict[str, set[tuple[int, int]]]:
    """Return (node, index) of each GPU that a role uses."""
    return {
        role: {(process.node, gpu) for process in plan.processes() if process.role == role for gpu in process.gpus}
        for role in ROLES
    }


def _table(rows: list[RoleRow], *, on_gpus: bool) -> Table:
    estimated = any(row.memory for row in rows)
    memory = ["memory per GPU", "headroom", ""] if estimated else []
    table = light_table("role", "nodes", "GPUs" if on_gpus else "processes", *memory, indent=2)
    table.columns[0].width = LABELS
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in rows:
        cells = [row.role, str(row.nodes), str(row.gpus if on_gpus else row.processes)]
        if row.memory:
            used = f"{row.memory.needed_gib:.0f} of {gib(row.memory.limit_gib)}"
            cells += [used, gib(row.free_gib), row.meaning]
        elif estimated:
            cells += ["-", "-", row.meaning]
        table.add_row(*cells)
    return table


def _in_flight(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return the number of sequences in the KV caches of decode engines, or of engines that also prefill."""
    holders = [role for role in plan.estimate.roles if role.longest] if plan.estimate else []
    role = next((role for role in holders if role.role in ("decode", "inference")), None)
    if role is None:
        return {}
    longest, typical = tokens(recipe.max_len), tokens(recipe.max_len / TYPICAL)
    many = f"{number(role.longest)} sequences of {longest} tokens, or {number(role.typical)} of {typical}"
    allowed = f"; the recipe allows {count(recipe.max_inflight, 'rollout')}" if plan.task == "rl" else ""
    return {"in flight": f"KV cache for {many}{allowed}"}


def _least(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return the shortest duration of all steps, to be compared with the time limit."""
    if not (steps := _trainer_steps(plan)):
        return {}
    least = min(amount.value for amount in steps) * recipe.max_steps
    return {"duration": f"at least {duration(least)} for {count(recipe.max_steps, 'step')} of the trainer"}


def _trainer_steps(plan: Plan) -> list[Quantity]:
    amounts = plan.estimate.amounts if plan.estimate else ()
    return [amount for amount in amounts if amount.name.startswith("trainer step")]


def _step(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return the duration of a training step for sequences from a quarter of `seq_len` to `seq_len`."""
    if plan.task == "rl":
        batch = count(recipe.orchestrator.batch_size, "rollout")
    elif plan.task == "sft" and recipe.sft is not None:
        batch = count(recipe.sft.batch_size, "sequence")
    else:
        return {}
    steps = _trainer_steps(plan)
    if not steps:
        return {"step": f"{batch} of at most {tokens(recipe.seq_len)} tokens"}
    times = " to ".join(dict.fromkeys(duration(value) for value in sorted(amount.value for amount in steps)))
    lengths = f"{tokens(recipe.seq_len / TYPICAL)} to {tokens(recipe.seq_len)} tokens"
    text = f"the trainer takes {times} for {batch} of {lengths}"
    most = max((amount.most for amount in steps if amount.most), default=None)
    return {"step": f"{text}; {duration(most)} if the network is not overlapped" if most else text}


def _rollouts(plan: Plan) -> dict[str, str]:
    """Return the rate at which engines sample, and what limits the run."""
    rate = _amount(plan, SAMPLED)
    return {SAMPLED: f"{number(rate.value)} tokens/s: {rate.how}"} if rate else {}


def _rates(plan: Plan) -> dict[str, str]:
    """Return which rates of the estimates were measured on this cluster, and which are assumptions."""
    rates = plan.estimate.rates if plan.estimate else ()
    measured = [rate for rate in rates if rate.how.startswith("measured")]
    if not measured:
        return {}
    text = f"{', '.join(rate.name for rate in measured)}: {measured[0].how.partition(', spread')[0]}"
    assumed = [rate.name for rate in rates if rate not in measured]
    return {"rates": "; ".join([text, *([f"{', '.join(assumed)}: assumed"] if assumed else [])])}


def _start(plan: Plan) -> dict[str, str]:
    """Return the longest start-up that the time limits allow."""
    names = {"engine start": "engines", "trainer loading": "trainer"}
    limits = {name: _amount(plan, amount) for amount, name in names.items()}
    parts = [f"{name} at most {duration(limit.value)}" for name, limit in limits.items() if limit]
    return {"start-up": ", ".join(parts)} if parts else {}


def _saving(plan: Plan, recipe: Recipe) -> dict[str, str]:
    """Return size and interval of checkpoints, and transport and duration of a weight update."""
    if plan.task not in ("rl", "sft"):
        return {}
    saved, update = _amount(plan, "checkpoint"), _amount(plan, "weight update")
    each = f"{size(saved.value * 1e9)} " if saved and saved.value else ""
    interval = count(min(recipe.checkpoint.interval, recipe.max_steps), "step")
    lines = {"checkpoint": f"{each}every {interval}, the newest {recipe.checkpoint.keep} are kept"}
    if plan.task == "rl" and (transport := plan.weight_transport):
        how = {"nccl": "over NCCL", "filesystem": "through files"}[transport.transport]
        takes = f"; an update takes {duration(update.value)}" if update else ""
        adapter, policy = _amount(plan, "adapter"), _amount(plan, "policy")
        sizes = (
            f"; adapter {size(adapter.value * 1e6)}, policy {size(policy.value * 1e9)}" if adapter and policy else ""
        )
        lines["weights"] = f"{how} ({transport.reason}){takes}{sizes}"
    return lines


def _amount(plan: Plan, name: str) -> Quantity | None:
    amounts = plan.estimate.amounts if plan.estimate else ()
    return next((amount for amount in amounts if amount.name == name), None)


def _lines(lines: dict[str, str]) -> Table:
    """Return a table with a label before each line, which indents wrapped lines."""
    table = light_table("", "", indent=2)
    table.show_header = False
    table.columns[0].width = LABELS
    for label, text in lines.items():
        table.add_row(label, text)
    return table
