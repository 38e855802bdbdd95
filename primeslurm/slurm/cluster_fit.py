"""Check whether a cluster can ever run a Plan: compare its requests with what Slurm reports.

Slurm often accepts a job that requests too much. The job then pends forever, for a reason that only squeue shows. Busy
and reserved nodes are no problem: the job waits for them.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from primeslurm.base.errors import Violation
from primeslurm.base.hostlists import compress, expand
from primeslurm.base.units import count
from primeslurm.plan.model import HetGroup, Node, Plan
from primeslurm.recipe.fields.suggestions import suggestion
from primeslurm.slurm.accounting import NO_ACCOUNTING, Accounting
from primeslurm.slurm.client import SlurmClient
from primeslurm.slurm.limits import limit_problems, memory_mib, qos_of
from primeslurm.slurm.partitions import (
    Gres,
    Partition,
    PartitionNode,
    Reservation,
    count_of,
    is_broken,
    parse_gres,
)

_FEATURES = re.compile(r"[\w.+-]+(&[\w.+-]+)*")
# Recipe field that sets the number of nodes of a component
_NODES = {
    "train": "deployment.train.nodes",
    "inference": "deployment.inference.num_replicas",
    "prefill": "deployment.inference.prefill",
    "decode": "deployment.inference.decode",
    "teacher": "teacher.nodes",
    "environments": "deployment.environments.nodes",
}
_GPUS = {
    "inference": "deployment.inference.gpus_per_node",
    "prefill": "deployment.inference.prefill.gpus_per_node",
    "decode": "deployment.inference.decode.gpus_per_node",
    "teacher": "teacher.gpus_per_node",
}


@dataclass(frozen=True)
class ClusterFacts:
    """Slurm's report about the cluster and this user."""

    partitions: dict[str, Partition]  # all partitions, including hidden ones
    reservations: tuple[Reservation, ...] = ()
    accounting: Accounting = NO_ACCOUNTING
    groups: frozenset[str] | None = None  # Unix groups of the user. None for root, who may use every partition.


def cluster_facts(client: SlurmClient) -> ClusterFacts:
    """Query Slurm. Raises ClusterError if it does not answer."""
    groups = None
    if os.geteuid() != 0:
        names = set()
        for number in {os.getegid(), *os.getgroups()}:
            with contextlib.suppress(KeyError):
                names.add(grp.getgrgid(number).gr_name)
        groups = frozenset(names)
    return ClusterFacts(client.partitions(), tuple(client.reservations()), client.accounting(), groups)


def cluster_fit_problems(plan: Plan, facts: ClusterFacts) -> list[Violation]:
    """Return every reason why the job could never start, each one once. Pure."""
    partitions = {name: facts.partitions[name] for name in _requested_partitions(plan) if name in facts.partitions}
    problems = [*_unknown_partitions(plan, facts), *_reservation_problems(plan, facts)]
    for partition in partitions.values():
        groups = [group for group in plan.groups if group.partition == partition.name]
        problems += _access_problems(plan, groups[0], partition, facts)
        problems += _resource_problems(plan, groups, partition, facts)
    return [*problems, *limit_problems(plan, facts.partitions, facts.accounting)]


def _requested_partitions(plan: Plan) -> list[str]:
    return list(dict.fromkeys(group.partition for group in plan.groups))


def _field(group: HetGroup, option: str) -> str:
    return f"slurm.{'train' if group.name == 'all' else group.name}.{option}"


def _unknown_partitions(plan: Plan, facts: ClusterFacts) -> Iterator[Violation]:
    for name in _requested_partitions(plan):
        if name not in facts.partitions:
            group = next(group for group in plan.groups if group.partition == name)
            fix = suggestion(name, list(facts.partitions))
            yield Violation(_field(group, "partition"), name, "no such partition", fix)


def _reservation_problems(plan: Plan, facts: ClusterFacts) -> Iterator[Violation]:
    names = [reservation.name for reservation in facts.reservations]
    for name in (plan.job.reservation or "").split(","):
        if name and name not in names:
            why = "no such reservation, or it is not for this user"
            yield Violation("slurm.reservation", name, why, suggestion(name, names))


# Access


