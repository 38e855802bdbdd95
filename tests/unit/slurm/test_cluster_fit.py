"""Plans compared with Slurm's reports: one violation per error. The reports are from real clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primeslurm.plan.model import HetGroup, Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe import Recipe
from primeslurm.slurm.accounting import (
    Accounting,
    Association,
    Qos,
    TresLimits,
    lists_subaccounts,
    parse_associations,
    parse_enforced,
    parse_qos,
    parse_tres,
)
from primeslurm.slurm.cluster_fit import ClusterFacts, cluster_fit_problems
from primeslurm.slurm.limits import clock
from primeslurm.slurm.partitions import (
    Gres,
    count_of,
    is_broken,
    is_usable,
    parse_gres,
    parse_minutes,
    parse_partitions,
    parse_reservations,
)
from tests.support.recipes import recipe_data, site
from tests.support.slurm_plans import group, plan

PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
Hidden=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] RootOnly=NO \
ReqResv=NO State=UP TotalNodes=4 MaxMemPerNode=UNLIMITED TRES=cpu=32,mem=96420M,node=4,billing=32
PartitionName=debug AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL QoS=N/A MaxNodes=2 MaxTime=00:30:00 MinNodes=1 \
MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] RootOnly=NO ReqResv=NO State=UP TotalNodes=4 MaxMemPerNode=UNLIMITED
PartitionName=closed AllowGroups=physics,chem AllowAccounts=a,b DenyQos=x QoS=part MaxNodes=UNLIMITED \
MaxTime=UNLIMITED MinNodes=0 MaxCPUsPerNode=4 Nodes=n[1-4] RootOnly=YES ReqResv=YES State=DOWN MaxMemPerNode=32000
PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 \
Nodes=c1 State=UP
"""
ROWS = [
    ["n1", "gpu", "idle", "16", "64000", "gpu:h100:4(S:0-1)", "ib,nvme"],
    ["n2", "gpu", "mix", "16", "64000", "gpu:h100:4(S:0-1)", "ib"],
    ["n3", "gpu", "drain*", "16", "64000", "gpu:h100:4(S:0-1)", "ib"],
    ["n4", "gpu", "plnd", "16+", "64000+", "gpu:h100:2(S:0)", "(null)"],
    ["c1", "cpu", "idle", "8", "24105", "(null)", "(null)"],
]
ROWS += [[row[0], name, *row[2:]] for name in ("debug", "closed") for row in ROWS[:4]]
FACTS = ClusterFacts(parse_partitions(PARTITIONS, ROWS))


def problems(given: Plan, facts: ClusterFacts = FACTS) -> list[str]:
    return [str(each) for each in cluster_fit_problems(given, facts)]


def make(*groups: HetGroup, **job: object) -> Plan:
    return plan(Path("/runs/demo"), *groups, **job)


def train(nodes: int = 1, **options: object) -> HetGroup:
    return group(1, "train", nodes, **({"partition": "gpu", "gres": "gpu:2"} | options))


CONTROL = group(0, "control")


