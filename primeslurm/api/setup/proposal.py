"""Choose the partitions of a first site file from the facts that Slurm gives. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from primeslurm.slurm.accounting import Association
from primeslurm.slurm.cluster_fit import ClusterFacts
from primeslurm.slurm.partitions import Partition, PartitionNode, is_broken, parse_gres

GPU_GRES = "gpu"
# Nodes have a RealMemory of 1 MiB if slurm.conf does not set it.
_UNSET_MEMORY_MIB = 1024


@dataclass(frozen=True)
class PartitionOffer:
    """Equal nodes of a partition that this user may use."""

    partition: str
    nodes: int
    gpus: int
    """Per node; 0 for a CPU partition."""
    gres: str
    """Generic resource to request, with the type of GPU if Slurm knows it."""
    cpus: int
    memory_gib: int | None
    """Per node. None: slurm.conf does not set it."""
    max_minutes: int | None
    """Longest job. None: no limit."""
    account: str
    """Account for jobs; empty if Slurm does not require accounts."""
    qos: str
    """QOS for jobs; empty if the default can be used."""

    @property
    def size(self) -> tuple[int, int, float]:
        """Sort key: more GPUs, more cores, longer jobs."""
        longest = float("inf") if self.max_minutes is None else self.max_minutes
        return self.nodes * self.gpus, self.nodes * self.cpus, longest

    def __str__(self) -> str:
        gpus = f", {self.gpus} x {self.gres}" if self.gpus else ""
        limit = "no time limit" if self.max_minutes is None else f"at most {self.max_minutes} minutes"
        count = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{self.partition}: {count} with {self.cpus} cores{gpus}, {limit}"


@dataclass(frozen=True)
class Proposal:
    """Partitions, accounts and QOS of this user."""

    gpu: PartitionOffer | None
    """The largest partition with GPUs."""
    cpu: PartitionOffer | None
    """The largest partition without GPUs whose nodes can be in the same job."""
    offers: tuple[PartitionOffer, ...]
    """All partitions, the largest first."""
    refused: tuple[str, ...]
    """Partitions that this user may not use now."""
    accounts: tuple[str, ...]
    qos_names: tuple[str, ...]


def propose(facts: ClusterFacts) -> Proposal:
    """Choose the partitions of a first site file."""
    offers: list[PartitionOffer] = []
    for partition in facts.partitions.values():
        offers += _offers(partition, facts)
    offers.sort(key=lambda offer: offer.size, reverse=True)
    associations = facts.accounting.associations
    gpu = next((offer for offer in offers if offer.gpus), None)
    return Proposal(
        gpu=gpu,
        cpu=next((offer for offer in offers if gpu and _goes_with(offer, gpu)), None),
        offers=tuple(offers),
        refused=tuple(sorted(set(facts.partitions) - {offer.partition for offer in offers})),
        accounts=tuple(sorted({each.account for each in associations})),
        qos_names=tuple(sorted({name for each in associations for name in each.qos_names})),
    )


def _goes_with(cpu: PartitionOffer, gpu: PartitionOffer) -> bool:
    return not cpu.gpus and cpu.partition != gpu.partition and (cpu.account, cpu.qos) == (gpu.account, gpu.qos)


def _offers(partition: Partition, facts: ClusterFacts) -> Iterator[PartitionOffer]:
    """Return the most frequent kind of node with GPUs, and without, that this user may use in a partition."""
    right = _right_to_use(partition, facts)
    if right is None:
        return
    account, qos, limit = right
    usable = [node for node in partition.nodes if not is_broken(node.state)]
    for with_gpus in (True, False):
        alike = _most_frequent(node for node in usable if (gpus_of(node)[0] > 0) == with_gpus)
        if not alike or (partition.max_nodes is not None and partition.max_nodes < 1):
            continue
        gpus, gres = gpus_of(alike[0])
        memory = min([node.memory_mib for node in alike] + [partition.max_memory_mib or alike[0].memory_mib])
        yield PartitionOffer(
            partition=partition.name,
            nodes=len(alike),
            gpus=gpus,
            gres=gres,
            cpus=min([node.cpus for node in alike] + [partition.max_cpus_per_node or alike[0].cpus]),
            memory_gib=memory // 1024 if memory >= _UNSET_MEMORY_MIB else None,
            max_minutes=min((each for each in (partition.max_minutes, limit) if each is not None), default=None),
            account=account,
            qos=qos,
        )


def gpus_of(node: PartitionNode) -> tuple[int, str]:
    """Return the number of GPUs of a node's most frequent type, and the generic resource to request."""
    gpus = [each for each in parse_gres(node.gres) if each.name == GPU_GRES]
    if not gpus:
        return 0, GPU_GRES
    most = max(gpus, key=lambda each: each.count)
    return most.count, f"{GPU_GRES}:{most.type}" if most.type else GPU_GRES


def _most_frequent(nodes: Iterable[PartitionNode]) -> list[PartitionNode]:
    candidates = list(nodes)
    if not candidates:
        return []
    ((kind, _),) = Counter(map(gpus_of, candidates)).most_common(1)
    return [node for node in candidates if gpus_of(node) == kind]


def _right_to_use(partition: Partition, facts: ClusterFacts) -> tuple[str, str, int | None] | None:
    """Return account, QOS and time limit [min] of this user's jobs in a partition; None if it accepts none."""
    if partition.state != "UP" or partition.needs_reservation:
        return None
    closed = partition.root_only or (partition.groups is not None and not (facts.groups or set()) & partition.groups)
    if closed and facts.groups is not None:  # root may use every partition
        return None
    accounting = facts.accounting
    if "associations" not in accounting.enforced:
        return "", "", None
    mine = [each for each in accounting.associations if each.partition in ("", partition.name)]
    mine.sort(key=lambda each: (each.account != accounting.default_account, each.account))
    for association in mine:
        denied = association.account in partition.denied_accounts
        if denied or (partition.accounts is not None and association.account not in partition.accounts):
            continue
        for qos in _qos_to_try(association) if "qos" in accounting.enforced else [""]:
            if qos and (qos in partition.denied_qos or not (partition.qos_names is None or qos in partition.qos_names)):
                continue
            limits = [association.limits.minutes]
            limits += [accounting.qos[name].limits.minutes for name in (qos, partition.qos) if name in accounting.qos]
            named = "" if qos == association.default_qos else qos
            return association.account, named, min((each for each in limits if each is not None), default=None)
    return None


def _qos_to_try(association: Association) -> list[str]:
    default = association.default_qos
    return list(dict.fromkeys([*([default] if default else []), *sorted(association.qos_names)])) or [""]