def _access_problems(plan: Plan, group: HetGroup, partition: Partition, facts: ClusterFacts) -> Iterator[Violation]:
    field, name = _field(group, "partition"), partition.name
    other = "use another partition, or ask an administrator"
    if partition.state != "UP":
        yield Violation(field, name, f"is {partition.state.lower()}, so it starts no jobs", other)
    if facts.groups is not None and partition.groups is not None and not facts.groups & partition.groups:
        yield Violation(field, name, f"is only for members of {_listed(partition.groups)}", other)
    if facts.groups is not None and partition.root_only:
        yield Violation(field, name, "is only for root", other)
    if partition.needs_reservation and not plan.job.reservation:
        yield Violation(field, name, "only runs jobs that name a reservation", "set slurm.reservation")
    accounting = facts.accounting
    account, qos = (plan.job.account or accounting.default_account).lower(), qos_of(plan, partition, accounting)
    if account and "associations" in accounting.enforced:
        listed = _may_use(account, partition.accounts, partition.denied_accounts)
        if not listed and not (accounting.subaccounts and partition.accounts is not None):
            fix = f"use {_listed(partition.accounts)}" if partition.accounts else "use another account"
            yield Violation("slurm.account", account, f"may not use partition {name}", fix)
    if qos and "qos" in accounting.enforced and not _may_use(qos, partition.qos_names, partition.denied_qos):
        fix = f"use {_listed(partition.qos_names)}" if partition.qos_names else "use another QOS"
        yield Violation("slurm.qos", qos, f"may not use partition {name}", fix)


def _may_use(name: str, allowed: frozenset[str] | None, denied: frozenset[str]) -> bool:
    """Return whether an account or QOS may use a partition. Slurm ignores `denied` if there is an allow list."""
    return name in allowed if allowed is not None else name not in denied


# Nodes and what they have


def _resource_problems(
    plan: Plan, groups: Sequence[HetGroup], partition: Partition, facts: ClusterFacts
) -> list[Violation]:
    nodes = _candidates(plan, partition, facts)
    problems = list(_partition_size_problems(plan, groups, partition, facts))
    seen: set[tuple[str, str]] = set()
    for group in groups:
        for problem in _node_problems(group, partition, nodes):
            kind = problem.field.rpartition(".")[2], problem.value
            if kind not in seen:  # another component has the same problem
                seen.add(kind)
                problems.append(problem)
    wanted, usable = sum(group.nodes for group in groups), [node for node in nodes if not is_broken(node.state)]
    if not problems and wanted > len(usable):
        available = f"has {len(usable)} usable {'node' if len(usable) == 1 else 'nodes'}"
        available += f" of {len(partition.nodes)}" if len(usable) < len(partition.nodes) else ""
        why = f"{available}, but the job needs {wanted}: {_needed(plan, groups)}"
        fix = _on_one_node(plan, partition, usable) or "lower the nodes or replicas of a role, or use another partition"
        problems.append(Violation(_field(groups[0], "partition"), partition.name, why, fix))
    return problems


def _needed(plan: Plan, groups: Sequence[HetGroup]) -> str:
    indices = {group.index for group in groups}
    roles = Counter((node.role, _gpus(node)) for node in plan.nodes if node.group in indices)
    parts = [f"{role} {nodes}" + (f" x {gpus} GPUs" if gpus else "") for (role, gpus), nodes in roles.items()]
    spares = sum(group.spares for group in groups)
    return ", ".join([*parts, *([f"spares {spares}"] if spares else [])])


def _gpus(node: Node) -> int:
    return len({gpu for process in node.processes for gpu in process.gpus})


def _on_one_node(plan: Plan, partition: Partition, nodes: Sequence[PartitionNode]) -> str:
    with_gpus = [node for node in plan.nodes if _gpus(node)]
    several = len({node.role for node in with_gpus}) < len(with_gpus)
    others = plan.totals.environment_nodes or plan.totals.spares
    gres = next((group.requested_gres for group in plan.groups if group.requested_gres), None)
    if plan.layout == "one_node" or not with_gpus or several or others or not nodes or gres is None:
        return ""
    name, (wanted,) = gres.rpartition(":")[0], parse_gres(gres)
    available, requested = max(count_of(node.gres, wanted) for node in nodes), sum(map(_gpus, with_gpus))
    fix = "to run all roles on one node, set deployment.layout: one_node"
    if requested > available:
        return f"{fix}, and gpus_per_node of each role so that together they use at most {available} GPUs"
    cores = min(sum(group.cpus_per_task for group in plan.groups), max(_cores(node, partition) for node in nodes))
    options = f"--partition={partition.name} --nodes=1 --gres={name}:{requested} --cpus-per-task={cores}"
    command = f"salloc {options} srun --cpus-per-task={cores} primeslurm submit RECIPE --local --wait"
    return f"{fix}. Or run it in an allocation of one node: {command}"


def _candidates(plan: Plan, partition: Partition, facts: ClusterFacts) -> list[PartitionNode]:
    """Return the nodes that the job may get: those of its reservation, without excluded ones."""
    excluded = set(expand(plan.job.exclude or ""))
    names = (plan.job.reservation or "").split(",")
    reserved = {node for each in facts.reservations if each.name in names and each.nodes for node in expand(each.nodes)}
    return [node for node in partition.nodes if node.name not in excluded and (not reserved or node.name in reserved)]