def test_plan_that_fits_has_no_problems() -> None:
    given = make(CONTROL, train(3, gres="gpu:h100:2", cpus_per_task=16, mem="62G", constraint=None))
    assert problems(given) == []
    assert problems(make(CONTROL, train(1, gres="gpu:h100:4", constraint="ib&nvme"), time="2-00:00:00")) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"partition": "gpus"}, "slurm.train.partition = gpus: no such partition (did you mean gpu?)"),
        (
            {"nodes": 4, "gres": "gpu:h100:2"},
            "slurm.train.partition = gpu: has 3 usable nodes of 4, but the job needs 4: train 4 "
            "(lower the nodes or replicas of a role, or use another partition)",
        ),
        (
            {"gres": "gpu:h200:2"},
            "site: nodes.train.gres = gpu:h200: nodes of partition gpu have gpu:h100 (nearest: gpu:h100)",
        ),
        (
            {"gres": "gpu:8"},
            "deployment.train.gpus_per_node = 8: nodes of partition gpu have at most 4 gpu "
            "(nearest: 4, or correct `gpus` of the site's nodes)",
        ),
        (
            {"gres": None, "gpus_per_node": "h200:2"},
            "site: nodes.train.gres = gpu:h200: nodes of partition gpu have gpu:h100 (nearest: gpu:h100)",
        ),
        (
            {"nodes": 4, "gres": "gpu:h100:4"},
            "deployment.train.gpus_per_node = 4: 3 nodes of partition gpu have as many gpu:h100, but 4 are needed "
            "(nearest: 2, or correct `gpus` of the site's nodes)",
        ),
        (
            {"partition": "cpu", "gres": "gpu:1"},
            "site: nodes.train.gres = gpu: nodes of partition cpu have no generic resources "
            "(`request_gpus: none` of the site's nodes, if Slurm does not count GPUs there)",
        ),
        (
            {"cpus_per_task": 32},
            "slurm.train.cpus_per_task = 32: nodes of partition gpu have at most 16 CPU cores "
            "(nearest: 16, or correct `cpus` of the site's nodes)",
        ),
        (
            {"mem": "100G"},
            "slurm.train.mem = 102400M: nodes of partition gpu have at most 64000 MiB "
            "(nearest: 64000M, or correct `mem` of the site's nodes)",
        ),
        (
            {"mem_per_cpu": "8G", "cpus_per_task": 16},
            "slurm.train.mem = 131072M: nodes of partition gpu have at most 64000 MiB "
            "(nearest: 64000M, or correct `mem` of the site's nodes)",
        ),
        (
            {"constraint": "ib&nvmee"},
            "slurm.train.constraint = nvmee: 0 nodes of partition gpu have this feature, but 1 are needed "
            "(did you mean nvme?)",
        ),
        ({"nodelist": "n[4-6]"}, "slurm.train.nodelist = n[5-6]: not in partition gpu"),
        (
            {"partition": "debug", "nodes": 3},
            "deployment.train.nodes = 3 nodes: partition debug gives a job at most 2 "
            "(ask for fewer, or use another partition)",
        ),
    ],
)
def test_resource_that_no_node_has_is_named_with_its_field(options: dict[str, object], expected: str) -> None:
    assert problems(make(CONTROL, train(**options), time="00:10:00")) == [expected]


def test_a_time_limit_over_the_partition_s_is_one_problem_of_all_components() -> None:
    given = make(CONTROL, train(partition="debug"), group(2, "decode", partition="debug", gres="gpu:2"))
    assert problems(given) == ['slurm.time = 01:00:00: partition debug allows 00:30:00 (nearest: "00:30:00")']
    shorter = given.model_copy(update={"job": given.job.model_copy(update={"time_min": "00:20:00"})})
    assert problems(shorter) == [], "Slurm may start it with time_min"
    days = problems(make(CONTROL, train(), time="3-00:00:00"))
    assert days == ['slurm.time = 3-00:00:00: partition gpu allows 2-00:00:00 (nearest: "2-00:00:00")']


def test_every_problem_is_reported_once_in_one_pass() -> None:
    given = make(
        CONTROL,
        train(partition="debug", gres="gpu:h200:8", cpus_per_task=64, mem="1T"),
        group(2, "decode", 1, partition="debug", gres="gpu:h200:8", cpus_per_task=64, mem="1T"),
        group(3, "prefill", partition="nowhere"),
        reservation="lab",
    )
    assert [each.split(" = ")[0] for each in problems(given)] == [
        "slurm.prefill.partition",
        "slurm.reservation",
        "slurm.train.cpus_per_task",
        "slurm.train.mem",
        "site: nodes.train.gres",
        "slurm.time",
    ]


def test_a_partition_that_is_not_for_this_user() -> None:
    given = make(train(partition="closed", cpus_per_task=8, mem="40G"))
    found = problems(given, replace(FACTS, groups=frozenset({"users"})))
    assert [each.partition(" (")[0] for each in found] == [
        "slurm.train.partition = closed: is down, so it starts no jobs",
        "slurm.train.partition = closed: is only for members of chem, physics",
        "slurm.train.partition = closed: is only for root",
        "slurm.train.partition = closed: only runs jobs that name a reservation",
        "slurm.train.cpus_per_task = 8: nodes of partition closed have at most 4 CPU cores",
        "slurm.train.mem = 40960M: nodes of partition closed have at most 32000 MiB",
    ]
    as_root = problems(given, FACTS)
    assert not [each for each in as_root if "only for" in each], "no partition refuses root"


