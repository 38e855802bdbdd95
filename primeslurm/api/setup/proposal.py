"""What a first site file says about a cluster: partitions that this user may use, and what their nodes have. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from primeslurm.slurm.accounting import Association
from primeslurm.slurm.cluster_fit import ClusterFacts
from primeslurm.slurm.partitions import Partition, PartitionNode, is_broken, parse_gres

GPU_GRES = "gpu"
_UNSET_MEMORY_MIB = 1024
"""RealMemory of nodes is 1 MiB where slurm.conf does not set it."""


@dataclass(frozen=True)
class PartitionOffer:
    """A partition that this user may use, and the nodes of one kind in it."""

    partition: str
    nodes: int
    gpus: int
    """Per node; 0 for a CPU partition."""
    gres: str
    """Name of the generic resource, with the type of GPU if Slurm knows it."""
    cpus: int
    memory_gib: int | None
    """Per node. None: slurm.conf does not set it."""
    max_minutes: int | None
    """Longest job. None: no limit."""
    account: str
    """That may use the partition; empty if Slurm does not ask for accounts."""
    qos: str
    """To name in a job; empty if the default is fine."""

    @property
    def size(self) -> tuple[int, int, float]:
        """By which offers are compared: more GPUs, more cores, longer jobs."""
        longest = float("inf") if self.max_minutes is None else self.max_minutes
        return self.nodes * self.gpus, self.nodes * self.cpus, longest

    def __str__(self) -> str:
        gpus = f", {self.gpus} x {self.gres}" if self.gpus else ""
        limit = "no time limit" if self.max_minutes is None else f"at most {self.max_minutes} minutes"
        count = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{self.partition}: {count} with {self.cpus} cores{gpus}, {limit}"


@dataclass(frozen=True)
class Proposal:
    """What was found on a cluster."""

    gpu: PartitionOffer | None
    """The largest partition with GPUs."""
    cpu: PartitionOffer | None
    """The largest partition without GPUs for other components of the same job."""
    offers: tuple[PartitionOffer, ...]
    """All of them, the largest first."""
    refused: tuple[str, ...]
    """Partitions that this user may not use now."""
    accounts: tuple[str, ...]
    """Accounts of this user."""
    qos_names: tuple[str, ...]
    """QOS that this user may name."""


def propose(facts: ClusterFacts) -> Proposal:
    """Choose partitions for a first site file.

    Args:
        facts: what Slurm says about itself and this user.
    """
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
    """Whether one job can have both. Nodes of one partition are told apart by GPUs only, and a job has one account."""
    return not cpu.gpus and cpu.partition != gpu.partition and (cpu.account, cpu.qos) == (gpu.account, gpu.qos)


def _offers(partition: Partition, facts: ClusterFacts) -> Iterator[PartitionOffer]:
    """What the partition's most frequent nodes with GPUs, and without, offer this user."""
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
    """Return how many GPUs of its most frequent type a node has, and the name to ask for them."""
    gpus = [each for each in parse_gres(node.gres) if each.name == GPU_GRES]
    if not gpus:
        return 0, GPU_GRES
    most = max(gpus, key=lambda each: each.count)
    return most.count, f"{GPU_GRES}:{most.type}" if most.type else GPU_GRES


def _most_frequent(nodes: Iterable[PartitionNode]) -> list[PartitionNode]:
    found = list(nodes)
    if not found:
        return []
    ((kind, _),) = Counter(map(gpus_of, found)).most_common(1)
    return [node for node in found if gpus_of(node) == kind]


def _right_to_use(partition: Partition, facts: ClusterFacts) -> tuple[str, str, int | None] | None:
    """Account, QOS and longest time [min] of jobs of this user in a partition; None if it takes none of them."""
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
    """The default QOS, then all others."""
    default = association.default_qos
    return list(dict.fromkeys([*([default] if default else []), *sorted(association.qos_names)])) or [""]