def _partition_size_problems(
    plan: Plan, groups: Sequence[HetGroup], partition: Partition, facts: ClusterFacts
) -> Iterator[Violation]:
    qos = facts.accounting.qos.get(qos_of(plan, partition, facts.accounting))
    flags = qos.flags if qos else frozenset[str]()
    for group in groups:
        field, value = _NODES.get(group.name, "deployment"), count(group.nodes, "node")
        most, least = partition.max_nodes, partition.min_nodes
        if most is not None and group.nodes > most and "PartitionMaxNodes" not in flags:
            why = f"partition {partition.name} gives a job at most {most}"
            yield Violation(field, value, why, "ask for fewer, or use another partition")
        if group.nodes < least and "PartitionMinNodes" not in flags:
            why = f"partition {partition.name} only runs jobs of at least {least} nodes"
            yield Violation(field, value, why, "use another partition")


def _node_problems(group: HetGroup, partition: Partition, nodes: Sequence[PartitionNode]) -> Iterator[Violation]:
    node_names = {node.name for node in partition.nodes}
    if absent := [name for name in expand(group.nodelist or "") if name not in node_names]:
        yield Violation(_field(group, "nodelist"), compress(absent), f"not in partition {partition.name}")
    if not nodes:
        return
    if shortage := _shortage(
        group, partition, nodes, lambda node: _cores(node, partition), group.cpus_per_task, "CPU cores"
    ):
        fix = f"nearest: {shortage.nearest}, or correct `cpus` of the site's nodes"
        yield Violation(_field(group, "cpus_per_task"), str(group.cpus_per_task), shortage.why, fix)
    memory = memory_mib(group)
    if memory and (
        shortage := _shortage(group, partition, nodes, lambda node: _memory(node, partition), memory, "MiB")
    ):
        fix = f"nearest: {shortage.nearest}M, or correct `mem` of the site's nodes"
        yield Violation(_field(group, "mem"), f"{memory}M", shortage.why, fix)
    for wanted in parse_gres(group.requested_gres or ""):
        yield from _gres_problems(group, partition, nodes, wanted)
    if group.constraint and _FEATURES.fullmatch(group.constraint):
        for feature in group.constraint.split("&"):
            having = sum(feature in node.features for node in nodes)
            if having < min(group.nodes, len(nodes)):
                features = sorted({name for node in nodes for name in node.features})
                why = f"{having} nodes of partition {partition.name} have this feature, but {group.nodes} are needed"
                yield Violation(_field(group, "constraint"), feature, why, suggestion(feature, features))


def _gres_problems(
    group: HetGroup, partition: Partition, nodes: Sequence[PartitionNode], wanted: Gres
) -> Iterator[Violation]:
    available = {each for node in nodes for each in parse_gres(node.gres)}
    types = sorted({f"{each.name}:{each.type}" if each.type else each.name for each in available})
    requested = f"{wanted.name}:{wanted.type}" if wanted.type else wanted.name
    field = "site: nodes.{}.gres".format("train" if group.name == "all" else group.name)
    if not any(each.name == wanted.name and wanted.type in ("", each.type) for each in available):
        if types:
            why, fix = f"nodes of partition {partition.name} have {_listed(types)}", f"nearest: {types[0]}"
        else:
            why = f"nodes of partition {partition.name} have no generic resources"
            fix = "`request_gpus: none` of the site's nodes, if Slurm does not count GPUs there"
        yield Violation(field, requested, why, fix)
    elif shortage := _shortage(
        group, partition, nodes, lambda node: count_of(node.gres, wanted), wanted.count, requested
    ):
        fix = f"nearest: {shortage.nearest}, or correct `gpus` of the site's nodes"
        yield Violation(_GPUS.get(group.name, "deployment.train.gpus_per_node"), str(wanted.count), shortage.why, fix)


@dataclass(frozen=True)
class _Shortage:
    why: str
    nearest: int  # the largest amount that enough nodes have


def _shortage(
    group: HetGroup,
    partition: Partition,
    nodes: Sequence[PartitionNode],
    amount: Callable[[PartitionNode], int],
    wanted: int,
    unit: str,
) -> _Shortage | None:
    """Describe the shortage if too few nodes have the wanted amount. Too few nodes in total is another problem."""
    values, needed = sorted(map(amount, nodes), reverse=True), min(group.nodes, len(nodes))
    enough = sum(value >= wanted for value in values)
    if enough >= needed:
        return None
    if not enough:
        return _Shortage(f"nodes of partition {partition.name} have at most {values[0]} {unit}", values[needed - 1])
    why = f"{enough} nodes of partition {partition.name} have as many {unit}, but {group.nodes} are needed"
    return _Shortage(why, values[needed - 1])


def _cores(node: PartitionNode, partition: Partition) -> int:
    return min(node.cpus, partition.max_cpus_per_node or node.cpus)


def _memory(node: PartitionNode, partition: Partition) -> int:
    return min(node.memory_mib, partition.max_memory_mib or node.memory_mib)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
