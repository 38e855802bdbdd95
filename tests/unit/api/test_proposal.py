"""Choice of partition, account and QOS for a first site file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primeslurm.api.setup.first_files import propose
from primeslurm.slurm.accounting import Accounting, Association, Qos, TresLimits
from primeslurm.slurm.cluster_fit import ClusterFacts
from primeslurm.slurm.partitions import Partition, PartitionNode


def nodes(
    count: int, gres: str = "", cpus: int = 96, mib: int = 2_000_000, state: str = "idle"
) -> tuple[PartitionNode, ...]:
    return tuple(PartitionNode(f"{gres or 'cpu'}-{state}-{i}", state, cpus, mib, gres) for i in range(count))


def facts(
    *partitions: Partition, accounting: Accounting | None = None, groups: tuple[str, ...] = ("users",)
) -> ClusterFacts:
    by_name = {partition.name: partition for partition in partitions}
    return ClusterFacts(by_name, (), accounting or Accounting(), frozenset(groups))


H100 = Partition("h100", "UP", nodes(4, "gpu:h100:8(S:0-1)"))
CPU = Partition("cpu", "UP", nodes(20, mib=256_000))


def test_partition_with_most_gpus_is_chosen_and_cpu_nodes_are_control() -> None:
    small = Partition("a100", "UP", nodes(9, "gpu:a100:2"))
    proposal = propose(facts(small, H100, CPU))
    assert proposal.gpu is not None and proposal.cpu is not None
    assert (proposal.gpu.partition, proposal.gpu.gpus, proposal.gpu.gres, proposal.gpu.cpus) == (
        "h100",
        8,
        "gpu:h100",
        96,
    )
    assert (proposal.gpu.memory_gib, proposal.cpu.partition, proposal.cpu.memory_gib) == (1953, "cpu", 250)
    assert [offer.partition for offer in proposal.offers] == ["h100", "a100", "cpu"]


def test_equal_partition_with_longer_jobs_is_chosen() -> None:
    short, long = (replace(H100, name=name, max_minutes=limit) for name, limit in (("short", 10), ("long", 2880)))
    for order in ((short, long), (long, short)):
        offer = propose(facts(*order)).gpu
        assert offer is not None and offer.partition == "long"
    offer = propose(facts(long, replace(H100, name="endless"))).gpu
    assert offer is not None and offer.partition == "endless"


@pytest.mark.parametrize(
    "closed",
    [
        {"state": "DOWN"},
        {"needs_reservation": True},
        {"root_only": True},
        {"groups": frozenset({"others"})},
        {"nodes": nodes(8, "gpu:h100:8", state="down")},
        {"nodes": ()},
        {"max_nodes": 0},
    ],
    ids=str,
)
def test_partition_that_refuses_the_user_is_listed_but_not_chosen(closed: dict[str, object]) -> None:
    proposal = propose(facts(replace(H100, **closed), CPU))  # type: ignore[arg-type]
    assert proposal.gpu is None and proposal.refused == ("h100",)


def test_smallest_node_of_the_most_frequent_kind_counts() -> None:
    mixed = (
        *nodes(3, "gpu:h100:8", cpus=64),
        *nodes(1, "gpu:h100:8", cpus=32, mib=100_000),
        *nodes(2, "gpu:h100:4"),
        *nodes(9),
    )
    proposal = propose(facts(replace(H100, nodes=mixed, max_cpus_per_node=48)))
    gpu, cpu = proposal.offers
    assert (gpu.nodes, gpu.gpus, gpu.cpus, gpu.memory_gib) == (4, 8, 32, 97)
    assert (cpu.partition, cpu.nodes, cpu.cpus) == ("h100", 9, 48)
    assert (proposal.gpu, proposal.cpu) == (gpu, None), "the job would have nodes with GPUs for control, too"


def test_unset_memory_is_left_out() -> None:
    offer = propose(facts(Partition("gpu", "UP", nodes(1, "gpu:4", mib=1)))).gpu
    assert offer is not None and offer.memory_gib is None and offer.gres == "gpu"


def association(account: str, *qos: str, default: str = "", minutes: int | None = None) -> Association:
    return Association(account, "", frozenset(qos), default, TresLimits(minutes=minutes))


ENFORCED = frozenset({"associations", "limits", "qos"})


@pytest.mark.parametrize(
    ("partition", "accounting", "choice"),
    [
        ({}, Accounting(), ("", "", None)),
        ({}, Accounting(ENFORCED, "b", (association("a"), association("b"))), ("b", "", None)),
        (
            {"accounts": frozenset({"a"})},
            Accounting(ENFORCED, "b", (association("a"), association("b"))),
            ("a", "", None),
        ),
        (
            {"denied_accounts": frozenset({"b"})},
            Accounting(ENFORCED, "b", (association("a"), association("b"))),
            ("a", "", None),
        ),
        (
            {"qos_names": frozenset({"long"})},
            Accounting(ENFORCED, "b", (association("b", "normal", "long", default="normal"),)),
            ("b", "long", None),
        ),
        (
            {"max_minutes": 600},
            Accounting(
                ENFORCED,
                "b",
                (association("b", "normal", default="normal", minutes=300),),
                {"normal": Qos("normal", TresLimits(minutes=120))},
            ),
            ("b", "", 120),
        ),
    ],
)
def test_account_qos_and_time_fit_the_partition(
    partition: dict[str, object], accounting: Accounting, choice: tuple[str, str, int | None]
) -> None:
    offer = propose(facts(replace(H100, **partition), accounting=accounting)).gpu  # type: ignore[arg-type]
    assert offer is not None and (offer.account, offer.qos, offer.max_minutes) == choice


def test_user_without_an_accepted_account_gets_no_partition() -> None:
    accounting = Accounting(ENFORCED, "b", (association("b"),))
    assert propose(facts(replace(H100, accounts=frozenset({"a"})), accounting=accounting)).gpu is None
    assert propose(facts(H100, accounting=Accounting(ENFORCED, "", ()))).gpu is None


def test_control_partition_accepts_the_account_of_the_gpu_partition() -> None:
    accounting = Accounting(ENFORCED, "b", (association("a"), association("b")))
    only_a = replace(CPU, name="cpu-a", accounts=frozenset({"a"}), nodes=nodes(99))
    proposal = propose(facts(H100, only_a, CPU, accounting=accounting))
    assert proposal.cpu is not None and (proposal.cpu.partition, proposal.cpu.account) == ("cpu", "b")
    assert propose(facts(H100, only_a, accounting=accounting)).cpu is None
