"""Reasons of pending jobs and their components, as several versions of Slurm print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.records.attempt import Obstacle
from primeslurm.slurm.client import JobComponent, JobState, Shared, SlurmClient, parse_job
from primeslurm.slurm.partitions import parse_reservations
from primeslurm.slurm.pending_reasons import depends_on_others, is_reserved, obstacles, pending_reason

# 22.05.8, shortened.
LIMIT = """\
JobId=19 HetJobId=19 HetJobOffset=0 JobName=demo HetJobIdSet=19-20 UserId=alice(1000) GroupId=alice(1000) Priority=1 \
Account=lab QOS=normal JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 Restarts=0 ExitCode=0:0 \
StartTime=2026-11-28T09:28:35 Partition=cpu NodeList= SchedNodeList=c1 NumNodes=1-1 Comment=x Reason=BadConstraints
JobId=20 HetJobId=19 HetJobOffset=1 JobName=demo/train HetJobIdSet=19-20 UserId=alice(1000) GroupId=alice(1000) \
Account=lab QOS=normal JobState=PENDING Reason=PartitionTimeLimit Dependency=(null) Requeue=1 Restarts=0 ExitCode=0:0 \
StartTime=Unknown Partition=debug NodeList= NumNodes=2-2 TresPerNode=gres:gpu:2
"""
# 20.11 writes (null) for a list of nodes that is empty; 24.11 has more fields, and other names of TRES.
OLD = LIMIT.replace("NodeList= ", "NodeList=(null) ").replace("Account=lab QOS=normal", "Account=(null) QOS=(null)")
NEW = LIMIT.replace("Partition=", "Licenses=(null) LicensesAlloc=(null) Partition=").replace("gres:gpu:2", "gres/gpu:2")
NAMES = {0: "control", 1: "train", 2: "decode", 3: "prefill"}


def job(*waits: str, state: str = "PENDING") -> JobState:
    components = tuple(JobComponent(str(7 + i), i, "gpu", state, "", reason) for i, reason in enumerate(waits))
    return JobState("7", state, waits[0], 0, "Unknown", None, components, "scontrol", len(components))


@pytest.mark.parametrize("text", [LIMIT, OLD, NEW])
def test_the_reason_of_every_component_is_read(text: str) -> None:
    found = parse_job(text)
    assert [component.reason for component in found.components] == ["Resources", "PartitionTimeLimit"]
    assert pending_reason(found, NAMES) == "Resources; train: PartitionTimeLimit"
    assert obstacles(found, NAMES) == [
        Obstacle(
            "train",
            "PartitionTimeLimit",
            "asks for more time than its partition allows",
            "set a shorter slurm.time and resume",
        )
    ]
    assert found.shares == (("alice(1000)", "", "") if text == OLD else ("alice(1000)", "lab", "normal"))


def test_components_with_the_same_reason_are_named_together() -> None:
    found = job("Resources", "QOSMaxGRESPerJob", "Priority", "QOSMaxGRESPerJob")
    assert pending_reason(found, NAMES) == "Resources; train, prefill: QOSMaxGRESPerJob; decode: Priority"
    assert [(each.component, each.never) for each in obstacles(found, NAMES)] == [("train, prefill", True)]
    alone = job("JobHeldUser")
    assert pending_reason(alone, {0: "all"}) == "JobHeldUser"
    (held,) = obstacles(alone, {0: "all"})
    assert (held.component, held.fix) == ("", "`scontrol release 7` lets it start")
    assert held.how == "cannot start: it is held (JobHeldUser)"


@pytest.mark.parametrize(
    "reason",
    [
        *("PartitionTimeLimit", "PartitionNodeLimit", "PartitionDown", "PartitionInactive", "PartitionConfig"),
        *("BadConstraints", "InvalidAccount", "InvalidQOS", "QOSNotAllowed", "AccountNotAllowed", "MaxMemPerLimit"),
        *("DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "ReservationDeleted"),
        *("QOSMaxWallDurationPerJobLimit", "QOSMaxCpuPerJobLimit", "QOSMaxNodePerJobLimit", "QOSMaxGRESPerJob"),
        *("QOSMaxMemoryPerJob", "QOSMaxGRESPerNode", "QOSMaxCpuPerNode", "QOSMaxCpuMinutesPerJobLimit", "QOSMinGRES"),
        *("QOSMinCpuNotSatisfied", "AssocMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "AssocMaxGRESPerJob"),
        *("AssocMaxCpuPerJobLimit", "AssocMaxMemPerNode", "AssocMaxBillingMinutesPerJob", "AccountingPolicy"),
        *("AssocGrpCPUMinutesLimit", "QOSGrpGRESMinutes", "AssocGrpBillingMinutes", "QOSGrpWallLimit"),
        *("AssociationTimeLimit", "QOSTimeLimit", "launch_failed_requeued_held", "DeadLine"),
    ],
)
def test_permanent_reasons_are_obstacles(reason: str) -> None:
    found = obstacles(job("Priority", reason), NAMES)
    assert [(each.component, each.reason, each.never) for each in found] == [("train", reason, True)]
    assert found[0].text and found[0].fix


@pytest.mark.parametrize(
    "reason",
    [
        *("", "Resources", "Priority", "Dependency", "BeginTime", "Licenses", "Prolog", "Reservation", "Cleaning"),
        *("ReqNodeNotAvail,_May_be_reserved_for_other_job", "ReqNodeNotAvail", "JobArrayTaskLimit", "SchedDefer"),
        "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
    ],
)
def test_temporary_reasons_are_not_obstacles(reason: str) -> None:
    assert obstacles(job("Priority", reason), NAMES, rivals=()) == []


@pytest.mark.parametrize(
    "reason",
    [
        *("QOSMaxGRESPerUser", "QOSMaxCpuPerUserLimit", "QOSMaxJobsPerUserLimit", "QOSGrpNodeLimit", "QOSGrpGRES"),
        *("AssocGrpGRES", "AssocMaxJobsLimit", "AssocGrpCPURunMinutesLimit", "MaxGRESPerAccount", "QOSResourceLimit"),
    ],
)
def test_limits_for_all_jobs_together_last_only_if_there_are_no_others(reason: str) -> None:
    waiting = job("Resources", reason)
    assert depends_on_others(waiting)
    assert obstacles(waiting, NAMES) == [], "the other jobs may end"
    (alone,) = obstacles(waiting, NAMES, rivals=())
    assert alone.never and alone.component == "train"


@pytest.mark.parametrize(
    ("reason", "rivals", "lasts"),
    [
        ("QOSMaxGRESPerUser", ["account", "qos"], True),
        ("QOSMaxGRESPerUser", ["user"], False),
        ("AssocMaxJobsLimit", ["qos"], True),
        ("QOSGrpGRES", ["user", "account"], True),
        ("QOSGrpGRES", ["qos"], False),
        ("MaxGRESPerAccount", ["user"], True),
        ("AssocGrpGRES", ["account"], False),
    ],
)
def test_only_jobs_that_a_limit_counts_may_make_room(reason: str, rivals: list[Shared], lasts: bool) -> None:
    assert bool(obstacles(job("Resources", reason), NAMES, rivals=rivals)) is lasts


def test_a_job_that_runs_has_no_obstacles() -> None:
    assert obstacles(job("PartitionTimeLimit", state="RUNNING"), NAMES) == []


MAINTENANCE = (
    "ReservationName=maint1 StartTime=2026-11-28T09:38:55 EndTime=2026-11-28T11:38:55 Duration=02:00:00 Nodes=n[1-4] "
    "NodeCnt=4 Features=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=32 Users=root State=INACTIVE"
)


def test_maintenance_is_named_with_its_times() -> None:
    waiting = job("Resources", "ReqNodeNotAvail,_Reserved_for_maintenance")
    assert is_reserved(waiting) and not is_reserved(job("Resources"))
    (ahead,) = obstacles(waiting, NAMES, parse_reservations(MAINTENANCE))
    assert ahead.how == (
        "does not start: cannot end before maintenance maint1 of n[1-4], from 2026-11-28T09:38:55 to "
        "2026-11-28T11:38:55 (ReqNodeNotAvail,_Reserved_for_maintenance)"
    )
    assert ahead.fix == "a slurm.time that ends before 2026-11-28T09:38:55, or wait"
    (now,) = obstacles(waiting, NAMES, parse_reservations(MAINTENANCE.replace("State=INACTIVE", "State=ACTIVE")))
    assert now.text == "waits for the end of maintenance maint1 of n[1-4], at 2026-11-28T11:38:55"
    (unknown,) = obstacles(waiting, NAMES)
    assert (unknown.text, unknown.never) == ("its nodes are reserved for maintenance", False)


def test_nodes_that_are_down_are_named() -> None:
    (found,) = obstacles(job("ReqNodeNotAvail,_UnavailableNodes:n[1-2]"), {})
    assert found.text == "the nodes that it needs are down, drained or reserved: n[1-2]"


def test_rivals_are_other_running_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["19|alice|lab|normal", "20|alice|lab|normal", "30|bob|lab|high", "31|eve||normal"]
    (tmp_path / "squeue").write_text("#!/bin/sh\n" + "\n".join(f"echo '{row}'" for row in rows))
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert SlurmClient().rivals(parse_job(LIMIT)) == {"account", "qos"}
    assert SlurmClient().rivals(parse_job(OLD)) == set()