def test_nodes_of_a_reservation_count_for_its_jobs_only() -> None:
    rows = [["n1", "gpu", "resv", "16", "64000", "gpu:4", ""], ["n2", "gpu", "maint", "16", "64000", "gpu:4", ""]]
    lab = parse_reservations(
        "ReservationName=lab StartTime=2026-11-28T09:28:55 EndTime=2026-11-28T10:28:55 Duration=01:00:00 Nodes=n1 "
        "NodeCnt=1 CoreCnt=8 Features=(null) PartitionName=(null) Flags=SPEC_NODES TRES=cpu=8 Users=root State=ACTIVE"
    )
    facts = ClusterFacts(parse_partitions(PARTITIONS, rows), tuple(lab))
    assert problems(make(train(2)), facts) == [], "reserved nodes are not broken: the job waits for them"
    (few,) = problems(make(train(2), reservation="lab"), facts)
    assert "has 1 usable node of 4" not in few and "has 1 usable node of 2, but the job needs 2: train 2" in few


def test_nodes_that_the_recipe_excludes_do_not_count() -> None:
    (few,) = problems(make(train(3), exclude="n[1-2]"))
    assert "has 1 usable node of 4, but the job needs 3: train 3" in few


ONE_NODE = [["n1", "gpu", "idle", "96", "64000", "gpu:h200:8", ""]]


@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (
            {"train": {"gpus_per_node": 4}, "inference": {"type": "single_node", "gpus_per_node": 4}},
            "gpu: has 1 usable node, but the job needs 2: train 1 x 4 GPUs, inference 1 x 4 GPUs (to run all roles on "
            "one node, set deployment.layout: one_node. Or run it in an allocation of one node: salloc --partition=gpu "
            "--nodes=1 --gres=gpu:h200:8 --cpus-per-task=96 srun --cpus-per-task=96 primeslurm submit RECIPE --local "
            "--wait)",
        ),
        (
            {"layout": "single"},
            "gpu: has 1 usable node, but the job needs 2: train 1 x 8 GPUs, inference 1 x 8 GPUs (to run all roles on "
            "one node, set deployment.layout: one_node, and gpus_per_node of each role so that together they use at "
            "most 8 GPUs)",
        ),
        (
            {"train": {"nodes": 2, "gpus_per_node": 1}},
            "gpu: has 1 usable node, but the job needs 3: train 2 x 1 GPUs, inference 1 x 8 GPUs (lower the nodes or "
            "replicas of a role, or use another partition)",
        ),
    ],
    ids=["halves of a node", "whole nodes", "several nodes"],
)
def test_a_cluster_of_one_node_is_told_how_roles_share_it(deployment: dict[str, Any], expected: str) -> None:
    where = site(nodes={"default": {"gres": "gpu:h200"}})
    given = derive(Recipe.model_validate(recipe_data(deployment=deployment)), where, Path("/runs/demo"))
    nodes = [*ONE_NODE, ["c1", "cpu", "idle", "96", "64000", "", ""]]
    (problem,) = problems(given, ClusterFacts(parse_partitions(PARTITIONS, nodes)))
    assert problem.partition(" = ")[2] == expected


ENFORCED = frozenset({"associations", "limits", "qos"})
ASSOCIATION = Association("lab", "", frozenset({"normal", "small"}), "normal")


NO_LIMITS = TresLimits()


def accounting(
    qos: TresLimits = NO_LIMITS, association: TresLimits = NO_LIMITS, flags: tuple[str, ...] = ()
) -> ClusterFacts:
    known = {"small": Qos("small", qos, frozenset(flags)), "normal": Qos("normal")}
    mine = (replace(ASSOCIATION, limits=association), Association("other", "", frozenset({"normal"}), ""))
    return replace(FACTS, accounting=Accounting(ENFORCED, "lab", mine, known))


TWO = (CONTROL, train(2, mem="10G"), group(2, "decode", 1, partition="gpu", gres="gpu:h100:4"))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (TresLimits(minutes=30), ["slurm.time = 01:00:00: QOS small allows 00:30:00"]),
        (TresLimits(minutes=60), []),
        (
            TresLimits(per_job={"gres/gpu": 3}),
            [
                "slurm.qos = small: allows gres/gpu=3 per component, but train requests 4",
                "slurm.qos = small: allows gres/gpu=3 per component, but decode requests 4",
            ],
        ),
        (TresLimits(per_job={"gres/gpu": 4, "node": 2, "cpu": 4}), []),
        (
            TresLimits(per_node={"gres/gpu": 3}),
            ["slurm.qos = small: allows gres/gpu=3 per node, but decode requests 4"],
        ),
        (
            TresLimits(per_user={"gres/gpu": 7, "mem": 20480}),
            ["slurm.qos = small: allows gres/gpu=7 for a user, but the recipe requests 8"],
        ),
        (
            TresLimits(total={"node": 3}),
            ["slurm.qos = small: allows node=3 for all jobs together, but the recipe requests 4"],
        ),
        (
            TresLimits(least={"gres/gpu": 1}),
            ["slurm.qos = small: requires gres/gpu=1 per component, but control requests 0"],
        ),
        (
            TresLimits(jobs=2),
            ["slurm.qos = small: runs 2 jobs at a time, but each of the 3 components counts as one"],
        ),
        (
            TresLimits(per_job={"gres/gpu:h100": 3}),
            ["slurm.qos = small: allows gres/gpu:h100=3 per component, but decode"],
        ),
        (TresLimits(per_job={"billing": 1}, least={"billing": 5}), []),
    ],
)
def test_limits_of_a_qos(limits: TresLimits, expected: list[str]) -> None:
    found = problems(make(*TWO, account="lab", qos="small"), accounting(limits))
    assert len(found) == len(expected)
    for text, beginning in zip(found, expected, strict=True):
        assert text.startswith(beginning)


def test_with_deny_on_limit_the_limit_of_a_job_counts_all_components_together() -> None:
    job = make(*TWO, account="lab", qos="small")
    limits, deny = TresLimits(per_job={"gres/gpu": 7}), ("DenyOnLimit",)
    assert problems(job, accounting(limits, flags=deny)) == [
        "slurm.qos = small: allows gres/gpu=7 for a job, but the recipe requests 8 (ask for less, or use another QOS)"
    ]
    assert problems(job, accounting(limits)) == []
    assert problems(job, accounting(TresLimits(per_job={"gres/gpu": 8}), flags=deny)) == []
    of_account = problems(job, accounting(TresLimits(), TresLimits(per_job={"node": 3}), flags=deny))
    assert of_account == [
        "slurm.account = lab: allows node=3 for a job, but the recipe requests 4 (ask for less, or use another account)"
    ]


def test_limits_of_an_account_count_where_the_qos_sets_none() -> None:
    account = TresLimits(per_job={"node": 1, "cpu": 2})
    found = problems(make(*TWO, qos="small"), accounting(TresLimits(per_job={"node": 8}), account))
    assert found == [
        "slurm.account = lab: allows cpu=2 per component, but train requests 4 (ask for less, or use another account)"
    ]
    assert problems(make(*TWO, qos="small", time="3-00:00:00"), accounting(flags=("PartitionTimeLimit",))) == []


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"account": "lap"}, "slurm.account = lap: this user has no such account (did you mean lab?)"),
        (
            {"account": "other", "qos": "small"},
            "slurm.qos = small: account other may not use this QOS (did you mean normal?)",
        ),
        ({"qos": "smal"}, "slurm.qos = smal: account lab may not use this QOS (did you mean small?)"),
    ],
)
def test_accounts_and_qos_that_the_user_does_not_have(job: dict[str, object], expected: str) -> None:
    assert problems(make(*TWO, **job), accounting()) == [expected]
    assert problems(make(*TWO, **job), replace(accounting(), accounting=Accounting())) == []


def test_the_least_time_counts_for_partitions_and_not_for_qos() -> None:
    facts = accounting(TresLimits(minutes=45))
    given = make(CONTROL, train(partition="debug"), qos="small", time_min="00:20:00")
    assert problems(given, facts) == ['slurm.time = 01:00:00: QOS small allows 00:45:00 (nearest: "00:45:00")']
    longer = make(CONTROL, train(partition="debug"), qos="small", time_min="00:40:00")
    assert problems(longer, facts) == [
        'slurm.time = 01:00:00: QOS small allows 00:45:00 (nearest: "00:45:00")',
        'slurm.time_min = 00:40:00: partition debug allows 00:30:00 (nearest: "00:30:00")',
    ]


def test_a_job_without_a_qos_has_the_account_s_default_or_only_one_or_normal() -> None:
    tight = {name: Qos(name, TresLimits(minutes=number)) for name, number in (("a", 1), ("b", 2), ("normal", 3))}
    for names, default, expected in (("ab", "b", "QOS b"), ("a", "", "QOS a"), ("ab", "", "QOS normal")):
        mine = Association("lab", "", frozenset(names), default)
        facts = replace(FACTS, accounting=Accounting(ENFORCED, "lab", (mine,), tight))
        (found,) = problems(make(CONTROL), facts)
        assert expected in found


def test_accounts_of_a_partition() -> None:
    found = problems(make(train(partition="closed"), reservation=None), accounting())
    assert "slurm.account = lab: may not use partition closed (use a, b)" in found


@pytest.mark.parametrize(
    ("lists", "account", "qos", "expected"),
    [
        # Slurm ignores DenyAccounts beside AllowAccounts, and DenyQos beside AllowQos.
        ({"accounts": "Lab", "denied_accounts": "lab"}, "lab", "small", []),
        ({"qos_names": "small", "denied_qos": "small"}, "lab", "small", []),
        ({"denied_accounts": "LAB"}, "lab", "small", ["slurm.account = lab: may not use partition gpu"]),
        ({"denied_qos": "Small"}, "lab", "small", ["slurm.qos = small: may not use partition gpu"]),
        # Slurm ignores case in these names.
        ({"accounts": "lab", "qos_names": "SMALL"}, "LAB", "Small", []),
        ({"accounts": "physics"}, "Lab", "small", ["slurm.account = lab: may not use partition gpu (use physics)"]),
    ],
)
def test_lists_of_accounts_and_qos_count_as_slurm_reads_them(
    lists: dict[str, str], account: str, qos: str, expected: list[str]
) -> None:
    options = {"accounts": "AllowAccounts", "denied_accounts": "DenyAccounts"}
    options |= {"qos_names": "AllowQos", "denied_qos": "DenyQos"}
    line = " ".join(["PartitionName=gpu", *(f"{options[name]}={value}" for name, value in lists.items())])
    (read,) = parse_partitions(line, []).values()
    gpu = replace(FACTS.partitions["gpu"], **{name: getattr(read, name) for name in lists})
    facts = replace(accounting(), partitions={**FACTS.partitions, "gpu": gpu})
    found = problems(make(train(), account=account, qos=qos), facts)
    assert [
        text.removesuffix(" (use another account)").removesuffix(" (use another QOS)") for text in found
    ] == expected


def test_only_slurm_knows_the_accounts_below_those_that_a_partition_lists() -> None:
    """Later releases than 22.05 include subaccounts. sbatch refuses those that are none."""
    gpu = replace(FACTS.partitions["gpu"], accounts=frozenset({"physics"}))
    facts = replace(accounting(), partitions={**FACTS.partitions, "gpu": gpu})
    later = replace(facts, accounting=replace(facts.accounting, subaccounts=True))
    assert problems(make(train(), account="lab"), later) == []
    assert problems(make(train(), account="lab"), facts) != []
    assert [lists_subaccounts(f"SLURM_VERSION           = {version}\n") for version in ("22.05.8", "24.11.0-0rc1")] == [
        False,
        True,
    ]


def test_sacctmgr_and_the_configuration_are_parsed() -> None:
    (lab2, _) = parse_associations(
        line.split("|") for line in ("lab2|gpu|normal,small||02:00:00|gres/gpu=2||cpu=9|4|", "root||normal|||||||")
    )
    assert lab2 == Association(
        "lab2",
        "gpu",
        frozenset({"normal", "small"}),
        "",
        TresLimits(120, {"gres/gpu": 2}, {}, {}, {"cpu": 9}, {}, 4),
    )
    row = [
        "small",
        "DenyOnLimit,OverPartQOS",
        "1-00:00:00",
        "gres/gpu=2,node=4",
        "",
        "cpu=16,mem=100G",
        "",
        "",
        "3",
        "",
    ]
    assert parse_qos([row])["small"] == Qos(
        "small",
        TresLimits(1440, {"gres/gpu": 2, "node": 4}, {}, {"cpu": 16, "mem": 102400}, {}, {}, 3),
        frozenset({"DenyOnLimit", "OverPartQOS"}),
    )
    assert parse_tres("mem=1.50T,cpu=4,billing=") == {"mem": 1572864, "cpu": 4}
    config = "ClusterName = c\nAccountingStorageEnforce = associations,limits,qos\n"
    assert parse_enforced(config) == ENFORCED
    assert parse_enforced("AccountingStorageEnforce = limits\n") == {"associations", "limits"}
    assert parse_enforced("AccountingStorageEnforce = safe\n") == {"associations", "limits", "safe"}
    assert parse_enforced("AccountingStorageEnforce = none\n") == parse_enforced("") == frozenset()


@pytest.mark.parametrize(
    ("state", "usable", "reserved", "broken"),
    [
        *((state, True, True, False) for state in ("idle", "mix", "alloc", "comp", "plnd", "idle~", "mix-", "alloc@")),
        *((state, True, True, False) for state in ("idle#", "idle%", "idle!", "idle-", "mix+", "pow_dn", "pow_up")),
        *((state, False, True, False) for state in ("resv", "maint", "resv-")),
        *((state, False, False, False) for state in ("idle*", "alloc*", "boot", "idle^", "unk", "unk*", "alloc$")),
        *((state, False, False, True) for state in ("down", "down*", "drain", "drain$", "drng", "drng@", "fail")),
        *((state, False, False, True) for state in ("failg", "down~", "down^", "inval", "drain*", "futr")),
    ],
)
def test_states_of_nodes(state: str, usable: bool, reserved: bool, broken: bool) -> None:
    assert is_usable(state) is usable
    assert is_usable(state, reserved=True) is reserved
    assert is_broken(state) is broken


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:8", [Gres("gpu", "", 8)]),
        ("gpu:h100:4(S:0,2),shard:16(S:0-1)", [Gres("gpu", "h100", 4), Gres("shard", "", 16)]),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1", [Gres("gpu", "a100", 2), Gres("gpu", "v100", 1)]),
        ("gpu:nvidia_h100_80gb_hbm3:8", [Gres("gpu", "nvidia_h100_80gb_hbm3", 8)]),
        ("gpu:no_consume:4,bandwidth:lustre:4G", [Gres("gpu", "", 4)]),
        ("gpu:1g.5gb:7,gpu:2g.10gb", [Gres("gpu", "1g.5gb", 7), Gres("gpu", "2g.10gb", 1)]),
        ("craynetwork", [Gres("craynetwork", "", 1)]),
        ("", []),
    ],
)
def test_generic_resources(text: str, found: list[Gres]) -> None:
    assert parse_gres(text) == found


def test_types_of_generic_resources_are_counted_apart_and_together() -> None:
    text = "gpu:a100:2,gpu:v100:1,shard:9"
    assert [count_of(text, Gres("gpu", kind, 1)) for kind in ("", "a100", "v100", "h100")] == [3, 2, 1, 0]


def test_times() -> None:
    assert [parse_minutes(text) for text in ("UNLIMITED", "00:30:00", "7-00:00:00", "")] == [None, 30, 10080, None]
    assert [clock(number) for number in (30, 1439, 1440, 2885)] == ["00:30:00", "23:59:00", "1-00:00:00", "2-00:05:00"]
